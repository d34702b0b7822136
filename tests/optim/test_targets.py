"""Ranks of GaLore and APOLLO against the short sides of the matrices that they project."""

import pytest

from maxlp.optim import targets
from tests.optim.common import optimizer_config, random_tree

# Short sides of 8, 4 and 8; the head is no target.
PARAMS = {
    "layers": {
        "attn": {"q_proj": {"kernel": (2, 8, 8)}, "k_proj": {"kernel": (2, 8, 4)}},
        "mlp": {"up_proj": {"kernel": (2, 8, 32)}},
    },
    "lm_head": {"kernel": (8, 64)},
}


def galore(**values):
    return optimizer_config(galore=values)


def apollo(**options):
    return optimizer_config(name="apollo", options=options)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (galore(rank=8), r"^galore.rank=8 must be at most 7, .* above 8; lower it or set galore.rank=0$"),
        (galore(rank=100, side="long"), r"^galore.rank=100 must be at most 7, "),
        (galore(rank=4, targets=("k_proj/",)), r"^galore.rank=4 must be at most 3, .* short side above 4;"),
        (apollo(rank=9), r"^options.rank=9 must be at most 8, because no target has .* above 8; lower it$"),
        (apollo(rank=5, targets=("k_proj/",)), r"^options.rank=5 must be at most 4, "),
    ],
)
def test_a_rank_that_leaves_every_target_whole_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        targets.check(random_tree(PARAMS, 0), config)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (galore(rank=4), None),
        (galore(rank=5), "galore.rank=5 is cut to the short side of 1 of 3 targets, such as 4 of"),
        (galore(rank=7, targets=("q_proj/", "up_proj/")), None),
        (galore(rank=0), None),
        (apollo(rank=4), None),
        (apollo(rank=8), "options.rank=8 is cut to the short side of 1 of 3 targets, such as 4 of"),
        (apollo(), "options.rank=256 is cut to the short side of 3 of 3 targets, such as 4 of"),
        (apollo(targets=("head/",)), "options.rank=256 is cut to the short side of 1 of 1 targets"),
        (optimizer_config(name="apollo_mini"), None),
        (optimizer_config(), None),
    ],
)
def test_a_rank_that_is_cut_for_some_targets_is_a_warning(config, part):
    params = random_tree(PARAMS, 0)
    targets.check(params, config)
    warnings = targets.warnings(params, config)
    assert len(warnings) == (part is not None)
    assert all(line.startswith(f"optimizer.{part}") and "\n" not in line for line in warnings)
    assert all("layers/attn/k_proj/kernel" in line for line in warnings if "3 targets" in line)


@pytest.mark.parametrize("name", ["muon", "normuon", "soap", "apollo", "apollo_mini"])
def test_an_optimizer_without_a_matrix_is_a_warning(name):
    """Adapters are no targets."""
    adapters = {"layers": {"attn": {"q_proj": {"adapter": {"a": (2, 8, 4), "b": (2, 4, 8)}}}}}
    targets.check(random_tree(adapters, 0), optimizer_config(name=name))
    (line,) = targets.warnings(random_tree(adapters, 0), optimizer_config(name=name))
    assert line.startswith(f"optimizer.name={name} trains everything with Adam")
    (cut,) = targets.warnings(random_tree(PARAMS, 0), optimizer_config(name=name)) or [""]
    assert "Adam" not in cut
