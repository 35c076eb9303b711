"""The same push with nothing overlapped: its stages one after another, and a worker at one slave after another.

For each layer a rank spells all chunks, makes all checksums, sends all; the slave receives all, checks all, puts all in
their place, and says so; then the next layer. A rank goes to its slaves in its own order; a slave serves
CONCURRENT_STREAMS ranks
at once, whoever came first. Frames, checks and codecs are the real ones, over the same kind of sockets.

python -m benchmarks.in_turn slave CAST NUMBER IP CONCURRENT_STREAMS       says [[address], ""]
    ["push", push, places]   serve every rank once;  ["end", push] → [processor time, seconds of check and put]
python -m benchmarks.in_turn rank CAST CLUSTER RANK
    ["push", number, slaves, rule] → [seconds, processor time, seconds of spelling and checksums]
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

import numpy as np
import xxhash
import zmq

from benchmarks.cast import CHUNK_BYTES, RUN, TURNS, Cast, random_order
from benchmarks.line_program import print_answer, processor_s, read_requests
from dips.protocol.order import slaves_for_worker
from dips.transport.memory import keep_message_memory
from dips.wire.chunks import encode_body, put_body
from dips.wire.frame import Header, Kind, Range, check_body, pack_header, run_id, unpack_header

HELLO, GO, DONE = b"hello", b"go", b"done"
OPTIONS = {zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.LINGER: 0}


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    for option, value in OPTIONS.items():
        socket.setsockopt(option, value)
    return socket


def slave(cast: Cast, number: int, ip: str, concurrent_streams: int) -> None:
    """Serve all ranks of one push, so many at once."""
    keep_message_memory()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    router = _socket(context, zmq.ROUTER)
    port = router.bind_to_random_port(f"tcp://{ip}")
    slot = {i: np.ones(cast.numel // cast.layers, np.float32) for i in cast.held_by(number)}
    print_answer([[f"{ip}:{port}"], ""])
    for word, *_ in read_requests():
        if word == "push":
            print_answer("open")
            used, staged_s = processor_s(), _serve(router, cast, slot, concurrent_streams)
        else:
            print_answer([processor_s() - used, staged_s])
    router.close()
    context.term()


def _serve(router: zmq.Socket[bytes], cast: Cast, slot: dict[int, Any], concurrent_streams: int) -> float:
    """Serve every rank to its end, who came first first; return the seconds of checks and copies."""
    waiting, served, over = deque[bytes](), dict[bytes, list[list[zmq.Frame]]](), 0
    layers, most = list(slot), len(cast.chunks(0, cast.share(0)))
    left: dict[bytes, list[int]] = {}
    staged_s = 0.0
    while over < cast.ranks:
        peer, *parts = router.recv_multipart(copy=False)
        if peer.bytes in served:
            served[peer.bytes].append(parts)
        else:
            waiting.append(peer.bytes)
        if len(served.get(peer.bytes, ())) == most:
            begun = time.perf_counter()
            _put(cast, served[peer.bytes], slot[left[peer.bytes].pop(0)])
            staged_s += time.perf_counter() - begun
            served[peer.bytes] = []
            router.send_multipart([peer.bytes, DONE])
            if not left[peer.bytes]:
                del served[peer.bytes]
                over += 1
        while waiting and len(served) < concurrent_streams:
            served[waiting[0]], left[waiting[0]] = [], list(layers)
            router.send_multipart([waiting.popleft(), GO])
    return staged_s


def _put(cast: Cast, frames: list[list[zmq.Frame]], target: Any) -> None:
    codec = cast.codec
    headers = [unpack_header(head.buffer, run_id(RUN), len(body.buffer), CHUNK_BYTES) for head, body in frames]
    for header, (_, body) in zip(headers, frames, strict=True):
        check_body(header, body.buffer)
    lengths = {chunk.offset: chunk.length for rank in range(cast.ranks) for chunk in cast.chunks(0, cast.share(rank))}
    for header, (_, body) in zip(headers, frames, strict=True):
        put_body(codec, body.buffer, target[header.offset : header.offset + lengths[header.offset]])


def rank(cast: Cast, number: int) -> None:
    """Push everything, as often as told."""
    pieces = [piece.array for piece in cast.pieces(number, 1e-3)]
    print_answer("ready")
    for _, seq, slaves, rule in read_requests():
        begun, used, made_s = time.perf_counter(), processor_s(), 0.0
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        planned = slaves_for_worker(number, len(slaves))
        for index in planned if rule == TURNS else random_order(len(slaves), f"{seq}/{number}"):
            dealer = _socket(context, zmq.DEALER)
            dealer.connect(f"tcp://{slaves[index][0][0]}")
            dealer.send(HELLO)
            dealer.recv()
            for layer in cast.held_by(index):
                made_s += _send(dealer, cast, layer, cast.share(number), pieces[layer])
                dealer.recv()
            dealer.close()
        context.term()
        print_answer([time.perf_counter() - begun, processor_s() - used, made_s])


def _send(dealer: zmq.Socket[bytes], cast: Cast, layer: int, share: Range, values: Any) -> float:
    """Send a rank's share of a layer; return the seconds of spelling and checksums."""
    codec, begun = cast.codec, time.perf_counter()
    chunks = cast.chunks(layer, share)
    made = [encode_body(codec, values[c.offset - share.offset : c.offset - share.offset + c.length]) for c in chunks]
    headers = [
        pack_header(
            Header(Kind.CHUNK, run_id(RUN), 1, chunk.nbytes, xxhash.xxh3_64_intdigest(body), *chunk[:3], chunk.dtype)
        )
        for chunk, body in zip(chunks, made, strict=True)
    ]
    made_s = time.perf_counter() - begun
    for header, body in zip(headers, made, strict=True):
        dealer.send(header, zmq.SNDMORE)
        dealer.send(body, copy=False)
    return made_s


if __name__ == "__main__":
    if sys.argv[1] == "slave":
        slave(Cast.parse(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
    else:
        rank(Cast.parse(sys.argv[2]), int(sys.argv[4]))
