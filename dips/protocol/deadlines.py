"""How long a transfer may take: three times its bytes over the cluster's measured bandwidth
(docs/rationale.md#19, #31). Pure.

Bandwidth is what heartbeats report of transfers; a cluster that never moved a byte is given `transfer_s`. A deadline is
a promise to the others (a pin, a slot is held no longer) and must not end an honest transfer: hence the slack, and
hence `least_transfer_s`, since a stream that broke needs time to come back however few bytes are left.
"""

from __future__ import annotations

from dataclasses import dataclass

from dips.protocol.heartbeats import LEAST_BYTES_PER_S
from dips.protocol.options import TimingOptions

SLACK = 3.0  # docs/rationale.md#19: a link that is shared by two more transfers than when it was measured
NEWEST_SHARE = 0.3  # of the newest heartbeat in the mean: one that saw half a transfer must not decide
REPORTED_CHANGE = 0.25  # a bandwidth that changed by more than this share is reported to the Coordinator
BITS = 8


def transfer_deadline_s(nbytes: int, bytes_per_s: float | None, timing: TimingOptions) -> float:
    """Seconds that a push or pull of `nbytes` may move; `transfer_s` while the bandwidth is unknown."""
    if not bytes_per_s:
        return timing.transfer_s
    return min(timing.transfer_s, max(timing.least_transfer_s, SLACK * nbytes / bytes_per_s))


def too_slow(bytes_per_s: float | None, measured_s_ago: float, timing: TimingOptions) -> str:
    """Why a push may not begin on this link, with the numbers; empty if it may.

    A measurement as old as `transfer_s` no longer counts: the link is measured anew by the push that it then may try.
    """
    bps = BITS * (bytes_per_s or 0.0)
    if not bps or bps >= timing.min_push_bps or measured_s_ago >= timing.transfer_s:
        return ""
    return f"its link moves {bps / 1e6:.4g} Mbit/s, a push needs min_push_bps = {timing.min_push_bps / 1e6:.4g} Mbit/s"


@dataclass
class Bandwidth:
    """The running mean of what a cluster's heartbeats report of its transfers, in bytes/s; None before the first."""

    mean: float | None = None
    reported: float = 0.0

    def measure_rate(self, bytes_per_s: float) -> float | None:
        """Take a heartbeat's rate (0: nothing moves); return the mean when it has changed enough to be reported."""
        if bytes_per_s < LEAST_BYTES_PER_S:
            return None
        self.mean = bytes_per_s if self.mean is None else self.mean + NEWEST_SHARE * (bytes_per_s - self.mean)
        if abs(self.mean - self.reported) <= REPORTED_CHANGE * self.reported:
            return None
        self.reported = self.mean
        return self.mean
