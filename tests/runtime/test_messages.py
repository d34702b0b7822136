from maxlp.runtime.messages import counted, format_seconds, one_line, rounded


def test_counted_nouns():
    assert [counted(n, "spike") for n in (0, 1, 2000)] == ["0 spikes", "1 spike", "2,000 spikes"]
    assert counted(2, "process", "processes") == "2 processes"


def test_rounded_numbers_have_an_exponent_only_beyond_the_readable():
    numbers = 0.0000271, 0.15, 8.26, 243.7, 9_960, 70_553
    assert [rounded(n, 2) for n in numbers] == ["0.000027", "0.15", "8.3", "240", "10,000", "71,000"]
    numbers = 15.2e12, 1.52e26, float("inf"), float("nan")
    assert [rounded(n, 2) for n in numbers] == ["15,000,000,000,000", "1.5e+26", "inf", "nan"]


def test_format_seconds():
    formatted = [format_seconds(s) for s in (0, 59.6, 3599, 90000, 100 * 3600)]
    assert formatted == ["0:00", "1:00", "59:59", "25:00:00", "4d04h"]


def test_one_line_of_an_error():
    assert one_line(ValueError("\n first\nsecond")) == "first"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
