"""Checksums of a version's chunks, each computed once: several clusters pull a version, and a version never changes.

A name v@r stands for the same bytes wherever they are (a bank, a snapshot file), so a checksum of one copy holds for
the other, and bytes that were damaged meanwhile are rejected by their reader. Not used for bytes that may change: a
push's source is hashed whenever it is sent. Any thread may call; two at once may compute the same number twice.
"""

from __future__ import annotations

import threading

import xxhash

from dips.ids import VersionId
from dips.wire.chunks import Range
from dips.wire.frame import Buffer

KEPT = 1 << 15  # chunks, over all versions: 32 GiB of parameters in chunks of 1 MiB, some 10 MB of memory


class Checksums:
    """A bounded table; when it is full, the version that was asked for first is forgotten."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._versions: dict[VersionId, dict[Range, int]] = {}
        self._held = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._held

    def chunk_checksum(self, version: VersionId, chunk: Range, body: Buffer) -> int:
        """Return the checksum of a chunk with the bytes `body`. Cost: the first call reads them, without the GIL."""
        table = self._versions.get(version)
        known = table.get(chunk) if table is not None else None
        if known is not None:
            return known
        made = xxhash.xxh3_64_intdigest(body)
        with self._lock:
            self._keep_checksum(version, chunk, made)
        return made

    def _keep_checksum(self, version: VersionId, chunk: Range, made: int) -> None:
        while self._held >= self._kept:
            oldest = next(iter(self._versions))
            if oldest == version:
                return  # nothing is older: further chunks are hashed each time
            self._held -= len(self._versions.pop(oldest))
        table = self._versions.setdefault(version, {})
        self._held += chunk not in table
        table[chunk] = made

    def forget_all(self) -> None:
        """Forget all checksums, for a new incarnation of the slave."""
        with self._lock:
            self._versions.clear()
            self._held = 0
