"""Runs mutants, some at a time, each in a copy of the tree and in a process of its own.

The processes are forked from this one, which has imported the large libraries and nothing of the package: a mutant
costs the time of its tests, not of importing torch. A copy is mended after each mutant, so that it is made once.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from tests.mutants.mutant import LostAnchor, Mutant, apply, mutate

ROOT = Path(__file__).parents[2]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "LICENSE", ".dockerignore")  # read by tests
COPIED = ("dips", "tests", "benchmarks", "configs", "deploy", "docs", "protos", "pyproject.toml", *TOP)
PRELOADED = ("numpy", "numba", "torch", "grpc", "zmq", "structlog", "yaml", "xxhash", "safetensors.numpy")
OWN = ("dips", "tests", "benchmarks")  # packages that each process imports anew, from its copy
WIDE_TIMEOUT_S = 600.0  # of one that meets all tests of its room
TIMEOUT_S = 120.0  # of one mutant; a test that never ends has noticed something, but is no good witness


class MutantVerdict(Enum):
    """What became of a mutant."""

    FOUND = "found"
    TIMEOUT = "found only by timeout"
    EQUIVALENT = "equivalent"
    SURVIVED = "SURVIVED"
    LOST = "no longer applies"


GOOD = frozenset({MutantVerdict.FOUND, MutantVerdict.TIMEOUT, MutantVerdict.EQUIVALENT})


@dataclass(frozen=True, slots=True)
class MutantResult:
    """A mutant, its verdict, how long it took, and what the tests printed last."""

    mutant: Mutant
    verdict: MutantVerdict
    seconds: float = 0.0
    text: str = ""


class _Copy:
    """One copy of the tree, in which one mutant at a time is tested."""

    def __init__(self, directory: Path) -> None:
        self.tree, self.output = directory / "tree", directory / "output.txt"
        self.tree.mkdir(parents=True)
        for name in COPIED:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, self.tree / name)
        self.process: ForkProcess | None = None

    def start(self, mutant: Mutant | None, tests: str) -> None:
        """Begin to run tests, on the tree as it is or on a mutant."""
        self.changed = apply(mutant, self.tree) if mutant else None
        self.mutant, self.tests, self.began = mutant, tests, time.monotonic()
        self.process = multiprocessing.get_context("fork").Process(target=self._run, args=(shlex.split(tests),))
        self.process.start()

    def finish(self) -> tuple[int | None, float]:
        """Return the exit code of the tests (None: they did not end) and their seconds; mend the tree."""
        process, seconds = self.process, time.monotonic() - self.began
        assert process is not None
        code = process.exitcode
        _kill_group(process)  # also what its tests started
        process.join()
        self.process = None
        if self.changed is not None:
            shutil.copy2(ROOT / self.changed.relative_to(self.tree), self.changed)
        return code, seconds

    def tail(self) -> str:
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-15:])

    def _run(self, arguments: list[str]) -> None:
        os.setsid()
        output = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(self.tree)
        os.environ["PYTHONPATH"] = str(self.tree)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # two mutants of one second and length share a name in the cache
        sys.dont_write_bytecode = True
        sys.path[:] = [str(self.tree), *(p for p in sys.path if Path(p).resolve() != ROOT)]
        for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
            del sys.modules[name]
        status = _Status()
        try:
            pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments], plugins=[status])
        finally:  # no way out of here leads into the runner's own code
            sys.stdout.flush()
            os._exit(status.code)


class _Status:
    """How the tests ended. What a failed one left open may make pytest itself fail afterwards, which says nothing."""

    code = int(pytest.ExitCode.INTERNAL_ERROR)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.code = int(exitstatus)


def _kill_group(process: ForkProcess) -> None:
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended by itself and left nothing


def check_clean(mutants: Iterable[Mutant], jobs: int, timeout_s: float = TIMEOUT_S) -> list[str]:
    """Run every selection on the tree as it is; return what fails: a test that is red anyway finds nothing."""
    selections = dict.fromkeys(m.tests for m in mutants if not m.equivalent)
    played = _play([(None, tests) for tests in selections], jobs, timeout_s)
    return [f"{tests}\n{text}" for _, tests, code, _, text in played if code != 0]


def run(mutants: Iterable[Mutant], jobs: int, timeout_s: float = TIMEOUT_S) -> Iterator[MutantResult]:
    """Test mutants, `jobs` at a time; yield each when it is done."""
    work: list[tuple[Mutant | None, str]] = []
    for mutant in mutants:
        try:
            mutate(mutant, ROOT)
        except LostAnchor as error:
            yield MutantResult(mutant, MutantVerdict.LOST, text=str(error))
            continue
        if mutant.equivalent:
            yield MutantResult(mutant, MutantVerdict.EQUIVALENT)
        else:
            work.append((mutant, mutant.tests))
    for played, _, code, seconds, text in _play(work, jobs, timeout_s):
        assert played is not None
        yield MutantResult(played, _verdict(code), seconds, text)


def _verdict(code: int | None) -> MutantVerdict:
    if code is None:
        return MutantVerdict.TIMEOUT
    # INTERRUPTED: a test file could not be imported, which the tree as it is could (check_clean). Nothing else counts.
    found = code in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
    return MutantVerdict.FOUND if found else MutantVerdict.SURVIVED


Played = tuple[Mutant | None, str, int | None, float, str]


def _play(work: list[tuple[Mutant | None, str]], jobs: int, timeout_s: float) -> Iterator[Played]:
    for name in PRELOADED:
        import_module(name)
    waiting = list(reversed(work))
    with tempfile.TemporaryDirectory(prefix="dips-mutants-") as directory:
        copies = [_Copy(Path(directory) / str(job)) for job in range(min(jobs, len(waiting)))]
        try:
            for copy in copies:
                copy.start(*waiting.pop())
            while busy := [copy for copy in copies if copy.process]:
                wait([copy.process.sentinel for copy in busy if copy.process], timeout=0.5)
                for copy in busy:
                    assert copy.process is not None
                    if copy.process.is_alive() and time.monotonic() - copy.began < timeout_s:
                        continue
                    mutant, (code, seconds) = copy.mutant, copy.finish()
                    yield mutant, copy.tests, code, seconds, copy.tail()
                    if waiting:
                        copy.start(*waiting.pop())
        finally:
            for copy in copies:
                if copy.process:
                    copy.finish()
