"""Forms made for speed are the derived ones: chunk by chunk, over several chunks, written over what they start from."""

import itertools

import pytest
import torch

from psgd import (
    PSGD,
    Blocks,
    Butterfly,
    Dense,
    Diagonal,
    Direct,
    InverseFree,
    Normalized,
    Positive,
    Scalar,
    Smoothed,
    XMat,
    linalg,
    lra,
)
from psgd.group import Group, How
from psgd.groups import blocks, uvd
from psgd.points import leaves, size
from psgd.step_size import StepSize

CASES = [
    (g, n)
    for g in (Diagonal(), XMat(), Butterfly(), lra(1), lra(4))
    for n in (1, 2, 3, 8, 21, 50)
    if n % 2 == 0 or g != Butterfly()
]
FORMS = [Diagonal(), XMat(), Butterfly(), lra(3)]


def derived(group, monkeypatch):
    """Return fit and precondition as they follow from the group's definition."""

    def fit(q, v, h, *how):
        with monkeypatch.context() as m:
            m.setattr(uvd, "fits", lambda *_: False)
            return (type(group) if "@" in str(group) else Group).fitted(group, q, v, h, How(*how))

    return fit, lambda q, g: Group.precondition(group, q, g)


def copied(q):
    return {k: copied(t) if isinstance(t, dict) else t.clone() for k, t in q.items()}


def pair(n, rng, dtype=torch.float64):
    v = torch.randn(n, generator=rng, dtype=dtype)
    return v, v * torch.linspace(0.5, 2, n, dtype=dtype) + v.mean()


@pytest.mark.parametrize("size", [4, 1 << 15], ids=["chunks", "one chunk"])
@pytest.mark.parametrize("rule", [Smoothed(), Normalized()], ids=str)
@pytest.mark.parametrize(("group", "n"), CASES, ids=str)
def test_the_same_steps(group, n, rule, size, monkeypatch):
    monkeypatch.setattr(linalg, "CHUNK", size)
    fit, precondition = derived(group, monkeypatch)
    rng = torch.Generator().manual_seed(n)
    q = group.init(n, dtype=torch.float64, generator=rng)
    for t in range(12):
        v, h = pair(n, rng)
        new = group.fit(q, v, h, lr=0.4, rule=rule, coin=t % 3 > 0)
        torch.testing.assert_close(new, fit(q, v, h, 0.4, t % 3 > 0, rule), rtol=1e-7, atol=1e-9)
        for point in (new, group.ready(new)):
            torch.testing.assert_close(group.precondition(point, v), precondition(new, v))
            over = v.clone()
            torch.testing.assert_close(group.precondition(point, over, over), precondition(new, v))
        q = new


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_norm_of_a_low_rank_step_does_not_cancel(sign):
    # where Qh = ±Q⁻ᵀv nearly, their squares differ by less than float32 has digits, and the step is still μ
    n, group = 40, lra(3)
    rng = torch.Generator().manual_seed(0)
    q = group.init(n, generator=rng)
    v = torch.randn(n, generator=rng)
    h = sign * (v + 1e-5 * torch.randn(n, generator=rng))
    q["0"]["U"] *= 1e-3  # so that Q ≈ I
    s = uvd.sums(uvd.rows(q), v, h, How(0.1, True, Normalized()))
    a, b = group.apply(q, h).double(), group.solve_t(q, v).double()
    exact = torch.linalg.matrix_norm((a.outer(a) - b.outer(b)) @ (q["0"]["V"] @ q["0"]["V"].mT).double())
    assert 0.98 * exact <= uvd.norms(s)[0]() <= 1.02 * exact


@pytest.mark.parametrize("group", FORMS, ids=str)
def test_nothing_that_was_given_changes(group, monkeypatch):
    monkeypatch.setattr(linalg, "CHUNK", 4)
    q = group.init(20)
    given, rng = copied(q), torch.Generator().manual_seed(0)
    v, h = pair(20, rng, torch.float32)
    before = v.clone(), h.clone()
    group.precondition(group.fit(q, v, h), v)
    assert all(torch.equal(a, b) for a, b in zip(leaves(q), leaves(given), strict=True))
    assert torch.equal(v, before[0]) and torch.equal(h, before[1])


@pytest.mark.parametrize("rule", [Smoothed(), Normalized()], ids=str)
@pytest.mark.parametrize("group", FORMS, ids=str)
def test_written_over_itself(group, rule, monkeypatch):
    monkeypatch.setattr(linalg, "CHUNK", 4)
    rng = torch.Generator().manual_seed(0)
    q = group.init(20, generator=rng)
    for t in range(6):
        v, h = pair(20, rng, torch.float32)
        new, out = group.fit(q, v, h, rule=rule, coin=t % 2 > 0), copied(q)
        big = [leaf.data_ptr() for leaf in leaves(out) if leaf.ndim]
        over = group.fit(out, v, h, rule=rule, coin=t % 2 > 0, out=out)
        assert all(torch.equal(a, b) for a, b in zip(leaves(new), leaves(over), strict=True))
        assert [leaf.data_ptr() for leaf in leaves(over) if leaf.ndim] == big
        q = new


