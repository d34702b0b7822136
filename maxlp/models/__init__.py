"""Models by name. A new one is a file here and an entry in `MODELS`."""

from maxlp.models.clip import CLIP
from maxlp.models.llama import Llama

MODELS = {"clip": CLIP, "llama": Llama}
