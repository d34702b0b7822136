"""The model of a run, for the commands that use one; and the checks before a start."""

from collections.abc import Mapping
from pathlib import Path

from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from maxlp.core.train_state import State, abstract_model, abstract_state
from maxlp.optim import eval_params
from maxlp.run import run_dir, settings
from maxlp.run.config import errors_of
from maxlp.run.experiment import Experiment
from maxlp.runtime import checkpoint


def restore_model(
    c: ConfigDict, workdir: Path, step: int | None, mesh: Mesh
) -> tuple[nnx.GraphDef, State, int]:
    """The model of a checkpoint.

    Args:
      c: the config of the run; that of imported weights has no optimizer.
      step: None takes the newest intact checkpoint.

    Returns:
      its structure, {"params", "model_state"} on the mesh, and the step.
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
    return graphdef, evaluated({"model_state": {}} | restored.state), restored.step


def check_start(run: Experiment, abstract: State, workdir: Path, changed: Mapping[str, str]) -> bool:
    """Raises at once what would fail later in a start: a workdir, weights or writers that cannot be used.

    Args:
      abstract: the training state as shapes, dtypes and shardings.
      changed: of `changes.check_config`.

    Returns:
      whether there is a checkpoint to resume.
    """
    s = run.settings
    run_dir.check_workdir(workdir)
    run_dir.check_checkpoints(workdir)
    resumes = any(i.status == "complete" for i in checkpoint.list_steps(workdir / "checkpoints"))
    if resumes:
        from maxlp.run import misfit  # new runs do not need it

        misfit.check(run, abstract, workdir, changed)
    elif s.train.init_from:
        from maxlp.run import pretrained  # few runs need it

        pretrained.check(s, run.mesh)
    with errors_of("metrics"):
        if project := s.metrics.keywords.get("wandb_project"):
            from maxlp.runtime.wandb_writer import check_installed

            check_installed(project)
    return resumes


def evaluated(state: State) -> State:
    """The state with the parameters to evaluate: of schedule_free_adamw, an average of the trained ones."""
    params = eval_params(state.get("opt_state", {}), state["params"])
    return {"params": params, "model_state": state["model_state"]}
