"""A pool whose processes are this one, for tests that count what a study computes."""

from __future__ import annotations

import gc
from concurrent.futures import Future
from typing import Any

import pytest

from dips.study import runner


class PoolInPlace:
    """What ProcessPoolExecutor is, as far as a study needs it."""

    computed = 0

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> PoolInPlace:
        return self

    def __exit__(self, *_: object) -> None: ...

    def shutdown(self, **_: object) -> None: ...

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        PoolInPlace.computed += 1
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001  # as a process of a pool hands it on
            future.set_exception(error)
        return future


def compute_in_place(monkeypatch: pytest.MonkeyPatch) -> type[PoolInPlace]:
    """Until the test is over; and only one file is digested, which is quick. What is there now is collected no more, so
    that the collection after each run walks over that run's objects.
    """
    gc.freeze()
    monkeypatch.setattr(runner, "ProcessPoolExecutor", PoolInPlace)
    monkeypatch.setattr(runner, "COMPUTING", ("study/fleet.py",))
    runner.digest_code.cache_clear()
    PoolInPlace.computed = 0
    return PoolInPlace
