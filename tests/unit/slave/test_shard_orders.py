"""A round from the first push to its Commit; what bears an old name changes nothing, what is repeated is done once."""

from __future__ import annotations

import numpy as np
import pytest

from dips.errors import (
    DipsError,
    LocalProtocolError,
    RemoteProtocolError,
    Stale,
    StaleIncarnation,
    StalePush,
    StaleTerm,
    StaleVersion,
    UnavailableSlave,
)
from dips.ids import GENESIS, PullId, VersionId
from dips.outer_step import nesterov_step
from dips.protocol.claims import MOST_TERMS_AHEAD
from dips.protocol.effects import (
    AdmitProbe,
    Apply,
    ClosePull,
    Commit,
    DropPush,
    Fold,
    Hold,
    Measure,
    OpenPull,
    OpenPush,
    Order,
    OrderBody,
    Persist,
    Ping,
    Retire,
)
from dips.protocol.events import Done, Folded, Measured, Persisted
from dips.slave import shard as shard_module
from dips.slave.ports import Staged
from dips.slave.shard import OrderFences
from tests.unit.slave.shard_rig import P1, P2, P3, PULL, V1, ShardRig, carry_out, read_prepared

# ---- a whole round ---------------------------------------------------------------------------------------------------


def test_a_round_from_open_to_commit() -> None:
    """Each order of a round gives its answer, and the version is served only after Commit (guards invariant 2)."""
    slave = ShardRig().ready()
    slave.stage(P1, 0.5)
    slave.stage(P2, 0.0)
    assert slave.shard.take_reports() == [Staged(P1, 28), Staged(P2, 28)]
    assert slave.shard.take_reports() == []
    assert slave.shard.transfers.staged == {P1: None, P2: None}
    first = slave.order(Measure(1, P1, GENESIS))
    assert first == Measured((6 * 0.25, 0.25), True, (0.0, 0.0), first.digest)
    assert slave.shard.transfers.staged == {P2: None}
    assert slave.order(Fold(1, P1, 1.0)) == Folded((6 * 0.25, 0.25))
    second = slave.order(Measure(1, P2, GENESIS))
    assert second == Measured((6.0, 1.0), True, (6 * 0.5, 0.5), second.digest)
    assert first.digest != second.digest
    assert slave.order(Fold(1, P2, 2.0)) == Folded((6 * 2.5**2, 2.5**2))
    assert read_prepared(slave.order(Apply(1, V1, nesterov_step(0.5, 1.0, 0.0)))) == V1
    assert slave.shard.versions.served_version == GENESIS
    assert slave.order(Persist(V1)) == Persisted(V1, "digest of v1@r1")
    assert slave.order(Commit(V1, (PULL,))) == Done()
    assert slave.shard.versions.served_version == V1
    np.testing.assert_array_equal(slave.flow.pulls[PULL][0], np.full(6, 1 - 1.25, np.float32))
    assert slave.shard.versions.used_bytes == 2 * 28


def test_a_push_with_nan_is_measured_not_finite() -> None:
    """One NaN makes Measured.finite False, so that the master gates it (guards invariant 8)."""
    slave = ShardRig().ready()
    slave.stage(P1, 0.5)
    slave.flow.pushes[P1][2][0] = np.nan
    answer = slave.order(Measure(1, P1, GENESIS))
    assert isinstance(answer, Measured)
    assert answer.finite is False
    assert answer.layer_sq[0] == 1.5


def test_a_later_probe_key_of_a_cluster_takes_the_place_of_its_former_one() -> None:
    slave = ShardRig().ready()
    for key in ("first", "second"):
        assert slave.order(AdmitProbe("west", key)) == Done()
    assert slave.flow.probes == {"west": "second"}


# ---- fences and retries ----------------------------------------------------------------------------------------------


