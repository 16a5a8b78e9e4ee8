"""The pages: up to date, complete, right about storage and costs, and their examples run."""

import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import psgd
from psgd.demo import floats

ROOT = Path(__file__).parents[1]


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


groups_page, distributed_page = script("make_groups_page"), script("make_distributed_page")
shakespeare_page, speed_page = script("make_shakespeare_page"), script("make_speed_page")

PAGES = [ROOT / "README.md", ROOT / "docs" / "groups.md", ROOT / "docs" / "kron.md"]
ROWS = groups_page.ROWS.values()
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@pytest.mark.parametrize(
    "name, made",
    [
        ("groups", groups_page),
        ("distributed", distributed_page),
        ("shakespeare", shakespeare_page),
        ("speed", speed_page),
    ],
)
def test_the_page_is_not_stale(name, made):
    written = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert written == made.page(), f"run `./run python docs/make_{name}_page.py`"


def test_every_public_group_has_a_row():
    public = {name for name, x in vars(psgd).items() if getattr(x, "__module__", "").startswith("psgd.groups.")}
    moved = {"InverseFree", "Direct", "Positive", "Procrustes", "Quadratic"}  # Kronecker's own matrices: docs/kron.md
    assert public - moved == set(groups_page.ROWS)


def test_every_row_has_a_picture_and_every_picture_a_row():
    found = {path.name for path in (ROOT / "docs" / "groups").iterdir()}
    assert found == {row.picture for row in ROWS}
    assert len({name.casefold() for name in found}) == len(found)


@each_row
def test_a_row_shows_its_name(row):
    group = row.make(groups_page.SIZES)
    assert row.name in (row.expression.split("(")[0], type(group).__name__)


@each_row
@pytest.mark.parametrize("n", [16, 64, 256])
def test_storage_is_what_the_point_takes(row, n):
    sizes = {"n": n, "k": 8, "r": 3, "m": n // 8, "c": 8, "s": 4}
    group = row.make(sizes)
    if isinstance(group, psgd.Padded):
        sizes["n"] += 1
    q = group.init(sizes["n"])
    assert floats(q) == groups_page.evaluate(row.storage, sizes)


class Operations(TorchDispatchMode):
    """Counts operations by their shapes, up to constants."""

    def __init__(self):
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        name = func.name().removeprefix("aten::")
        if name in ("mm", "bmm", "mv", "addmm", "dot"):
            self.total += outputs[0].numel() * inputs[0].shape[-1]
        elif name == "_linalg_solve_ex":
            self.total += inputs[0].numel() * inputs[0].shape[-1]
        elif name == "linalg_solve_triangular":
            self.total += outputs[0].numel() * inputs[0].shape[-1]
        elif "fft" in name:
            self.total += outputs[0].numel() * math.log2(outputs[0].shape[-1])
        elif not func.is_view:
            self.total += max((t.numel() for t in inputs + outputs), default=0)
        return out


def count(group, action, n):
    meta = torch.device("meta")
    q, x = group.init(n, device=meta), torch.empty(n, device=meta)
    with Operations() as operations:
        group.precondition(q, x) if action == "apply" else group.fit(q, x, x)
    return operations.total


@each_row
@pytest.mark.parametrize("action", ["apply", "fit"])
def test_costs_grow_as_the_page_says(row, action):
    """All sizes grow, so that a wrong power of any of them shows; lower terms may turn a factor of 2."""
    small = {"n": 2**12, "k": 2**7, "r": 2**5, "m": 2**6, "c": 2**6, "s": 2**3}
    large = {"n": 2**15, "k": 2**9, "r": 2**8, "m": 2**8, "c": 2**7, "s": 2**5}
    formula = getattr(row, action)
    if formula == "0":
        assert not row.make(small).moves
        return
    counted = count(row.make(large), action, large["n"]) / count(row.make(small), action, small["n"])
    claimed = groups_page.evaluate(formula, large) / groups_page.evaluate(formula, small)
    assert 0.5 < counted / claimed < 2


def test_the_map_of_the_source_names_what_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = re.search(r"```\nsrc/psgd/\n(.*?)```", text, re.DOTALL).group(1)
    for line in tree.splitlines():
        folder = ROOT / "src" / "psgd" if line.startswith("  ") else ROOT
        assert (folder / line.split()[0]).exists()


def test_formulas_are_written_as_mathematics():
    assert groups_page.pretty("2*n*log2(n)") == "2n log₂ n"
    assert groups_page.pretty("n*(m + log2(c)) + m**3") == "n(m + log₂ c) + m³"
    assert groups_page.pretty("k**2*ceil(n/k)") == "k²⌈n/k⌉"
    assert groups_page.pretty("2*n - 1") == "2n − 1"


def test_blocks_of_diagonals_are_a_permutation_group():
    """Row 16 of the paper's table: the butterfly matrices, as orbits."""
    group = psgd.permutation(orbits=[(i, i + 3) for i in range(3)])
    one, other = (g.matrix(groups_page.walked(g, 6), 6) for g in (group, psgd.Butterfly()))
    assert torch.equal(one != 0, other != 0)


def test_an_outer_rotation_drops_out():
    """Row 12: Uᵀ·A·U and A·U have one P."""
    one, other = psgd.XMat() @ psgd.DCT(), psgd.Conjugate(psgd.DCT(), psgd.XMat())
    a, x = groups_page.walked(psgd.XMat(), 6), torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(one.precondition({"0": a, "1": {}}, x), other.precondition({"A": a, "C": {}}, x))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    with torch.random.fork_rng():
        torch.manual_seed(0)
        names: dict = {"__name__": page.stem}  # a page is read from top to bottom
        for block in blocks:
            exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)[^):]*\)", page.read_text(encoding="utf-8"))
    assert not {link for link in links if not (page.parent / link).exists()}


def test_every_page_is_linked_from_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not {page.name for page in ROOT.glob("docs/*.md") if f"](docs/{page.name})" not in text}
