"""What a test of durability records: which files and names were made durable, and when they were renamed or removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


class DiskCalls:
    """The calls of the operating system that matter for durability, in their order, with the names they touched."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self._root = root
        fsync, rename, unlink = os.fsync, Path.rename, Path.unlink

        def recorded_fsync(fd: int) -> None:
            self.calls.append(f"fsync {self._name(os.readlink(f'/proc/self/fd/{fd}'))}")
            fsync(fd)

        def recorded_rename(path: Path, target: Path) -> Path:
            self.calls.append(f"rename {self._name(path)} {self._name(target)}")
            return rename(path, target)

        def recorded_unlink(path: Path, missing_ok: bool = False) -> None:
            if path.exists():
                self.calls.append(f"remove {self._name(path)}")
            unlink(path, missing_ok)

        monkeypatch.setattr(os, "fsync", recorded_fsync)
        monkeypatch.setattr(Path, "rename", recorded_rename)
        monkeypatch.setattr(Path, "replace", recorded_rename)  # the same call, on the systems that we know
        monkeypatch.setattr(Path, "unlink", recorded_unlink)
        self._remove = shutil.rmtree
        monkeypatch.setattr(shutil, "rmtree", self._removed)

    def _removed(self, path: Path, *args: object, **kwargs: object) -> None:
        if path.exists():
            self.calls.append(f"remove {self._name(path)}")
        self._remove(path, *args, **kwargs)  # type: ignore[arg-type]

    def _name(self, path: str | Path) -> str:
        return os.path.relpath(path, self._root)
