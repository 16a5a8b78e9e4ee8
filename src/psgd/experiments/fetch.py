"""Files of data sets: found in a folder or in the cache, or downloaded: checked, resumable, atomic, once for all."""

from __future__ import annotations

import hashlib
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO

from filelock import FileLock

TIMEOUT = 30.0  # seconds without a byte
CHUNK = 1 << 20
log = logging.getLogger(__name__)


class Unavailable(RuntimeError):
    """A data set is neither here nor to be had; the message says what to do."""


@dataclass(frozen=True)
class File:
    """A file of a data set: what it must be, where it may lie, and where it can be had."""

    paths: tuple[str, ...]
    """Relative to the folder of all data; a download goes to the first."""
    size: int
    sha256: str
    urls: tuple[str, ...] = ()
    """Of the canonical source, then of mirrors."""


def folders() -> list[Path]:
    """Return where to look: the folder that PSGD_DATA names, if any, then the cache."""
    given = os.environ.get("PSGD_DATA")
    if given and not Path(given).expanduser().is_dir():
        raise ValueError(f"PSGD_DATA must name a folder, got {given!r}")
    return ([Path(given).expanduser()] if given else []) + [cache()]


def cache() -> Path:
    """Return where downloads go: psgd in $XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "psgd"


def fetch(title: str, arrangements: Sequence[Sequence[File]]) -> tuple[int, list[Path]]:
    """Return the files of a data set that may be arranged in several ways, and the number of the arrangement.

    The first folder that holds any arrangement wins. Where there is none the first one is downloaded.
    """
    for folder in folders():
        for i, files in enumerate(arrangements):
            there = [path for file in files if (path := present(folder, file))]
            if len(there) == len(files):
                return i, [checked(title, path, file) for path, file in zip(there, files, strict=True)]
    return 0, [downloaded(title, file) for file in arrangements[0]]


def present(folder: Path, file: File) -> Path | None:
    """Return where a file lies in a folder, None if it does not."""
    return next((folder / p for p in file.paths if (folder / p).is_file()), None)


def checked(title: str, path: Path, file: File) -> Path:
    """Return the path of a file that is what its name says: another set's may have the same name."""
    if (sum_ := sha256(path)) != file.sha256:
        raise Unavailable(
            f"{title}: the SHA-256 of {path.name} must be {file.sha256}, but that of {path} is {sum_}; "
            "put the original there, or take the file away"
        )
    return path


def sha256(path: Path) -> str:
    """Return a file's sum."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


def downloaded(title: str, file: File) -> Path:
    """Return a file in the cache, downloaded if it is not there yet; only one process does it, others wait."""
    path = cache() / file.paths[0]
    if path.is_file():
        return checked(title, path, file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):  # which the system lets go of, even of a killed process
            if not path.is_file():  # while we waited, another may have brought it
                download(title, file, path)
    except OSError as e:
        raise Unavailable(
            f"{title} must be downloaded, but its place {path.parent} cannot be written: {e}; "
            "let XDG_CACHE_HOME name a folder that can be, or PSGD_DATA one that holds the data"
        ) from e
    return path


def download(title: str, file: File, path: Path) -> None:
    """Bring a file from the first of its sources that gives it; it appears under its name when it is whole and right.

    What a broken transfer leaves is in a hidden file, where the next attempt goes on, today or another day.
    """
    part = path.with_name(f".{path.name}.part")
    failures = []
    # What is left of another day may turn out to be wrong: then the same source once more, from the start.
    for url in (*file.urls[: part.exists()], *file.urls):
        log.info("downloading %s from %s (%.1f MB)", path.name, url, file.size / 1e6)
        try:
            while (before := length(part)) < file.size:
                receive(url, part, file.size)
                if length(part) <= before:
                    raise ConnectionError(f"ended after {length(part)} of {file.size} bytes")
        except (urllib.error.URLError, HTTPException, ConnectionError, TimeoutError) as e:
            failures.append(f"{url}: {e}")
            continue
        if (sum_ := sha256(part)) == file.sha256:
            part.replace(path)
            return
        part.unlink()
        failures.append(f"{url}: the SHA-256 must be {file.sha256}, got {sum_}")
    places = " nor in ".join(str(folder / file.paths[0]) for folder in folders())
    raise Unavailable(
        f"{title}: {path.name} is not in {places}, and could not be downloaded:\n"
        + "".join(f"  {failure}\n" for failure in failures)
        + f"Download {path.name} ({file.size / 1e6:.1f} MB) by hand, e.g. from {file.urls[0]}, and put it into "
        f"{path.parent}, or let PSGD_DATA name a folder with {file.paths[0]}."
    )


def length(path: Path) -> int:
    """Return the size of a file, 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def receive(url: str, part: Path, size: int) -> None:
    """Append to a file what it lacks of `size` bytes, as far as the server goes on; a server may begin anew."""
    have = length(part)
    headers = {"User-Agent": "psgd", **({"Range": f"bytes={have}-"} if have else {})}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
        resumed = response.status == 206 and str(response.headers["Content-Range"]).startswith(f"bytes {have}-")
        with part.open("ab" if resumed else "wb") as f:
            copy(response, f, size - (have if resumed else 0))


def copy(source: IO[bytes], target: IO[bytes], limit: int) -> None:
    """Copy at most so many bytes."""
    while limit and (block := read(source, min(CHUNK, limit))):
        target.write(block)
        limit -= len(block)


def read(source: IO[bytes], size: int) -> bytes:
    """Read from a connection; whatever goes wrong with it is not to be taken for a full disk."""
    try:
        return source.read(size)
    except OSError as e:
        raise ConnectionError(str(e)) from e
