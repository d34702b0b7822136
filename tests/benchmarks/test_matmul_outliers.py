"""Outliers in a matmul: the data, the errors, and the criteria."""

import importlib
import itertools
from types import ModuleType

import numpy as np
import pytest

from maxlp.precision import make_recipe


@pytest.fixture
def outliers() -> ModuleType:
    return importlib.import_module("matmul_outliers")


@pytest.mark.parametrize("kind", ["channels", "tokens"])
def test_outliers_multiply_zeros(outliers, kind):
    x, w, g = outliers.make_data(kind, 1e4, 0, whole=False)
    _, plain_w, _ = outliers.make_data("Gaussian", 1.0, 0, whole=True)
    is_large = np.abs(x) > 100
    axis = 0 if kind == "channels" else 1
    assert is_large.any(axis=axis).sum() == outliers.OUTLIERS
    if kind == "channels":
        np.testing.assert_array_equal(x @ w, np.where(is_large, 0, x) @ w)
        np.testing.assert_array_equal(w[~is_large.any(axis=0)], plain_w[~is_large.any(axis=0)])
    else:
        product = np.where(is_large, 0, x).T @ np.where(np.abs(g) > 100, 0, g)
        np.testing.assert_allclose(x.T @ g, product, rtol=1e-12)  # float64
    whole_x, whole_w, whole_g = outliers.make_data(kind, 1e4, 0, whole=True)
    assert whole_w.all() and whole_x.all() and whole_g.all()


def test_an_error_is_that_of_the_rows(outliers):
    exact = np.array([[3.0, 4.0], [0.0, 0.0], [3e6, 4e6]])
    ours = exact + np.array([[0.5, 0.0], [9.0, 9.0], [0.0, 1e6]])
    assert outliers.error(ours, exact) == pytest.approx(np.sqrt((0.1**2 + 0.2**2) / 2))


def test_bfloat16_has_its_own_error_whatever_the_outliers(outliers, monkeypatch):
    monkeypatch.setitem(outliers.RECIPES, "bf16", make_recipe("bf16"))
    x, w, g = outliers.make_data("channels", 1e4, 0, whole=False)
    for ours, exact in zip(outliers.matmuls("bf16", x, w, g), (x @ w, g @ w.T, x.T @ g), strict=True):
        assert outliers.error(ours, exact) < 0.002


def test_the_criteria(outliers):
    kinds = [outliers.label(kind, size) for size in outliers.SIZES for kind in ("channels", "tokens")]
    errors = {
        key: 0.04 for key in itertools.product(["Gaussian", *kinds], outliers.GEMMS, outliers.RECIPES)
    }
    lines = outliers.criteria(errors)
    assert lines[0] == (
        "* 1. channels × 10,000, fwd / fp8_current, at most 0.5: fp8_blocks 1.00 (no), mxfp8 1.00 (no)"
    )
    assert [line for line in lines if line.startswith("* 3") and "(no)" in line] == []
    errors["channels × 10,000", "fwd", "fp8_current"] = 0.08
    assert "(no)" not in outliers.criteria(errors)[0]
    errors["tokens × 100", "drhs", "mxfp8"] = 0.05
    assert sum("mxfp8 1.25 (no)" in line for line in outliers.criteria(errors)) == 1
