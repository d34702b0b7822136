"""Families of models."""

from maxlp.families.clip import task as clip_task
from maxlp.families.clip.model import CLIP
from maxlp.families.llama import task as llama_task
from maxlp.families.llama.model import Llama

MODELS = {"clip": CLIP, "llama": Llama}
TASKS = {"llama": llama_task, "clip": clip_task}
