"""What the slaves' mirrors hold stays on every disk, also while nobody knows what they hold
(docs/protocol.md#mirrors: "the newest mirrored one stays on every disk")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dips.dataclass import replace
from dips.ids import VersionId
from dips.protocol import events as ev
from dips.protocol.coordinator import Coordinator
from dips.protocol.data import Intervals
from dips.protocol.effects import Hold, LoadVersion, Note, Order, RegisterLater, Reply, Retire
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.protocol.options import MOST_ROLLBACK, Options
from dips.protocol.records import LedgerState, RolledBack, RunRow, ScoreHistory, VersionRow
from dips.protocol.view import MirrorView, RollbackView
from tests.unit.protocol.scripted_run import MANIFEST, OPTIONS, ScriptedRun

AWAY = "No route to host"


def told(run: ScriptedRun, *held: VersionId, reason: str = "", unknown: bool = False) -> None:
    """A heartbeat of the present process of the slave says this of its mirror."""
    run.step(ev.MirrorReported("s", run.view.slaves["s"].sinc, ev.MirrorReport(held, reason, unknown)))


def make_version(run: ScriptedRun) -> VersionId:
    """A push of each cluster, and the version that they make."""
    pushes = [run.open_push(name) for name in ("a", "b")]
    for push in pushes:
        run.step(ev.PushStaged("s", run.view.slaves["s"].sinc, push, 4))
        run.ask(ev.PushFinished(0, push, 100, 1, (), 2.5))
    run.wait(20)
    for push in pushes:
        run.outcome(push)
    return run.head


def register_again(run: ScriptedRun, disk: tuple[VersionId, ...], report: ev.MirrorReport) -> None:
    """Another process of the slave loads the head from its disk, and serves it."""
    for memory in (None, run.head):
        run.ask(
            ev.SlaveRegistered(
                0, "s", "n2", "r", "s:1", ("s:2",), 1, memory, None, disk, 4, "", mirror=report, rival_heard_s=1e9
            )
        )


def retired(run: ScriptedRun) -> set[VersionId]:
    return {version for order in run.all_of(Retire) for version in order.versions}


def two_versions(options: Options = OPTIONS) -> tuple[ScriptedRun, VersionId]:
    """A run whose mirror holds its second version."""
    run = ScriptedRun(options)
    run.train("a", "b")
    told(run)
    make_version(run)
    held = make_version(run)
    told(run, held)
    return run, held


def test_a_process_that_cannot_list_its_mirror_keeps_what_may_be_there() -> None:
    """A slave starts again while its mirror is away: what may lie there stays, until it has been listed.

    That is what was reported last, and what the process before may have copied and reported no more.
    """
    run, held = two_versions()
    told(run, held, reason=AWAY)
    head = make_version(run)
    register_again(run, (held, head), ev.MirrorReport((), AWAY, unknown=True))
    newer = [make_version(run) for _ in range(4)]
    assert not {held, head} & retired(run) and newer[0] in retired(run)
    assert run.view.slaves["s"].mirror.version is None
    told(run)
    make_version(run)
    assert {held, head} <= retired(run), "it was listed: nothing lies there"


def test_what_a_process_has_listed_is_known_while_its_mirror_is_away() -> None:
    """Versions that were not in it are of no use there: they go as ever."""
    run, held = two_versions()
    told(run, reason=AWAY, unknown=True)
    made = [make_version(run) for _ in range(3)]
    assert retired(run) == {VersionId(1, 1), made[0]} and held not in retired(run)


def test_mirrors_copy_one_version_after_another() -> None:
    """The newest durable one; then the next when all have it. What a mirror holds stays until it has a newer one."""
    run = ScriptedRun()
    run.train("a", "b")
    told(run)
    assert run.machine.mirror_wanted() == (), "the initial model needs no mirror"
    v1 = make_version(run)
    v2 = make_version(run)
    assert run.machine.mirror_wanted() == (v1,)
    v2_at = run.now
    told(run, v1)
    assert run.machine.mirror_wanted() == (v1, v2)
    run.now += 5.0
    seen = run.view.slaves["s"].mirror
    assert (seen.version, seen.behind_versions) == (str(v1), 1)
    assert 5.0 <= seen.behind_s <= run.now - v2_at + 20.0
    told(run, v1, v2)
    assert run.machine.mirror_wanted() == (v2,)
    assert run.view.slaves["s"].mirror == MirrorView(str(v2))


def test_how_long_a_mirror_lags_counts_from_the_version_that_it_lacks() -> None:
    """Also when that one is on no disk any more: the mirror goes on from the newest."""
    run, held = two_versions()
    lacked = make_version(run)
    for _ in range(4):
        make_version(run)
    (made,) = (row.at for row in run.committed if row.version == lacked)
    mirror = run.view.slaves["s"].mirror
    assert lacked in retired(run) and mirror is not None and mirror.version == str(held)
    assert (mirror.behind_versions, mirror.behind_s) == (5, run.now - made)


def test_a_mirror_that_fails_is_told_once() -> None:
    """And that it works again, once."""
    run, held = two_versions()
    for reason in ("", AWAY, AWAY, "", ""):
        told(run, held, reason=reason)
    said = [e.kind for e in run.effects if isinstance(e, Note) and e.kind.startswith("mirror_")]
    assert said == ["mirror_fails", "mirror_works_again"]


def lagging(reason: str = "", options: Options = OPTIONS) -> tuple[ScriptedRun, VersionId]:
    """A run whose mirror lags by five versions, which is its usual pace, or since it fails."""
    run, held = two_versions(options)
    if reason:
        told(run, held, reason=reason)
    for _ in range(5):
        make_version(run)
    return run, held


def lose_disk(run: ScriptedRun, disk: tuple[VersionId, ...], mirror: tuple[VersionId, ...]) -> RollbackView:
    """Another process of the slave offers this, and says that of its mirror; what status shows of a rollback."""
    report = ev.MirrorReport(mirror)
    new = ev.SlaveRegistered(0, "s", "n2", "r", "s:1", ("s:2",), 1, None, None, disk, 4, "", mirror=report)
    run.ask(replace(new, rival_heard_s=1e9))
    return run.view.rollback


def test_a_lost_disk_costs_what_its_mirror_was_known_to_lag() -> None:
    """Nobody is asked, though that is more than most_rollback: at rounds of seconds mirrors always lag so far."""
    run, held = lagging()
    assert run.head.version - held.version > MOST_ROLLBACK
    assert lose_disk(run, (held,), (held,)) == RollbackView()
    assert run.head == held


def test_beyond_what_a_mirror_lagged_a_person_is_asked() -> None:
    """So an old disk waits; `most_rollback` more are undone as ever."""
    run, held = lagging(options=replace(OPTIONS, most_rollback=1))
    seen = run.head
    older = VersionId(held.version - 1, held.round - 1)
    assert lose_disk(run, (older,), (older,)).red is False and run.head == older

    strict, _ = lagging(options=replace(OPTIONS, most_rollback=0))
    shown = lose_disk(strict, (older,), (older,))
    assert shown.red and strict.head == seen and strict.view.slaves["s"].cause == "lacks_head"
    assert "6 outer steps back, and master.most_rollback is 0 beyond the 5 that its mirror lagged" in shown.reason


def test_a_mirror_that_fails_covers_nothing() -> None:
    """Red already, it may lag by a thousand versions: how many of them are lost, a person decides."""
    run, held = lagging(AWAY)
    shown = lose_disk(run, (held,), (held,))
    assert shown.red and shown.steps == 5


def test_a_report_of_a_former_process_says_nothing_of_the_mirror() -> None:
    """Nor one of a slave that is not in the run."""
    run, held = lagging()
    for slave, sinc in (("s", run.view.slaves["s"].sinc - 1), ("t", 1)):
        run.step(ev.MirrorReported(slave, sinc, ev.MirrorReport((run.head,), "", False)))
    mirror = run.view.slaves["s"].mirror
    assert mirror is not None and mirror.version == str(held)


def test_only_who_serves_is_believed_of_its_mirror() -> None:
    """A process with an old disk says that its mirror holds no more: the mirror had held the head."""
    run, held = lagging()
    told(run, run.head)
    seen = run.head
    for _ in range(2):
        assert lose_disk(run, (held,), (held,)).red
        told(run, held)
    assert run.head == seen


def test_what_a_mirror_had_when_its_slave_came_is_known() -> None:
    """Its process told it once, as it registered: what an older disk lacks beyond that, a person decides."""
    run, held = two_versions(replace(OPTIONS, most_rollback=0))
    for _ in range(3):
        make_version(run)
    register_again(run, (run.head,), ev.MirrorReport((run.head,)))
    shown = lose_disk(run, (held,), (held,))
    assert shown.red and shown.steps == 3


def two_slaves(
    mirrors: dict[str, ev.MirrorReport], effects: list[Any] | None = None, most_rollback: int = 100
) -> tuple[Callable[..., Any], Any]:
    """A run whose head is v7, with v2, v6 and v7 on offer: how a slave registers, and what status says."""
    layers = Manifest(tuple(Layer(n, (Parameter(n + ".w", (9,)),)) for n in ("x", "y")))
    placed = (("a", (0,)), ("b", (1,)))
    row = RunRow("r", "c", layers.to_json(), placed, ("0" * 32,) * 2, (1.0,) * 2)
    rows = tuple(VersionRow(version(n), version(max(n - 1, 0)), True, 0, 0 < n < 6 and n != 2) for n in range(8))
    state = LedgerState(row, 2, 8, rows, (), (), (), (), ScoreHistory((), ()), (), Intervals(), None)
    master = Coordinator(state, layers, replace(OPTIONS, most_rollback=most_rollback), 0.0)

    def register(
        name: str, memory: VersionId | None, disk: tuple[VersionId, ...], unread: tuple[VersionId, ...] = ()
    ) -> Any:
        event = ev.SlaveRegistered(
            1, name, "n", "r", "h:1", ("h:2",), 1, memory, None, disk, 2, "", rival_heard_s=1e9,
            mirror=mirrors.get(name), unread=unread,
        )  # fmt: skip
        told = master.step(event, 20.0)
        if effects is not None:
            effects.extend(told)
        (reply,) = [effect for effect in told if isinstance(effect, Reply)]
        return reply.result.order

    return register, lambda: master.build_view(20.0)


def test_who_lacks_a_version_that_all_others_have_is_asked_to_bring_it_back() -> None:
    """b lost its disk, its mirror holds v2; v2 has rotted on a's disk below v7, and lies in its mirror: no operator."""
    v2, v6, v7, heard = version(2), version(6), version(7), list[Any]()
    mirrors = {"a": ev.MirrorReport((v2, v6)), "b": ev.MirrorReport((v2,))}
    register, view = two_slaves(mirrors, heard)
    assert isinstance(register("a", v7, (v6, v7)), Hold)
    assert isinstance(register("b", None, (v2,)), RegisterLater)
    assert view().slaves["a"].state == "restoring", "it is told to register, by its next heartbeat"
    asked = register("a", v7, (v6, v7))
    assert isinstance(asked, RegisterLater) and asked.look_for == (v2,)
    assert "v2@r2 is brought back from mirrors" in asked.reason
    assert register("b", None, (v2,)).look_for == (), "it has it"
    assert register("a", v7, (v2, v6, v7)) == LoadVersion(v2)
    assert view().head == "v2@r2"
    assert isinstance(register("b", v2, (v2,)), Hold) and isinstance(register("a", v2, (v2,)), Hold)
    assert len([e for e in heard if isinstance(e, RolledBack)]) == 1, "nobody lacks the head any more"


