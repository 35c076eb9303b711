"""A peer of another release is refused with both numbers and what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.errors import ConfigError
from dips.protocol.claims import find_protocol_mismatch
from dips.protocol.events import PROTOCOL, ClusterJoined, SlaveRegistered
from dips.wire.generated import cluster_pb2, slave_pb2
from dips.wire.messages import from_proto

JOINED = ClusterJoined(0, "west", "n", "run", "{}", "digest")
REGISTERED = SlaveRegistered(0, "s0", "n", "run", "h:1", ("h:2",), 0, None, None, (), 2, "")


@pytest.mark.parametrize("event", [JOINED, REGISTERED])
@pytest.mark.parametrize("spoken", [0, PROTOCOL + 1])
def test_a_peer_of_another_release_is_refused(event: ClusterJoined | SlaveRegistered, spoken: int) -> None:
    """The answer names both numbers, the peer, and what to do."""
    answer = find_protocol_mismatch(replace(event, protocol=spoken))
    assert answer is not None and answer.error is ConfigError
    for words in (f"expected {PROTOCOL}, got {spoken} from ", "; install one release everywhere"):
        assert words in answer.message
    assert find_protocol_mismatch(event) is None


def test_a_message_without_a_number_says_zero() -> None:
    """A peer from before the numbers does not know the field, so the wire makes 0 of it, not our own number."""
    joined = from_proto(cluster_pb2.ClusterJoined(cluster="west", nonce="n", run="run"), ClusterJoined, req=0)
    registered = from_proto(
        slave_pb2.SlaveRegistered(slave="s0", nonce="n", run="run", address="h:1"), SlaveRegistered, req=0
    )
    assert isinstance(joined, ClusterJoined) and joined.protocol == 0
    assert isinstance(registered, SlaveRegistered) and registered.protocol == 0
