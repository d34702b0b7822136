import re

import pytest

from configs.clip import debug
from maxlp.families.clip.constraints import RULES
from maxlp.run import constraints
from maxlp.run.config import ConfigError
from maxlp.run.settings import read


def check(devices=8, **changes) -> None:
    """Checks configs/clip/debug.py on CPU devices, with changes like ``data__batch_size=4``."""
    c = debug.get_config()
    c.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    settings = read(c)
    constraints.check(settings, settings.machine(devices, "cpu"))


SIGMOID = dict(loss__kind="sigmoid")


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(mesh__stage=2), "config.mesh.stage=2 cannot split a CLIP; set it to 1"),
        (
            dict(mesh__context=2, model__attention="ring"),
            "config.mesh.context=2 cannot split a CLIP; set it to 1",
        ),
        (dict(data__image_size=64), "config.data.image_size=64 differs from model.visual.image_size=32"),
        (dict(data__text_len=21), "config.data.text_len=21 is above model.text.max_len=20"),
        (
            dict(optimizer__name="sgd", optimizer__adascale=2.0, train__microbatches=2),
            "config.optimizer.adascale=2.0 needs a loss that is a mean over examples",
        ),
        (
            dict(precision__exchange="int8", mesh__data=2),
            "config.precision.exchange=int8 needs a loss that is a sum over rows",
        ),
        (
            dict(train__local__steps=8, mesh__data=2),
            "config.train.local.steps=8 needs a loss that is a sum over rows",
        ),
        (
            dict(precision__sharpness_every=5),
            "config.precision.sharpness_every=5 needs a model that predicts tokens",
        ),
        (
            dict(data__batch_size=1, devices=1),
            "config.data.batch_size=1 leaves loss.kind=softmax no other pair to compare; raise",
        ),
        (
            dict(data__crop_scale=(0.5, 1.0)),
            "config.data.crop_scale=(0.5, 1.0) has no effect on data.source=glyphs?augment=0.4; unset it",
        ),
        (SIGMOID, "config.loss.kind=sigmoid needs a bias of the logits; set model.logit_bias"),
    ],
)
def test_each_rule_refuses_its_violation(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(**changes)


def test_the_debug_config_and_the_proposed_fixes_are_accepted():
    assert len(RULES) == 10, "one case for each rule in the test above"
    check()
    check(data__text_len=20, mesh__tensor=2)
    check(data__source="tar:unread", data__crop_scale=(0.5, 1.0))
    check(data__validation_source="tar:unread", data__classes="unread")
    check(**SIGMOID, model__logit_bias=-10.0)
    check(**SIGMOID, model__logit_bias=-10.0, data__batch_size=1, devices=1)
    check(data__batch_size=2, train__microbatches=2, devices=1)
    check(train__release_gradients=True, optimizer__clip_norm=0.0)


@pytest.mark.parametrize("method", ["sharded", "tiled"])
def test_scale_propagation_needs_the_plain_loss_on_several_devices(method):
    scalify = dict(model__dtype="float16", precision__scalify="fp16")
    message = f"config.loss.method={method} on 8 devices cannot be combined .* set loss.method=plain"
    with pytest.raises(ConfigError, match=message):
        check(**scalify, loss__method=method)
    check(**scalify)
    check(**scalify, loss__method=method, devices=1)


def test_attention_kernels_must_fit_both_towers():
    """`run.constraints` checks both towers: the image tower has 3 heads, the text tower 2."""
    with pytest.raises(
        ConfigError, match=r"model.attention=ring needs .* multiple of mesh.tensor=2, not 3"
    ):
        check(model__attention="ring", mesh__tensor=2)
    with pytest.raises(
        ConfigError, match=r"model.attention=ring needs .* multiple of mesh.tensor=4, not 2"
    ):
        check(model__attention="ring", mesh__tensor=4, model__visual__num_heads=4)
