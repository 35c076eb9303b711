"""Admission of ranks' streams: keys that the lanes admit, and a HELLO that is meant for this slave's incarnation."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from dips.errors import RemoteProtocolError
from dips.ids import PullId, PushId
from dips.protocol.rank_keys import find_wrong_keys
from dips.slave.ports import Move, error_message
from dips.slave.receiver import Receiver
from dips.slave.sender import Sender
from dips.wire.frame import BadFrame, Range, StreamName

# ---- keyring --------------------------------------------------------------------------------------------------------
# The public keys that a slave's lanes admit now: those of the ranks of open pushes and pulls, and those of probes for a
# while.
#
# A connection has one key for all its life (transport/seal.py). It is accepted only while that key is admitted, and
# each HELLO must be of the rank with that key, so a stream ends with its push or pull, whatever its connection does
# later. Lanes without encryption, on loopback, have no keyring. Any thread; no clock.


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


# ---- admission ------------------------------------------------------------------------------------------------------
# Admission of ranks' streams: a HELLO must be meant for this run, slave and incarnation, and come from the rank that it
# names; then it is passed to the receiver or the sender. Pure.


class Admission:
    """Checks HELLOs for a receiver and a sender; `start` must come before any HELLO."""

    def __init__(
        self, run: str, slave: str, receiver: Receiver, sender: Sender, keyring: Keyring | None = None
    ) -> None:
        """`keyring` has the keys that ranks may use; None: the lanes are not encrypted."""
        self._run, self._slave, self._receiver, self._sender = run, slave, receiver, sender
        self._keyring = keyring
        self.sinc = -1

    def start(self, sinc: int) -> None:
        """Accept streams of incarnation `sinc`; a new incarnation drops every push and pull of the former one."""
        changed, first = sinc != self.sinc, self.sinc == -1
        self.sinc = sinc
        if changed and not first:
            if self._keyring is not None:
                self._keyring.close_all()
            self._receiver.drop_all()
            self._sender.close_all(f"slave {self._slave} has incarnation {sinc} now")

    def on_hello(
        self,
        lane: int,
        peer: bytes,
        stream: int,
        name: StreamName,
        pieces: tuple[Range, ...],
        now: float,
        ready: int | None = None,
        key: str = "",
    ) -> list[Move]:
        """Begin a rank's stream, numbered `stream` in its header; raise BadFrame if that is not the name's number.

        key  public key of the connection; "": the lane is not encrypted
        """
        if name.stream_id != stream or name.run != self._run:
            raise BadFrame("message", f"the HELLO of {name} bears another stream's number")
        refusal = self._find_misdirected(name) or self._find_stranger(name, key)
        if refusal is not None:
            return [error_message(lane, peer, name.stream_id, *refusal)]
        if name.kind == "push":
            return self._receiver.on_hello(lane, peer, name, pieces, now, ready)
        return self._sender.on_hello(lane, peer, name, pieces, now)

    def _find_stranger(self, name: StreamName, key: str) -> tuple[str, str] | None:
        why = self._keyring.find_stranger(name, key) if self._keyring is not None else ""
        return ("denied", why) if why else None

    def _find_misdirected(self, name: StreamName) -> tuple[str, str] | None:
        if name.slave != self._slave:
            return "invalid", f"this is slave {self._slave}, the HELLO is for {name.slave}"
        if name.sinc != self.sinc:
            text = f"slave {self._slave} has incarnation {self.sinc}, the HELLO is for {name.sinc}"
            return "stale_incarnation", text
        return None
