"""A data set's directory: its token files with their document boundaries, and the documents of each range."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from dips.data.deal import I64
from dips.errors import ConfigError, Corrupt

# ---- tokenfile ------------------------------------------------------------------------------------------------------
# A file of tokens with its document boundaries, in each supported format of tokenised text.
#
#     corpus.bin + corpus.idx             Megatron's indexed data set
#     corpus.npy + corpus.documents.npy   one array of tokens, and where each document begins
#     corpus.bin + corpus.documents.npy   the same as raw little-endian numbers of a named dtype
#     … without .documents.npy            documents end with the token `eos`, which is searched for
#
# Nothing is copied: a file is read through a map of its pages. The meaning of tokens is not known here.


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
        """Return the largest token of the whole file, which is read once. Raises ConfigError for one below 0."""
        tokens, largest = self.open(), 0
        for i in range(0, len(tokens), _SCAN):
            part = tokens[i : i + _SCAN]
            if (least := int(part.min())) < 0:
                raise ConfigError(
                    f"{self.path}: expected tokens of 0 or more, got {least}: another type than they were written with "
                    f"({part.dtype}), or values that stand for no token"
                )
            largest = max(largest, int(part.max()))
        return largest


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
    dtype, skip, listed = _numpy_header(path) if path.suffix == ".npy" else (dtype, 0, None)
    if dtype is None:
        raise ConfigError(f"{path}: the type of its tokens is not known: give --dtype uint16 or uint32")
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise ConfigError(f"--dtype: expected uint16 or uint32, got {dtype!r}") from error
    if kind.kind not in "iu":
        raise ConfigError(f"{path}: expected whole numbers as tokens, got {kind}")
    tokens = open_tokens(path, kind.str, skip)
    if listed is not None and len(tokens) != listed:
        raise ConfigError(f"{path}: expected {listed} tokens, as its header says, got {len(tokens)}: copy it once more")
    starts = _find_starts(path, tokens, eos, scan_tokens)
    return TokenFile(path, kind.str, skip, starts, np.diff(starts, append=len(tokens)))


def _numpy_header(path: Path) -> tuple[str, int, int]:
    """Return the dtype of a .npy file's tokens, the bytes before them, and how many there should be."""
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, kind = read(file)
            if len(shape) != 1:
                raise ConfigError(f"{path}: expected one row of tokens, got an array of shape {shape}")
            return kind.str, file.tell(), shape[0]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a .npy file: {error}") from error


def _find_starts(path: Path, tokens: Tokens, eos: int | None, scan_tokens: int) -> I64:
    beside = path.with_suffix(".documents.npy")
    if beside.exists():
        try:
            return _check_starts(beside, np.load(beside), len(tokens))
        except (OSError, EOFError, ValueError) as error:
            raise ConfigError(f"{beside}: not a .npy file: {error}") from error
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


# ---- index ----------------------------------------------------------------------------------------------------------
# A data set's directory: the documents of each range, and the token files that hold them.
#
#     dataset.json     seed, sources with their token files and digests, balance; its `digest` identifies the data set
#     documents.npy    DOCUMENT[n], in the order of the ranges
#     ranges.npy       int64[ranges + 1]: range i has documents[ranges[i] : ranges[i + 1]]
#     tokens/NAME.bin  the tokens of a source of text; token files of the user stay where they are
#
# Two directories with one digest hold the same tokens in the same ranges, wherever their files are.


FORMAT = 1
MANIFEST, DOCUMENTS, RANGES = "dataset.json", "documents.npy", "ranges.npy"
_BLOCK = 8 << 20  # bytes hashed at once
_UNREADABLE = "a file of the data set cannot be read"


@dataclass(frozen=True)
class Listed:
    """One token file as the manifest lists it."""

    path: Path
    dtype: str
    skip: int
    nbytes: int
    xxh3: str

    def open(self) -> Tokens:
        """Map its tokens; raise ConfigError if it is gone, Corrupt if it has another size by now."""
        _check_file(self, verify=False)
        return open_tokens(self.path, self.dtype, self.skip)


