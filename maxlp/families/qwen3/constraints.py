"""Rules for the settings of a Qwen3, besides those of `run.constraints`."""

from maxlp.families.llama import constraints
from maxlp.run.settings import Machine, Settings


def queries_and_keys_are_normed(s: Settings, machine: Machine) -> str | None:
    """Without norms of queries and keys it is a Llama, and no other library reads it as a Qwen3."""
    if s.model.qk_norm:
        return None
    return "model.qk_norm=False is not a Qwen3; set model.qk_norm=True, or model.name=llama"


RULES = (*constraints.RULES, queries_and_keys_are_normed)
