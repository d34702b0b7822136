"""The closed form of a CLIP step: savings from dropped patches and from tiles of the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.families.clip import cost
from maxlp.families.clip.contrastive import ContrastiveConfig, contrastive_sums
from maxlp.families.clip.model import CLIP
from maxlp.families.clip.presets import CLIP_SIZES, clip
from maxlp.parallel import sharding
from maxlp.planning import compiled
from maxlp.planning.cost_model import state_shapes
from maxlp.run.experiment import assemble
from maxlp.run.settings import read
from tests.planning import hlo_flops, peaks


def settings(**changes):
    c = clip(**CLIP_SIZES["l14"])
    c.data.update(source="unread", tokenizer="bytes", batch_size=2048)
    c.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return read(c)


def test_dropped_patches_shorten_the_image_tower():
    whole, half = settings(), settings(model__visual__patch_dropout=0.5)
    machine = whole.machine(8, "cuda")
    (a, text), (b, same) = (cost.towers(s, machine) for s in (whole, half))
    assert (a.S, b.S) == (257, 129) and text == same
    shorter = 6 * (a.S - b.S) * a.L * a.block_params + 12 * (a.S**2 - b.S**2) * a.L * a.D
    assert whole.flops_per_unit[0] - half.flops_per_unit[0] == shorter


def test_block_params_are_the_kernels_of_a_block():
    s = settings()
    params = nnx.to_pure_dict(nnx.eval_shape(lambda: nnx.state(CLIP(s.model, rngs=nnx.Rngs(0)), nnx.Param)))
    sizes = {"image": 0, "text": 0}
    for path, kernel in nnx.traversals.flatten_mapping(params).items():
        if "layers" in path and path[-1] == "kernel":
            sizes["image" if path[0] == "visual" else "text"] += kernel.size
    image, text = cost.towers(s, s.machine(8, "cuda"))
    assert sizes == {"image": image.L * image.block_params, "text": text.L * text.block_params}


@pytest.mark.parametrize("layer_scale", [None, 0.1])
def test_work_and_the_gradients_that_replicas_add_are_those_of_a_compiled_step(layer_scale, tmp_path):
    """In float32 here; those of the text's embeddings are a sixth of them."""
    changes = {"mesh.data": 8, "model.dtype": "float32", "data.batch_size": 64}
    changes["model.layer_scale"] = layer_scale
    s = peaks.settings_of(clip(**CLIP_SIZES["b32"]), changes)
    mesh = sharding.make_mesh(**s.mesh)
    machine = s.machine_of(jax.devices())
    program = compiled.compile_step(assemble(s, machine, mesh), str(tmp_path / "step.txt")).collectives

    def added(found):
        return sum(one.sent for one in found if one.kind == "all-reduce" and one.axes == ("data",))

    # The closed form leaves out small sums, 2 % here.
    assert added(cost.collectives(s, machine)) == pytest.approx(added(program), rel=0.1)
    flops = sum(cost.work(s, machine, state_shapes(s, machine)).flops.values())
    compiled_flops = hlo_flops.matmul_flops((tmp_path / "step.txt").read_text())
    assert flops == pytest.approx(compiled_flops, rel=1e-3)  # and 0.005 % of the FLOPs


def test_tiles_of_the_loss_do_not_grow_with_the_square_of_the_batch():
    def loss(method):
        s = settings(loss__method=method, data__batch_size=65536)
        return cost.loss(s, s.machine(8, "cuda"))

    assert loss("sharded") >= 65536**2 / 8 * 4
    assert loss("tiled") < loss("sharded") / 3


def test_tiles_of_the_loss_take_the_memory_that_the_compiler_reports():
    """That of docs/contrastive.md: 1,048,576 pairs on 16 H100 take 1 GiB with 512 features, 2 with 1024."""
    changes = {"loss__method": "tiled", "data__batch_size": 2**20}
    narrow, wide = (settings(model__embed_dim=E, **changes) for E in (512, 1024))
    grown = cost.loss(wide, wide.machine(16, "cuda")) - cost.loss(narrow, narrow.machine(16, "cuda"))
    assert grown == pytest.approx(2**30, rel=0.01)  # the numbers there have three digits


def test_the_products_of_tiles_are_those_of_a_compiled_loss():
    """A float32 product counts as six; see `work`."""
    flops, B, E = {}, 64, 16
    for method in ("sharded", "tiled"):
        config = ContrastiveConfig(kind="softmax", method=method, tile_size=16)
        loss = jax.grad(lambda *args, c=config: contrastive_sums(*args, c)["loss"], argnums=(0, 1, 2))
        args = (jnp.ones((B, E)), jnp.ones((B, E)), 1.0, 0.0)
        compiled_flops = hlo_flops.matmul_flops(jax.jit(loss).lower(*args).compile().as_text())
        s = settings(model__embed_dim=E, data__batch_size=B, loss__method=method)
        machine = s.machine(1, "cuda")
        work = cost.work(s, machine, state_shapes(s, machine))
        flops[method] = np.array([6 * compiled_flops, sum(work.flops.values())])
    compiled_more, more = flops["tiled"] - flops["sharded"]
    assert more == compiled_more > 0


def test_the_features_are_those_of_both_towers_and_their_gradients():
    s = settings()
    model = nnx.eval_shape(lambda: CLIP(s.model, rngs=nnx.Rngs(0)))
    rows, size = s.data.batch_size // 8, s.model.visual.image_size
    image = jax.ShapeDtypeStruct((rows, size, size, 3), jnp.uint8)
    text = jax.ShapeDtypeStruct((rows, s.data.text_len), jnp.int32)
    found = (nnx.eval_shape(CLIP.encode_image, model, image), nnx.eval_shape(CLIP.encode_text, model, text))
    assert cost.features(s, s.machine(8, "cuda")) == 2 * sum(x.size * x.dtype.itemsize for x in found)


@pytest.mark.parametrize(("kind", "compiled_gib"), [("softmax", 17.0), ("sigmoid", 48.5)])
def test_logits_of_the_loss_take_the_memory_that_the_compiler_reports(kind, compiled_gib):
    """That of docs/contrastive.md, for 262,144 pairs on 16 H100."""
    changes = {"loss__kind": kind, "loss__method": "sharded"}
    changes |= {"model__logit_bias": -10.0} if kind == "sigmoid" else {}
    s = settings(model__embed_dim=512, data__batch_size=262144, **changes)
    # Beside the logits, the program has small arrays.
    assert cost.loss(s, s.machine(16, "cuda")) == pytest.approx(compiled_gib * 2**30, rel=0.02)


def test_the_loss_of_many_microbatches_holds_the_batch_twice():
    """The step of B/32 with 131,072 pairs on 8 H100 compiles to 13.54 GiB, of which 2.3 are such a copy."""
    c = clip(**CLIP_SIZES["b32"])
    c.data.update(source="unread", tokenizer="bytes", batch_size=131072)
    c.update_from_flattened_dict(
        {"loss.method": "sharded", "train.microbatches": 128, "model.remat": "block"}
    )
    s = read(c)
    machine = s.machine(8, "cuda")
    memory = cost.memory(s, machine, state_shapes(s, machine))
    assert sum(memory.values()) == pytest.approx(13.54 * 2**30, rel=0.02)  # a tenth of such a copy