@dataclass(frozen=True)
class Index:
    """The contents of a data set's directory."""

    manifest: dict[str, Any]
    files: tuple[Listed, ...]
    documents: np.ndarray  # DOCUMENT[n]
    bounds: I64  # [ranges + 1]
    directory: Path

    @property
    def digest(self) -> str:
        return str(self.manifest["digest"])

    def __reduce__(self) -> tuple[Any, ...]:
        """A process that gets it maps the arrays itself: a pickled map is a copy of all that it shows."""
        return _map_index, (self.manifest, self.files, self.directory)


def digest_of(manifest: dict[str, Any]) -> str:
    """Return a digest of the parts of a manifest that determine the tokens, without paths."""
    listed = {key: value for key, value in manifest.items() if key not in ("digest", "balance")}
    sources = [
        {**s, "files": [{k: v for k, v in f.items() if k != "path"} for f in s["files"]]} for s in listed["sources"]
    ]
    text = json.dumps({**listed, "sources": sources}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def file_checksum(path: Path, progress: Callable[[int], None] = lambda _: None) -> str:
    """Return xxh3 of a file, 128 bits in hex; `progress` is called with the bytes read."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
            progress(len(block))
    return hasher.hexdigest()


def write_index(directory: Path, manifest: dict[str, Any], documents: np.ndarray, bounds: I64) -> str:
    """Write the three files and return the digest; the manifest comes last, so a failed build leaves no data set."""
    for name, array in ((DOCUMENTS, documents), (RANGES, bounds)):
        np.save(directory / name, array)
        manifest[name] = file_checksum(directory / name)
    manifest["digest"] = digest_of(manifest)
    aside = directory / f"{MANIFEST}.new"
    aside.write_text(json.dumps(manifest, indent=1) + "\n")
    os.replace(aside, directory / MANIFEST)
    return str(manifest["digest"])


def open_index(directory: Path, verify: bool = False) -> Index:
    """Open a data set; with `verify` every byte of its token files is compared with its digest.

    Raise ConfigError if there is none, Corrupt if a file is not as it was written.
    """
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        form = manifest["format"]
    except OSError as error:
        raise ConfigError(f"{path}: no data set: {error.strerror}; `dips data build` makes one") from error
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"{path}: not a manifest of a data set: {error!r}") from error
    if form != FORMAT:
        raise ConfigError(f"{path}: expected format {FORMAT}, got {form!r}; build it anew: `dips data build`")
    if digest_of(manifest) != manifest.get("digest"):
        raise Corrupt(f"{path}: its digest is not that of its contents: it was edited")
    files = tuple(_parse_listed(directory, f) for source in manifest["sources"] for f in source["files"])
    for name in (DOCUMENTS, RANGES):
        try:
            checksum = file_checksum(directory / name)
        except FileNotFoundError as error:
            raise ConfigError(f"{directory / name}: {_UNREADABLE}: {error.strerror}") from error
        if checksum != manifest[name]:
            raise Corrupt(f"{directory / name}: its checksum is not the manifest's")
    for file in files:
        _check_file(file, verify)
    return _map_index(manifest, files, directory)


def _map_index(manifest: dict[str, Any], files: tuple[Listed, ...], directory: Path) -> Index:
    documents, bounds = (np.load(directory / name, mmap_mode="r") for name in (DOCUMENTS, RANGES))
    return Index(manifest, files, documents, bounds, directory)


def _parse_listed(directory: Path, raw: dict[str, Any]) -> Listed:
    return Listed(directory / raw["path"], raw["dtype"], raw["skip"], raw["bytes"], raw["xxh3"])


def _check_file(file: Listed, verify: bool) -> None:
    try:
        size = file.path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{file.path}: {_UNREADABLE}: {error.strerror}") from error
    if size != file.nbytes:
        raise Corrupt(f"{file.path}: expected {file.nbytes} bytes, it has {size}")
    if verify and file_checksum(file.path) != file.xxh3:
        raise Corrupt(f"{file.path}: its checksum is not the manifest's")
