"""Passes a trainer's standard error on, byte for byte, and keeps its end: why it crashed.

The trainer writes to a pipe instead of our own standard error; a thread copies it, so that a slow terminal holds up the
trainer and not the agent.

When one rank fails the others fail of it, with errors of their own (a connection was closed), and usually print last.
torchrun says which rank was the first; where it did not look in time, an error that is no such consequence is taken.
"""

from __future__ import annotations

import os
import re
import select
import signal
import threading

from dips.printable import make_printable

TAIL_BYTES = 1 << 18  # kept: a traceback of each rank of a host, and the page that torchrun prints after them
PIECE_BYTES = 65536
LINE_CHARS = 160  # shown of the line
PAST_CHARS = 4 * LINE_CHARS  # looked at for a line that is shown
END_S = 1.0  # for the rest of the output, after all processes of the trainer are gone
# Python's last line of a traceback, as torch prints it for a rank; torchrun's own comes after it and says nothing.
RAISED = re.compile(
    r"^(?:\[rank(\d+)\]: ?)?((?:dips\.errors\.\w+|(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Iteration))\b.*)$",
    re.MULTILINE,
)
OF_TORCHRUN = "torch.distributed.elastic"
# torchrun's page: the rank whose end it saw first, and its exit code; below 0 the signal that killed it.
ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\):.*?rank +: (\d+) .*?exitcode +: (-?\d+)", re.DOTALL)
OF_OTHERS = re.compile(
    r"Connection (?:closed|reset|refused)|Broken pipe|DistNetworkError|gloo|Gloo|NCCL|ncclRemoteError|DistBackendError"
    r"|not all \d+ ranks reached",
)
WARNED = re.compile(r":\d+: \w*Warning: ")  # Python prints the source line below it
BY_SIGNAL = 128  # exit codes above it
SILENT = {signal.SIGKILL: " (out of memory?)", signal.SIGTERM: ""}  # whom they end has said nothing of it


class ErrorTail:
    """One launch: hand `writer` to the process, `close_writer` in ours, and `finish` when it has ended."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self._tail = bytearray()
        self._thread = threading.Thread(target=self._copy, name="trainer-stderr", daemon=True)

    def close_writer(self) -> None:
        """The process has its own copy: the pipe ends when that does."""
        os.close(self.writer)
        self._thread.start()

    def last_lines(self, most: int) -> tuple[str, ...]:
        """The newest whole lines so far that have words in them."""
        text = bytes(self._tail[-most * PAST_CHARS :]).decode(errors="replace")
        return tuple(make_printable(line)[:LINE_CHARS] for line in _list_spoken(text)[-most:])

    def finish(self) -> str:
        """Return what seems to be the cause of its end, in one line; empty if nothing was said."""
        self._thread.join(END_S)
        return find_cause(bytes(self._tail).decode(errors="replace"))

    def _copy(self) -> None:
        while piece := os.read(self._reader, PIECE_BYTES):
            self._tail += piece
            del self._tail[:-TAIL_BYTES]
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


def find_cause(text: str) -> str:
    """The error of the rank that failed first, or what killed it; without an error, the last line with words in it."""
    raised = [found for found in RAISED.findall(text) if not found[1].startswith(OF_TORCHRUN)]
    first = ROOT_CAUSE.search(text)
    if first is not None and int(first[2]) < 0:
        return f"rank {first[1]} was {describe_signal(-int(first[2]))}"
    lines = [line for rank, line in raised if first is not None and rank == first[1]]
    if not lines or OF_OTHERS.search(lines[-1]):
        lines = [line for _, line in raised if not OF_OTHERS.search(line)] or lines or [line for _, line in raised]
    return (lines or _list_spoken(text) or [""])[-1].strip()[:LINE_CHARS]


def describe_signal(number: int) -> str:
    """What a signal did, and the usual reason."""
    try:
        named = signal.Signals(number)
    except ValueError:
        return f"killed by signal {number}"
    return f"killed by {named.name}{SILENT.get(named, '')}"


def _list_spoken(text: str) -> list[str]:
    lines = text.splitlines()
    before = ["", *lines]
    return [
        line.strip()
        for line, above in zip(lines, before, strict=False)
        if any(c.isalnum() for c in line) and not (line[0].isspace() and WARNED.search(above))
    ]
