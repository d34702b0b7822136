"""Matmuls are counted as often as they run, in every form in which a compiler writes them."""

import jax
import jax.numpy as jnp
import pytest

from tests.planning import hlo_flops

# Two matmuls in the TPU compiler's form. The first sums over two dims, one of them written as a window.
# The output of the second has two feature dims, one of them written as a window that slides over padding,
# so that only one of three products has entries that exist.
TPU = """
ENTRY %main (x: bf16[8,3,5], w: bf16[3,5,7], y: bf16[8,5,1], v: bf16[5,3,7]) -> bf16[8,7] {
  %x = bf16[8,3,5]{2,1,0:T(8,128)} parameter(0)
  %w = bf16[3,5,7]{2,1,0} parameter(1)
  %y = bf16[8,5,1]{1,0,2} parameter(2)
  %v = bf16[5,3,7]{2,1,0} parameter(3)
  %convolution.1 = bf16[8,7,1]{1,0,2} convolution(%x, %w), window={size=3}, dim_labels=b0f_0io->bf0
  %convolution.2 = bf16[8,3,7]{2,1,0} convolution(%y, %v), window={size=3 pad=2_2}, dim_labels=bf0_i0o->b0f
  %splash_fwd.3 = bf16[8,7]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"
}
"""


def test_convolutions_count_products_of_entries_that_exist():
    assert hlo_flops.matmul_flops(TPU) == 2 * 8 * (3 * 5) * 7 + 2 * 8 * 5 * (3 * 7)
    assert hlo_flops.kernel_calls(TPU) == {"splash_fwd": 1}


def test_what_loops_in_loops_run_counts_with_the_product_of_their_trip_counts():
    def loop(name: str, inside: str, n: int) -> str:
        counts = f'backend_config={{"known_trip_count":{{"n":"{n}"}}}}'
        return f"  %{name} = f32[4,4] while(%x), condition=%any, body=%{inside}, {counts}\n"

    parts = {
        "%layer": "  %y = f32[4,4] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        '  %fwd.1 = f32[4,4] custom-call(%y), custom_call_target="tpu_custom_call"\n',
        "%microbatch": loop("layers", "layer", 5),
        "ENTRY %main": loop("microbatches", "microbatch", 3),
    }
    head = " (x: f32[4,4]) -> f32[4,4] {\n  %x = f32[4,4] parameter(0)\n"
    text = "".join(f"{name}{head}{body}}}\n\n" for name, body in parts.items())
    assert hlo_flops.matmul_flops(text) == 3 * 5 * 2 * 4**3
    assert hlo_flops.kernel_calls(text) == {"fwd": 3 * 5}


def test_each_spatial_dim_has_its_own_field_of_the_window():
    """Of 4 by 6 entries, every second column; with zeros between the rows, as many products."""
    labels = "dim_labels=b01f_01io->b01f"
    text = f"""
ENTRY %main (x: f32[1,4,6,1], w: f32[1,1,1,1]) -> f32[1,7,3,1] {{
  %x = f32[1,4,6,1] parameter(0)
  %w = f32[1,1,1,1] parameter(1)
  %y = f32[1,4,3,1] convolution(%x, %w), window={{size=1x1 stride=1x2}}, {labels}
  %z = f32[1,7,3,1] convolution(%x, %w), window={{size=1x1 stride=1x2 lhs_dilate=2x1}}, {labels}
}}
"""
    assert hlo_flops.matmul_flops(text) == 2 * (4 * 3 + 4 * 3)


@pytest.mark.parametrize("num_steps", [1, 6])
def test_loops_and_gradients_of_a_program_compiled_here(num_steps):
    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=num_steps)[0])

    w, x = jax.ShapeDtypeStruct((48, 48), jnp.float32), jax.ShapeDtypeStruct((16, 48), jnp.float32)
    text = jax.jit(jax.grad(loss)).lower(w, x).compile().as_text()
    assert text is not None
    matmul = 2 * 16 * 48 * 48
    needed = num_steps * 3 - 1  # the first step's input needs no gradient, which XLA may not see in a loop
    assert hlo_flops.matmul_flops(text) / matmul in (needed, needed + 1)


@pytest.mark.parametrize(
    "window",
    [
        {},
        {"pad": "2_2"},
        {"stride": "2", "pad": "2_0"},
        {"lhs_dilate": "2"},
        {"rhs_dilate": "3", "pad": "2_2"},
    ],
)
def test_products_are_those_of_a_convolution_of_ones(window):
    """Each entry of the output is the number of products that it sums."""
    n, m = 8, 3
    low, high = (int(p) for p in window.get("pad", "0_0").split("_"))
    out = jax.lax.conv_general_dilated(
        jnp.ones((1, 1, n)),
        jnp.ones((1, 1, m)),
        (int(window.get("stride", 1)),),
        [(low, high)],
        (int(window.get("lhs_dilate", 1)),),
        (int(window.get("rhs_dilate", 1)),),
    )
    assert hlo_flops._num_products(n, m, out.size, window, 0) == out.sum()
