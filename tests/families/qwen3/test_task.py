"""What a Qwen3 shares with Llama, and what it does not."""

import pytest

from maxlp import families
from maxlp.run import constraints
from maxlp.run.config import ConfigError, load_file
from maxlp.run.settings import Settings
from tests.planning import peaks

PARAMS = {  # of the published weights
    "0.6b": 596_049_920,
    "1.7b": 1_720_574_976,
    "4b": 4_022_468_096,
    "8b": 8_190_735_360,
}


def settings(preset: str, **changes) -> Settings:
    return peaks.settings_of(load_file(f"qwen3/{preset}"), changes)


@pytest.mark.parametrize("preset", PARAMS)
def test_presets_have_the_published_sizes(preset):
    assert settings(preset).num_params == PARAMS[preset]


def test_a_qwen3_without_norms_is_refused():
    s = settings("debug", **{"model.qk_norm": False})
    with pytest.raises(ConfigError, match=r"model.qk_norm=False is not a Qwen3; .*model.name=llama"):
        constraints.check(s, s.machine(1, "cpu"))


def test_the_matmuls_are_those_of_a_llama():
    """So precision recipes, adapters and the cost model find them."""
    kinds = {path.rpartition("/")[2] for path in settings("debug").matmuls}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_it_is_a_family():
    family = families.get("qwen3")
    assert family.name == "qwen3" and family.generates_text
