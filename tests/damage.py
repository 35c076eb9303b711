"""Rot on a disk: one bit of a named part of a snapshot, so that a test says which digest must find it."""

from __future__ import annotations

import json
from pathlib import Path


def flip_bit(model: Path, part: str) -> None:
    """Flip one bit of the first tensor of a safetensors file whose name begins with `part`, and has elements."""
    raw = bytearray(model.read_bytes())
    begin = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:begin])
    offsets = [e["data_offsets"] for name, e in entries.items() if name.startswith(part)]
    first, last = next((a, b) for a, b in offsets if a < b)
    raw[begin + (first + last) // 2] ^= 1
    model.write_bytes(raw)