@pytest.mark.parametrize("group", FORMS, ids=str)
@pytest.mark.parametrize("spoiled", [float("nan"), float("inf"), 1e30])
def test_nothing_is_written_over_by_a_step_that_is_not_finite(group, spoiled):
    q = group.init(20, generator=torch.Generator().manual_seed(0))
    before, h = copied(q), torch.ones(20)
    h[7] = spoiled
    group.fit(q, torch.ones(20), h, out=q)
    assert all(torch.equal(a, b) for a, b in zip(leaves(q), leaves(before), strict=True) if a.ndim)


DIRECT = InverseFree((5, 2), (Positive(), Diagonal()), Direct())
STACKS = [
    Blocks(4, Dense()),
    Blocks(10, InverseFree((5, 2), (Dense(), Dense()))),
    Blocks(10, DIRECT),
    Blocks(5, lra(2)),
]


@pytest.mark.parametrize("piece", [1, 300, blocks.PIECE])
@pytest.mark.parametrize("group", STACKS, ids=str)
def test_blocks_are_written_over_piece_by_piece_but_for_those_that_are_not_finite(group, piece, monkeypatch):
    monkeypatch.setattr(blocks, "PIECE", piece)
    rng = torch.Generator().manual_seed(0)
    q = group.init(20, generator=rng)
    v, h = pair(20, rng, torch.float32)
    new, out, itself = group.whiten(q, v, h), copied(q), copied(q)
    assert group.whiten(q, v, h, out=out) is out and group.whiten(itself, v, h, out=itself) is itself
    for a, b, c in zip(leaves(new), leaves(out), leaves(itself), strict=True):
        torch.testing.assert_close(a, b)
        assert torch.equal(b, c)
    h[7] = torch.nan
    out, spoiled = copied(q), 7 // group.k
    group.whiten(out, v, h, out=out)
    for was, a, b in zip(leaves(q), leaves(new), leaves(out), strict=True):
        assert torch.equal(was[spoiled], b[spoiled])
        torch.testing.assert_close(*(torch.cat((t[:spoiled], t[spoiled + 1 :])) for t in (a, b)))


@pytest.mark.parametrize("piece", [1, 300, blocks.PIECE])
@pytest.mark.parametrize("group", STACKS, ids=str)
def test_blocks_are_multiplied_piece_by_piece_in_what_is_given(group, piece, monkeypatch):
    monkeypatch.setattr(blocks, "PIECE", piece)
    rng = torch.Generator().manual_seed(0)
    q = group.whiten(group.init(20, generator=rng), *pair(20, rng, torch.float32))
    for g in (pair(20, rng, torch.float32)[1], torch.stack(pair(20, rng, torch.float32))):
        whole, before, out = group.precondition(q, g), g.clone(), torch.empty_like(g)
        torch.testing.assert_close(group.precondition(q, g, out), whole)
        assert torch.equal(g, before)
        torch.testing.assert_close(group.precondition(q, g, g), whole)
    written = group.precondition(q, g, out).data_ptr() == out.data_ptr()
    assert written == (piece == 1 or (piece == 300 and size(q) >= 450))  # a piece at a time, if there are several


def test_a_rate_of_zero_writes_nothing():
    q = lra(3).init(20, generator=torch.Generator().manual_seed(0))
    before = copied(q)
    lra(3).fit(q, torch.ones(20), torch.ones(20), lr=torch.zeros(()), out=q)
    assert all(torch.equal(a, b) for a, b in zip(leaves(q), leaves(before), strict=True))


def test_what_vmap_batches_or_a_compiler_traces_is_not_looked_at():
    group, rng = Blocks(5, lra(2)), torch.Generator().manual_seed(0)
    q = group.init(20, generator=rng)
    v, h = pair(20, rng, torch.float32)
    assert all(leaf.isfinite().all() for leaf in leaves(group.fit(q, v, h, out=q)))
    assert not linalg.ordinary(torch.ones(3, dtype=torch.bfloat16))
    assert not linalg.ordinary(torch.ones(3), torch.ones(3, dtype=torch.float64))


def test_rank_zero_trains():
    p = torch.nn.Parameter(torch.ones(6))
    opt = PSGD([p], lra(0), precond_prob=1.0)
    for _ in range(12):  # past the first balancing
        opt.step(lambda: (p**2).sum())
    assert p.abs().max() < 1


@pytest.mark.parametrize("group", FORMS, ids=str)
def test_the_optimizer_keeps_its_storage(group):
    p = torch.nn.Parameter(torch.randn(4, 5, generator=torch.Generator().manual_seed(0)))
    opt = PSGD([p], group, precond_prob=1.0, init_scale=1.0)

    def closure():
        return (p**2).sum()

    opt.step(closure)
    where = {k: t.data_ptr() for k, t in opt.state[p]["q"].items() if isinstance(t, torch.Tensor)}
    before = copied(opt.state[p]["q"])
    for _ in range(3):
        opt.step(closure)
    assert where == {k: t.data_ptr() for k, t in opt.state[p]["q"].items() if isinstance(t, torch.Tensor)}
    moved = [not torch.equal(a, b) for a, b in zip(leaves(opt.state[p]["q"]), leaves(before), strict=True)]
    assert any(moved)
    kept = copied(opt.state[p]["q"])
    opt.step(lambda: (p**2).sum() * float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(leaves(opt.state[p]["q"]), leaves(kept), strict=True))


