"""A stage works off what it is given, in order, and never lets its giver wait."""

from __future__ import annotations

import threading

from dips.transport.lane import Stage


def test_items_are_worked_in_order_and_the_end_waits_for_all():
    """Closing loses nothing; closing twice is closing once."""
    seen: list[int] = []
    stage = Stage("test", 100, seen.append)
    assert all(stage.put_item(i) for i in range(100))
    stage.close()
    stage.close()
    assert seen == list(range(100))


def test_a_full_stage_says_so_at_once():
    """A producer is never blocked: it gets False, and decides."""
    go, busy = threading.Event(), threading.Event()

    def work(_: int) -> None:
        busy.set()
        assert go.wait(10)

    stage = Stage("test", 1, work)
    assert stage.put_item(1)
    assert busy.wait(10)
    assert stage.put_item(2)
    assert not stage.put_item(3)
    go.set()
    stage.close()


def test_without_a_thread_the_work_is_done_where_it_is_put():
    """On few cores nobody is woken: the item is worked off when `put_item` returns."""
    seen: list[int] = []
    stage = Stage("test", 1, seen.append, threads=0)
    assert stage.in_place
    assert stage.put_item(1)
    assert stage.put_item(2)
    assert seen == [1, 2]
    stage.close()


def test_several_threads_work_off_everything():
    """In any order, and the end waits for all of them."""
    seen: list[int] = []
    stage = Stage("test", 100, seen.append, threads=3)
    assert all(stage.put_item(i) for i in range(100))
    stage.close()
    assert sorted(seen) == list(range(100))
