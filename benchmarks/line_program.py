"""A program in a network namespace that answers each line with a line of JSON, and says what processor time it took."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.namespaces import End
from benchmarks.record import ROOT

END_S = 30.0


class LineProgram:
    """One such program; `send_request` and `read_answer` apart let several work at once."""

    def __init__(self, end: End, module: str, *words: str) -> None:
        self._popen = subprocess.Popen(
            end.command(sys.executable, "-m", f"benchmarks.{module}", *words),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.first = self.read_answer()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send_request(self, *words: Any) -> None:
        """Write a line: a word and its arguments."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(words) + "\n")
        self._popen.stdin.flush()

    def read_answer(self) -> Any:
        """Wait for an answer; RuntimeError if the program has died."""
        assert self._popen.stdout is not None
        answer = self._popen.stdout.readline()
        if not answer:
            raise RuntimeError(f"a program in a namespace died with exit code {self._popen.wait(END_S)}")
        return json.loads(answer)

    def ask_program(self, *words: Any) -> Any:
        self.send_request(*words)
        return self.read_answer()

    def close(self) -> None:
        """End it: its input is over."""
        try:
            self._popen.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.communicate()


def ask_programs(programs: Sequence[LineProgram], *words: Any) -> list[Any]:
    """Ask all of them the same, at once; return their answers."""
    for program in programs:
        program.send_request(*words)
    return [program.read_answer() for program in programs]


@contextmanager
def open_programs() -> Iterator[Callable[..., LineProgram]]:
    """Start programs that all end together, the last first."""
    with ExitStack() as stack:

        def start(end: End, module: str, *words: str) -> LineProgram:
            program = LineProgram(end, module, *words)
            stack.callback(program.close)
            return program

        yield start


# ---- in the program --------------------------------------------------------------------------------------------------


def print_answer(answer: Any) -> None:
    """Write the answer to the last request."""
    print(json.dumps(answer), flush=True)


def read_requests() -> Iterator[Any]:
    """Yield each request, until the input is over."""
    for line in sys.stdin:
        yield json.loads(line)


def processor_s() -> float:
    """User and system time of this process until now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
