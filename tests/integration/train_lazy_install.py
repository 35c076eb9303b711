"""Torch's own example, which is killed once when its first version was pulled: whole, or while a forward installs it.

train_lazy_install.py OUT EXAMPLE.py [WORDS…]    as run_example.py; OUT.died says what was installed when it happened
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from run_example import main

from dips.client import OuterLoop
from dips.client.parallel import LazyMemory
from dips.client.parallel.adapter import ReadGroup


def die_once(died: Path) -> None:
    """Before the middle one of the model's read groups is installed; with `install: whole`, once all of it is."""
    reach, step = LazyMemory._before_forward, OuterLoop.step

    def die(how: str) -> None:
        if not died.exists():
            died.write_text(how)
            os.kill(os.getpid(), signal.SIGKILL)

    def reached(self: LazyMemory, group: ReadGroup) -> None:
        if group is self._groups[len(self._groups) // 2] and self._pending:
            die(f"{len(self._parameters) - len(self._pending)} of {len(self._parameters)}")
        reach(self, group)

    def stepped(self: OuterLoop, **words: Any) -> None:
        before = self.version
        step(self, **words)
        if self.version != before and self._config.install == "whole":
            die("all")

    LazyMemory._before_forward, OuterLoop.step = reached, stepped  # type: ignore[method-assign]


if __name__ == "__main__":
    out = Path(sys.argv[1])
    die_once(out.with_name(f"{out.name}.died"))
    main(out, 1, Path(sys.argv[2]), sys.argv[3:])
