"""The outbox: order, and nothing behind a record before it is durable."""

from __future__ import annotations

from dips.master.core import Outbox, WriteRecords
from dips.protocol.effects import Note
from dips.protocol.records import RoundReserved


def row(number: int) -> RoundReserved:
    return RoundReserved(number, 0.0)


def note(text: str) -> Note:
    return Note(text, ())


def filled(*items: Note | RoundReserved) -> Outbox:
    outbox = Outbox()
    for item in items:
        outbox.put_item(item)
    return outbox


def test_nothing_behind_a_record_leaves_before_it_is_durable() -> None:
    """What stands before the record leaves; what stands behind it waits until the caller says that it is written."""
    outbox = filled(note("before"), row(1), note("after"))
    assert outbox.take_actions() == [note("before"), WriteRecords((row(1),))]
    assert outbox.take_actions() == []
    outbox.on_written()
    assert outbox.take_actions() == [note("after")]


def test_records_that_are_waiting_are_one_transaction() -> None:
    """Records of several steps share one fsync, in their order, and the order of all the rest is kept."""
    outbox = filled(row(1), note("a"), row(2), row(3), note("b"), note("c"))
    assert outbox.take_actions() == [WriteRecords((row(1), row(2), row(3)))]
    outbox.on_written()
    assert outbox.take_actions() == [note("a"), note("b"), note("c")]


def test_what_comes_while_the_disk_is_busy_waits_its_turn() -> None:
    """Items put during a write leave after it, and their records are the next transaction."""
    outbox = filled(row(1))
    assert outbox.take_actions() == [WriteRecords((row(1),))]
    for item in (note("a"), row(2), note("b")):
        outbox.put_item(item)
    assert outbox.take_actions() == []
    outbox.on_written()
    assert outbox.take_actions() == [note("a"), WriteRecords((row(2),))]
    outbox.on_written()
    assert outbox.take_actions() == [note("b")]


def test_an_action_is_taken_once() -> None:
    """Nothing leaves twice."""
    outbox = filled(note("a"))
    assert outbox.take_actions() == [note("a")]
    assert outbox.take_actions() == []


def test_a_record_is_unwritten_until_it_is_durable() -> None:
    """While it waits among others, and while it is being written; what is no record never is."""
    outbox = filled(note("a"), row(1))
    assert outbox.has_unwritten()
    outbox.take_actions()
    assert outbox.has_unwritten()
    outbox.on_written()
    outbox.put_item(note("b"))
    assert not outbox.has_unwritten()
