"""Optional libraries, which the extras of the package install."""

import importlib
from typing import Any


def import_extra(module: str, extra: str = "data") -> Any:
    """Imports an optional library, which the extra of this name installs.

    Raises:
      ValueError: the library is not installed; the message contains the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; run pip install 'maxlp[{extra}]'") from None
