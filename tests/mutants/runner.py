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
FIRST = 30  # tests of a long selection that run before the others are so much as collected
TIMEOUT_S = 400.0  # of one mutant; a test that never ends has noticed something, but is no good witness


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
    """A mutant, its verdict, how long it took, what the tests printed last, and the arguments of those that failed."""

    mutant: Mutant
    verdict: MutantVerdict
    seconds: float = 0.0
    text: str = ""
    finders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Played:
    """How a selection of tests ended (code None: it did not), on a mutant or on the tree as it is."""

    mutant: Mutant | None
    tests: str
    code: int | None
    seconds: float
    text: str
    finders: tuple[str, ...]


class _Copy:
    """One copy of the tree, in which one mutant at a time is tested."""

    def __init__(self, directory: Path) -> None:
        self.tree, self.output, self.failed = directory / "tree", directory / "output.txt", directory / "failed.txt"
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
        self.failed.unlink(missing_ok=True)
        self.process = multiprocessing.get_context("fork").Process(target=self._run, args=(shlex.split(tests),))
        self.process.start()

    def finish(self) -> _Played:
        """End the tests if they have not; mend the tree."""
        process, seconds = self.process, time.monotonic() - self.began
        assert process is not None
        code = process.exitcode
        _kill_group(process)  # also what its tests started
        process.join()
        self.process = None
        if self.changed is not None:
            shutil.copy2(ROOT / self.changed.relative_to(self.tree), self.changed)
        text = "\n".join(self.output.read_text(errors="replace").splitlines()[-15:])
        failed = self.failed.read_text().splitlines() if self.failed.exists() else []
        return _Played(self.mutant, self.tests, code, seconds, text, tuple(map(shlex.quote, failed)))

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
        every = ["-m", ""] if any("::" in a for a in arguments) else []  # a test that is named may be slow
        try:
            for part in filter(None, (arguments[:FIRST], arguments[FIRST:])):
                pytest.main(["-x", "-q", "-p", "no:cacheprovider", *every, *part], plugins=[status])
                if status.code != pytest.ExitCode.OK:
                    break
        finally:  # no way out of here leads into the runner's own code
            self.failed.write_text("".join(f"{test}\n" for test in status.failed))
            sys.stdout.flush()
            os._exit(status.code)


class _Status:
    """How the tests ended. What a failed one left open may make pytest itself fail afterwards, which says nothing."""

    def __init__(self) -> None:
        self.code, self.failed = int(pytest.ExitCode.INTERNAL_ERROR), list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.code = int(exitstatus)


def _kill_group(process: ForkProcess) -> None:
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended by itself and left nothing


def check_clean(selections: Iterable[str], jobs: int, timeout_s: float = TIMEOUT_S) -> list[str]:
    """Run every selection of tests on the tree as it is; return what fails: a test that is red anyway finds nothing."""
    played = _play([(None, tests) for tests in dict.fromkeys(selections)], jobs, timeout_s)
    return [f"{p.tests}\n{p.text}" for p in played if p.code != 0]


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
        elif not mutant.tests:
            yield MutantResult(mutant, MutantVerdict.SURVIVED, text="no test executes it")
        else:
            work.append((mutant, mutant.tests))
    for p in _play(work, jobs, timeout_s):
        assert p.mutant is not None
        yield MutantResult(p.mutant, _verdict(p.code), p.seconds, p.text, p.finders)


def _verdict(code: int | None) -> MutantVerdict:
    if code is None:
        return MutantVerdict.TIMEOUT
    # INTERRUPTED, USAGE_ERROR: a test file, or a test of one, could not be imported, which the tree as it is could.
    found = code in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR)
    return MutantVerdict.FOUND if found else MutantVerdict.SURVIVED


def _play(work: list[tuple[Mutant | None, str]], jobs: int, timeout_s: float) -> Iterator[_Played]:
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
                    yield copy.finish()
                    if waiting:
                        copy.start(*waiting.pop())
        finally:
            for copy in copies:
                if copy.process:
                    copy.finish()
