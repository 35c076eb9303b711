"""A rank's line to its agent: a blocking socket, one question at a time; sealed when it leads to another host.

An agent that is gone ends the training (the line is closed): nobody else may speak for this cluster. Knows no torch.
"""

from __future__ import annotations

import socket
import time

from dips.client.ipc import encoding, messages
from dips.client.ipc.address import AGENT, Address, OnThisHost
from dips.client.ipc.connection import keep_alive
from dips.client.ipc.seal import GREETING, PROOF, TAG, Seal, TokenClient
from dips.errors import Denied, DipsError, RemoteProtocolError, Unavailable

GRACE_S = 30.0  # an agent that does not answer for poll_s and so long is hung
CONNECT_S = 10.0  # to another host, handshake included
AGAIN_S = 0.5


class Line:
    """A connection to the agent."""

    def __init__(self, address: Address, poll_s: float) -> None:
        """Raise Unavailable if nobody is there, Denied if it is not our agent."""
        self._address = address
        self._seal: Seal | None = None
        try:
            self._socket = _dial(address)
        except OSError as error:
            raise Unavailable(
                f"no agent answers: tried {address} (from {address.named_by}): {error.strerror or error}. Start this "
                f"script as `dips-client --config … -- …`; on another host than the agent's, name it in {AGENT}"
            ) from error
        if not isinstance(address, OnThisHost):
            try:
                self._seal = self._introduce(address.token)
            except Unavailable as error:  # it hung up: to whoever does not know the token it says no more
                self._socket.close()
                raise Denied(
                    f"{address} (from {address.named_by}) hung up on us: is it the agent of this job, and have both "
                    "the same token?"
                ) from error
            except (OSError, DipsError) as error:
                self._socket.close()
                if isinstance(error, DipsError):
                    raise
                raise Unavailable(f"{address} (from {address.named_by}) does not greet us: {error}") from error
        self._socket.settimeout(poll_s + GRACE_S)

    @classmethod
    def wait_for(cls, address: Address, poll_s: float, within_s: float) -> Line:
        """As the constructor, but an agent that starts later than its ranks is waited for."""
        until = time.monotonic() + within_s
        while True:
            try:
                return cls(address, poll_s)
            except Unavailable as error:
                if time.monotonic() >= until:
                    raise Unavailable(f"{error} (tried for {within_s:g} s)") from error
                time.sleep(AGAIN_S)

    def ask(self, question: messages.Question) -> messages.Answer:
        """Ask, and wait for the answer; it may be Wait. Raise Unavailable if the agent is gone."""
        self.tell(question)
        try:
            head = self._receive(encoding.LENGTH.size)
            body = self._receive(encoding.body_length(head))
            if self._seal:
                self._seal.check(head + body, self._receive(TAG))
        except OSError as error:
            raise Unavailable(f"the agent at {self._address} does not answer: {error}") from error
        answer = encoding.decode(body)
        if not isinstance(answer, messages.Answer):
            raise RemoteProtocolError(f"the agent answered {type(answer).__name__} to {type(question).__name__}")
        return answer

    def tell(self, message: messages.Question | messages.Notice) -> None:
        """Say something without waiting."""
        words = encoding.encode(message)
        try:
            self._socket.sendall(words + self._seal.tag(words) if self._seal else words)
        except OSError as error:
            raise Unavailable(f"the agent at {self._address} is gone: {error}") from error

    def outlive(self) -> None:
        """Return when the agent has closed the line, or its host is gone; for a line on which nothing is said."""
        try:
            self._socket.settimeout(None)
            self._socket.recv(1)
        except OSError:  # reset, closed on this side before we came here, or the keep-alive gave up: gone either way
            pass

    def close(self) -> None:
        """End it, also for a thread that stands in `outlive`."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the agent was faster
            pass
        self._socket.close()

    def _introduce(self, token: bytes) -> Seal:
        keep_alive(self._socket)
        guest = TokenClient(token, self._receive(GREETING))
        self._socket.sendall(guest.answer)
        return guest.admitted(self._receive(PROOF))

    def _receive(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            part = self._socket.recv(length - len(parts))
            if not part:
                raise Unavailable(f"the agent at {self._address} hung up")
            parts += part
        return bytes(parts)


def _dial(address: Address) -> socket.socket:
    if not isinstance(address, OnThisHost):
        return socket.create_connection((address.host, address.port), CONNECT_S)
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.settimeout(CONNECT_S)
    try:
        line.connect(str(address.path))
    except OSError:
        line.close()
        raise
    return line
