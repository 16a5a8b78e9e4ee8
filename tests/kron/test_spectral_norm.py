"""The norm estimate: a lower bound, and tight."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from psgd.linalg import spectral_norm


def normal(n, rng):
    z = torch.randn(n, n, generator=rng)
    return z + z.mT


def heavy_tailed(n, rng):
    z = torch.randn(n, n, generator=rng) / torch.rand(n, n, generator=rng).clamp_min(1e-6)
    return z + z.mT


def low_rank(n, rng):
    z = torch.randn(n, 3, generator=rng)
    return z @ torch.diag(torch.tensor([1.0, -1.0, 0.9])) @ z.mT


def badly_scaled(n, rng):
    d = torch.exp(3 * torch.randn(n, generator=rng))
    return d[:, None] * normal(n, rng) * d


def gram(n, rng):
    z = torch.randn(n, 4 * n, generator=rng)
    return z @ z.mT


def skew(n, rng):
    z = torch.randn(n, n, generator=rng)
    return z - z.mT


@pytest.mark.parametrize("kind", [normal, heavy_tailed, low_rank, badly_scaled, gram, skew])
def test_within_a_tenth_on_ninety_nine_of_a_hundred_draws(kind):
    rng, ratios = torch.Generator().manual_seed(0), []
    for n in (2, 3, 10, 33, 64, 130):
        for _ in range(20):
            a = kind(n, rng)
            ratios.append(float(spectral_norm(a) / torch.linalg.matrix_norm(a, 2)))
    assert max(ratios) < 1 + 1e-4
    assert sum(r < 0.9 for r in ratios) <= len(ratios) // 100


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_any_scale_and_zero(scale):
    a = torch.diag(torch.tensor([1.0, -3.0, 2.0])) * scale
    torch.testing.assert_close(spectral_norm(a), torch.tensor(3.0 * scale))
    assert spectral_norm(torch.zeros(4, 4)) == 0


def test_a_matrix_of_one_entry_and_bfloat16():
    assert spectral_norm(torch.full((1, 1), -2.0)) == 2
    a = torch.diag(torch.arange(1.0, 9.0)).bfloat16()
    assert spectral_norm(a).dtype == torch.float32
    torch.testing.assert_close(spectral_norm(a), torch.tensor(8.0), rtol=1e-3, atol=0)


def test_side_by_side():
    a = torch.stack([normal(8, torch.Generator().manual_seed(i)) for i in range(3)])
    each = torch.stack([spectral_norm(t) for t in a])
    torch.testing.assert_close(torch.vmap(spectral_norm)(a), each)
    torch.testing.assert_close(spectral_norm(a), each)
    torch.testing.assert_close(spectral_norm(a[:, None])[:, 0], each)


@pytest.mark.parametrize("size", [1e-300, 1e-170, 1e160, 1e300])
def test_float64_of_any_size(size):
    a = normal(10, torch.Generator().manual_seed(0)).double()
    assert float(spectral_norm(a * size) / size / spectral_norm(a)) == pytest.approx(1, rel=1e-6)


def test_what_is_made_under_a_mode_stays_there():
    a = normal(19, torch.Generator().manual_seed(0))
    with torch.inference_mode():
        spectral_norm(a.clone())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        spectral_norm(mode.from_tensor(a))
    leaf = a.clone().requires_grad_()
    spectral_norm(leaf).backward()
    assert leaf.grad is not None and bool(leaf.grad.any())


@pytest.mark.parametrize("n", [1, 8, 31, 32, 33, 200])
def test_a_flat_spectrum_has_powers_in_float32(n):
    turn, _ = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(0)))
    for a in (torch.eye(n), -torch.eye(n), turn):  # which is normal, too
        torch.testing.assert_close(spectral_norm(a), torch.tensor(1.0), rtol=1e-3, atol=0)
