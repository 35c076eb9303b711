"""Turns: fair in bytes, never idle while somebody waits, and nobody waits for who is slow."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dips.transport.intake import Turns


def drained(_: str) -> bool:
    return True


def prompt(_: str) -> bool:
    return False


def test_no_more_than_the_concurrent_streams_are_asked_in_the_order_of_the_grant():
    """Who entered first is asked first."""
    turns: Turns[str] = Turns(concurrent_streams=2, quantum=10)
    for key in "abc":
        turns.enter_line(key)
    assert turns.rotate_turns(drained, prompt) == ("a", "b")
    assert turns.bytes_left("c") == 0


def test_a_used_up_turn_passes_to_who_waits():
    """And comes back, when all others had theirs."""
    turns: Turns[str] = Turns(concurrent_streams=1, quantum=10)
    for key in "abc":
        turns.enter_line(key)
    order = []
    for _ in range(6):
        (key,) = turns.rotate_turns(drained, prompt)
        order.append(key)
        turns.spend_bytes(key, 10)
    assert order == list("abcabc")


def test_a_turn_ends_only_when_nothing_is_in_flight():
    """At most `concurrent_streams` streams are busy, draining ones included."""
    turns: Turns[str] = Turns(concurrent_streams=1, quantum=10)
    turns.enter_line("a")
    turns.enter_line("b")
    turns.rotate_turns(drained, prompt)
    turns.spend_bytes("a", 10)
    assert turns.rotate_turns(lambda _: False, prompt) == ("a",)
    assert turns.rotate_turns(drained, prompt) == ("b",)


def test_a_sender_with_many_streams_has_a_few_turns():
    """Its streams share its link; another sender's begin at once, and end no turn of the first one's."""
    turns: Turns[str] = Turns(4, 10, sender_of=lambda key: key[0], most_each=2)
    for key in ("a1", "a2", "a3", "b1"):
        turns.enter_line(key)
    assert turns.rotate_turns(drained, prompt) == ("a1", "a2", "b1")
    turns.spend_bytes("a1", 10)
    turns.spend_bytes("b1", 10)
    assert turns.rotate_turns(drained, prompt) == ("a2", "b1", "a3")  # b1 goes on: nobody waits for its turn
    assert turns.bytes_left("b1") == 10
    for key in ("c1", "d1"):
        turns.enter_line(key)
    assert turns.rotate_turns(drained, prompt) == ("a2", "b1", "a3", "c1")  # no more than four in all
    turns.leave_line("d1")
    turns.leave_line("a2")
    assert turns.rotate_turns(drained, prompt) == ("b1", "a3", "c1", "a1")
    for key in ("a1", "a3", "b1", "c1"):
        turns.leave_line(key)
    assert turns.empty and not turns._waits


def test_turns_of_all_pass_when_all_are_taken():
    """Whoever waits can take over any of them."""
    turns: Turns[str] = Turns(2, 10, sender_of=lambda key: key[0], most_each=2)
    for key in ("a1", "b1", "c1"):
        turns.enter_line(key)
    assert turns.rotate_turns(drained, prompt) == ("a1", "b1")
    turns.spend_bytes("b1", 10)
    assert turns.rotate_turns(drained, prompt) == ("a1", "c1")


def test_a_stream_alone_is_never_stopped():
    """A turn goes on while nobody waits."""
    turns: Turns[str] = Turns(concurrent_streams=1, quantum=10)
    turns.enter_line("a")
    for _ in range(5):
        turns.rotate_turns(lambda _: False, prompt)
        assert turns.bytes_left("a") > 0
        turns.spend_bytes("a", turns.bytes_left("a"))


def test_a_silent_stream_loses_its_turn():
    """Nobody waits for who was asked and does not answer; it stands in line again."""
    turns: Turns[str] = Turns(concurrent_streams=1, quantum=10)
    turns.enter_line("a")
    turns.enter_line("b")
    turns.rotate_turns(drained, prompt)
    turns.spend_bytes("a", 5)
    assert turns.rotate_turns(lambda _: False, lambda key: key == "a") == ("b",)
    turns.leave_line("b")
    assert turns.rotate_turns(drained, prompt) == ("a",)
    assert turns.bytes_left("a") == 10, "what it has not asked for is not kept for it"


def test_bytes_beyond_a_turn_are_taken_from_the_next():
    """Not from that of a stream which begins anew: its debt went with it."""
    turns: Turns[str] = Turns(concurrent_streams=1, quantum=10)
    for left in (7, 10):
        turns.enter_line("a")
        turns.rotate_turns(drained, prompt)
        turns.enter_line("b")
        turns.spend_bytes("a", 13)
        assert turns.rotate_turns(drained, prompt) == ("b",)
        if left == 10:
            turns.leave_line("a")
            turns.enter_line("a")
        turns.leave_line("b")
        assert turns.rotate_turns(drained, prompt) == ("a",) and turns.bytes_left("a") == left
        turns.leave_line("a")


def test_who_leaves_is_gone_from_everywhere():
    """Active, waiting or unknown: leaving is always possible, entering twice is entering once."""
    turns: Turns[str] = Turns(concurrent_streams=1, quantum=10)
    for key in "aabb":
        turns.enter_line(key)
    turns.rotate_turns(drained, prompt)
    for key in "abz":
        turns.leave_line(key)
    assert turns.rotate_turns(drained, prompt) == ()


@given(st.lists(st.integers(1, 25), min_size=2, max_size=6))
def test_streams_are_served_evenly_in_bytes(sizes):
    """Streams of small and of large chunks get the same number of bytes, to within a turn and a chunk."""
    quantum = 30
    turns: Turns[int] = Turns(1, quantum)
    for key in range(len(sizes)):
        turns.enter_line(key)
    served: Counter[int] = Counter()
    for _ in range(2000):
        for key in turns.rotate_turns(lambda _: True, lambda _: False):
            if turns.bytes_left(key) > 0:
                turns.spend_bytes(key, sizes[key])
                served[key] += sizes[key]
    assert max(served.values()) - min(served[k] for k in range(len(sizes))) <= quantum + max(sizes)


def test_a_new_order_holds_for_those_who_wait():
    """Who has a turn keeps it; the others come in the order of their places, equal ones as they stood."""
    turns: Turns[str] = Turns(concurrent_streams=1, quantum=10)
    for key in "abcd":
        turns.enter_line(key)
    assert turns.rotate_turns(drained, prompt) == ("a",)
    turns.line_up({"a": 0, "b": 2, "c": 1, "d": 1}.__getitem__)
    order = []
    for _ in range(4):
        turns.spend_bytes(turns.rotate_turns(drained, prompt)[0], 10)
        (key,) = turns.rotate_turns(drained, prompt)
        order.append(key)
    assert order == list("cdba")
