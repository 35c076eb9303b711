"""What peers claim is held against what is known of them; an honest one is never refused (dips/protocol/claims.py)."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.errors import Busy, RemoteProtocolError, StaleTerm, StaleVersion, UnavailableSlave
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.protocol import claims, clusters, effects
from dips.protocol import events as ev
from dips.protocol.claims import MOST_AHEAD, MOST_STEPS_PER_S, MOST_TERMS_AHEAD, MOST_TOKENS_PER_S, ToldProgress
from dips.protocol.effects import Committed, Exit, Failed, Grant, Pending
from dips.slave.shard import OrderFences
from tests.unit.protocol.scripted_run import ScriptedRun
from tests.unit.protocol.test_bites_transfers import failure, make

ALL = 1 << 40  # more than any heartbeat here tells
counts = st.integers(0, 1 << 53)


def finish(run: ScriptedRun, push: PushId, tokens: int, steps: int) -> object:
    return run.commit(push, tokens, steps)


def settled(run: ScriptedRun, push: PushId) -> None:
    """The window closes, and the cluster has pulled."""
    run.wait(20.0)
    run.outcome(push)


# ---- tokens and inner steps ------------------------------------------------------------------------------------------


@given(counts, counts, st.floats(0, 1e12))
def test_what_can_be_done_in_the_time_is_never_refused(tokens: int, steps: int, passed_s: float) -> None:
    """Refused is what needs more than MOST_…_PER_S, an hour being forgiven, and nothing else; nothing if unknown."""
    possible = tokens <= (passed_s + 3600) * MOST_TOKENS_PER_S and steps <= (passed_s + 3600) * MOST_STEPS_PER_S
    assert (claims.why_impossible(tokens, steps, passed_s) == "") is possible
    assert claims.why_impossible(tokens, steps, inf) == ""


@given(st.lists(st.tuples(counts, counts), max_size=5), st.randoms())
def test_reports_that_overtake_each_other_say_the_same(told: list[tuple[int, int]], random: object) -> None:
    """Whatever their order: the most that was told counts."""
    expected = ToldProgress(max((t for t, _ in told), default=0), max((s for _, s in told), default=0))
    random.shuffle(told)  # type: ignore[attr-defined]
    found = ToldProgress()
    for tokens, steps in told:
        found = found.raised(tokens, steps)
    assert found == expected


def test_the_time_counts_from_the_last_push_that_was_settled() -> None:
    """From when it was opened: what the next one brings was done after its freeze. From the Join for the first."""
    run = make("a")
    most = int(3_600 * MOST_TOKENS_PER_S)
    run.now = 1000.0
    push = run.open_push("a")
    assert failure(finish(run, push, most + int(1001 * MOST_TOKENS_PER_S), 1)) is RemoteProtocolError
    assert isinstance(finish(run, push, most + int(1000 * MOST_TOKENS_PER_S), 1), Committed)
    settled(run, push)
    run.now = 1500.0
    push = run.open_push("a")
    assert failure(finish(run, push, most + int(501 * MOST_TOKENS_PER_S), 1)) is RemoteProtocolError
    assert run.view.clusters["a"].claims_refused == 2
    assert isinstance(finish(run, push, most + int(500 * MOST_TOKENS_PER_S), 1), Committed)


def test_what_was_settled_is_not_told_again() -> None:
    """Heartbeats tell sums of an incarnation: a second push waits until they tell more than the first one brought."""
    run = make("a")
    run.step(ev.TokensReported("a", 1, 100, 0, 5))
    push = run.open_push("a")
    assert isinstance(finish(run, push, 100, 5), Committed)
    settled(run, push)
    push = run.open_push("a")
    assert isinstance(finish(run, push, 10, 1), Pending)
    run.step(ev.TokensReported("a", 1, 110, 0, 5))
    assert isinstance(finish(run, push, 10, 1), Pending)
    run.step(ev.TokensReported("a", 1, 110, 0, 6))
    assert isinstance(finish(run, push, 10, 1), Committed)


def test_a_new_incarnation_begins_with_nothing_told() -> None:
    """What heartbeats of the one before told bears out no push of this one."""
    run = make("a")
    run.step(ev.TokensReported("a", 1, ALL, 0, ALL))
    run.train("a", process="another")
    run.step(ev.TokensReported("a", 1, ALL, 0, ALL))
    run.step(ev.TokensReported("a", 2, 5, 0, 5))
    assert isinstance(finish(run, run.open_push("a"), 10, 1), Pending)


# ---- bases, numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [VersionId(7, 0), VersionId(0, 1), VersionId(1, 0), VersionId(2, 1)])
def test_a_base_without_a_row_is_refused(base: VersionId) -> None:
    """The cluster is told to pull, and may push from what it pulled."""
    run = make("a")
    settled(run, run.push("a"))
    assert run.head == VersionId(1, 1)
    assert failure(run.ask(ev.PushRequested(0, run.next_push("a"), base, 1))) is StaleVersion
    for known in (GENESIS, run.head):
        push = run.next_push("a")
        run.ask(ev.PushRequested(0, push, known, 1))
        assert isinstance(run.ask(ev.PushRequested(0, push, known, 1)), Grant)
        run.ask(ev.PushAborted(0, push, "enough"))


def test_no_seq_ends_all_others() -> None:
    """A seq that no cluster could have counted to is refused: the next honest one is still legal."""
    run = make("a")
    for seq in (1 + MOST_AHEAD + 1, (1 << 53) - 1):
        assert failure(run.ask(ev.PushRequested(0, PushId("a", 1, seq), run.head, 1))) is RemoteProtocolError
        assert failure(run.ask(ev.PullRequested(0, PullId("a", 1, seq), 1))) is RemoteProtocolError
    settled(run, run.push("a"))
    assert run.head == VersionId(1, 1)
    highest = run.next_push("a").seq - 1
    assert isinstance(run.ask(ev.PushRequested(0, PushId("a", 1, highest + MOST_AHEAD), run.head, 1)), Pending)


def test_a_register_does_not_end_a_master_by_absurd_numbers() -> None:
    """Terms, rounds, lanes and snapshots beyond all reason are the slave's fault; a later term within it is a fact."""
    run = make("a")
    honest = ev.SlaveRegistered(0, "s", "n", "r", "s:1", ("s:2",), 1, GENESIS, None, (), 4, "")
    absurd = VersionId(1, 2 + MOST_AHEAD)
    for forged in (
        replace(honest, term_seen=2 + MOST_TERMS_AHEAD),
        replace(honest, memory=absurd),
        replace(honest, prepared=absurd),
        replace(honest, complete=(GENESIS, absurd)),
        replace(honest, lanes=("s:2",) * (claims.MOST_LANES + 1)),
        replace(honest, complete=(GENESIS,) * (claims.MOST_SNAPSHOTS + 1)),
    ):
        begin = len(run.effects)
        assert failure(run.ask(forged)) is RemoteProtocolError
        assert not any(isinstance(effect, Exit) for effect in run.effects[begin:])
    most = replace(honest, lanes=("s:2",) * claims.MOST_LANES, complete=(GENESIS,) * claims.MOST_SNAPSHOTS)
    assert isinstance(run.ask(most), effects.Registered)
    settled(run, run.push("a"))
    begin = len(run.effects)
    assert failure(run.ask(replace(honest, term_seen=2))) is StaleTerm
    assert any(isinstance(effect, Exit) for effect in run.effects[begin:])


