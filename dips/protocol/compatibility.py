"""The check that a peer speaks this master's protocol number (docs/protocol.md#versions-of-formats)."""

from __future__ import annotations

from dips.errors import ConfigError
from dips.protocol.effects import Failed
from dips.protocol.events import PROTOCOL, ClusterJoined, SlaveRegistered


def find_protocol_mismatch(event: ClusterJoined | SlaveRegistered) -> Failed | None:
    """Return the answer for a peer with another protocol number; None if it is ours."""
    if event.protocol == PROTOCOL:
        return None
    peer = f"cluster {event.cluster}" if isinstance(event, ClusterJoined) else f"slave {event.slave}"
    spoken = f"this master speaks {PROTOCOL}, {peer} speaks {event.protocol}"
    return Failed(ConfigError, f"protocol: {spoken}; install one release everywhere")
