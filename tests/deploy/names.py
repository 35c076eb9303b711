"""The DNS of a node: answers A for the names in a JSON file, nothing for what else is asked of them.

python names.py ADDRESS FILE          # {"dips-master.dips.svc": "10.233.0.1"}; read for each question
"""

from __future__ import annotations

import ipaddress
import json
import socket
import struct
import sys
from pathlib import Path

PORT, MOST_BYTES, TTL_S = 53, 512, 1
A, INTERNET = 1, 1
ANSWER, NO_SUCH_NAME = 0x8180, 0x8183  # of the header's flags: recursion is available


def answer_query(query: bytes, names: dict[str, str]) -> bytes:
    """The response to one question; raise ValueError or struct.error if it is none."""
    number, _, questions = struct.unpack_from(">HHH", query)
    if questions != 1:
        raise ValueError(f"expected one question, got {questions}")
    labels, at = [], 12
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    kind, _ = struct.unpack_from(">HH", query, at + 1)
    question, address = query[12 : at + 5], names.get(".".join(labels).lower())
    flags = NO_SUCH_NAME if address is None else ANSWER
    record = b""
    if address is not None and kind == A:
        record = struct.pack(">HHHIH", 0xC00C, A, INTERNET, TTL_S, 4) + ipaddress.ip_address(address).packed
    return struct.pack(">HHHHHH", number, flags, 1, bool(record), 0, 0) + question + record


def serve(address: str, file: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.bind((address, PORT))
        while True:
            query, asker = s.recvfrom(MOST_BYTES)
            try:
                s.sendto(answer_query(query, json.loads(file.read_text())), asker)
            except (ValueError, IndexError, struct.error):
                continue  # not a question


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
