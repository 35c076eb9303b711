"""A rebalance while the run is up: the head stays, hosts stage their layers, one row, and the master ends."""

from __future__ import annotations

from typing import Any

import pytest

from dips.errors import ConfigError, UnavailableMaster
from dips.ids import GENESIS, PullId, VersionId
from dips.protocol import events as ev
from dips.protocol.effects import Acknowledged, Exit, Failed, Grant, Pending, RebalancePlanned, Refused, Reply
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.protocol.rebalancing import EXIT_REBALANCED
from dips.protocol.records import IncarnationGiven, OperatorActed, Rebalanced, RolledBack, VersionsRetired
from tests.unit.protocol.scripted_run import ScriptedRun

LAYERS = 4
MANIFEST = Manifest(tuple(Layer(f"l{i}", (Parameter(f"l{i}.w", (10,)),)) for i in range(LAYERS)))
SLAVES = ("s", "t")


def at_version(version: int) -> ScriptedRun:
    """A run at this version, whose every layer is on `s`; `a` trains in it."""
    run = ScriptedRun(manifest=MANIFEST)
    run.train("a")
    for _ in range(version):
        push = run.push("a")
        run.wait(11.0)
        run.outcome(push)
    assert run.head.version == version
    return run


def ask(run: ScriptedRun, slave: str, digest: str = "", slaves: tuple[str, ...] = SLAVES) -> Any:
    version = run.head if digest else None
    return run.ask(ev.OperatorAsked(0, "alice.operator", 1e9, ev.RebalanceAsked(0, slave, slaves, version, digest)))


def is_pushing(run: ScriptedRun) -> bool:
    push = run.next_push("a")
    return not isinstance(run.ask(ev.PushRequested(0, push, run.head, 1)), Refused)


def test_all_hosts_stage_and_the_row_is_written() -> None:
    """Until the last digest nothing is written; then placement, incarnations and the end, behind the answer."""
    run = at_version(2)
    planned = {name: ask(run, name) for name in SLAVES}
    assert all(isinstance(plan, RebalancePlanned) and plan.version == run.head for plan in planned.values())
    layers = {name: plan.layers for name, plan in planned.items()}
    assert sorted(layers["s"] + layers["t"]) == list(range(LAYERS)) and len(layers["t"]) == 2
    assert (planned["s"].sinc, planned["t"].sinc) == (2, 1)
    assert ask(run, "t", "of t") == Pending("the hosts of s are still to copy their layers")
    assert not run.all_of(Rebalanced) and not run.all_of(Exit)
    assert ask(run, "s", "of s") == Acknowledged()
    row = Rebalanced(run.head, (("s", layers["s"]), ("t", layers["t"])), (("s", "of s"), ("t", "of t")))
    assert run.all_of(Rebalanced) == [row]
    assert run.all_of(VersionsRetired)[-1].versions == (VersionId(1, 1),)
    assert [(r.name, r.inc) for r in run.all_of(IncarnationGiven)[-2:]] == [("s", 2), ("t", 1)]
    kinds = [type(effect) for effect in run.effects]
    assert kinds[-1] is Exit and run.effects[-1].code == EXIT_REBALANCED  # type: ignore[union-attr]
    assert kinds.index(Rebalanced) < len(kinds) - 1 - kinds[::-1].index(OperatorActed) < len(kinds) - 2
    assert kinds[-2] is Reply
    assert ask(run, "t", "of t") == Acknowledged() and len(run.all_of(Exit)) == 1
    assert not is_pushing(run), "the process that is about to end begins nothing"


def test_the_head_stays_while_layers_are_copied() -> None:
    """An open push goes on to its end, and the version that it makes is the one that is copied; no other begins."""
    run = at_version(1)
    run.train("b")  # a window waits for it
    push = run.open_push("a")
    assert ask(run, "t") == Pending("waits for the pushes that are open")
    run.commit(push)
    assert "waits for round 2" in ask(run, "t").reason
    for _ in range(3):
        run.wait(4.0)
        answer = ask(run, "t")
    assert answer.version == run.head and run.head.version == 2
    run.outcome(push)
    assert not is_pushing(run)
    assert "rebalance to s, t" in run.machine.explain_unready()


def test_a_copy_that_nobody_goes_on_with_costs_a_lease() -> None:
    """Asked again within the lease it is held on; after that pushes begin again, and what was staged is forgotten."""
    run = at_version(1)
    assert isinstance(ask(run, "t"), RebalancePlanned)
    assert isinstance(ask(run, "t", "of t"), Pending)
    run.wait(9.0)
    assert isinstance(ask(run, "t"), RebalancePlanned)
    run.wait(9.0)
    assert not is_pushing(run)
    assert run.machine.next_deadline() == pytest.approx(run.now + 1.0)
    run.wait(1.0)
    assert is_pushing(run)
    assert not run.all_of(Rebalanced)


