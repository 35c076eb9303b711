"""How attackers call: gRPC with whatever certificate, and bare sockets."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from dips.errors import class_named, treatment_of
from dips.identity.paths import TlsFiles
from dips.wire import messages
from dips.wire.generated import status_pb2
from dips.wire.generated.slave_pb2 import Order, OrderReply

CALL_S = 5.0
BIG = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]


@contextmanager
def channel_to(address: str, files: TlsFiles | None, san: str, shown: bool = True) -> Iterator[grpc.Channel]:
    """With the certificate of `files`, with none (`shown`), or, without files, in plain text."""
    if files is None:
        channel = grpc.insecure_channel(address, BIG)
    else:
        pair = (files.key.read_bytes(), files.cert.read_bytes()) if shown else (None, None)
        credentials = grpc.ssl_channel_credentials(files.ca.read_bytes(), *pair)
        channel = grpc.secure_channel(address, credentials, [*BIG, ("grpc.ssl_target_name_override", san)])
    try:
        yield channel
    finally:
        channel.close()


def ask(channel: grpc.Channel, method: str, said: object, within_s: float = CALL_S) -> tuple[str, str]:
    """Call `/dips.v1.<method>`; return the status's name, OK if it was answered, and what it says."""
    message = said if isinstance(said, Message) else messages.to_proto(said)
    call: Callable[..., Any] = channel.unary_unary(f"/dips.v1.{method}", lambda m: m.SerializeToString(), bytes)
    try:
        reply = call(message, timeout=within_s)
    except grpc.RpcError as error:
        return status_of(error), cast(grpc.Call, error).details() or ""
    return _result_of(OrderReply.FromString(reply)) if isinstance(message, Order) else ("OK", "")


def _result_of(reply: OrderReply) -> tuple[str, str]:
    """Orders are a stream, whose replies tell errors by their class."""
    if not reply.HasField("error"):
        return "OK", ""
    cls = class_named(reply.error.error)
    assert cls is not None, reply
    return treatment_of(cls()).status, reply.error.why


def describe(channel: grpc.Channel) -> dict[str, Any]:
    """The run, as `dips check` and pullers ask for it."""
    call = channel.unary_unary(
        "/dips.v1.StatusService/Describe", lambda m: m.SerializeToString(), status_pb2.DescribeReply.FromString
    )
    described: dict[str, Any] = json.loads(call(status_pb2.DescribeRequest(), timeout=CALL_S).json)
    return described


def ask_cluster(channel: grpc.Channel, method: str, reply: type[Any], said: object) -> Any:
    """A question of ClusterService that is answered."""
    call = channel.unary_unary(f"/dips.v1.ClusterService/{method}", lambda m: m.SerializeToString(), reply.FromString)
    return messages.unwrap_oneof(call(messages.to_proto(said), timeout=20.0))


def status_of(error: grpc.RpcError) -> str:
    return str(cast(grpc.Call, error).code().name)


def refused_with(address: str, files: TlsFiles | None, san: str, method: str, said: object, shown: bool = True) -> str:
    """The one call of a new connection: its refusal, `STATUS details`."""
    with channel_to(address, files, san, shown) as channel:
        status, details = ask(channel, method, said)
    assert status != "OK", f"{method} was answered"
    return f"{status} {details}"


def connect_to(address: tuple[str, int], within_s: float = CALL_S) -> socket.socket:
    return socket.create_connection(address, within_s)


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def closed_within(connection: socket.socket, within_s: float) -> bool:
    """Whether the other end hangs up."""
    end = time.monotonic() + within_s
    while (left_s := end - time.monotonic()) > 0:
        connection.settimeout(left_s)
        try:
            if not connection.recv(1 << 16):
                return True
        except TimeoutError:
            return False
        except OSError:
            return True
    return False


def client_hello() -> bytes:
    """The first flight of an honest handshake."""
    out = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    shaking = context.wrap_bio(ssl.MemoryBIO(), out)
    try:
        shaking.do_handshake()
    except ssl.SSLWantReadError:
        pass  # it waits for the answer
    return out.read()


def read_exactly(connection: socket.socket, nbytes: int, within_s: float = CALL_S) -> bytes:
    connection.settimeout(within_s)
    read = bytearray()
    while len(read) < nbytes:
        more = connection.recv(nbytes - len(read))
        assert more, f"hung up after {len(read)} of {nbytes} bytes"
        read += more
    return bytes(read)
