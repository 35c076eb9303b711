"""Alignment: clusters of very different speed push at about the same time (docs/architecture.md#pace, `aligned`)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.protocol.alignment import LEAST_STEP_S, NEVER_S, Alignment, WindowTiming
from dips.protocol.enums import Activity, TrainerState
from dips.protocol.heartbeats import OWN_PACE, ClusterHeartbeat

HEARTBEAT_S = 0.5
WINDOW_SHARE = 0.05  # of the time between pushes: the window's default


def heartbeat(
    name: str, step_s: float, since: int = 0, wanted: int = 64, bytes_per_s: float = 0.0, idle_s: float = 0.0
) -> ClusterHeartbeat:
    return ClusterHeartbeat(
        name, 1, TrainerState.TRAINING, Activity.INNER, 1, 0, 0, 0, 0.0, None, 0, 0, bytes_per_s, wanted, step_s, since,
        idle_s=idle_s,
    )  # fmt: skip


def gathering(opened_at: float | None = None, slots: int = 2, nbytes: int = 0) -> WindowTiming:
    return WindowTiming(opened_at, slots, nbytes)


def test_who_keeps_its_own_pace_is_told_nothing() -> None:
    """No member, no meeting; a member that stops aligning is one no more."""
    alignment = Alignment()
    assert alignment.push_in_s("a", gathering(), 0.0) == OWN_PACE
    alignment.record_heartbeat(heartbeat("a", 0.1))
    assert alignment.push_in_s("a", gathering(), 0.0) == pytest.approx(6.4)
    assert "H 64 (by itself 64)" in alignment.explain_pace("a", gathering(), 0.0)
    for step_s, aligns in ((LEAST_STEP_S, True), (LEAST_STEP_S / 2, False)):
        alignment.record_heartbeat(heartbeat("a", step_s))
        assert (alignment.push_in_s("a", gathering(), 0.0) != OWN_PACE) == aligns
    alignment.record_heartbeat(heartbeat("a", 0.1, wanted=0))
    assert alignment.push_in_s("a", gathering(), 0.0) == OWN_PACE
    assert alignment.explain_pace("a", gathering(), 0.0) == ""


def test_windows_that_heartbeats_cannot_steer_are_named() -> None:
    """Clusters of a tiny first model met by chance, and nothing said so; one alone has nobody to meet."""
    alignment = Alignment()
    alignment.record_heartbeat(heartbeat("a", 0.02, wanted=64))
    alignment.push_in_s("a", gathering(), 0.0)
    assert alignment.warn_pace(2.0) == ""
    alignment.record_heartbeat(heartbeat("b", 0.02, wanted=64))
    assert "windows every 1.3 s are too short to be steered by heartbeats every 2 s" in alignment.warn_pace(2.0)
    assert alignment.warn_pace(0.5) == ""


def test_the_late_come_and_the_early_wait_for_the_next() -> None:
    """One that has worked for it goes to a meeting that has just begun; one that was there goes to the next."""
    alignment = Alignment()
    for name in "ab":
        alignment.record_heartbeat(heartbeat(name, 0.1, since=64))
    alignment.push_in_s("a", gathering(), 0.0)  # the period is 6.4 s
    assert alignment.push_in_s("a", gathering(opened_at=10.0), 11.0) == 0.0
    alignment.record_heartbeat(heartbeat("b", 0.1, since=0))
    assert alignment.push_in_s("b", gathering(opened_at=10.0), 11.0) == pytest.approx(5.4)


def test_who_would_come_with_too_few_steps_goes_to_the_next_window() -> None:
    """An eighth of its H at least: 8 steps of 0.1 s do not fit before the window at 16.4 s, one more does."""
    alignment = Alignment()
    alignment.record_heartbeat(heartbeat("a", 0.1, since=64))
    alignment.push_in_s("a", gathering(), 0.0)  # the period is 6.4 s
    alignment.record_heartbeat(heartbeat("a", 0.1, since=0))
    assert alignment.push_in_s("a", gathering(opened_at=10.0), 16.0) == pytest.approx(6.8)
    alignment.record_heartbeat(heartbeat("a", 0.1, since=7))
    assert alignment.push_in_s("a", gathering(opened_at=10.0), 16.0) == pytest.approx(0.4)


def test_the_period_moves_slowly() -> None:
    """A cluster that reports nonsense once moves the alignment by a quarter at most."""
    alignment = Alignment()
    alignment.record_heartbeat(heartbeat("a", 0.1))
    alignment.push_in_s("a", gathering(), 0.0)
    alignment.record_heartbeat(heartbeat("a", 100.0))
    alignment.push_in_s("a", gathering(opened_at=7.0), 7.0)
    assert alignment.period_s == pytest.approx(8.0)


def test_a_first_step_of_a_minute_does_not_make_rounds_of_hours() -> None:
    """The grid stood on whatever the first heartbeat measured, a step that was compiled, say: a run with H 64 had ten
    rounds of 512 steps, where its agent gives up waiting, and ten more until it came down to 64.
    """
    alignment = Alignment()
    alignment.record_heartbeat(heartbeat("a", 60.0, since=2))
    assert alignment.push_in_s("a", gathering(), 100.0) == pytest.approx(3840.0)
    alignment.record_heartbeat(heartbeat("a", 1.0, since=4))
    assert alignment.push_in_s("a", gathering(), 102.0) == pytest.approx(62.0)
    assert alignment.push_in_s("a", gathering(opened_at=164.0), 164.0) == 64.0, "the next window"


def test_pushes_that_share_a_slot_begin_one_after_the_other() -> None:
    """With two slots, four pushes of 1 s each begin in two batches, and the last is in at the meeting."""
    alignment = Alignment()
    for name in "abcd":
        alignment.record_heartbeat(heartbeat(name, 0.1, bytes_per_s=100.0))
    delays = sorted(alignment.push_in_s(name, gathering(nbytes=100), 0.0) for name in "abcd")
    assert delays == pytest.approx([4.4, 4.4, 5.4, 5.4])
    fewer = sorted(alignment.push_in_s(name, gathering(slots=1, nbytes=100), 0.0) for name in "abcd")
    assert fewer == pytest.approx([2.4, 3.4, 4.4, 5.4]), "planned anew when a slave with fewer slots comes"


def test_a_push_begins_earlier_by_the_time_in_which_it_does_not_move() -> None:
    """Its ranks look up from their inner steps, and its fragments are apart; known or not how fast its link is."""
    alignment = Alignment()
    alignment.record_heartbeat(heartbeat("a", 0.1, idle_s=2.0))
    assert alignment.push_in_s("a", gathering(nbytes=100), 0.0) == pytest.approx(4.4)
    alignment.record_heartbeat(heartbeat("a", 0.1, bytes_per_s=100.0, idle_s=2.0))
    assert alignment.push_in_s("a", gathering(nbytes=100), 0.0) == pytest.approx(3.4)
    alignment.record_heartbeat(heartbeat("a", 0.1, bytes_per_s=100.0, idle_s=1.0))
    assert alignment.push_in_s("a", gathering(nbytes=100), 0.0) == pytest.approx(4.4)


REALS = st.sampled_from([0.0, 5e-324, 1e-300, 1e-6, 1.0, 1e6, float(1 << 53)])
COUNTS = st.sampled_from([0, 1, 64, (1 << 53) - 1])


@given(
    st.lists(st.tuples(REALS, COUNTS, COUNTS, REALS, REALS), min_size=1, max_size=4),
    st.sampled_from([0, 2, (1 << 53) - 1]),
    st.booleans(),
)
def test_no_heartbeat_that_the_wire_lets_in_is_too_much(
    members: list[tuple[float, int, int, float, float]], slots: int, opened: bool
) -> None:
    """Speeds and rates at the very edges give a number of seconds that the cluster's agent lets in as well."""
    alignment, found = Alignment(), gathering(5.0 if opened else None, slots, nbytes=1 << 40)
    for i, (step_s, since, wanted, bytes_per_s, idle_s) in enumerate(members):
        alignment.record_heartbeat(heartbeat(f"c{i}", step_s, since, wanted, bytes_per_s, idle_s))
    for i in range(len(members)):
        left = alignment.push_in_s(f"c{i}", found, 10.0)
        assert left == OWN_PACE or 0 <= left <= NEVER_S
        alignment.explain_pace(f"c{i}", found, 10.0)


