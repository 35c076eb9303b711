"""One frame of each kind that carries numbers: header and body, as hexadecimal text."""

from __future__ import annotations

import numpy as np
import xxhash

from dips.codecs import Codec
from dips.wire.chunks import encode_body
from dips.wire.frame import (
    Header,
    Kind,
    Range,
    StreamName,
    Welcome,
    encode_done,
    encode_hello,
    encode_ready,
    encode_want,
    encode_welcome,
    make_message,
    pack_header,
    run_id,
)

FILE = "frames.txt"
VALUES = np.array([0.0, 1.0, -2.5, 3.1415927, 1e-3, -0.0], np.float32)
RUN, STREAM = run_id("golden"), 0x0123456789ABCDEF
NAME = StreamName("golden", "push", "east", 2, 7, 3, "ps0", 4, 1, "", 1)
RANGES = (Range(5, 2, 64, 6), Range(6, 0, 0, 1))


def chunk(codec: Codec) -> tuple[bytes, bytes]:
    """VALUES from element 64 of layer 5, parameter 2."""
    body = bytes(encode_body(codec, VALUES))
    checksum = xxhash.xxh3_64_intdigest(body)
    return pack_header(Header(Kind.CHUNK, RUN, STREAM, len(body), checksum, 5, 2, 64, codec.dtype)), body


def make() -> dict[str, bytes]:
    frames = {f"CHUNK {name}": chunk(name) for name in Codec}
    frames["HELLO"] = make_message(Kind.HELLO, RUN, STREAM, encode_hello(NAME, RANGES))
    frames["WELCOME"] = make_message(Kind.WELCOME, RUN, STREAM, encode_welcome(Welcome(4096, 1 << 20)))
    frames["WANT"] = make_message(Kind.WANT, RUN, STREAM, encode_want(RANGES))
    frames["DONE"] = make_message(Kind.DONE, RUN, STREAM, encode_done(4096))
    frames["READY"] = make_message(Kind.READY, RUN, STREAM, encode_ready(1))
    lines = [f"{name}: {header.hex()} {body.hex()}\n" for name, (header, body) in frames.items()]
    return {FILE: "".join(lines).encode()}


def read(text: str) -> dict[str, tuple[bytes, bytes]]:
    """Header and body of each frame, by name."""
    found = {}
    for line in text.splitlines():
        name, _, parts = line.partition(": ")
        header, body = parts.split(" ")
        found[name] = bytes.fromhex(header), bytes.fromhex(body)
    return found
