"""Input pipelines by name."""

from maxlp.data.text import make_data, merge_states

DATA = {"text": make_data}

__all__ = ["DATA", "merge_states"]
