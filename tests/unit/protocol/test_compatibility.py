"""A peer of another release is refused with both numbers, and with what was renamed since."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.errors import ConfigError
from dips.protocol.compatibility import find_protocol_mismatch
from dips.protocol.events import PROTOCOL, ClusterJoined, SlaveRegistered
from dips.wire.generated import cluster_pb2, slave_pb2
from dips.wire.messages import from_proto

JOINED = ClusterJoined(0, "west", "n", "run", "{}", "digest")
REGISTERED = SlaveRegistered(0, "s0", "n", "run", "h:1", ("h:2",), 0, None, None, (), 2, "")


@pytest.mark.parametrize("event", [JOINED, REGISTERED])
def test_a_peer_from_before_the_renames_is_refused(event: ClusterJoined | SlaveRegistered) -> None:
    """The answer names the numbers, the peer, the old and the new words."""
    answer = find_protocol_mismatch(replace(event, protocol=0))
    assert answer is not None and answer.error is ConfigError
    for words in (f"speaks {PROTOCOL}", "speaks 0", "Beat is Heartbeat", "beat_s is heartbeat_s", "one release"):
        assert words in answer.message
    assert find_protocol_mismatch(event) is None


def test_a_newer_peer_is_refused_without_a_guess() -> None:
    """What it renamed is not known here."""
    answer = find_protocol_mismatch(replace(JOINED, protocol=PROTOCOL + 1))
    assert answer is not None and f"speaks {PROTOCOL + 1}; install" in answer.message


def test_a_message_without_a_number_says_zero() -> None:
    """A peer from before the numbers does not know the field, so the wire makes 0 of it, not our own number."""
    joined = from_proto(cluster_pb2.ClusterJoined(cluster="west", nonce="n", run="run"), ClusterJoined, req=0)
    registered = from_proto(
        slave_pb2.SlaveRegistered(slave="s0", nonce="n", run="run", address="h:1"), SlaveRegistered, req=0
    )
    assert isinstance(joined, ClusterJoined) and joined.protocol == 0
    assert isinstance(registered, SlaveRegistered) and registered.protocol == 0
