"""Who is asked when, as the Coordinator says it: pulls that begin apart, pushes that are lined up anew."""

from __future__ import annotations

import pytest

from dips.codecs import Codec
from dips.ids import GENESIS, PullId, PushId
from dips.protocol import events as ev
from dips.protocol.effects import Grant, Reorder, Reply
from dips.protocol.order import MOST_PAIRS, slaves_for_worker
from tests.transcripts.story import Teller
from tests.unit.protocol.scripted_run import OPTIONS, ScriptedRun, replace


def make_teller() -> Teller:
    """Two slaves that serve, two clusters that have joined."""
    teller = Teller({"slots": "4"})
    teller.ready("all", {})
    for cluster in "ab":
        teller.joins(cluster, {})
    return teller


def granted(teller: Teller, question: ev.Event) -> Grant:
    (reply,) = [effect for effect in teller.machine.step(question, teller.now) if isinstance(effect, Reply)]
    assert isinstance(reply.result, Grant)
    return reply.result


def test_clusters_that_pull_at_once_begin_at_different_slaves() -> None:
    """The second walks behind the first, so their first turns meet nowhere; a repetition gets the same order."""
    teller = make_teller()
    for cluster in "ab":
        teller.asks_pull(cluster, {"pull": f"{cluster}/1^1", "ranks": "1"})
    teller.answers("all", {"only": "OpenPull"})
    grants = [granted(teller, ev.PullRequested(9, PullId(cluster, 1, 1), 1)) for cluster in "ab"]
    orders = [slaves_for_worker(g.first, len(g.slaves)) for g in grants]
    assert orders == [(0, 1), (1, 0)]
    teller.finishes_pull("a", {"pull": "a/1^1"})
    assert granted(teller, ev.PullRequested(9, PullId("b", 1, 1), 1)) == grants[1]


def test_a_run_has_as_many_slots_as_its_slave_with_the_fewest() -> None:
    """A push needs one on each."""
    teller = Teller({"slots": "2"})
    teller.registers("s0", {"holds": "v0@r0"})
    teller.slots = 1
    teller.registers("s1", {"holds": "v0@r0"})
    for cluster in "ab":
        teller.trains(cluster, {})
    assert "← Pending" in teller.asks_push("a", {"push": "a/1#2"})[-1]
    assert teller.asks_push("b", {"push": "b/1#2"}) == ["b ← Refused for 2 s: waits for a slot: 1st of 1"]


def reorders(teller: Teller) -> dict[tuple[str, PushId], tuple[int, ...]]:
    return {(o.slave, o.body.push): o.body.places for o in teller.orders if isinstance(o.body, Reorder)}


def test_a_push_that_joins_is_lined_up_with_the_first() -> None:
    """Every rank of both pushes has its own place in each slave's line, and nobody is first in two lines.

    One push alone gets nothing beyond its OpenPush.
    """
    teller = make_teller()
    for cluster in "ab":
        teller.trains(cluster, {})
    teller.asks_push("a", {"push": "a/1#2", "ranks": "2"})
    teller.answers("all", {"only": "OpenPush"})
    assert reorders(teller) == {}
    teller.asks_push("b", {"push": "b/1#2", "ranks": "3"})
    teller.answers("all", {"only": "OpenPush"})
    places = reorders(teller)
    for slave in ("s0", "s1"):
        line = (*places[slave, PushId("a", 1, 2)], *places[slave, PushId("b", 1, 2)])
        assert sorted(line) == list(range(5))
    firsts = [[who for who, row in places.items() if who[0] == slave and 0 in row] for slave in ("s0", "s1")]
    ranks = {(push, places[slave, push].index(0)) for ((slave, push),) in firsts}
    assert len(ranks) == 2


def test_a_slave_s_link_is_guessed_from_the_fastest_cluster() -> None:
    """The one that needs ten times as long is first at its slave, though it was there last."""
    teller = make_teller()
    for cluster, bytes_per_s in (("a", 10.0), ("b", 1.0)):
        teller.trains(cluster, {})
        teller.step(ev.BandwidthMeasured(cluster, 1, bytes_per_s))
        teller.asks_push(cluster, {"push": f"{cluster}/1#2"})
        teller.answers("all", {"only": "OpenPush"})
    places = reorders(teller)
    assert [places[s, PushId("b", 1, 2)] for s in ("s0", "s1")] == [(0,), (1,)]


@pytest.mark.parametrize(("ranks", "lined_up"), [(MOST_PAIRS // 4, True), (MOST_PAIRS // 4 + 1, False)])
def test_too_many_ranks_keep_their_places(ranks: int, lined_up: bool) -> None:
    """At most MOST_PAIRS of ranks and slaves are lined up anew: it must not take long."""
    teller = make_teller()
    for cluster in "ab":
        teller.trains(cluster, {})
        teller.asks_push(cluster, {"push": f"{cluster}/1#2", "ranks": str(ranks)})
        teller.answers("all", {"only": "OpenPush"})
    assert bool(reorders(teller)) is lined_up


def test_what_is_left_of_the_first_is_guessed_from_its_bandwidth() -> None:
    """A push that should be nearly here gives the first place to one that has all before it, and begins elsewhere."""
    teller = make_teller()
    for cluster in "ab":
        teller.trains(cluster, {})
        teller.step(ev.BandwidthMeasured(cluster, 1, 1.0))
    teller.asks_push("a", {"push": "a/1#2"})
    teller.answers("all", {"only": "OpenPush"})
    teller.now += 28.0  # of the 32 s that its 32 bytes take
    teller.asks_push("b", {"push": "b/1#2"})
    teller.answers("all", {"only": "OpenPush"})
    places = reorders(teller)
    assert [places[s, PushId("a", 1, 2)] + places[s, PushId("b", 1, 2)] for s in ("s0", "s1")] == [(1, 0), (0, 1)]


def test_each_rank_of_unknown_speed_is_taken_to_fill_a_slave_s_link() -> None:
    """Not all of them together: the cluster whose two ranks share what is known of its link has more left, and is asked
    first, beside a newcomer that was guessed to be as slow.
    """
    teller = make_teller()
    for cluster in "ab":
        teller.trains(cluster, {})
    teller.step(ev.BandwidthMeasured("a", 1, 10.0))
    for cluster in "ab":
        teller.asks_push(cluster, {"push": f"{cluster}/1#2", "ranks": "2"})
        teller.answers("all", {"only": "OpenPush"})
    places = reorders(teller)
    assert {places[slave, PushId("a", 1, 2)] for slave in ("s0", "s1")} == {(0, 2), (2, 0)}


def test_what_is_left_of_a_push_is_guessed_from_its_codec() -> None:
    """A push from an older base is fp32, and has four times the bytes of one in int8: it was lined up behind that."""
    run = ScriptedRun(replace(OPTIONS, codec=Codec.INT8))
    run.train(*"ab")
    for name in "ab":
        run.step(ev.BandwidthMeasured(name, 1, 250.0))
    run.outcome(run.push("a"))
    run.wait(OPTIONS.timing.window_s)
    short = run.open_push("a")
    long = run.open_push("b", base=GENESIS)
    places = {order.push: order.places for order in run.all_of(Reorder)}
    assert places == {long: (0,), short: (1,)}
