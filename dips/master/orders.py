"""One order to a slave, from its first sending to the event that ends it: when to send it again, what is a failure.

A deadline is for silence: neither what a model's size takes is, nor the wait for a disk that a heartbeat tells of.

Pure: the daemon's links and the simulated master send, and report here what came back. An order keeps its number when
it is sent again, so the slave repeats its answer and never the work.
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
        """How long the slave still has to answer."""
        return max(0.0, self.until - now)

    def on_progress(self, now: float, most_s: float = inf) -> None:
        """Its slave works on what it was given, or waits for its disk: its whole time begins anew, up to `most_s`."""
        self.until = max(self.until, now + min(self.order.deadline_s, most_s))

    @property
    def needs_listener(self) -> bool:
        """Should it fail at once if nobody listens at the slave's address, instead of being sent until its deadline?

        OpenPush should: a trainer stands still for its slot, and can just as well ask again.
        """
        return isinstance(self.order.body, OpenPush)

    def on_answer(self, answer: Answer) -> OrderAnswered:
        """The slave answered."""
        return OrderAnswered(self.order.slave, self.order.sinc, self.order.number, answer)

    def on_error(self, error: DipsError, now: float) -> OrderFailed | None:
        """The slave refused, or nothing came back; None: send the order again."""
        if isinstance(error, UnavailableSlave):
            return None if now < self.until else self.on_deadline()
        return self.on_refusal(error)

    def on_refusal(self, error: DipsError) -> OrderFailed:
        """It will not be carried out."""
        return OrderFailed(self.order.slave, self.order.sinc, self.order.number, type(error), str(error))

    def on_deadline(self) -> OrderFailed:
        """No answer came in time."""
        return self.on_refusal(UnresponsiveSlave(f"no answer within {self.order.deadline_s:g} s"))


class SlavePatience:
    """What heartbeats tell of the orders under way at each slave: which are given time, and for how long.

    Work gives it to all of them. Without work those have it that wait for the disk, until none of them has been worked
    on for `compute_s`: then the disk hangs (docs/protocol.md#timing).
    """

    def __init__(self, compute_s: float) -> None:
        self._compute_s = compute_s
        self._seen: dict[str, tuple[int, int]] = {}  # incarnation, bytes worked through
        self._waiting_since: dict[str, float] = {}  # by slave: its disk has told nothing since

    def knows(self, slave: str) -> bool:
        return slave in self._seen

    def judge_heartbeat(self, heartbeat: SlaveHeartbeat, now: float) -> SlaveProgress | None:
        """What this heartbeat says for its slave's orders; None: nothing."""
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
        """The master did not run for `gap_s`: what was silent meanwhile was heard by nobody."""
        self._waiting_since = {slave: since + gap_s for slave, since in self._waiting_since.items()}
