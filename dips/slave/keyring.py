"""The public keys that a slave's lanes admit now: those of the ranks of open pushes and pulls, and those of probes for
a while.

A connection has one key for all its life (transport/zap.py). It is accepted only while that key is admitted, and each
HELLO must be of the rank with that key, so a stream ends with its push or pull, whatever its connection does later.
Lanes without encryption, on loopback, have no keyring. Any thread; no clock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from dips.errors import RemoteProtocolError
from dips.ids import PullId, PushId
from dips.protocol.rank_keys import find_wrong_keys
from dips.wire.streams import StreamName

PROBE_S = 600.0  # how long a probe's key is admitted: `dips check` takes seconds for each slave
MOST_PROBES = 256  # keys; the oldest is forgotten


class Keyring:
    """The keys of all open transfers and recent probes."""

    def __init__(self) -> None:
        self._open: dict[PushId | PullId, tuple[str, ...]] = {}
        self._uses: dict[str, int] = {}  # key → open transfers with it: a cluster pushes and pulls with the same keys
        self._probes: dict[str, tuple[str, float]] = {}  # cluster → its probe's key, and until when it is admitted
        self._lock = threading.Lock()

    def open_transfer(self, transfer: PushId | PullId, keys: Sequence[str], ranks: int | None = None) -> None:
        """Admit the ranks of a transfer, rank r with the r-th key; raise RemoteProtocolError if these are no keys of
        `ranks` ranks.
        """
        if wrong := find_wrong_keys(keys, len(keys) if ranks is None else ranks, needed=True):
            raise RemoteProtocolError(f"{transfer}: {wrong}")
        with self._lock:
            if transfer not in self._open:
                self._open[transfer] = tuple(keys)
                for key in set(keys):
                    self._uses[key] = self._uses.get(key, 0) + 1

    def close_transfer(self, transfer: PushId | PullId) -> None:
        """Stop admitting the ranks of a transfer. Idempotent."""
        with self._lock:
            for key in set(self._open.pop(transfer, ())):
                self._uses[key] -= 1
                if self._uses[key] <= 0:
                    del self._uses[key]

    def close_all(self) -> None:
        """Stop admitting all ranks, for a new incarnation of the slave."""
        with self._lock:
            self._open.clear()
            self._uses.clear()

    def admit_probe(self, cluster: str, key: str, now: float) -> None:
        """Admit a probe for a while; each cluster has one."""
        with self._lock:
            self._probes.pop(cluster, None)
            if len(self._probes) >= MOST_PROBES:
                del self._probes[next(iter(self._probes))]
            self._probes[cluster] = key, now + PROBE_S

    def admits(self, key: str, now: float) -> bool:
        """Whether a connection with this key is accepted, and may send messages that need no HELLO."""
        with self._lock:
            return key in self._uses or any(key == k and now < until for k, until in self._probes.values())

    def find_stranger(self, name: StreamName, key: str) -> str:
        """Return why `key` is not that of the rank in a HELLO; "" if it is, or if the transfer is not open."""
        transfer = (PushId if name.kind == "push" else PullId)(name.cluster, name.inc, name.seq)
        with self._lock:
            keys = self._open.get(transfer)
        if keys is None:
            return ""
        if name.rank >= len(keys):
            return f"{transfer} has {len(keys)} ranks, got rank {name.rank}"
        return "" if keys[name.rank] == key else f"this connection's key is not that of rank {name.rank} of {transfer}"
