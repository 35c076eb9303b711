"""Deadlines of transfers: how long one may be open without progress reported by its cluster (docs/rationale.md#19,
#31). Pure.

A deadline is three times the whole model over the cluster's measured bandwidth, which heartbeats report; `transfer_s`
for a cluster that has not moved a byte yet. It bounds how long a pin or slot is held and must not end an honest
transfer, so it is counted from the cluster's last report of the transfer (movement.py); a rank counts it from the last
byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from dips.protocol.heartbeats import LEAST_BYTES_PER_S
from dips.protocol.options import TimingOptions

SLACK = 3.0  # docs/rationale.md#19: a link shared by two more transfers than when it was measured
NEWEST_SHARE = 0.3  # weight of the newest heartbeat in the running mean: one that saw half a transfer must not decide
REPORTED_CHANGE = 0.25  # a change of bandwidth beyond this share is reported to the Coordinator
BITS = 8


def transfer_deadline_s(nbytes: int, bytes_per_s: float | None, timing: TimingOptions) -> float:
    """Return the seconds for which a transfer of `nbytes` may be silent; `transfer_s` while its rate is unknown."""
    known = max(timing.least_transfer_s, SLACK * nbytes / bytes_per_s) if bytes_per_s else timing.transfer_s
    return max(known, timing.lease_s)  # a cluster may miss as many heartbeats as its lease allows


def too_slow(bytes_per_s: float | None, measured_s_ago: float, timing: TimingOptions) -> str:
    """Return why a push may not begin on this link, with the numbers; empty if it may.

    A measurement older than `transfer_s` no longer counts: the push may begin, and measures the link anew.
    """
    bps = BITS * (bytes_per_s or 0.0)
    if not bps or bps >= timing.min_push_bps or measured_s_ago >= timing.transfer_s:
        return ""
    return f"its link moves {bps / 1e6:.4g} Mbit/s, a push needs min_push_bps = {timing.min_push_bps / 1e6:.4g} Mbit/s"


@dataclass
class Bandwidth:
    """Running mean of a cluster's bandwidth as its heartbeats report it, in bytes/s; None before the first."""

    mean: float | None = None
    reported: float = 0.0

    def measure_rate(self, bytes_per_s: float) -> float | None:
        """Add a heartbeat's rate (0: nothing moves); return the mean if it has changed enough to be reported, else
        None.
        """
        if bytes_per_s < LEAST_BYTES_PER_S:
            return None
        self.mean = bytes_per_s if self.mean is None else self.mean + NEWEST_SHARE * (bytes_per_s - self.mean)
        if abs(self.mean - self.reported) <= REPORTED_CHANGE * self.reported:
            return None
        self.reported = self.mean
        return self.mean
