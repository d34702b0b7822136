"""Input pipelines by name: each entry takes a config's data section as its keyword arguments."""

from maxlp.data.text import make_data, merge_states

DATA = {"text": make_data}

__all__ = ["DATA", "merge_states"]