def test_one_absurd_speed_leaves_the_others_a_number() -> None:
    """A cluster whose inner step takes 2^53 s makes the period long, and not endless, for the other."""
    alignment = Alignment()
    alignment.record_heartbeat(heartbeat("absurd", float(1 << 53), wanted=(1 << 53) - 1))
    alignment.record_heartbeat(heartbeat("a", 0.1))
    assert 0 <= alignment.push_in_s("a", gathering(), 0.0) <= NEVER_S


@dataclass
class Trainee:
    """A cluster that takes inner steps and pushes when it was ordered to."""

    name: str
    step_s: float
    since: int = 0
    due: float = float("inf")


def rounds_of(seed: int, jitter: float, dies_at: float = 1e9, lasts_s: float = 1500.0) -> list[tuple[float, set[str]]]:
    """Play four clusters of the paper's speeds; return (opened, who came within the window) of each round."""
    rng, alignment = Random(seed), Alignment()
    trainees = [Trainee(n, 1.0 / t) for n, t in zip("abcd", (5.23, 3.8, 2.4, 1.0), strict=True)]
    heap: list[tuple[float, int, str, Trainee]] = []
    for i, t in enumerate(trainees):
        heapq.heappush(heap, (t.step_s, i, "step", t))
        heapq.heappush(heap, (HEARTBEAT_S * rng.random(), i + 10, "heartbeat", t))
    found: list[tuple[float, set[str]]] = []
    opened, number = None, 100
    while heap[0][0] < lasts_s:
        now, _, what, t = heapq.heappop(heap)
        number += 1
        if t.name == "b" and now > dies_at:
            alignment.forget_cluster("b")
            continue
        if what == "heartbeat":
            alignment.record_heartbeat(heartbeat(t.name, t.step_s, t.since))
            delays = alignment.push_in_s(t.name, gathering(opened), now)
            t.due = now + delays
            heapq.heappush(heap, (now + HEARTBEAT_S, number, "heartbeat", t))
            continue
        t.since += 1
        rest = 0.0
        if t.due - now < t.step_s / 2:
            window = WINDOW_SHARE * alignment.period_s
            if opened is None or now > opened + window:
                opened = now
                found.append((now, set()))
            found[-1][1].add(t.name)
            rest, t.since, t.due = opened + window - now + 0.5, 0, float("inf")
        heapq.heappush(heap, (now + rest + t.step_s * (1 + jitter * rng.uniform(-1, 1)), number, "step", t))
    return found


