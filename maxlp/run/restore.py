"""The model of a run, for the commands that use one."""

from pathlib import Path

from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from maxlp.core.train_state import State, abstract_model, abstract_state
from maxlp.optim import eval_params
from maxlp.run import run_dir, settings
from maxlp.runtime import checkpoint


def restore_model(
    c: ConfigDict, workdir: Path, step: int | None, mesh: Mesh
) -> tuple[nnx.GraphDef, State, int]:
    """The model of a checkpoint.

    Args:
      c: the config of the run; that of imported weights has no optimizer.
      step: None takes the newest intact checkpoint.

    Returns:
      its structure, {"params", "model_state"} on the mesh, and the step. The parameters are those to
      evaluate: of schedule_free_adamw, an average of the trained ones.
    """
    if run_dir.is_imported(c):  # whose config names the kernel of attention
        graphdef, wanted = abstract_model(settings.make_model(*settings.read_model(c)), mesh)
    else:
        s = settings.read(c).on(settings.Machine.of(mesh))
        make_model = settings.make_model(s.family, s.model, s.precision, s.train.lora)
        graphdef, abstract = abstract_state(make_model, settings.make_optimizer(s).tx, mesh)
        # An empty part would not fit that of a run whose replicas keep errors, which no model needs.
        wanted = {key: abstract[key] for key in ("params", "model_state") if abstract[key]}
        if s.optimizer.kind.averages:
            from maxlp.optim.schedule_free import eval_part

            wanted["opt_state"] = eval_part(abstract["opt_state"])
    root = workdir / "checkpoints"
    restored = checkpoint.restore(root if step is None else root / str(step), wanted)
    params = eval_params(restored.state.get("opt_state", {}), restored.state["params"])
    return graphdef, {"params": params, "model_state": restored.state.get("model_state", {})}, restored.step
