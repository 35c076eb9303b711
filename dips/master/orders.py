"""One order to a slave, from its first sending to the event that ends it: when to send it again, and what is a failure.

A deadline limits silence: neither the time that a model's size takes, nor a wait for a disk that heartbeats report.
Pure: the daemon's links and the simulated master send, and report the results here. An order that is sent again keeps
its number, so the slave repeats its answer and not the work.
"""

from __future__ import annotations

from math import inf

from dips.errors import DipsError, UnavailableSlave, UnresponsiveSlave
from dips.master.outbox import SlaveProgress
from dips.protocol.effects import OpenPush, Order
from dips.protocol.events import Answer, OrderAnswered, OrderFailed
from dips.protocol.heartbeats import SlaveHeartbeat


class SentOrder:
    """An order that was first sent at `now`, on the sender's clock in seconds."""

    def __init__(self, order: Order, now: float) -> None:
        self.order, self.until = order, now + order.deadline_s

    def left_s(self, now: float) -> float:
        """Return how long the slave still has to answer."""
        return max(0.0, self.until - now)

    def on_progress(self, now: float, most_s: float = inf) -> None:
        """Restart the deadline, by at most `most_s`, since the slave works or waits for its disk."""
        self.until = max(self.until, now + min(self.order.deadline_s, most_s))

    @property
    def needs_listener(self) -> bool:
        """Whether to fail at once if the slave's address refuses connections, instead of sending until the deadline.

        True for OpenPush, since a trainer waits for its slot and can ask again.
        """
        return isinstance(self.order.body, OpenPush)

    def on_answer(self, answer: Answer) -> OrderAnswered:
        """Return the event for the slave's answer."""
        return OrderAnswered(self.order.slave, self.order.sinc, self.order.number, answer)

    def on_error(self, error: DipsError, now: float) -> OrderFailed | None:
        """Return the event for a refusal; None, to send the order again, if the slave was unavailable before the
        deadline.
        """
        if isinstance(error, UnavailableSlave):
            return None if now < self.until else self.on_deadline()
        return self.on_refusal(error)

    def on_refusal(self, error: DipsError) -> OrderFailed:
        """Return the event for an order that will not be carried out."""
        return OrderFailed(self.order.slave, self.order.sinc, self.order.number, type(error), str(error))

    def on_deadline(self) -> OrderFailed:
        """Return the event for an order without an answer in time."""
        return self.on_refusal(UnresponsiveSlave(f"no answer within {self.order.deadline_s:g} s"))


class SlavePatience:
    """Decides from heartbeats which orders of a slave get more time, and how much.

    If the slave has worked, all of them do. Otherwise those that wait for the disk do, until no work was reported for
    `compute_s`: then the disk hangs (docs/protocol.md#timing).
    """

    def __init__(self, compute_s: float) -> None:
        self._compute_s = compute_s
        self._seen: dict[str, tuple[int, int]] = {}  # slave → (incarnation, bytes processed)
        self._waiting_since: dict[str, float] = {}  # slave → time since which its disk has reported no work

    def knows(self, slave: str) -> bool:
        return slave in self._seen

    def judge_heartbeat(self, heartbeat: SlaveHeartbeat, now: float) -> SlaveProgress | None:
        """Return the extension that a heartbeat gives its slave's orders; None if none."""
        slave, seen = heartbeat.slave, (heartbeat.sinc, heartbeat.work_bytes)
        before = self._seen.get(slave, seen)
        self._seen[slave] = seen
        has_worked = before[0] == seen[0] and before[1] < seen[1]
        if has_worked or before[0] != seen[0] or not heartbeat.waits:
            self._waiting_since.pop(slave, None)
        if has_worked:
            return SlaveProgress(slave)
        if not heartbeat.waits:
            return None
        left_s = self._waiting_since.setdefault(slave, now) + self._compute_s - now
        if left_s <= 0.0:
            return None
        return SlaveProgress(slave, frozenset(wait.number for wait in heartbeat.waits), left_s)

    def skip_gap(self, gap_s: float) -> None:
        """Shift all times by `gap_s`, in which the master did not run and received no heartbeats."""
        self._waiting_since = {slave: since + gap_s for slave, since in self._waiting_since.items()}