def test_nothing_is_undone_that_a_mirror_brings_back() -> None:
    """All offer v2, b has v6 in a mirror that works: that is looked for first; one that fails is not waited for."""
    v2, v6, v7 = version(2), version(6), version(7)
    register, view = two_slaves({"a": ev.MirrorReport(()), "b": ev.MirrorReport((v6,))})
    register("a", v7, (v2, v6, v7))
    asked = register("b", None, (v2,))
    assert asked.look_for == (v6,) and "no version after v2@r2 is offered by every slave" in asked.reason
    register("a", v7, (v2, v6, v7))
    assert register("b", None, (v2, v6)) == LoadVersion(v6)
    register, view = two_slaves({"a": ev.MirrorReport(()), "b": ev.MirrorReport((v6,), AWAY)})
    register("a", v7, (v2, v6, v7))
    assert register("b", None, (v2,)) == LoadVersion(v2)
    assert view().head == "v2@r2"


def test_the_mirror_that_lagged_most_decides_how_far_nobody_is_asked() -> None:
    """The mirror of a had v6, that of b had v2: when b has lost its disk, too, five steps are what was known."""
    v2, v6, v7 = version(2), version(6), version(7)
    mirrors = {"a": ev.MirrorReport((v6,)), "b": ev.MirrorReport((v2,))}
    register, view = two_slaves(mirrors, most_rollback=0)
    for name in "ab":
        assert isinstance(register(name, v7, (v2, v6, v7)), Hold)
    mirrors["a"] = ev.MirrorReport(())
    register("a", None, (v2,))
    assert view().rollback.red and view().head == "v7@r7"
    assert register("b", None, (v2,)) == LoadVersion(v2) and view().head == "v2@r2"


