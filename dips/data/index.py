"""A data set's directory: the documents of each range, and the token files that hold them.

    dataset.json     seed, sources with their token files and digests, balance; its `digest` identifies the data set
    documents.npy    DOCUMENT[n], in the order of the ranges
    ranges.npy       int64[ranges + 1]: range i has documents[ranges[i] : ranges[i + 1]]
    tokens/NAME.bin  the tokens of a source of text; token files of the user stay where they are

Two directories with one digest hold the same tokens in the same ranges, wherever their files are.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dips.data.order import I64
from dips.errors import ConfigError, Corrupt

FORMAT = 1
MANIFEST, DOCUMENTS, RANGES = "dataset.json", "documents.npy", "ranges.npy"
_BLOCK = 8 << 20  # bytes hashed at once


@dataclass(frozen=True)
class Listed:
    """One token file as the manifest lists it."""

    path: Path
    dtype: str
    skip: int
    nbytes: int
    xxh3: str


@dataclass(frozen=True)
class Index:
    """The contents of a data set's directory."""

    manifest: dict[str, Any]
    files: tuple[Listed, ...]
    documents: np.ndarray  # DOCUMENT[n]
    bounds: I64  # [ranges + 1]

    @property
    def digest(self) -> str:
        return str(self.manifest["digest"])


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
    arrays = []
    for name in (DOCUMENTS, RANGES):
        if file_checksum(directory / name) != manifest[name]:
            raise Corrupt(f"{directory / name}: its checksum is not the manifest's")
        arrays.append(np.load(directory / name, mmap_mode="r"))
    for file in files:
        _check_file(file, verify)
    return Index(manifest, files, *arrays)


def _parse_listed(directory: Path, raw: dict[str, Any]) -> Listed:
    return Listed(directory / raw["path"], raw["dtype"], raw["skip"], raw["bytes"], raw["xxh3"])


def _check_file(file: Listed, verify: bool) -> None:
    try:
        size = file.path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{file.path}: a token file of the data set cannot be read: {error.strerror}") from error
    if size != file.nbytes:
        raise Corrupt(f"{file.path}: expected {file.nbytes} bytes, it has {size}")
    if verify and file_checksum(file.path) != file.xxh3:
        raise Corrupt(f"{file.path}: its checksum is not the manifest's")
