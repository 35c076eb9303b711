"""Checksums of a version's chunks: made once, in a table that does not grow."""

from __future__ import annotations

import xxhash

from dips.ids import VersionId
from dips.slave.sender import Checksums
from dips.wire.frame import Range

V1, V2 = VersionId(1, 1), VersionId(2, 2)


def chunk(number: int) -> Range:
    return Range(0, 0, number * 10, 10)


def test_a_chunk_of_a_version_is_read_once():
    """Asked again, the number is that of the bytes that were read first: others do not pass at a reader."""
    table = Checksums()
    right = xxhash.xxh3_64_intdigest(b"right")
    assert table.chunk_checksum(V1, chunk(0), b"right") == right
    assert table.chunk_checksum(V1, chunk(0), b"wrong") == right
    assert len(table) == 1


def test_versions_and_chunks_are_told_apart():
    """The same range of another version, and another range of the same one, are other bytes."""
    table = Checksums()
    bodies = {(v, n): f"{v} {n}".encode() for v in (V1, V2) for n in range(3)}
    for _ in range(2):
        for (v, n), body in bodies.items():
            assert table.chunk_checksum(v, chunk(n), body) == xxhash.xxh3_64_intdigest(body)


def test_the_oldest_version_makes_room():
    """A full table forgets whole versions, never the one that is asked for; what does not fit is right all the same."""
    table = Checksums(kept=4)
    for n in range(3):
        table.chunk_checksum(V1, chunk(n), b"one")
    for n in range(6):
        assert table.chunk_checksum(V2, chunk(n), b"two") == xxhash.xxh3_64_intdigest(b"two")
    assert len(table) == 4
    assert table.chunk_checksum(V1, chunk(0), b"anew") == xxhash.xxh3_64_intdigest(b"anew")
    table.forget_all()
    assert len(table) == 0
    other = b"of another incarnation"
    assert table.chunk_checksum(V1, chunk(0), other) == xxhash.xxh3_64_intdigest(other)
