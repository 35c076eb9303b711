"""The yardsticks of the data flow: the same chunks through a bare ZeroMQ pair, and through gRPC streaming.

Each is a peer in a process of its own and moves the bytes and nothing else: no checksum, no copy into place, nobody
asks. What arrives is counted and dropped. Both do the like work, too: checksums on both ends and a copy into place,
over gRPC in messages spelled by protobuf, as a data flow on gRPC would; over ZeroMQ with nothing else, which shows how
much of the bare rate the checks leave to any data flow on this machine.
"""

from __future__ import annotations

import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
import numpy.typing as npt
import xxhash
import zmq
from google.protobuf.any_pb2 import Any as Any_  # two fields, text and bytes: a checksum and a chunk

HEADER = bytes(64)
HWM = 64  # messages that wait on either side of a lane
PUSH, PULL, END = "push", "pull", "end"
CHECKED = " checked"
Bytes = npt.NDArray[np.uint8]


class Peer(ABC):
    """A process that serves `serve(pipe, nbytes, chunk_bytes, lanes)`; ended on exit."""

    def __init__(self, serve: Callable[..., None], nbytes: int, chunk_bytes: int, lanes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, nbytes, chunk_bytes, lanes), daemon=True)
        self.data = np.zeros(nbytes, np.uint8)
        self.data += 1  # touched
        self.chunk_bytes = chunk_bytes

    def __enter__(self) -> Self:
        self._process.start()
        self.connect(self.pipe.recv())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.disconnect()
        self.pipe.send(END)
        self._process.join()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @abstractmethod
    def connect(self, addresses: list[str]) -> None:
        """Reach the process where it says that it listens."""

    @abstractmethod
    def disconnect(self) -> None:
        """Let go of what `connect` made."""


# ---- ZeroMQ ----------------------------------------------------------------------------------------------------------


class BareZmq(Peer):
    """PUSH → PULL, a socket, a context and a thread for each lane and direction, as the lanes of a slave have."""

    def __init__(self, nbytes: int, chunk_bytes: int, lanes: int) -> None:
        super().__init__(_serve_zmq, nbytes, chunk_bytes, lanes)

    def connect(self, addresses: list[str]) -> None:
        half = len(addresses) // 2
        self._outs = [_socket(zmq.PUSH) for _ in range(half)]
        self._ins = [_socket(zmq.PULL) for _ in range(half)]
        for socket, address in zip(self._outs + self._ins, addresses, strict=True):
            socket.connect(address)
        self._threads = ThreadPoolExecutor(half)

    def disconnect(self) -> None:
        self._threads.shutdown()
        _close(self._outs + self._ins)

    def push(self, checked: str = "") -> None:
        """Send every byte; return when all have arrived."""
        self.pipe.send(PUSH + checked)
        _send_all(self._threads, self._outs, self.data, self.chunk_bytes, checked)
        self.pipe.recv()

    def pull(self, checked: str = "") -> None:
        """Have every byte sent here."""
        self.pipe.send(PULL + checked)
        _receive_all(self._threads, self._ins, self.data, checked)
        self.pipe.recv()

    def push_checked(self) -> None:
        """Send every byte into place there, with a checksum made and compared for each chunk."""
        self.push(CHECKED)

    def pull_checked(self) -> None:
        """Have every byte sent into place here, likewise."""
        self.pull(CHECKED)