def test_a_host_that_copies_anew_is_waited_for() -> None:
    """Its call was ended and is repeated with another directory, or finds damage in what it had staged: the row was
    written for what the former call had told, and its slave began without the head.
    """
    run = at_version(1)
    for name in SLAVES:
        assert isinstance(ask(run, name), RebalancePlanned)
    assert isinstance(ask(run, "t", "of t"), Pending)
    assert isinstance(ask(run, "t"), RebalancePlanned)
    assert ask(run, "s", "of s") == Pending("the hosts of t are still to copy their layers")
    assert not run.all_of(Rebalanced)
    assert ask(run, "t", "of t") == Acknowledged() and len(run.all_of(Rebalanced)) == 1


def test_what_was_staged_of_a_former_head_does_not_count() -> None:
    """A master that forgot the rebalance in a restart went on to another version: the answer is its plan."""
    run = at_version(1)
    told = ev.RebalanceAsked(0, "t", SLAVES, VersionId(0, 0), "of t")
    answer = run.ask(ev.OperatorAsked(0, "alice.operator", 1e9, told))
    assert isinstance(answer, RebalancePlanned) and answer.version == run.head
    assert isinstance(ask(run, "s", "of s"), Pending), "the digest of the former head was not taken"


def test_a_rollback_that_an_operator_waits_for_comes_first() -> None:
    """The row retires every version but the head: there would be none to go back to."""
    run = at_version(2)
    before, head = VersionId(1, 1), run.head
    for name in SLAVES:
        assert isinstance(ask(run, name), RebalancePlanned)
    assert isinstance(ask(run, "t", "of t"), Pending)
    assert isinstance(run.ask(ev.RollbackAsked(0, before)), Pending)
    assert ask(run, "s", "of s") == Pending(f"waits for the rollback to {before}") and not run.all_of(Rebalanced)
    for memory in (head, before):
        run.ask(ev.SlaveRegistered(0, "s", "n", "r", "s:1", ("s:2",), 1, memory, None, (before, head), 4, ""))
    assert run.head == before
    answer = ask(run, "s")
    assert isinstance(answer, RebalancePlanned) and answer.version == before


def test_nothing_is_asked_behind_the_row() -> None:
    """Until it is written the process lives on: a rollback would end at a version that the row has retired, and that
    the new owners do not have.
    """
    run = at_version(2)
    for name in SLAVES:
        ask(run, name)
    for name in SLAVES:
        ask(run, name, f"of {name}")
    assert run.all_of(Rebalanced)
    before, head = VersionId(1, 1), run.head
    answer = run.ask(ev.RollbackAsked(0, before))
    assert isinstance(answer, Failed) and answer.error is UnavailableMaster and "ask the next one" in answer.message
    for memory, complete in ((head, (before, head)), (before, (before, head)), (None, (before,))):
        run.ask(ev.SlaveRegistered(0, "s", "n", "r", "s:1", ("s:2",), 1, memory, None, complete, 4, ""))
    assert not run.all_of(RolledBack) and run.head == head, "not by itself either, if the head is lost just then"


def test_requests_that_cannot_be() -> None:
    run = at_version(1)
    assert ask(run, "s", slaves=("s",)) == Acknowledged(), "the layers are there already"
    assert not run.all_of(Rebalanced)
    for slave, slaves, expected in (
        ("x", SLAVES, "expected one of the new slaves, s, t, got 'x'"),
        ("a", tuple("abcde"), f"at most {LAYERS}"),
        ("../s", ("../s", "t"), "slave"),
    ):
        answer = ask(run, slave, slaves=slaves)
        assert isinstance(answer, Failed) and answer.error is ConfigError and expected in answer.message
    assert isinstance(ask(run, "t"), RebalancePlanned)
    assert isinstance(ask(run, "u", slaves=("s", "u")), Refused), "another one is under way"


def test_the_first_model_is_not_copied() -> None:
    """At v0@r0 there is nothing to stage: each slave has its layers of the first model from elsewhere."""
    run = at_version(0)
    assert run.head == GENESIS
    assert ask(run, "t") == Acknowledged()
    assert run.all_of(Rebalanced)[0].digests == () and run.all_of(Exit)


def test_momentum_is_pulled_with_digests() -> None:
    """By who only reads; the grant says what the slaves have of θ and m of each layer."""
    run = at_version(1)
    refused = run.ask(ev.PullRequested(0, PullId("a", 1, 99), 1, run.head, momentum=True))
    assert isinstance(refused, Failed) and "only who does not push" in refused.message
    run.ask(ev.ClusterJoined(0, "b.puller", "p", "r", run.manifest.digest, "c"))
    pull = PullId("b.puller", 1, 1)
    assert isinstance(ask(run, "t"), RebalancePlanned)
    run.ask(ev.PullRequested(0, pull, 1, run.head, momentum=True))
    grant = run.ask(ev.PullRequested(0, pull, 1, run.head, momentum=True))
    assert isinstance(grant, Grant) and grant.slaves[0].digests == ("θ", "m") * LAYERS


def test_a_plan_that_is_asked_for_again_and_again_has_one_row() -> None:
    """A host asks each second while it copies: the audit has its first question."""
    run = at_version(1)
    for _ in range(5):
        assert isinstance(ask(run, "s"), RebalancePlanned)
    assert len(run.all_of(OperatorActed)) == 1
