"""Words and numbers of messages to the user."""


def counted(number: int, singular: str, plural: str = "") -> str:
    """`1 spike`, `2,000 spikes`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def rounded(value: float, digits: int) -> str:
    """A number with this many significant digits and no exponent: `0.074`, `240`, `12,000`."""
    return f"{float(f'{value:.{digits}g}'):,.12g}"
