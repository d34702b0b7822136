"""What config files share: the argument string."""

from ml_collections import ConfigDict


def parse_arg(arg: str, **defaults):
    """``"a=1,b=x,flag"`` as a ConfigDict of the given defaults, each value in its default's type.

    A bare name of a boolean sets it. Raises ValueError for names without a default.
    """
    values = ConfigDict(defaults)
    for item in filter(None, (arg or "").split(",")):
        name, _, text = item.partition("=")
        if name not in defaults:
            raise ValueError(f"config argument {name!r} is unknown; arguments: {', '.join(sorted(defaults))}")
        kind = type(defaults[name])
        if kind is bool:
            if text not in ("", "true", "false", "True", "False", "0", "1"):
                raise ValueError(f"config argument {name}={text!r}: expected true or false")
            values[name] = text not in ("false", "False", "0")
        else:
            try:
                values[name] = kind(text)
            except ValueError:
                raise ValueError(f"config argument {name}={text!r}: expected {kind.__name__}") from None
    return values
