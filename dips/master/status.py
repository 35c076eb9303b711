"""What people look at: the core's view merged with the newest heartbeats. For showing, never for deciding."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

from dips.protocol.heartbeats import ClusterHeartbeat, SlaveHeartbeat

# The newest by (role, name), with the time when it came.
Heartbeats = Mapping[tuple[str, str], tuple[ClusterHeartbeat | SlaveHeartbeat, float]]

# Fields that the view has already.
_IN_THE_VIEW = frozenset({"cluster", "slave", "inc", "sinc", "term", "base", "memory", "mirror", "tokens_lost"})


def build_status(view: Mapping[str, Any], heartbeats: Heartbeats, now: float) -> dict[str, Any]:
    """Merge `view` (Coordinator.build_view) with each peer's newest heartbeat; `heard_s` is its age in seconds."""
    merged = dict(view)
    for section, role in (("clusters", "cluster"), ("slaves", "slave")):
        peers = {name: dict(known) for name, known in view.get(section, {}).items()}
        for name, known in peers.items():
            found = heartbeats.get((role, name))
            if found is not None:
                known.update(_fields_of(found[0]), heard_s=now - found[1])
                if isinstance(
                    found[0], ClusterHeartbeat
                ):  # the view counts incarnations that are over, a heartbeat its own
                    known["tokens_lost"] = known.get("tokens_lost", 0) + found[0].tokens_lost
        merged[section] = peers
    return merged


def to_json(merged: Mapping[str, Any]) -> str:
    """Spell a status as JSON that any reader accepts: NaN and infinity become null."""
    return json.dumps(_drop_infinite(merged), separators=(",", ":"))


def _fields_of(heartbeat: ClusterHeartbeat | SlaveHeartbeat) -> dict[str, Any]:
    fields = {f.name: getattr(heartbeat, f.name) for f in dataclasses.fields(heartbeat) if f.name not in _IN_THE_VIEW}
    if isinstance(heartbeat, ClusterHeartbeat) and not isfinite(heartbeat.loss):
        fields["loss"] = None
    if isinstance(heartbeat, SlaveHeartbeat):
        fields["staged"] = [str(push) for push in heartbeat.staged]
        fields["waits"] = [dataclasses.asdict(wait) for wait in heartbeat.waits]
        fields["transfers"] = [dataclasses.asdict(t) for t in heartbeat.transfers]
    return fields


def _drop_infinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _drop_infinite(v) for k, v in value.items()}
    return [_drop_infinite(v) for v in value] if isinstance(value, list | tuple) else value
