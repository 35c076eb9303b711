"""What every test shares: nothing is left running, and random order has a printed seed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
from hypothesis import settings

from dips.transport import pipeline
from tests.forkserver.fixtures import guarded

# Two shared cores are slow at times; a test that hangs has its own timeout.
settings.register_profile("dips", deadline=None, print_blob=True)
settings.load_profile("dips")


def pytest_configure() -> None:
    """Until all is collected only more is kept: the collector would walk over every library again and again."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What stays until the end is walked over no more."""
    gc.freeze()
    gc.enable()


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


@pytest.fixture(params=[0, 1], ids=["in place", "threads"])
def stage_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a test's transfer stages in place and in threads of their own, whatever cores this machine has."""
    threads: int = request.param
    monkeypatch.setattr(pipeline, "MANY_CORES", 1 if threads else 1 << 20)
    return threads