@pytest.mark.parametrize("jitter", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_four_clusters_meet(seed: int, jitter: float) -> None:
    """Speeds of 5.23 : 3.8 : 2.4 : 1: after the third round all four are in one window, in 9 of 10 rounds."""
    rounds = rounds_of(seed, jitter)[3:]
    met = sum(len(who) == 4 for _, who in rounds)
    assert len(rounds) >= 15
    assert met >= 0.9 * len(rounds), [sorted(who) for _, who in rounds]


def test_one_that_dies_does_not_hold_up_the_others() -> None:
    """The three that live go on meeting."""
    rounds = [who for at, who in rounds_of(1, 0.1, dies_at=500.0) if at > 600.0]
    assert sum(who == {"a", "c", "d"} for who in rounds) >= 0.9 * len(rounds)


def test_the_longest_push_has_the_slot_next_to_the_window() -> None:
    """With one slot the short push goes first, and the long one ends as the window opens."""
    alignment = Alignment()
    alignment.record_heartbeat(heartbeat("long", 0.1, since=64, bytes_per_s=100.0))
    alignment.record_heartbeat(heartbeat("short", 0.1, since=64, bytes_per_s=300.0))
    one_slot = WindowTiming(None, 1, 300)  # 3 s for the one, 1 s for the other; the window is 6.4 s away
    assert alignment.push_in_s("long", one_slot, 0.0) == pytest.approx(6.4 - 3.0)
    assert alignment.push_in_s("short", one_slot, 0.0) == pytest.approx(6.4 - 3.0 - 1.0)


def test_windows_of_others_do_not_hold_a_slow_link_back_for_ever() -> None:
    """Its push must begin before the next window, and each window that opens meanwhile moves that away: seed 40."""
    alignment, opened, waits = Alignment(), 0.0, []
    slow = heartbeat("a", 0.1, since=0, bytes_per_s=1.0)
    alignment.record_heartbeat(slow)
    alignment.push_in_s("a", gathering(nbytes=2), 0.0)  # the period is 6.4 s, its push takes 2 s
    for step in range(1, 200):
        now = 0.1 * step
        opened = now - now % 2.0  # somebody pushes every 2 s
        alignment.record_heartbeat(heartbeat("a", 0.1, since=step, bytes_per_s=1.0))
        waits.append(alignment.push_in_s("a", gathering(opened, nbytes=2), now))
    assert min(waits[:127]) > 0.0 and waits[127:] == [0.0] * len(waits[127:])