def test_an_old_version_is_read_before_the_run_goes_back_to_it() -> None:
    """b has lost v7 and v6 has rotted there: v2, which a has not read, is read first, and only then the head."""
    v2, v6, v7 = version(2), version(6), version(7)
    register, view = two_slaves({})
    assert isinstance(register("a", v7, (v6, v7), (v2,)), Hold)
    asked = register("b", None, (v2,))
    assert asked.look_for == () and "a: v6@r6, v7@r7 (1 more are not read)" in asked.reason
    assert "v2@r2 is read on the disks and verified first" in asked.reason
    assert view().head == "v7@r7"
    assert register("a", v7, (v6, v7), (v2,)).look_for == (v2,)
    assert register("a", v7, (v2, v6, v7)) == LoadVersion(v2)
    assert view().head == "v2@r2"


def test_an_old_version_that_is_found_rotten_is_not_waited_for() -> None:
    """a reads v2 as it is told and does not name it any more: there is no common version, a person must help."""
    v2, v6, v7 = version(2), version(6), version(7)
    register, view = two_slaves({})
    register("a", v7, (v6, v7), (v2,))
    register("b", None, (v2,))
    assert register("a", v7, (v6, v7), (v2,)).look_for == (v2,)
    again = register("a", v7, (v6, v7))
    assert again.look_for == () and "no version is offered by every slave" in again.reason
    assert "restore a snapshot directory" in again.reason and view().head == "v7@r7"


