"""What each family of models trains on, minimizes and is measured by.

A task is a module with the functions below, which take the whole config ``c``; `maxlp.build` picks it by
``config.model.name``.

    check(c, mesh, matmuls)         raises a ConfigError for sections that do not fit each other
    abstract_batch(c, mesh)         the global training batch as shapes
    gradients(c)                    what a step differentiates: see `maxlp.gradients`
    evaluator(c, graphdef, data)    (state, function that gives the held-out batches) to a dict of numbers
    flops(c, num_params)            of training on one of what is counted, (full, causal) attention
    texts(c)                        what a tokenizer learns from ("bpe:V")
    vocabulary(c)                   the key that says how many tokens the model knows, and their number
    UNIT, units(c)                  what throughput counts, and how many a step has
    describe(c)                     the batch in words
"""

from maxlp.tasks import image_text, language

TASKS = {"llama": language, "clip": image_text}
