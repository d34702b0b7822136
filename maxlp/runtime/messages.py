"""Words of messages to the user."""


def counted(number: int, singular: str, plural: str = "") -> str:
    """`1 spike`, `2,000 spikes`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
