"""maxlp: low-precision, low-memory training of Llama and CLIP in Flax NNX."""

__version__ = "0.1.0"
