"""One connection of a rank, on the agent's side: whole messages in and out, sealed if it came from the network."""

from __future__ import annotations

import asyncio
import socket

from dips.client.ipc import encoding
from dips.client.ipc.messages import Message
from dips.client.ipc.seal import ANSWER, TAG, Seal, TokenServer

ADMIT_S = 10.0  # time for a rank to prove that it knows the token


class Connection:
    """Reads and writes messages of messages.py."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seal: Seal | None = None) -> None:
        self._reader, self._writer, self._seal = reader, writer, seal

    @classmethod
    async def admit_rank(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes) -> Connection:
        """Admit a rank that proves the token. Raises Denied, TimeoutError, or the error of a broken connection."""
        keep_alive(writer.get_extra_info("socket"))
        host = TokenServer(token)
        writer.write(host.greeting)
        async with asyncio.timeout(ADMIT_S):
            answer = await reader.readexactly(ANSWER)
        proof, seal = host.admit_rank(answer)
        writer.write(proof)
        return cls(reader, writer, seal)

    @property
    def peer(self) -> str:
        """The rank's host, for the log."""
        name = self._writer.get_extra_info("peername")
        return str(name[0]) if name else "this host"

    async def read_message(self) -> Message:
        """Return the next message. Raises IncompleteReadError at the end, RemoteProtocolError for an invalid
        message.
        """
        head = await self._reader.readexactly(encoding.LENGTH.size)
        body = await self._reader.readexactly(encoding.body_length(head))
        if self._seal:
            self._seal.check_frame(head + body, await self._reader.readexactly(TAG))
        return encoding.decode_message(body)

    async def write_message(self, message: Message) -> None:
        frame = encoding.encode_message(message)
        self._writer.write(frame + self._seal.tag_frame(frame) if self._seal else frame)
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel detect within half a minute that the other host is gone, also when nothing is sent."""
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),  # s
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),  # s
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),  # ms, of what was sent and not acknowledged
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    ):
        connection.setsockopt(level, option, value)
