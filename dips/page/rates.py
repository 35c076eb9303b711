"""Bytes a second of each slave and between clusters and slaves, from what heartbeats report."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

MOST_SEEN = 8192  # pairs of a cluster and a slave
SAMPLES = 6  # heartbeats over which a rate is the mean


class _Sample(NamedTuple):
    at: float
    received: int
    sent: int


class SeenTransfer(NamedTuple):
    """A push or pull as a slave's heartbeat told of it."""

    push: bool
    rate: float  # bytes a second


class SeenTransfers:
    """The last one with a rate between each cluster and slave that are here; most last for less than a heartbeat."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], SeenTransfer] = {}

    def note_transfers(
        self, slaves: Mapping[str, Any], clusters: Mapping[str, Any]
    ) -> Mapping[tuple[str, str], SeenTransfer]:
        self._seen = {ends: seen for ends, seen in self._seen.items() if ends[0] in clusters and ends[1] in slaves}
        for slave, peer in slaves.items():
            for t in peer.get("transfers", ()):
                ends = (str(t.get("cluster")), slave)
                if (rate := t.get("bytes_per_s") or 0.0) > 0 and ends[0] in clusters and len(self._seen) < MOST_SEEN:
                    self._seen[ends] = SeenTransfer(bool(t.get("push")), rate)
        return self._seen


class SlaveRates:
    """Looked at whenever somebody looks at the page."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[_Sample]] = {}

    def measure_rates(self, slaves: Mapping[str, Any], now: float) -> dict[str, tuple[float, float]]:
        """Take the newest sums; return (in, out) of each slave that has told them twice."""
        self._samples = {name: self._samples.get(name, deque(maxlen=SAMPLES)) for name in slaves}
        for name, peer in slaves.items():
            if (heard_s := peer.get("heard_s")) is None:
                continue
            sample = _Sample(now - heard_s, int(peer.get("bytes_in", 0)), int(peer.get("bytes_out", 0)))
            samples = self._samples[name]
            if samples and (sample.received < samples[-1].received or sample.sent < samples[-1].sent):
                samples.clear()  # a new process counts from 0
            if not samples or sample.at - samples[-1].at > 1e-3:  # not the same heartbeat again
                samples.append(sample)
        return {name: _rate_of(s[0], s[-1]) for name, s in self._samples.items() if len(s) > 1}


def _rate_of(a: _Sample, b: _Sample) -> tuple[float, float]:
    seconds = b.at - a.at
    return (b.received - a.received) / seconds, (b.sent - a.sent) / seconds
