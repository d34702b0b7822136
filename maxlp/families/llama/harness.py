"""Benchmarks of EleutherAI's `lm-eval` on a Llama; needs the extra `lm-eval`.

The library makes the prompts and computes the metrics; this module answers its three kinds of requests.
Every text begins with the token that begins documents in training, or as a chat template has it.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from flax import nnx

from maxlp.data.chat import Chat, Messages
from maxlp.data.tokenizers import Tokenizer
from maxlp.families.llama import likelihood
from maxlp.nn.decoding import Sampling, generate, padded_length
from maxlp.runtime.extras import import_extra

NEW_TOKENS = 256  # for tasks that name no number, as in the library


def evaluate(
    model: nnx.Module,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    *,
    max_len: int,
    chat: Chat | None = None,
    include: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> tuple[dict[str, Any], str]:
    """The results of tasks, and a table of them.

    Args:
      tasks: names of tasks, groups or tags.
      max_len: how many tokens the model reads.
      chat: a template, in which prompts become messages of the user; None leaves them as they are.
      include: folder with further tasks, as YAML files.
      num_fewshot: examples before each question; None for each task's own number.
      limit: use only the first examples of each task.

    Raises:
      ValueError: an unknown task, or the library is not installed.
    """
    lm_eval, api, library_tasks, utils = (
        import_extra(module, "lm-eval")
        for module in ("lm_eval", "lm_eval.api.model", "lm_eval.tasks", "lm_eval.utils")
    )

    class Adapter(api.LM):
        """The library's interface."""

        def __init__(self) -> None:
            super().__init__()
            self.questions = Questions(model, tokenizer, max_len, chat)

        def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
            return self.questions.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: list) -> list[float]:
            return self.questions.loglikelihood_rolling([request.args[0] for request in requests])

        def generate_until(self, requests: list) -> list[str]:
            return self.questions.generate_until([request.args for request in requests])

        def apply_chat_template(self, chat_history: Messages, add_generation_prompt: bool = True) -> str:
            assert chat is not None
            if add_generation_prompt:
                return chat.render_prompt(chat_history)
            *messages, begun = chat_history  # the model continues an answer that the task begins
            return chat.render_prompt(messages) + begun["content"]

        @property
        def tokenizer_name(self) -> str:
            return "maxlp"  # for a cache of requests, which is not used

    manager = library_tasks.TaskManager(include_path=include)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise ValueError(
            f"--lm_eval={','.join(unknown)} is unknown to lm-eval; `lm-eval ls tasks` lists its tasks, and"
            " --lm_eval_include=DIR adds others"
        )
    results = lm_eval.simple_evaluate(
        Adapter(),
        tasks=[*tasks],
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        log_samples=False,
        apply_chat_template=chat is not None,
    )
    results["chat_template"] = dict.fromkeys(results["results"], chat is not None)
    kept = ("results", "groups", "versions", "n-shot", "n-samples", "chat_template", "higher_is_better")
    table = "\n".join(
        utils.make_table(results, part) for part in ("results", "groups") if results.get(part)
    )
    return {key: results[key] for key in kept if key in results}, table


class Questions:
    """What `lm-eval` asks: likelihoods of continuations and of texts, and greedy or sampled answers.

    With a ``chat``, contexts are rendered conversations, and answers end with its end of a turn.
    """

    def __init__(self, model: nnx.Module, tokenizer: Tokenizer, max_len: int, chat: Chat | None = None):
        self._model, self._tokenizer, self._max_len = model, tokenizer, max_len
        if chat is None:
            self._encode = functools.partial(likelihood.encode_document, tokenizer)
            self._end_id = tokenizer.eos_id
        else:
            self._encode, self._end_id = chat.encode_rendered, chat.end_id

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """For each (context, continuation), its log-likelihood and whether it is the greedy one."""
        encoded = [likelihood.encode_pair(self._encode, *pair) for pair in pairs]
        return likelihood.score(self._model, encoded, self._max_len)

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """The log-likelihood of each text, in windows if it is longer than the model reads."""
        windows = [likelihood.rolling(self._tokenizer, text, self._max_len) for text in texts]
        scores = likelihood.score(self._model, [*itertools.chain(*windows)], self._max_len)
        values = iter([log_likelihood for log_likelihood, _ in scores])
        return [sum(itertools.islice(values, len(of_text))) for of_text in windows]

    def generate_until(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """For each (context, options), the text up to one of the strings in the option `until`."""
        groups: dict[tuple, list[int]] = defaultdict(list)
        prompts = []
        for number, (context, options) in enumerate(requests):
            new = options.get("max_gen_toks", NEW_TOKENS)
            new = new if new < self._max_len else self._max_len // 2  # leaves room for the question
            ids = self._encode(context)
            prompts.append(ids[-(self._max_len - new) :])
            groups[padded_length(len(prompts[-1])), new, _sampling(options)].append(number)
        texts = [""] * len(requests)
        for (length, new, sampling), numbers in groups.items():
            for rows in likelihood.batches(numbers, likelihood.rows_of(length + new)):
                made = generate(
                    self._model,
                    [prompts[number] for number in rows],
                    max_new_tokens=new,
                    sampling=sampling,
                    seed=rows[0],  # another one for each batch
                    eos_id=self._end_id,
                )
                for number, row in zip(rows, made, strict=True):
                    texts[number] = self._text(prompts[number], row, requests[number][1].get("until"))
        return texts

    def _text(self, prompt: list[int], row: list[int], until: str | Sequence[str] | None) -> str:
        # With the prompt, because some tokenizers drop the space before the first token.
        text = self._tokenizer.decode(prompt + row)[len(self._tokenizer.decode(prompt)) :]
        ends = [until] if isinstance(until, str) else until or []
        for end in ends:
            if end:
                text, _, _ = text.partition(end)
        return text


def _sampling(options: dict[str, Any]) -> Sampling:
    if not options.get("do_sample"):
        return Sampling(0.0)
    top_k, top_p = options.get("top_k", 0), options.get("top_p", 1.0)
    return Sampling(options.get("temperature", 1.0), top_k, top_p)
