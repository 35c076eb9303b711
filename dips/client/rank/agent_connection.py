"""A rank's connection to its agent: a blocking socket, one question at a time; authenticated between hosts.

When the agent is gone (the connection is closed) training ends: no other process may act for this cluster. No torch.
"""

from __future__ import annotations

import socket
import time

from dips.client.ipc import encoding, messages
from dips.client.ipc.address import AGENT, Address, OnThisHost
from dips.client.ipc.connection import keep_alive
from dips.client.ipc.seal import GREETING, PROOF, TAG, Seal, TokenClient
from dips.errors import Denied, DipsError, RemoteProtocolError, Unavailable

GRACE_S = 30.0  # an agent that does not answer within poll_s plus this time is hung
CONNECT_S = 10.0  # timeout for connecting, handshake included
RETRY_S = 0.5


class AgentConnection:
    """An open connection to the agent."""

    def __init__(self, address: Address, poll_s: float) -> None:
        """Connect. Raises Unavailable if no agent answers, Denied if it is not this job's agent."""
        self._address = address
        self._seal: Seal | None = None
        try:
            self._socket = _open_socket(address)
        except OSError as error:
            raise Unavailable(
                f"no agent answers: tried {address} (from {address.named_by}): {error.strerror or error}. Start this "
                f"script as `dips-client --config … -- …`; on another host than the agent's, name it in {AGENT}"
            ) from error
        if not isinstance(address, OnThisHost):
            try:
                self._seal = self._prove_token(address.token)
            except Unavailable as error:  # a peer with another token closes the connection without a message
                self._socket.close()
                raise Denied(
                    f"{address} (from {address.named_by}) closed the connection: is it the agent of this job, and do "
                    "both have the same token?"
                ) from error
            except (OSError, DipsError) as error:
                self._socket.close()
                if isinstance(error, DipsError):
                    raise
                raise Unavailable(f"{address} (from {address.named_by}) sent no greeting: {error}") from error
        self._socket.settimeout(poll_s + GRACE_S)

    @classmethod
    def connect_within(cls, address: Address, poll_s: float, within_s: float) -> AgentConnection:
        """Connect as the constructor, but retry for `within_s`: an agent may start later than its ranks."""
        until = time.monotonic() + within_s
        while True:
            try:
                return cls(address, poll_s)
            except Unavailable as error:
                if time.monotonic() >= until:
                    raise Unavailable(f"{error} (tried for {within_s:g} s)") from error
                time.sleep(RETRY_S)

    def receive_answer(self, question: str) -> messages.Answer:
        """Wait for the answer, which may be AskAgain; `question` is named in errors. Raises Unavailable if the agent is
        gone.
        """
        try:
            head = self._receive_bytes(encoding.LENGTH.size)
            body = self._receive_bytes(encoding.body_length(head))
            if self._seal:
                self._seal.check_frame(head + body, self._receive_bytes(TAG))
        except OSError as error:
            raise Unavailable(f"the agent at {self._address} does not answer: {error}") from error
        answer = encoding.decode_message(body)
        if not isinstance(answer, messages.Answer):
            raise RemoteProtocolError(f"the agent answered {type(answer).__name__} to {question}")
        return answer

    def send_message(self, message: messages.Question | messages.Notice) -> None:
        """Send a message without waiting for an answer. Raises Unavailable if the agent is gone."""
        frame = encoding.encode_message(message)
        try:
            self._socket.sendall(frame + self._seal.tag_frame(frame) if self._seal else frame)
        except OSError as error:
            raise Unavailable(f"the agent at {self._address} is gone: {error}") from error

    def wait_until_closed(self) -> None:
        """Block until the agent has closed the connection or its host is gone; for connections without messages."""
        try:
            self._socket.settimeout(None)
            self._socket.recv(1)
        except OSError:  # reset, closed by this side, or the keep-alive failed: closed in each case
            pass

    def close(self) -> None:
        """Close the connection, and unblock a thread in `wait_until_closed`."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the agent has closed it already
            pass
        self._socket.close()

    def _prove_token(self, token: bytes) -> Seal:
        keep_alive(self._socket)
        client = TokenClient(token, self._receive_bytes(GREETING))
        self._socket.sendall(client.answer)
        return client.accept_proof(self._receive_bytes(PROOF))

    def _receive_bytes(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            part = self._socket.recv(length - len(parts))
            if not part:
                raise Unavailable(f"the agent at {self._address} closed the connection")
            parts += part
        return bytes(parts)


def _open_socket(address: Address) -> socket.socket:
    if not isinstance(address, OnThisHost):
        return socket.create_connection((address.host, address.port), CONNECT_S)
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unix.settimeout(CONNECT_S)
    try:
        unix.connect(str(address.path))
    except OSError:
        unix.close()
        raise
    return unix
