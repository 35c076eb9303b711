"""Kills a command that works on disks, at each of its steps in turn."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dips.master.ledger import Ledger


class Killed(BaseException):
    """The command is gone, as by SIGKILL."""


class Guillotine:
    """Kills the command at its k-th change of a disk; a change that was not made stands for one that was half made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.left, self.fell = at, False
        for owner, name in ((Path, "rename"), (shutil, "rmtree"), (Ledger, "write_records")):
            monkeypatch.setattr(owner, name, self._guarded(getattr(owner, name), after=owner is Ledger))

    def _guarded(self, real: Any, after: bool) -> Any:
        def guarded(*args: Any, **named: Any) -> Any:
            self._count()
            done = real(*args, **named)
            if after:
                self._count()  # and once when the transaction is durable, before anything else
            return done

        return guarded

    def _count(self) -> None:
        self.left -= 1
        self.fell = self.fell or self.left == 0
        if self.fell:  # and what would clean up after it is gone, too
            raise Killed
