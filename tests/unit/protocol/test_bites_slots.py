"""The queue for slots, as the Coordinator keeps it: who is in it, who leaves it, and what a master forgets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dips.dataclass import replace
from dips.ids import GENESIS, PushId, VersionId
from dips.protocol import codec
from dips.protocol import events as ev
from dips.protocol.coordinator import Coordinator
from dips.protocol.effects import Commit, Finished, OpenPush, Pending, Refused
from dips.protocol.options import Options, PenaltyOptions, StopOptions, TimingOptions
from tests.unit.protocol.scripted_run import OPTIONS, ScriptedRun

FIRST = PushId("a", 1, 2)


def crowded(clusters: str = "abc", options: Options = OPTIONS) -> ScriptedRun:
    """One slot, in which the push of `a` moves."""
    run = ScriptedRun(options, slots=1)
    run.train(*clusters)
    assert run.open_push("a") == FIRST
    return run


def place(run: ScriptedRun, cluster: str, tokens: int = 0, step_s: float = 1.0) -> tuple[int, int] | None:
    """Its place and how many wait; None if it is admitted."""
    answer = run.ask(ev.PushRequested(0, run.next_push(cluster), run.head, 1, tokens, step_s))
    if isinstance(answer, Pending):
        return None
    assert isinstance(answer, Refused), answer
    return answer.place, answer.waiting


def free_the_slot(run: ScriptedRun, push: PushId = FIRST) -> None:
    run.step(ev.PushAborted(0, push, "its trainer died"))


def test_places_are_told_and_shown() -> None:
    """In the answer, and as the reason of the cluster's state."""
    run = crowded()
    assert [place(run, "b"), place(run, "c"), place(run, "b")] == [(1, 1), (2, 2), (1, 2)]
    assert run.view.clusters["c"].reason == "waits for a slot: 2nd of 2"
    free_the_slot(run)
    assert [place(run, "c"), place(run, "b"), place(run, "c")] == [(2, 2), None, (1, 1)]


def test_the_first_in_the_queue_ask_again_when_a_slot_is_due() -> None:
    """As many as there are slots; the others as ever. All are told about when their turn comes."""
    run = ScriptedRun(slots=2)
    run.train(*"abcde")
    for cluster, bytes_per_s in (("a", 4000.0), ("b", 4000 / 3)):  # of a model of 4000 bytes
        run.step(ev.BandwidthMeasured(cluster, 1, bytes_per_s))
        run.open_push(cluster)
    answers = [run.ask(ev.PushRequested(0, run.next_push(cluster), run.head, 1)) for cluster in "cde"]
    assert [(answer.retry_after_s, answer.reason) for answer in answers] == [
        (1.0, "waits for a slot: 1st of 1, about 1 s"),
        (1.0, "waits for a slot: 2nd of 2, about 3 s"),
        (2.0, "waits for a slot: 3rd of 3, about 3 s"),
    ]


def test_differences_are_pushed_to_what_all_slaves_serve() -> None:
    """To an older base, or while slaves go over to a new head, parameters are pushed, in fp32."""
    run = ScriptedRun(replace(OPTIONS, codec="int8"))
    run.train("a", "b", "c")
    first = run.push("a")
    run.wait(11.0)
    run.outcome(first)
    run.open_push("a")
    run.open_push("b", base=GENESIS)
    run.held.add(Commit)
    run.push("c")
    run.wait(11.0)
    run.step(ev.PushAborted(0, PushId("b", 1, 2), "its trainer died"))
    run.open_push("b")
    opened = [(order.push.cluster, order.codec, order.base) for order in run.all_of(OpenPush)][1:]
    v1, v2 = VersionId(1, 1), run.head
    assert opened == [("a", "int8", v1), ("b", "fp32", None), ("c", "int8", v1), ("b", "fp32", None)] and v2 != v1


def test_a_place_is_kept_while_a_slave_drains() -> None:
    """No push is admitted then; who asked first is first afterwards."""
    run = crowded("ab")
    run.step(ev.DrainAsked(0, "s"))
    answer = run.ask(ev.PushRequested(0, run.next_push("b"), run.head, 1))
    assert "drains" in answer.reason and (answer.place, answer.waiting) == (1, 1)


@pytest.mark.parametrize(
    "leave",
    [
        lambda run: run.step(ev.ClusterSilent("b", 1, 10.0, 0)),
        lambda run: run.ask(ev.ClusterLeft(0, "b", 1, 0)),
        lambda run: run.train("b", process="another"),
        lambda run: run.ask(ev.PushAborted(0, run.next_push("b"), "its trainer died")),
        lambda run: (run.ask(ev.QuarantineAsked(0, "b", "a look")), place(run, "b")),
    ],
    ids=["lease", "leaves", "incarnation", "gives up", "quarantine"],
)
def test_who_is_gone_holds_up_nobody(leave: Callable[[ScriptedRun], object]) -> None:
    """No slot is kept for it."""
    run = crowded()
    place(run, "b", step_s=100.0)
    place(run, "c")
    leave(run)
    free_the_slot(run)
    assert place(run, "c") is None


def test_a_quarantined_cluster_pushes_while_no_other_waits() -> None:
    """It has no place, and takes a slot from nobody."""
    penalty = PenaltyOptions(warmup_rounds=1, gate_patience=1)
    run = ScriptedRun(Options(penalty=penalty, timing=TimingOptions(window_s=0.0)), slots=1)
    run.train("a", "b", "c")
    for cluster in "ab" * 3:
        run.outcome(run.push(cluster))
    run.norms["a"] = 1e6
    run.outcome(run.push("a"))
    assert run.view.clusters["a"].quarantined
    push = run.open_push("b")
    assert place(run, "a") == (0, 0)
    assert place(run, "c") == (1, 1)
    free_the_slot(run, push)
    assert place(run, "a") == (0, 0)
    assert place(run, "c") is None


def test_the_end_of_a_run_ends_the_queue() -> None:
    """Everybody hears that the run is over."""
    run = crowded("ab", Options(stop=StopOptions(wall_s=10.0)))
    place(run, "b")
    run.wait(11.0)
    assert isinstance(run.ask(ev.PushRequested(0, run.next_push("b"), run.head, 1)), Finished)


def test_the_queue_is_part_of_what_a_journal_keeps() -> None:
    """A Coordinator that is read from its spelled state keeps every place: a replay grants in the same order."""
    run = crowded()
    place(run, "b"), place(run, "c")
    free_the_slot(run)
    run.machine = Coordinator.from_state(codec.decode_value(codec.encode_value(run.machine.capture_state())))
    assert [place(run, "c"), place(run, "b")] == [(2, 2), None]


def test_a_gap_of_the_master_makes_nobody_late() -> None:
    """It slept for a minute: the slot is still kept for who asked before."""
    run = crowded()
    place(run, "b")
    free_the_slot(run)
    run.now += 60.0
    run.step(ev.Blind(60.0))
    assert place(run, "c") == (2, 2)
