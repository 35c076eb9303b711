"""The ordered outbox: effects leave in their order, and nothing behind a Record leaves before that record is durable.

All records that wait when the writer is free become one transaction (group commit), so a slow disk costs time and never
order. Pure: the caller writes, and reports when the transaction is durable. The meaning of effects is not known here.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TypeGuard, cast, get_args

from dips.dataclass import dataclass
from dips.protocol.effects import Exit, Note, Order, Reply
from dips.protocol.heartbeats import ClusterHeartbeatAnswer, SlaveHeartbeatAnswer
from dips.protocol.records import Record

_RECORDS = frozenset(get_args(Record))


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """Answer to heartbeat `req`."""

    req: int
    answer: ClusterHeartbeatAnswer | SlaveHeartbeatAnswer


@dataclass(frozen=True, slots=True)
class SlaveEndpoint:
    """The address of a slave's control server, to which its orders go from now on."""

    slave: str
    address: str


@dataclass(frozen=True, slots=True)
class SlaveProgress:
    """Extension of the deadlines of a slave's orders: its kernels or disk have worked since its last heartbeat.

    Or it has not worked, and some of its orders wait for its disk.
    """

    slave: str
    waiting: frozenset[int] | None = None  # numbers of the orders that are extended; None: all
    most_s: float = inf  # limit of the extension


@dataclass(frozen=True, slots=True)
class WriteRecords:
    """Make these records durable in one transaction, then call `on_written`: nothing behind them leaves before."""

    records: tuple[Record, ...]


Outgoing = (
    Order | Reply | HeartbeatReply | Note | Exit | SlaveEndpoint | SlaveProgress
)  # what may have to wait for a record
Action = Outgoing | WriteRecords  # carried out by the shell, at once and in order


class Outbox:
    """A queue of outgoing items and records, of which at most one transaction is being written."""

    def __init__(self) -> None:
        self._queue: deque[Outgoing | Record] = deque()
        self._writing = False

    def put_item(self, item: Outgoing | Record) -> None:
        """Append an item."""
        self._queue.append(item)

    def take_actions(self) -> list[Action]:
        """Remove and return the actions that may leave now, in order; a WriteRecords can only be the last."""
        actions: list[Action] = []
        if self._writing:
            return actions
        while self._queue:
            if type(self._queue[0]) in _RECORDS:
                actions.append(self._begin_transaction())
                break
            actions.append(cast(Outgoing, self._queue.popleft()))
        return actions

    def has_unwritten(self) -> bool:
        """Whether a record waits, or is being written."""
        return self._writing or any(_is_record(item) for item in self._queue)

    def on_written(self) -> None:
        """Record that the transaction is durable: items behind it may leave."""
        self._writing = False

    def _begin_transaction(self) -> WriteRecords:
        records = tuple(item for item in self._queue if _is_record(item))
        self._queue = deque(item for item in self._queue if not _is_record(item))
        self._writing = True
        return WriteRecords(records)


def _is_record(item: Outgoing | Record) -> TypeGuard[Record]:
    return type(item) in _RECORDS
