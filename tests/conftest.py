"""What every test shares: nothing is left running, and random order has a printed seed."""

from __future__ import annotations

import asyncio
import asyncio.runners
import atexit
import functools
import gc
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import typer.main
import typer.testing
from coverage import Coverage
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from dips.telemetry import logs
from dips.transport import lane
from tests.forkserver.fixtures import guarded

TESTS = Path(__file__).parent
DEAREST = (  # the longest files, the longest first; --durations=0 tells
    "integration/test_client_agent.py",
    "simulation/test_seeds.py",
    "integration/test_flow.py",
    "unit/master/test_standby.py",
    "integration/test_adapters.py",
    "integration/test_object_store.py",
    "integration/test_operator.py",
    "simulation/test_sabotages.py",
    "integration/test_silent_failures.py",
    "integration/test_mistakes.py",
    "integration/test_overlap.py",
    "integration/test_pipeline.py",
    "integration/test_up.py",
    "integration/test_control.py",
    "integration/test_lazy_install.py",
    "integration/test_deploy_scripts.py",
    "integration/test_performer.py",
    "unit/master/test_journal.py",
    "integration/test_forkserver.py",
    "integration/test_seed.py",
    "integration/test_follow.py",
    "integration/test_mesh.py",
    "integration/test_renewing.py",
    "integration/test_preflight.py",
    "unit/master/test_ledger_mirror.py",
    "integration/test_scarce.py",
    "unit/study/test_study.py",
    "unit/study/test_emulator.py",
    "unit/test_docstrings.py",
    "integration/test_checkpoint.py",
    "integration/test_slave_health.py",
    "unit/protocol/test_bounded.py",
    "integration/test_ranges.py",
    "unit/inside/pipeline/test_replan.py",
    "integration/test_lane_thieves.py",
    "simulation/test_long.py",
    "unit/sim/test_sizes.py",
    "integration/test_dcp.py",
)
RACING = tuple(  # real processes and sockets, on a machine that is not ours alone
    TESTS / name
    for name in (
        *("attacks", "chaos", "deploy", "integration", "unit/demo", "unit/transport"),
        *("unit/benchmarks/test_harness.py", "unit/client/test_doors.py", "unit/slave/test_probes.py"),
        *("unit/master/test_children.py", "unit/master/test_on_version.py", "unit/master/test_supervisor.py"),
    )
)

ALL_SLOW = re.compile(r"^pytestmark = (\[[^\]]*)?pytest\.mark\.slow\b", re.MULTILINE)  # a file says so of its tests
COLLECTED_AFTER = (10_000, 20, 50)  # Python's own (700, 10, 10) walk over torch's and typer's objects again and again

# A process makes its commands of their functions once; CliRunner would do so for each call.
typer.testing._get_command = functools.cache(typer.main.get_command)  # type: ignore[attr-defined]

# Two shared cores are slow at times; a test that hangs has its own timeout.
settings.register_profile("dips", max_examples=25, deadline=None, print_blob=True)
settings.load_profile("dips")


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "play once more what failed last (with --last-failed), if all of it races with this machine: see RACING"
    parser.addoption("--racing-only", action="store_true", help=told)


def pytest_configure() -> None:
    """Until all is collected only more is kept: the collector would walk over every library again and again.

    A shell's job in the background is born deaf to Ctrl-C, and all that tests start and interrupt would be, too.
    """
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files of which every test would be deselected: their imports take each worker seconds."""
    marks = [mark for mark in ("attacks", "chaos", "slow") if f"not {mark}" in config.option.markexpr]
    if collection_path.parent == TESTS and collection_path.name in marks:
        return True
    if "slow" in marks and collection_path.suffix == ".py" and ALL_SLOW.search(collection_path.read_text()):
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the dearest files, so that no worker is left with one of them when the others are done."""
    if missing := [str(place) for place in (*(TESTS / name for name in DEAREST), *RACING) if not place.exists()]:
        raise pytest.UsageError(f"DEAREST or RACING of {__file__}: {', '.join(missing)} is not there")
    rank = {TESTS / name: at for at, name in enumerate(DEAREST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))
    racing = {path for path in {item.path for item in items} if any(path.is_relative_to(place) for place in RACING)}
    for item in items:
        if item.path in racing:
            item.add_marker("races")