def _serve_zmq(pipe: Connection, nbytes: int, chunk_bytes: int, lanes: int) -> None:
    data = np.ones(nbytes, np.uint8)
    ins, outs = [_socket(zmq.PULL) for _ in range(lanes)], [_socket(zmq.PUSH) for _ in range(lanes)]
    pipe.send([f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}" for socket in ins + outs])
    with ThreadPoolExecutor(lanes) as threads:
        while (word := pipe.recv()) != END:
            kind, checked = word[: len(PUSH)], word[len(PUSH) :]
            if kind == PUSH:
                _receive_all(threads, ins, data, checked)
            else:
                _send_all(threads, outs, data, chunk_bytes, checked)
            pipe.send(None)
    _close(ins + outs)


def _socket(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context(io_threads=1).socket(kind)
    socket.set(zmq.SNDHWM, HWM)
    socket.set(zmq.RCVHWM, HWM)
    socket.set(zmq.LINGER, 0)
    return socket


def _close(sockets: list[zmq.Socket[bytes]]) -> None:
    for socket in sockets:
        socket.close()
        socket.context.term()


def _shares(sockets: list[zmq.Socket[bytes]], nbytes: int) -> list[tuple[zmq.Socket[bytes], int, int]]:
    """Each socket with its first byte and its end."""
    cuts = [nbytes * i // len(sockets) for i in range(len(sockets) + 1)]
    return list(zip(sockets, cuts, cuts[1:], strict=False))


def _send_all(
    threads: ThreadPoolExecutor, sockets: list[zmq.Socket[bytes]], data: Bytes, chunk_bytes: int, checked: str
) -> None:
    def send(share: tuple[zmq.Socket[bytes], int, int]) -> None:
        socket, begin, end = share
        for at in range(begin, end, chunk_bytes):
            body = data[at : min(at + chunk_bytes, end)].data
            socket.send(_header(body) if checked else HEADER, zmq.SNDMORE)
            socket.send(body, copy=False)

    list(threads.map(send, _shares(sockets, data.nbytes)))


def _receive_all(threads: ThreadPoolExecutor, sockets: list[zmq.Socket[bytes]], data: Bytes, checked: str) -> None:
    def receive(share: tuple[zmq.Socket[bytes], int, int]) -> None:
        socket, begin, end = share
        while begin < end:
            header, body = socket.recv_multipart(copy=False)
            if checked:
                assert header.bytes == _header(body.buffer), "a chunk is corrupt"
                data[begin : begin + len(body)] = np.frombuffer(body.buffer, np.uint8)
            begin += len(body)

    list(threads.map(receive, _shares(sockets, data.nbytes)))


def _header(body: memoryview) -> bytes:
    return xxhash.xxh3_64_digest(body).ljust(len(HEADER), b"\0")


# ---- gRPC ------------------------------------------------------------------------------------------------------------


class GrpcStream(Peer):
    """One stream of messages of a chunk each, over one connection: raw bytes, counted and dropped."""

    def __init__(self, nbytes: int, chunk_bytes: int) -> None:
        super().__init__(_serve_grpc, nbytes, chunk_bytes, 1)

    def connect(self, addresses: list[str]) -> None:
        self._channel = grpc.insecure_channel(addresses[0])
        self._push: Any = self._channel.stream_unary("/bench/push")
        self._pull: Any = self._channel.unary_stream("/bench/pull")
        self._push_checked: Any = self._channel.stream_unary("/bench/push_checked", Any_.SerializeToString)
        self._pull_checked: Any = self._channel.unary_stream(
            "/bench/pull_checked", response_deserializer=Any_.FromString
        )

    def disconnect(self) -> None:
        self._channel.close()

    def push(self) -> None:
        """Stream every byte there; return when all were counted."""
        self._push(_messages(self.data, self.chunk_bytes))

    def pull(self) -> None:
        """Stream every byte here."""
        came = sum(len(message) for message in self._pull(b""))
        assert came == self.data.nbytes, f"expected {self.data.nbytes} bytes, got {came}"

    def push_checked(self) -> None:
        """Stream every byte into place there, as a data flow on gRPC would: protobuf, checksums on both ends."""
        self._push_checked(_spelled(self.data, self.chunk_bytes))

    def pull_checked(self) -> None:
        """Stream every byte into place here, likewise."""
        _into_place(self._pull_checked(b""), self.data)


def _messages(data: Bytes, chunk_bytes: int) -> Iterator[bytes]:
    return (data[at : at + chunk_bytes].tobytes() for at in range(0, data.nbytes, chunk_bytes))


def _spelled(data: Bytes, chunk_bytes: int) -> Iterator[Any_]:
    """Chunks with their checksum, as protobuf messages."""
    for body in _messages(data, chunk_bytes):
        yield Any_(type_url=xxhash.xxh3_64_hexdigest(body), value=body)


def _into_place(messages: Iterator[Any_], data: Bytes) -> None:
    at = 0
    for message in messages:
        body = message.value
        assert xxhash.xxh3_64_hexdigest(body) == message.type_url, "a chunk is corrupt"
        data[at : at + len(body)] = np.frombuffer(body, np.uint8)
        at += len(body)
    assert at == data.nbytes, f"expected {data.nbytes} bytes, got {at}"


def _serve_grpc(pipe: Connection, nbytes: int, chunk_bytes: int, lanes: int) -> None:
    data = np.ones(nbytes, np.uint8)

    def push(messages: Iterator[bytes], context: Any) -> bytes:
        return str(sum(len(message) for message in messages)).encode()

    def pull(request: bytes, context: Any) -> Iterator[bytes]:
        return _messages(data, chunk_bytes)

    def push_checked(messages: Iterator[Any_], context: Any) -> bytes:
        _into_place(messages, data)
        return b""

    def pull_checked(request: bytes, context: Any) -> Iterator[Any_]:
        return _spelled(data, chunk_bytes)

    handlers: dict[str, Any] = {
        "push": grpc.stream_unary_rpc_method_handler(push),
        "pull": grpc.unary_stream_rpc_method_handler(pull),
        "push_checked": grpc.stream_unary_rpc_method_handler(push_checked, Any_.FromString),
        "pull_checked": grpc.unary_stream_rpc_method_handler(pull_checked, response_serializer=Any_.SerializeToString),
    }
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads, handlers=[grpc.method_handlers_generic_handler("bench", handlers)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        pipe.send([f"127.0.0.1:{port}"])
        assert pipe.recv() == END
        server.stop(None).wait()