def test_every_order_repeated_gets_its_answer_and_changes_nothing() -> None:
    """The same (term, number) repeats the answer, never the work (guards invariants 1 and 4)."""
    slave = ShardRig().ready()
    bodies: list[OrderBody] = [
        Measure(1, P1, GENESIS),
        Fold(1, P1, 1.0),
        Apply(1, V1, nesterov_step(1.0, 1.0, 0.0)),
        Persist(V1),
        Commit(V1, (PULL,)),
        OpenPull(PullId("x", 1, 2), V1),
        ClosePull(PULL),
        DropPush(P2, "over"),
        Retire((VersionId(9, 9),)),
        Ping(),
    ]
    slave.stage(P1, 0.5)
    slave.stage(P2, 0.5)
    for body in bodies:
        order = slave.made(body)
        answer, state = carry_out(slave.shard, order), slave.state()
        assert carry_out(slave.shard, order) is answer
        assert slave.state() == state
    assert slave.disk.writes == 1


def test_the_same_number_with_another_body_is_refused() -> None:
    """A number names one order: another one under it is a bug, and is not carried out."""
    slave = ShardRig().ready()
    order = slave.made(Ping())
    slave.shard.execute_order(order)
    other = Order(order.slave, order.sinc, order.term, order.number, DropPush(P1, ""), 1.0)
    with pytest.raises(LocalProtocolError, match="was Ping"):
        slave.shard.execute_order(other)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"term": 1}, StaleTerm),
        ({"term": 3}, UnavailableSlave),
        ({"sinc": 6}, StaleIncarnation),
        ({"slave": "t"}, RemoteProtocolError),
    ],
)
def test_orders_of_yesterday_change_nothing(change: dict[str, object], error: type[DipsError]) -> None:
    """An old term, another incarnation or another slave's order changes no state (guards invariant 5)."""
    slave = ShardRig().ready()
    slave.term = 2
    slave.welcome(Hold())
    slave.stage(P1, 0.5)
    state = slave.state()
    fields = {"slave": "s", "sinc": 7, "term": 2, "number": 99, "body": DropPush(P1, ""), "deadline_s": 1.0}
    with pytest.raises(error):
        slave.shard.execute_order(Order(**{**fields, **change}))  # type: ignore[arg-type]
    assert slave.state() == state


def test_a_new_term_forgets_the_answers_of_the_old() -> None:
    """Numbers begin anew with a term, so an order of a new master is carried out under a number used before."""
    slave = ShardRig().ready()
    slave.shard.execute_order(Order("s", 7, 1, 5, Ping(), 1.0))
    slave.welcome(Hold(), term=2)
    slave.shard.execute_order(Order("s", 7, 2, 5, OpenPush(P1, 1, 1.0), 1.0))
    assert slave.shard.versions.open_pushes == (P1,)
    assert slave.shard.term == 2


def test_answers_are_bounded_and_what_is_older_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the remembered answers an old number is stale: it is never carried out a second time."""
    monkeypatch.setattr(shard_module, "REMEMBERED", 3)
    slave = ShardRig().ready()
    first = slave.made(OpenPush(P1, 1, 1.0))
    slave.shard.execute_order(first)
    slave.order(DropPush(P1, ""))
    slave.order(Ping())
    assert slave.shard.execute_order(first) == Done(), "the third last answer is remembered"
    slave.order(Ping())
    with pytest.raises(Stale, match="older than the last") as raised:
        slave.shard.execute_order(first)
    assert raised.type is Stale, "a later master would be told by StaleTerm, and ours would end"


def test_an_order_that_is_busy_for_long_is_not_taken_for_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow reader holds an Apply up while the others are ordered more than a slave remembers: it is carried out yet.

    It was answered StaleTerm, which ends the master.
    """
    monkeypatch.setattr(shard_module, "REMEMBERED", 3)
    fences = OrderFences("s")
    fences.see_term(1, "Registered")
    apply = Order("s", 0, 1, 1, Apply(5, VersionId(5, 5), nesterov_step(1.0, 1.0, 0.0)), 300.0)
    assert fences.admit_order(apply) is None
    for number in range(2, 12):
        ping = Order("s", 0, 1, number, Ping(), 10.0)
        assert fences.admit_order(ping) is None
        fences.remember_answer(ping, Done())
    assert fences.admit_order(apply) is None
    fences.remember_answer(apply, Done())
    assert fences.admit_order(apply) == Done()
    for number in range(20, 30):
        assert fences.admit_order(Order("s", 0, 1, number, Ping(), 10.0)) is None
    assert list(fences._begun) == [27, 28, 29], "a master that never asks again fills no memory"


