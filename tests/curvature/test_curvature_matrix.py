"""Every row of the matrix: what `automatic` settles on, what it says, and whether h is right."""

import warnings

import pytest
import situations
import torch
from situations import EXACT, F32, FINITE_DIFFERENCE, Recorder, compiled, error, reference, regression, trained

import psgd


@pytest.mark.parametrize("name", EXACT)
def test_exact_products_are_found_silently_and_right(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = trained(EXACT[name])
    assert opt.source is psgd.hessian
    for theta, v, h in opt.pairs:
        assert error(h.values(), reference(EXACT[name], theta, v)) < 1e-4


@pytest.mark.parametrize("name", FINITE_DIFFERENCE)
def test_without_exact_products_finite_differences_are_right_and_say_why_once(name):
    situation, cause = FINITE_DIFFERENCE[name]
    with pytest.warns(UserWarning, match=f"finite differences.*({cause})") as seen:
        opt = trained(situation)
    assert len(seen) == 1
    assert opt.source is psgd.finite_difference
    for theta, v, h in opt.pairs:
        assert error(h.values(), reference(situation, theta, v)) < 1e-2
