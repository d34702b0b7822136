import pytest

from tests import matrix


@pytest.mark.parametrize("row", matrix.rows("clip"))
def test_a_row_trains_like_one_device_and_resumes_to_the_bit(row, tmp_path):
    matrix.check_row("clip", row, tmp_path)