def test_an_order_does_not_lock_out_the_true_master() -> None:
    """A slave takes no term that is a million above the last: else nobody could ever give it an order again."""
    fences = OrderFences("s")
    fences.see_term(3, "Registered")
    fences.sinc = 1
    order = effects.Order("s", 1, (1 << 53) - 1, 1, effects.Ping(), 1.0)
    for term in (4 + MOST_TERMS_AHEAD, (1 << 53) - 1):
        with pytest.raises(UnavailableSlave):
            fences.admit_order(replace(order, term=term))
    with pytest.raises(RemoteProtocolError, match="expected at most"):
        fences.see_term(4 + MOST_TERMS_AHEAD, "Registered")
    assert fences.admit_order(replace(order, term=3)) is None


def test_a_term_rises_by_registering_alone() -> None:
    """An order of the next term waits (it is sent again) until the slave's own Register is answered by that master."""
    fences = OrderFences("s")
    fences.see_term(3, "Registered")
    fences.sinc = 1
    order = effects.Order("s", 1, 4, 1, effects.Ping(), 1.0)
    with pytest.raises(UnavailableSlave, match="as soon as it registers"):
        fences.admit_order(order)
    assert fences.admit_order(replace(order, term=3)) is None, "the true master goes on"
    fences.see_term(4, "Registered")
    assert fences.admit_order(order) is None


def test_another_process_of_a_slave_that_lives_counts_for_nothing() -> None:
    """Neither its term, which would end the master, nor its address; once the first has been silent, it may come."""
    run = make("a")
    rival = ev.SlaveRegistered(0, "s", "other", "r", "x:1", ("x:2",), 2, GENESIS, None, (), 4, "", rival_heard_s=1.9)
    begin = len(run.effects)
    assert failure(run.ask(rival)) is Busy
    assert failure(run.ask(replace(rival, term_seen=0, rival_heard_s=3.9))) is Busy
    assert not any(isinstance(effect, Exit) for effect in run.effects[begin:])
    settled(run, run.push("a"))
    assert isinstance(run.ask(replace(rival, term_seen=0, rival_heard_s=4.0)), effects.Registered)
    third = replace(rival, nonce="third", term_seen=0, rival_heard_s=0.1)
    assert failure(run.ask(replace(third, former_nonce="n"))) is Busy, "that process was not the last"
    assert isinstance(run.ask(replace(third, former_nonce="other")), effects.Registered)


def test_failed_is_what_a_refusal_is() -> None:
    """A refused claim leaves the push open: the honest repetition is committed."""
    run = make("a")
    push = run.open_push("a")
    assert isinstance(finish(run, push, (1 << 53) - 1, 1), Failed)
    assert isinstance(finish(run, push, 8, 1), Committed)


def test_names_of_clusters_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has joined before may always come back."""
    monkeypatch.setattr(clusters, "MAX_CLUSTERS", 2)
    run = make("ab")
    joins = [ev.ClusterJoined(0, name, "p2", "r", run.manifest.digest, "c", take_over=True) for name in "ca"]
    assert failure(run.ask(joins[0])) is Busy and isinstance(run.ask(joins[1]), effects.Joined)
