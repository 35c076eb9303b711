"""Held questions: asked again when something changes, less often the more there are, never beyond their patience."""

from __future__ import annotations

from math import inf

from dips.master.core import HeldQuestion, HeldQuestions, PollOptions
from dips.protocol.events import Ticked

OPTIONS = PollOptions(patience_s=10.0, again_s=2.0, pause_s=0.002, longest_pause_s=1.0)


def holding(count: int, at: float = 0.0) -> HeldQuestions:
    """So many questions, asked at this time."""
    held = HeldQuestions(OPTIONS)
    for req in range(count):
        held.hold_question(req, HeldQuestion(Ticked(), at + OPTIONS.patience_s), at)
    return held


def ask_again(held: HeldQuestions, now: float) -> int:
    """Ask all that is due; every answer is Pending again. Return how many were asked."""
    due = held.take_due(now)
    for req, question in enumerate(due):
        held.hold_question(req, question, now)
    return len(due)


def test_nothing_is_due_without_questions() -> None:
    """A change wakes nobody where nobody waits."""
    held = HeldQuestions(OPTIONS)
    held.on_change(1.0)
    assert held.next_deadline() == inf


def test_a_change_is_seen_at_once() -> None:
    """The first change after a quiet time is not delayed, however many wait."""
    held = holding(500)
    assert held.next_deadline() == 2.0
    held.on_change(0.7)
    assert (held.next_deadline(), ask_again(held, 0.7)) == (0.7, 500)


def test_many_questions_are_asked_again_less_often() -> None:
    """After a round of asking the next waits 2 ms for each open question, at most a second."""
    for count, pause_s in ((1, 0.002), (100, 0.2), (5000, 1.0)):
        held = holding(count)
        held.on_change(1.0)
        ask_again(held, 1.0)
        held.on_change(1.001)
        assert held.next_deadline() == 1.0 + max(0.001, pause_s)


def test_who_was_asked_again_is_held_no_longer() -> None:
    """Unless the answer is Pending again: an answer leaves once."""
    held = holding(3)
    assert len(held.take_due(2.0)) == 3
    assert (held.next_deadline(), held.take_due(1e9)) == (inf, [])


def test_only_who_loses_patience_is_asked_at_the_end() -> None:
    """Questions whose patience ends one by one cost one step each, and not one for every other."""
    held = HeldQuestions(PollOptions(patience_s=10.0, again_s=100.0))
    for req, at in enumerate((0.0, 1.0, 2.0)):
        held.hold_question(req, HeldQuestion(Ticked(), at + 10.0), at)
    assert held.next_deadline() == 10.0
    assert len(held.take_due(10.0)) == 1
    assert held.next_deadline() == 11.0
    held.withdraw_question(1)
    assert held.next_deadline() == 12.0
