"""Passes a trainer's standard error on, byte for byte, and keeps its end: what a crash said last.

The trainer writes to a pipe instead of our own standard error; a thread copies it, so that a slow terminal holds up the
trainer and not the agent.
"""

from __future__ import annotations

import os
import re
import select
import threading

TAIL_BYTES = 16384  # kept: torchrun prints a page of its own after what its worker said
PIECE_BYTES = 65536
LINE_CHARS = 160  # shown of the last line
END_S = 1.0  # for the rest of the output, after all processes of the trainer are gone
# Python's last line of a traceback, as torch prints it for a rank; torchrun's own comes after it and says nothing.
RAISED = re.compile(
    r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Iteration)\b.*)$", re.MULTILINE
)
OF_TORCHRUN = "torch.distributed.elastic"


class ErrorTail:
    """One launch: hand `writer` to the process, `close_writer` in ours, and `finish` when it has ended."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self._tail = b""
        self._thread = threading.Thread(target=self._copy, name="trainer-stderr", daemon=True)

    def close_writer(self) -> None:
        """The process has its own copy: the pipe ends when that does."""
        os.close(self.writer)
        self._thread.start()

    def finish(self) -> str:
        """Return what was said last, in one line; empty if nothing was."""
        self._thread.join(END_S)
        return last_line(self._tail.decode(errors="replace"))

    def _copy(self) -> None:
        while piece := os.read(self._reader, PIECE_BYTES):
            self._tail = (self._tail + piece)[-TAIL_BYTES:]
            _pass_on(piece)
        os.close(self._reader)


def _pass_on(piece: bytes) -> None:
    """To our own standard error; if that is gone, the trainer goes on without it."""
    while piece:
        try:
            piece = piece[os.write(2, piece) :]
        except BlockingIOError:  # a terminal that another program has made non-blocking
            select.select([], [2], [])
        except OSError:
            return


def last_line(text: str) -> str:
    """The last error that was raised, else the last line with words in it."""
    raised = [line for line in RAISED.findall(text) if not line.startswith(OF_TORCHRUN)]
    lines = raised or [line.strip() for line in text.splitlines() if any(c.isalnum() for c in line)]
    return lines[-1].strip()[:LINE_CHARS] if lines else ""
