import pytest

from maxlp.data.readers.access import expand_braces


def test_braces():
    assert expand_braces("a{08..11}.tar") == ["a08.tar", "a09.tar", "a10.tar", "a11.tar"]
    assert expand_braces("{8..10}") == ["8", "9", "10"]
    assert expand_braces("{08..100}")[::46] == ["008", "054", "100"], "as in bash"
    assert expand_braces("{0..10}")[::5] == ["0", "5", "10"] and expand_braces("{1..02}") == ["01", "02"]
    assert expand_braces("{x,y}/{0..1}") == ["x/0", "x/1", "y/0", "y/1"]
    with pytest.raises(ValueError, match=r"range \{10\.\.08\} is empty; write \{08\.\.10\}"):
        expand_braces("a{10..08}.tar")
