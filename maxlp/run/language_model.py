"""The language model of a run and its tokenizer, for the commands that generate or evaluate text."""

from pathlib import Path

from flax import nnx
from jax.sharding import Mesh

from maxlp.data.tokenizers import Tokenizer, make_tokenizer
from maxlp.run import run_dir
from maxlp.run.restore import restore_model
from maxlp.run.settings import read_model
from maxlp.run.tokenizer import saved_tokenizer


class LanguageModel:
    """A run of a language model, or imported weights.

    Attributes:
      model: the config of the model.
      tokenizer, tokenizer_spec: the run's own.
    """

    def __init__(self, workdir: Path):
        """Reads all but the weights.

        Raises:
          ValueError: no run, or one of another family.
        """
        self.workdir, self._config = workdir, run_dir.load_config(workdir)
        family, self.model, _ = read_model(self._config)
        if not family.generates_text:
            raise ValueError(
                f"{workdir} holds a {family.name} model, which does not generate text; use the run of a "
                "language model"
            )
        self.tokenizer_spec = saved_tokenizer(self._config.data.tokenizer, workdir)
        self.tokenizer: Tokenizer = make_tokenizer(self.tokenizer_spec)
        self.step: int | None = None

    def restore(self, step: int | None, mesh: Mesh) -> nnx.Module:
        """The model of a checkpoint, by default the newest; its step is then `step`."""
        graphdef, state, self.step = restore_model(self._config, self.workdir, step, mesh)
        return nnx.merge(graphdef, state["params"], state["model_state"])