class Fixed(StepSize):
    """A step of one size, so that the mean over steps is the step of the mean; L is what the bound is."""

    def __call__(self, lr, ell, norm, bound):
        return torch.as_tensor(lr, dtype=ell.dtype), bound()


KNOWING = [(Diagonal(), 3), (Scalar(), 3), (XMat(), 4), (XMat(), 5), (XMat(), 1), (Butterfly(), 4)]


@pytest.mark.parametrize("small", [False, True], ids=["in one piece", "in several"])
@pytest.mark.parametrize("pairs", [(), (1,), (3,)], ids=str)
@pytest.mark.parametrize(("group", "n"), KNOWING, ids=str)
def test_whitening_takes_the_mean_over_all_probes_and_looks_at_none(group, n, pairs, small, monkeypatch):
    if small:
        monkeypatch.setattr(linalg, "CHUNK", 1)
    rng, count = torch.Generator().manual_seed(0), pairs[0] if pairs else 1
    q = group.init(n, dtype=torch.float64)
    for _ in range(3):
        v, h = torch.randn(2, n, generator=rng, dtype=torch.float64)
        q = group.fit(q, v, h, lr=0.3)
    h = torch.randn(*pairs, n, generator=rng, dtype=torch.float64)
    signs = torch.tensor(list(itertools.product([1.0, -1.0], repeat=n)), dtype=torch.float64)  # their mean of vvᵀ is I
    probes = [s * torch.eye(1, count).T.to(s) * count**0.5 if pairs else s for s in signs]  # one is as good as `count`
    each = [group.fit(q, v, h, lr=0.1, rule=Fixed()) for v in probes]
    assert not group.probing
    new = group.whiten(q, torch.full((n,), torch.nan), h, lr=0.1, rule=Fixed())
    for key in new.keys() - {"ell"}:
        torch.testing.assert_close(new[key], torch.stack([p[key] for p in each]).mean(0))
    over = copied(q)
    again = group.whiten(over, torch.zeros(n), h, lr=0.1, rule=Fixed(), out=over)
    assert all(torch.equal(a, b) for a, b in zip(leaves(new), leaves(again), strict=True))


@pytest.mark.parametrize("rule", [Fixed(), Normalized()], ids=["fixed", "normalized"])
@pytest.mark.parametrize(("group", "n"), [(XMat(), 20), (XMat(), 21), (Butterfly(), 20)], ids=str)
def test_whitening_in_closed_form_is_the_derived_one(group, n, rule, monkeypatch):
    rng, q = torch.Generator().manual_seed(0), group.init(n, dtype=torch.float64)
    for t in range(5):
        h = torch.randn(n, generator=rng, dtype=torch.float64)
        with monkeypatch.context() as m:
            m.setattr(linalg, "CHUNK", 4 if t % 2 else linalg.CHUNK)
            fused = group.whiten(q, h, h, lr=0.1, rule=rule)
        derived = group.whiten(q, h, h[None], lr=0.1, rule=rule)  # a batch of one
        for key in "ab":
            torch.testing.assert_close(fused[key], derived[key])
        if rule == Normalized():
            torch.testing.assert_close(fused["ell"], derived["ell"])
        else:  # the trace bounds the norm, of what is brought by v
            assert 1 - 1e-9 <= fused["ell"] / derived["ell"] <= 2
        q = fused


def test_whitening_without_probes_finds_the_inverse_root_of_the_covariance():
    rng, root = torch.Generator().manual_seed(0), torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    group, q, p = XMat(), XMat().init(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    for t in range(4000):
        q = group.whiten(q, torch.zeros(2), root @ torch.randn(2, generator=rng, dtype=torch.float64), lr=0.05)
        if t >= 2000:
            p += group.precondition(q, torch.eye(2, dtype=torch.float64)) / 2000
    torch.testing.assert_close(p, torch.linalg.inv(root), rtol=0.1, atol=0.03)


@pytest.mark.parametrize("size", [1e-16, 1e-8, 1e8, 1e15])
@pytest.mark.parametrize("group", [Diagonal(), XMat(), Butterfly()], ids=str)
def test_whitening_of_gradients_of_any_size(group, size):
    h = torch.randn(20, generator=torch.Generator().manual_seed(0))
    q, large = group.init(20), group.init(20, scale=size**-0.5)
    for _ in range(3):
        q, large = group.whiten(q, h, h, lr=0.3), group.whiten(large, h, size * h, lr=0.3)
    for key in q.keys() - {"ell"}:
        torch.testing.assert_close(large[key] * size**0.5, q[key])
