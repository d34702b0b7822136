import sys

import pytest

from maxlp.runtime.extras import import_extra


def test_a_missing_library_is_named_with_its_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"pyarrow.* is not installed; run pip install 'maxlp\[data\]'"):
        import_extra("pyarrow.parquet")
