"""Next-token prediction on packed text, as for Llama."""

import dataclasses

from maxlp.families.llama import task
from maxlp.families.qwen3.constraints import RULES

FAMILY = dataclasses.replace(task.FAMILY, name="qwen3", rules=RULES)
