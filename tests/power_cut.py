"""What a disk would still hold if its power went now, by what was fsynced, and in which order.

A file keeps what it held at its last fsync, a directory the names that it had at its own; what was there when the
recording began is on the disk. So a write that was not flushed before its fsync, a name that came after its
directory's, and a rename of what is not on the disk are all found, wherever they happen.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.guillotine import Killed

Kept = bytes | frozenset[tuple[str, int]]  # a file's content, a directory's names and inodes


class PowerCut:
    """Records all fsyncs and renames below `root`."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.early: list[str] = []  # what was not on the disk when it was renamed
        self._root, self._kept = root, dict[int, Kept]()
        self._open: list[int] = []  # an inode is not given again while it is open
        for path in (root, *root.rglob("*")):
            if path.is_dir() or path.is_file():
                self._keep(os.open(path, os.O_RDONLY))
        fsync, rename, replace = os.fsync, Path.rename, Path.replace

        def recorded_fsync(fd: int) -> None:
            fsync(fd)
            self._keep(os.dup(fd))

        def recorded_rename(path: Path, target: Path) -> Path:
            self.early += self._find_lost_below(path)
            return rename(path, target)

        def recorded_replace(path: Path, target: Path) -> Path:
            self.early += self._find_lost_below(path)
            return replace(path, target)

        monkeypatch.setattr(os, "fsync", recorded_fsync)
        monkeypatch.setattr(Path, "rename", recorded_rename)
        monkeypatch.setattr(Path, "replace", recorded_replace)

    def close(self) -> None:
        for fd in self._open:
            os.close(fd)

    def find_lost(self, path: Path) -> list[str]:
        """Names and contents of a file, or of a directory and all below it, that would not be as they are now."""
        lost, at = self._find_lost_below(path), path
        while at != self._root:
            if (at.name, at.stat().st_ino) not in self._names(at.parent):
                lost.append(f"name {self._relative(at)}")
            at = at.parent
        return lost

    def would_return(self, path: Path) -> bool:
        """Whether a name that was removed would be there again."""
        return any(name == path.name for name, _ in self._names(path.parent))

    def _find_lost_below(self, path: Path) -> list[str]:
        if path.is_file():
            kept = self._kept.get(path.stat().st_ino)
            return [] if kept == path.read_bytes() else [f"content {self._relative(path)}"]
        lost, names = list[str](), self._names(path)
        for one in sorted(path.iterdir()):
            if (one.name, one.stat().st_ino) not in names:
                lost.append(f"name {self._relative(one)}")
            lost += self._find_lost_below(one)
        return lost

    def _names(self, directory: Path) -> frozenset[tuple[str, int]]:
        kept = self._kept.get(directory.stat().st_ino, frozenset())
        assert isinstance(kept, frozenset)
        return kept

    def _keep(self, fd: int) -> None:
        self._open.append(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        found = os.fstat(fd).st_ino
        self._kept[found] = (
            frozenset((one.name, one.stat(follow_symlinks=False).st_ino) for one in os.scandir(path))
            if path.is_dir()
            else path.read_bytes()
        )

    def _relative(self, path: Path) -> str:
        return os.path.relpath(path, self._root)


def fell_behind(at: int, patch: pytest.MonkeyPatch, act: Callable[[], object]) -> bool:
    """Do it, and die behind the `at`-th fsync or rename; nothing is cleaned up then. False: it has fewer."""
    left = at

    def guard(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def guarded(*args: Any) -> Any:
            nonlocal left
            done = real(*args)
            left -= 1
            if left == 0:
                patch.setattr(shutil, "rmtree", lambda *_, **__: None)
                raise Killed
            return done

        patch.setattr(owner, name, guarded)

    for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace")):
        guard(owner, name)
    try:
        act()
    except Killed:
        return True
    return False
