"""Small disks for slaves, and what goes wrong with what lies on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from dips.ids import VersionId
from dips.store.version import MANIFEST_FILE, MOMENTUM, THETA
from tests.damage import flip_bit, layer_files

FILLER = "filler"
TAKE_S = 0.01


def missing() -> str | None:
    """Why no small disk can be had here, or None."""
    return None if os.geteuid() == 0 and shutil.which("mount") else "only root may mount a tmpfs"


@contextmanager
def small_disk(directory: Path, kib: int = 1024) -> Iterator[None]:
    """A tmpfs at `directory`; gone on return, whatever lay on it."""
    directory.mkdir(parents=True, exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "dips-chaos", str(directory)]
    subprocess.run(words, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@contextmanager
def full(directory: Path) -> Iterator[None]:
    """Leave not a byte, nor what is given back meanwhile: room that was reserved for a snapshot, an old version."""
    over, filler = threading.Event(), directory / FILLER

    def take() -> None:
        while not over.wait(TAKE_S):
            _fill(filler)

    _fill(filler)
    with ThreadPoolExecutor(1) as thread:
        taking = thread.submit(take)
        try:
            yield
        finally:
            over.set()
            taking.result()
            filler.unlink()


def _fill(filler: Path) -> None:
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:  # that is what we want
                continue


def versions(directory: Path) -> list[VersionId]:
    """Snapshots by their names, oldest first."""
    return sorted(VersionId.parse(path.name) for path in directory.glob("v*@r*"))


def rot_theta(directory: Path, version: VersionId) -> None:
    """One bit of the parameters."""
    flip_bit(directory / str(version), THETA)


def rot_momentum(directory: Path, version: VersionId) -> None:
    """One bit of the outer momentum, which nobody pulls: only its digest shows it."""
    flip_bit(directory / str(version), MOMENTUM)


def halve(directory: Path, version: VersionId) -> None:
    """Half-written, as a disk that lied about fsync leaves it."""
    path = layer_files(directory / str(version))[0]
    os.truncate(path, path.stat().st_size // 2)


def lose_manifest(directory: Path, version: VersionId) -> None:
    (directory / str(version) / MANIFEST_FILE).unlink()


def copy(directory: Path, to: Path) -> None:
    shutil.copytree(directory, to, ignore=shutil.ignore_patterns(".lock"))


def put_back(saved: Path, directory: Path) -> None:
    """What was copied takes the place of what is there."""
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    shutil.copytree(saved, directory, dirs_exist_ok=True)
