"""Words and numbers of messages to the user."""

from decimal import Decimal


def counted(number: int, singular: str, plural: str = "") -> str:
    """`1 spike`, `2,000 spikes`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def rounded(value: float, digits: int) -> str:
    """A number with this many significant digits, below 1e15 without an exponent: `0.000074`, `12,000`."""
    text = f"{value:.{digits}g}"
    return f"{Decimal(text):,f}" if abs(value) < 1e15 else text


def format_seconds(seconds: float) -> str:
    """Formats hours, minutes and seconds as in 1:02:03 or 2:03, and from 100 hours on days as in 4d04h."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24}d{hours % 24:02}h"
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def one_line(error: BaseException) -> str:
    """The first line of an error's message, for use in another message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
