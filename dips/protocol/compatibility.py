"""Which peers a master understands: those that speak the same number (docs/protocol.md#versions-of-formats)."""

from __future__ import annotations

from dips.errors import ConfigError
from dips.protocol.effects import Failed
from dips.protocol.events import PROTOCOL, ClusterJoined, SlaveRegistered


def find_protocol_mismatch(event: ClusterJoined | SlaveRegistered) -> Failed | None:
    """Return the answer for a peer of another protocol number; None if it speaks ours."""
    if event.protocol == PROTOCOL:
        return None
    peer = f"cluster {event.cluster}" if isinstance(event, ClusterJoined) else f"slave {event.slave}"
    spoken = f"this master speaks {PROTOCOL}, {peer} speaks {event.protocol}"
    return Failed(ConfigError, f"protocol: {spoken}; install one release everywhere")
