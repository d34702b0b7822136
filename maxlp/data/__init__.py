"""Input pipelines by name: each entry takes a config's data section as its keyword arguments."""

from maxlp.data import image_text, text
from maxlp.data.common import merge_states

DATA = {"text": text.make_data, "image_text": image_text.make_data}

__all__ = ["DATA", "merge_states"]
