"""Admission of ranks' streams: a HELLO must be meant for this run, slave and incarnation, and come from the rank that
it names; then it is passed to the receiver or the sender. Pure; used by the ZeroMQ flow and by the simulated one.
"""

from __future__ import annotations

from dips.slave.keyring import Keyring
from dips.slave.moves import Move, error_message
from dips.slave.receiver import Receiver
from dips.slave.sender import Sender
from dips.wire.chunks import Range
from dips.wire.frame import BadFrame
from dips.wire.streams import StreamName


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
