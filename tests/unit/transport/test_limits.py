"""How much a server takes: buckets of peers, the arithmetic of a large run, handshakes that come to nothing."""

from __future__ import annotations

import pytest

from dips.telemetry.refusals import refusals_by_reason
from dips.transport import limits
from dips.transport.limits import MASTER_LIMITS, PATIENCE_S, CallLimits, HandshakeWatch, TokenBucket

CLUSTERS, SLAVES, HEARTBEAT_S = 1_000, 100, 2.0


def test_a_bucket_lets_a_burst_pass_and_then_its_rate() -> None:
    bucket = TokenBucket(10.0, 3.0, now=0.0)
    assert [bucket.take_token(0.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take_token(0.09) and bucket.take_token(0.2)
    assert [bucket.take_token(99.0) for _ in range(4)] == [True, True, True, False], "it holds no more than a burst"


def test_a_run_of_a_thousand_clusters_passes() -> None:
    """Heartbeats of all, and a round of all within 10 s, after a stall in which everybody waited with two calls."""
    gate, now = CallLimits(MASTER_LIMITS, now=0.0), 0.0
    peers = [f"c{i}" for i in range(CLUSTERS)] + [f"s{i}" for i in range(SLAVES)]
    assert not any(gate.find_excess(peer, now) for peer in peers for _ in range(2))
    for tick in range(200):  # of 50 ms: all push and are reported by all slaves within 10 s
        now += 0.05
        beating = peers[tick % 40 :: 40]
        asking = [f"c{i}" for i in range(tick * 5, tick * 5 + 5)]
        calls = [*beating, *asking * 7, *(f"s{i}" for i in range(SLAVES) for _ in range(5))]
        assert not any(gate.find_excess(peer, now) for peer in calls), tick


def test_a_flooder_empties_its_own_bucket() -> None:
    """The others do not notice; and peers that come and go do not fill the memory."""
    gate = CallLimits(MASTER_LIMITS, now=0.0)
    said = [gate.find_excess("eve", 0.0) for _ in range(100_000)]
    assert said.count("") == limits.PEER_CALLS_AT_ONCE
    assert "eve makes more than 200 calls a second" in said[-1]
    assert not gate.find_excess("west", 0.0)
    for i in range(3 * limits.MOST_PEERS):
        gate.find_excess(f"eve-{i}", 1.0 + i)
    assert len(gate._peers) == limits.MOST_PEERS


def test_new_peers_do_not_give_a_flooder_its_calls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has been silent longest is forgotten for a new peer, never the one that calls all the time."""
    monkeypatch.setattr(limits, "MOST_PEERS", 3)
    gate = CallLimits(MASTER_LIMITS, now=0.0)
    while not gate.find_excess("eve", 0.0):
        pass
    for peer in ("west", "east", "north", "south"):
        assert not gate.find_excess(peer, 0.0)
        assert gate.find_excess("eve", 0.0), f"eve begins anew after {peer} came"
    assert list(gate._peers) == ["north", "south", "eve"]


def test_all_together_are_bounded() -> None:
    gate = CallLimits(MASTER_LIMITS, now=0.0)
    said = [gate.find_excess(f"eve-{i}", 0.0) for i in range(int(limits.CALLS_AT_ONCE) + 10)]
    assert sum(bool(text) for text in said) == 10 and "calls a second come in" in said[-1]


@pytest.mark.parametrize("honest", [0, 3])
def test_a_handshake_that_leads_to_no_call_is_counted(honest: int) -> None:
    now = [0.0]
    watch, before = HandshakeWatch(lambda: now[0]), refusals_by_reason().get("handshake", 0)
    for _ in range(5):
        watch.on_handshake()
    for i in range(honest):
        watch.on_call(f"10.0.0.{i}:1")
        watch.on_call(f"10.0.0.{i}:1")
    now[0] += PATIENCE_S
    watch.on_handshake()
    assert refusals_by_reason().get("handshake", 0) - before == 5 - honest


def test_a_port_that_another_connection_has_later_is_no_refusal() -> None:
    """`dips status` from a loop of a shell: each call is a new connection, and a host has some 28,000 ports."""
    now = [0.0]
    watch, before = HandshakeWatch(lambda: now[0]), refusals_by_reason().get("handshake", 0)
    for _ in range(3):
        watch.on_handshake()
        watch.on_call("ipv4:10.0.0.1:40000")
        now[0] += limits.REMEMBERED_S
    assert refusals_by_reason().get("handshake", 0) == before


def test_as_many_connections_are_remembered_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call over one of them is no answer to a handshake that has begun since; the oldest is forgotten for a new."""
    monkeypatch.setattr(limits, "MOST_REMEMBERED", 2)
    now = [0.0]
    watch, before = HandshakeWatch(lambda: now[0]), refusals_by_reason().get("handshake", 0)
    for peer in ("a", "b", "a"):
        watch.on_call(peer)
    watch.on_handshake()
    watch.on_call("a")
    watch.on_call("b")
    now[0] += PATIENCE_S
    watch.on_call("b")
    assert refusals_by_reason().get("handshake", 0) == before + 1
    watch.on_call("c")
    assert list(watch._peers) == ["b", "c"]
