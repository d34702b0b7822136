"""The Gaussian error of recipes, against what is known of equal and of relative steps."""

import jax
import numpy as np

from maxlp.precision import make_recipe
from maxlp.precision.gaussian_error import gaussian_mse


def test_gaussian_error_of_equal_steps():
    """Steps of size d have the mean squared error d² / 12; d is a 127th of the largest of 2^20 numbers."""
    step = float(np.abs(jax.random.normal(jax.random.key(0), (1024, 1024))).max()) / 127
    whole = gaussian_mse(make_recipe("int8_all", granularity="tensor"))
    # The variance of the numbers is 1 within its error of √(2 / 2^20), that of the errors likewise.
    np.testing.assert_allclose(whole, step**2 / 12, rtol=0.01)
    four_of_six = make_recipe("int8_switchback", granularity="tensor")
    np.testing.assert_allclose(gaussian_mse(four_of_six), whole * 4 / 6, rtol=1e-6)
    assert gaussian_mse(make_recipe("bf16")) == 0


def test_gaussian_error_of_relative_steps():
    """Steps of a float with 7 bits of mantissa are between 2^-8 and 2^-7 of the number."""
    found = gaussian_mse(make_recipe("simulate", format="e8m7", granularity="unscaled"))
    assert 2.0**-16 / 12 < found < 2.0**-14 / 12
