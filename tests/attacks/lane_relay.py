"""A man in the middle of a lane's connections: it reads ZeroMQ's framing, and passes on what it likes."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator

GREETING_BYTES = 64  # of ZMTP
MORE, LONG, COMMAND = 1, 2, 4  # flags of a ZMTP frame
Parts = list[bytes]
Tamper = Callable[[Parts], list[Parts]]  # a message → what is passed on in its place


class LaneRelay:
    """Listens at `address` and passes on to a lane; ended by `with`."""

    def __init__(self, lane: str, to_lane: Tamper, to_rank: Tamper = lambda parts: [parts]) -> None:
        host, _, port = lane.rpartition(":")
        self._lane, self._to_lane, self._to_rank = (host, int(port)), to_lane, to_rank
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> LaneRelay:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listener, *self._sockets):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is closed already
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for each in (self._listener, *self._sockets):
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                rank, _ = self._listener.accept()
            except OSError:
                return
            lane = socket.create_connection(self._lane)
            self._sockets += [rank, lane]
            for source, target, tamper in ((rank, lane, self._to_lane), (lane, rank, self._to_rank)):
                thread = threading.Thread(target=self._pass_on, args=(source, target, tamper))
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, tamper: Tamper) -> None:
        try:
            for _ in range(GREETING_BYTES):  # each end waits for the other's first bytes
                target.sendall(_read(source, 1))
            message: Parts = []
            for flags, body in _read_frames(source):
                if flags & COMMAND:
                    target.sendall(_spell(flags, body))
                    continue
                message.append(body)
                if not flags & MORE:
                    for parts in tamper(message):
                        target.sendall(b"".join(_spell(MORE * (part is not parts[-1]), part) for part in parts))
                    message = []
        except (OSError, EOFError):
            pass
        for each in (source, target):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other direction has ended first


def _read_frames(source: socket.socket) -> Iterator[tuple[int, bytes]]:
    while True:
        flags = _read(source, 1)[0]
        nbytes = struct.unpack(">Q", _read(source, 8))[0] if flags & LONG else _read(source, 1)[0]
        yield flags, _read(source, nbytes)


def _read(source: socket.socket, nbytes: int) -> bytes:
    body = bytearray()
    while len(body) < nbytes:
        part = source.recv(min(nbytes - len(body), 1 << 20))
        if not part:
            raise EOFError
        body += part
    return bytes(body)


def _spell(flags: int, body: bytes) -> bytes:
    if len(body) > 255:
        return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body
    return bytes([flags & ~LONG, len(body)]) + body