def test_a_head_that_is_not_read_yet_is_loaded() -> None:
    """After a rollback the head is below newer directories: a load verifies what it reads, so it is ordered at once;
    nobody rolls back because of it.
    """
    v2, v6, v7 = version(2), version(6), version(7)
    register, view = two_slaves({})
    assert register("a", None, (v2, v6), (v7,)) == LoadVersion(v7)
    assert register("b", None, (v6, v7)) == LoadVersion(v7)
    assert isinstance(register("a", v7, (v2, v6, v7)), Hold) and view().head == "v7@r7"
    assert view().slaves["a"].state == "ready"


def test_what_was_retired_goes_though_nobody_has_read_it() -> None:
    """A slave that died before it deleted v1 finds it below its newest two: it would stay for ever."""
    heard = list[Any]()
    register, _ = two_slaves({}, heard)
    register("a", version(7), (version(6), version(7)), (version(1), version(2)))
    register("b", version(7), (version(2), version(6), version(7)))
    assert [e.body for e in heard if isinstance(e, Order) and isinstance(e.body, Retire)] == [Retire((version(1),))]


def test_nobody_is_asked_for_what_no_mirror_holds() -> None:
    """Then a person is, and a disk that is put back is looked at within a second, also of one that was serving."""
    v2, v7, heard = version(2), version(7), list[Any]()
    register, view = two_slaves({"a": ev.MirrorReport(()), "b": ev.MirrorReport((v2,))}, heard)
    assert isinstance(register("a", v7, (v7,)), Hold)
    assert register("b", None, (v2,)).look_for == ()
    assert view().slaves["a"].state == "restoring"
    again = register("a", v7, (v7,))
    assert (again.look_for, again.retry_after_s) == ((), 1.0)
    assert isinstance(register("a", v7, ()), RegisterLater)
    assert [view().slaves[name].cause for name in "ab"] == ["awaits", "lacks_head"], "a has it in memory"
    again = register("a", v7, (v7,))
    assert again.reason.endswith("a: v7@r7; b: v2@r2; restore a snapshot directory")
    assert register("b", None, (v2, v7)) == LoadVersion(v7)
    assert isinstance(register("a", v7, (v7,)), Hold) and not [e for e in heard if isinstance(e, RolledBack)]


def test_a_mirror_that_fails_is_hoped_for_if_nothing_else_is_left() -> None:
    """No version is offered by all: what lies there may come back."""
    v6, v7 = version(6), version(7)
    register, _ = two_slaves({"a": ev.MirrorReport(()), "b": ev.MirrorReport((v6,), AWAY)})
    register("a", v7, (v6, v7))
    assert register("b", None, ()).look_for == (v6,)


def version(number: int) -> VersionId:
    return VersionId(number, number)


@pytest.mark.parametrize("unknown", [True, False])
def test_a_new_master_keeps_whatever_an_unknown_mirror_may_hold(unknown: bool) -> None:
    """It has no word of its own: all that the ledger has not retired stays, since the former master kept v2 for it."""
    rows = tuple(VersionRow(version(n), version(max(n - 1, 0)), True, 0, 0 < n < 6 and n != 2) for n in range(8))
    row = RunRow("r", "c", MANIFEST.to_json(), (("s", (0,)),), ("0" * 32,), (100.0,))
    state = LedgerState(row, 2, 8, rows, (), (), (), (), ScoreHistory((), ()), (), Intervals(), None)
    run = ScriptedRun()
    run.machine = Coordinator(state, MANIFEST, OPTIONS, 0.0)
    register_again(run, (version(2), version(6), version(7)), ev.MirrorReport((), AWAY, unknown))
    run.train("a", "b")
    for _ in range(4):
        make_version(run)
    kept = {version(2), version(6), version(7)}
    assert retired(run) & kept == (set() if unknown else kept)
    told(run, version(6))
    make_version(run)
    assert retired(run) & kept == (kept - {version(6)} if unknown else kept)
