"""Rot on a disk: one bit of a named part of a version, so that a test says which digest must find it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def flip_bit(version: Path, part: str) -> None:
    """Flip one bit of the first tensor in a version's files whose name begins with `part`, and has elements."""
    model = layer_files(version)[0]
    raw = bytearray(model.read_bytes())
    begin = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:begin])
    offsets = [e["data_offsets"] for name, e in entries.items() if name.startswith(part)]
    first, last = next((a, b) for a, b in offsets if a < b)
    raw[begin + (first + last) // 2] ^= 1
    model.write_bytes(raw)


def layer_files(version: Path) -> list[Path]:
    """The files of a version's layers, by their index."""
    return sorted(version.glob("*.safetensors"))


def load_parameters(version: Path) -> dict[str, np.ndarray]:
    """All tensors of a version by the names in its files."""
    return {name: tensor for file in layer_files(version) for name, tensor in load_file(file).items()}