def test_a_late_answer_makes_no_other_order_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """The highest number that was forgotten counts, in whatever order answers came; with a term numbers begin anew."""
    monkeypatch.setattr(shard_module, "REMEMBERED", 2)
    fences = OrderFences("s")
    fences.see_term(1, "Registered")
    ping = lambda term, number: Order("s", 0, term, number, Ping(), 10.0)  # noqa: E731
    for number in (5, 3, 6, 7):
        assert fences.admit_order(ping(1, number)) is None
        fences.remember_answer(ping(1, number), Done())
    for number in (3, 4, 5):
        with pytest.raises(Stale, match="older than the last"):
            fences.admit_order(ping(1, number))
    fences.see_term(2, "Registered")
    assert fences.admit_order(ping(2, 1)) is None


def test_a_term_that_is_far_ahead_is_not_believed() -> None:
    """Whoever names it would lock out the true master for ever; after a restart terms may have gone on."""
    fences = OrderFences("s")
    with pytest.raises(RemoteProtocolError, match="expected at most"):
        fences.see_term(MOST_TERMS_AHEAD + 1, "Registered")
    fences.see_term(MOST_TERMS_AHEAD, "Registered")
    assert fences.term == MOST_TERMS_AHEAD


def test_orders_of_a_round_that_is_over_are_stale() -> None:
    """Measure, Fold and Apply of an earlier round, or of a committed one, change nothing (guards invariant 5)."""
    slave = ShardRig().ready()
    slave.order(Commit(slave.prepare(P1, 3), ()))
    slave.stage(P2, 0.5)
    state = slave.state()
    for round_ in (2, 3):
        for body in (
            Measure(round_, P2, VersionId(1, 3)),
            Fold(round_, P2, 1.0),
            Apply(round_, V1, nesterov_step(1.0, 1.0, 0.0)),
        ):
            with pytest.raises(Stale, match="is over"):
                slave.order(body)
    assert slave.state() == state


def test_measure_against_another_version_is_refused() -> None:
    """Norms are taken against the θ that the master means, or not at all."""
    slave = ShardRig().ready()
    slave.stage(P1, 0.5)
    with pytest.raises(StaleVersion, match="expected to measure against v0@r0, got v1@r1"):
        slave.order(Measure(1, P1, V1))


def test_illegal_orders_are_our_bug_and_change_nothing() -> None:
    """What the protocol never orders is refused without a change and without poison."""
    slave = ShardRig().ready()
    slave.stage(P1, 0.5)
    slave.order(OpenPush(P2, 1, 1.0))
    slave.order(Measure(1, P1, GENESIS))
    state = slave.state()
    illegal: list[tuple[OrderBody, type[DipsError]]] = [
        (Measure(1, P2, GENESIS), LocalProtocolError),  # still moving
        (Measure(1, P3, GENESIS), StalePush),
        (Fold(1, P2, 1.0), LocalProtocolError),
        (Apply(1, V1, nesterov_step(1.0, 1.0, 0.0)), LocalProtocolError),  # nothing folded
        (Apply(1, VersionId(2, 1), nesterov_step(1.0, 1.0, 0.0)), LocalProtocolError),
        (Persist(V1), LocalProtocolError),
        (Commit(V1, ()), StaleVersion),
        (OpenPull(PULL, V1), StaleVersion),
        (Retire((GENESIS,)), LocalProtocolError),
    ]
    for body, error in illegal:
        with pytest.raises(error):
            slave.order(body)
    assert slave.state() == state