class Scheduling(LoadFileScheduling):
    """Forgets a file whose tests are over: the base class counts all of a worker's at the end of each."""

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        path, units = self._split_scope(self.registered_collections[node][item_index]), self.assigned_work[node]
        if all(units[path].values()):
            del units[path]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


DIED = "dips/worker-died"  # in pytest's cache: of the last whole run


def pytest_sessionstart(session: pytest.Session) -> None:
    """A whole run begins: no worker of it has died."""
    if not (hasattr(session.config, "workerinput") or session.config.option.racing_only):
        _note_death(session.config, "")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker that dies ends the run (Makefile), and leaves tests that nobody has played."""
    if error:
        _note_death(node.config, str(error))


def _note_death(config: pytest.Config, error: str) -> None:
    if (cache := getattr(config, "cache", None)) is not None:  # `-p no:cacheprovider` has none
        cache.set(DIED, error)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What stays until the end is walked over no more. A test without a race that failed has failed."""
    sure = [item.nodeid for item in session.items if item.get_closest_marker("races") is None]
    if session.config.getoption("--racing-only"):
        if sure:
            raise pytest.UsageError(f"these race with nothing, so they are not played again: {', '.join(sure)}")
        if error := session.config.cache.get(DIED, ""):
            raise pytest.UsageError(f"a worker died, and tests were not played, so play all of them again: {error}")
    gc.freeze()
    gc.set_threshold(*COLLECTED_AFTER)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """A worker that has told all ends at once: Python would free every object of every library, which takes seconds."""
    if hasattr(config, "workerinput") and Coverage.current() is None:  # coverage writes what it measured
        atexit.register(os._exit, 0)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Under `make coverage` each line knows the tests that execute it, also in processes that they start."""
    if measured := Coverage.current():
        measured.switch_context(nodeid)


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_its_tests() -> Iterator[None]:
    """What a test starts and cannot end, because it was killed itself, is killed."""
    with guarded():
        yield


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test() -> Iterator[None]:
    """Every thread that a test starts has ended with it; daemons of libraries may stay."""
    before = set(threading.enumerate())
    yield
    started = [t for t in threading.enumerate() if t not in before and not t.daemon]
    for thread in started:
        thread.join(5)
    left = [t.name for t in started if t.is_alive()]
    assert not left, f"threads left running: {left}"


LEFT_TASKS = list[str]()  # of this test
ENDING_S = 2.0  # gRPC's handlers end a moment after the server has stopped
_cancel_all_tasks = asyncio.runners._cancel_all_tasks


def _note_and_cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """What `asyncio.run` does with tasks at its end; a thread of Di-PS may leave its own to it."""
    if threading.current_thread() is threading.main_thread() and (left := asyncio.all_tasks(loop)):
        _, left = loop.run_until_complete(asyncio.wait(left, timeout=ENDING_S))
        LEFT_TASKS.extend(str(task.get_coro()) for task in left)
    _cancel_all_tasks(loop)


asyncio.runners._cancel_all_tasks = _note_and_cancel_all


@pytest.fixture(autouse=True)
def no_task_outlives_its_test() -> Iterator[None]:
    """What a test, or a command that it calls, has begun is over, or was cancelled by who began it."""
    LEFT_TASKS.clear()
    yield
    assert not LEFT_TASKS, f"tasks left running: {LEFT_TASKS}"


@pytest.fixture(autouse=True)
def no_log_outlives_its_test() -> Iterator[None]:
    """A command configures the process's log, onto a stream that is closed when its test is over, and its level."""
    level = logs._LevelledLogger.level
    yield
    structlog.reset_defaults()
    logs._LevelledLogger.level = level


@pytest.fixture(params=[0, 1], ids=["in place", "threads"])
def stage_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a test's transfer stages in place and in threads of their own, whatever cores this machine has."""
    threads: int = request.param
    monkeypatch.setattr(lane, "MANY_CORES", 1 if threads else 1 << 20)
    return threads
