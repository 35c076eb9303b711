"""A file of tokens with its document boundaries, in each supported format of tokenised text.

    corpus.bin + corpus.idx             Megatron's indexed data set
    corpus.npy + corpus.documents.npy   one array of tokens, and where each document begins
    corpus.bin + corpus.documents.npy   the same as raw little-endian numbers of a named dtype
    … without .documents.npy            documents end with the token `eos`, which is searched for

Nothing is copied: a file is read through a map of its pages. The meaning of tokens is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dips.data.order import I64
from dips.errors import ConfigError

Tokens = npt.NDArray[Any]

_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats, not tokens
_SCAN = 1 << 24  # tokens searched at once: 64 MiB of the widest


@dataclass(frozen=True)
class TokenFile:
    """One file and its documents; `starts` and `tokens` count tokens, not bytes."""

    path: Path
    dtype: str
    skip: int  # bytes before the first token
    starts: I64
    tokens: I64

    def open(self) -> Tokens:
        return open_tokens(self.path, self.dtype, self.skip)

    def largest_token(self) -> int:
        """Return the largest token of the whole file, which is read once."""
        tokens = self.open()
        return max((int(tokens[i : i + _SCAN].max()) for i in range(0, len(tokens), _SCAN)), default=0)


def open_tokens(path: Path, dtype: str, skip: int) -> Tokens:
    """Map a file's tokens into memory, read-only; raise ConfigError if it is missing or has a broken token."""
    try:
        size = path.stat().st_size - skip
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    kind = np.dtype(dtype)
    if size % kind.itemsize:
        raise ConfigError(f"{path}: expected whole tokens of {kind.itemsize} bytes, got {size} bytes")
    if size == 0:
        return np.empty(0, kind)
    return np.memmap(path, kind, "r", skip)


def find_tokens(path: Path, dtype: str | None, eos: int | None, scan_tokens: int = _SCAN) -> TokenFile:
    """Recognise the form of a token file; raise ConfigError saying what is missing.

    scan_tokens  tokens searched at once for `eos`
    """
    if path.suffix == ".idx":
        return _read_megatron(path)
    if path.suffix == ".bin" and path.with_suffix(".idx").exists():
        return _read_megatron(path.with_suffix(".idx"))
    dtype, skip = _numpy_header(path) if path.suffix == ".npy" else (dtype, 0)
    if dtype is None:
        raise ConfigError(f"{path}: the type of its tokens is not known: give --dtype uint16 or uint32")
    kind = np.dtype(dtype)
    if kind.kind not in "iu":
        raise ConfigError(f"{path}: expected whole numbers as tokens, got {kind}")
    tokens = open_tokens(path, kind.str, skip)
    starts = _find_starts(path, tokens, eos, scan_tokens)
    return TokenFile(path, kind.str, skip, starts, np.diff(starts, append=len(tokens)))


def _numpy_header(path: Path) -> tuple[str, int]:
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, kind = read(file)
            if len(shape) != 1:
                raise ConfigError(f"{path}: expected one row of tokens, got an array of shape {shape}")
            return kind.str, file.tell()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a .npy file: {error}") from error


def _find_starts(path: Path, tokens: Tokens, eos: int | None, scan_tokens: int) -> I64:
    beside = path.with_suffix(".documents.npy")
    if beside.exists():
        return _check_starts(beside, np.load(beside), len(tokens))
    if eos is None:
        raise ConfigError(f"{path}: where its documents begin is not known: expected {beside.name} beside it, or --eos")
    blocks = range(0, len(tokens), scan_tokens)
    ends = [np.flatnonzero(tokens[at : at + scan_tokens] == eos) + at + 1 for at in blocks]
    starts = np.concatenate([np.zeros(1, np.int64), *ends]).astype(np.int64)
    return starts[starts < len(tokens)]


def _check_starts(path: Path, starts: Tokens, tokens: int) -> I64:
    if starts.ndim != 1 or starts.dtype.kind not in "iu" or not len(starts):
        raise ConfigError(f"{path}: expected one row of whole numbers, got {starts.dtype}{list(starts.shape)}")
    starts = starts.astype(np.int64)
    if starts[-1] == tokens:  # some tools write the end as well
        starts = starts[:-1]
    if not len(starts) or starts[0] != 0 or (np.diff(starts) <= 0).any() or starts[-1] >= tokens:
        raise ConfigError(f"{path}: expected numbers that rise from 0 and stay below {tokens}, the tokens of its file")
    return starts


def _read_megatron(index: Path) -> TokenFile:
    """Read Megatron's .idx: magic, version, dtype, counts, then lengths, byte offsets and documents of sequences."""
    try:
        raw = index.read_bytes()
    except OSError as error:
        raise ConfigError(f"{index}: cannot be read: {error.strerror}") from error
    if raw[:9] != _MAGIC or len(raw) < 34 or int.from_bytes(raw[9:17], "little") != 1:
        raise ConfigError(f"{index}: expected a Megatron index of version 1, it begins with {raw[:17]!r}")
    dtype = _MEGATRON_DTYPES.get(raw[17])
    sequences, documents = (int.from_bytes(raw[a : a + 8], "little") for a in (18, 26))
    if dtype is None or len(raw) < 34 + 12 * sequences + 8 * documents:
        raise ConfigError(f"{index}: a dtype of code {raw[17]}, or an index that ends early: not readable as tokens")
    lengths = np.frombuffer(raw, "<i4", sequences, 34).astype(np.int64)
    offsets = np.frombuffer(raw, "<i8", sequences, 34 + 4 * sequences)
    bounds = np.frombuffer(raw, "<i8", documents, 34 + 12 * sequences)  # first sequence of each document, and the end
    item, data = np.dtype(dtype).itemsize, index.with_suffix(".bin")
    first = bounds[:-1][np.diff(bounds) > 0]
    if not len(first) or bounds[0] != 0 or bounds[-1] != sequences:
        raise ConfigError(f"{index}: its documents do not hold each of its {sequences} sequences once")
    starts, tokens = offsets[first] // item, np.add.reduceat(lengths, first)
    if int((starts + tokens).max()) > len(open_tokens(data, dtype, 0)):
        raise ConfigError(f"{data}: it is shorter than {index.name} says")
    return TokenFile(data, dtype, 0, starts[tokens > 0], tokens[tokens > 0])
