"""Rank 0's line to its agent: a blocking Unix socket, one question at a time.

An agent that is gone ends the training (the socket is closed): nobody else may speak for this cluster. Knows no torch.
"""

from __future__ import annotations

import socket
from pathlib import Path

from dips.client import local
from dips.config import ClusterFile
from dips.errors import ConfigError, RemoteProtocolError, Unavailable

MOST_PATH = 107  # bytes of a Unix socket's path, a limit of Linux
GRACE_S = 30.0  # an agent that does not answer for poll_s and so long is hung


def socket_path(config: ClusterFile) -> Path:
    """Where agent and rank 0 meet; raise ConfigError if the kernel cannot take the path."""
    path = (config.socket or config.directory / "agent.sock").absolute()
    if len(str(path).encode()) > MOST_PATH:
        raise ConfigError(f"socket: {path} is longer than {MOST_PATH} bytes: name a shorter one under the key `socket`")
    return path


class Line:
    """A connection to the agent."""

    def __init__(self, path: Path, poll_s: float) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(poll_s + GRACE_S)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise Unavailable(
                f"no agent answers at {path} ({error.strerror}): start this script as `dips-client --config … -- …`"
            ) from error

    def ask(self, question: local.Question) -> local.Answer:
        """Ask, and wait for the answer; it may be Wait. Raise Unavailable if the agent is gone."""
        self.tell(question)
        try:
            length = local.body_length(self._receive(local.LENGTH.size))
            answer = local.decode(self._receive(length))
        except OSError as error:
            raise Unavailable(f"the agent at {self._path} does not answer: {error}") from error
        if not isinstance(answer, local.Answer):
            raise RemoteProtocolError(f"the agent answered {type(answer).__name__} to {type(question).__name__}")
        return answer

    def tell(self, message: local.Question | local.Notice) -> None:
        """Say something without waiting."""
        try:
            self._socket.sendall(local.encode(message))
        except OSError as error:
            raise Unavailable(f"the agent at {self._path} is gone: {error}") from error

    def close(self) -> None:
        self._socket.close()

    def _receive(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            part = self._socket.recv(length - len(parts))
            if not part:
                raise Unavailable(f"the agent at {self._path} hung up")
            parts += part
        return bytes(parts)
