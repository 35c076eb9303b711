"""A manifest's JSON as it travels: compressed, in one message, bounded before and after.

From rank 0 to its agent, and on to the master, only when its digest is not the run's; to a master by `dips seed`; from
a master to slaves that do not know it. Names repeat: the JSON of 250,000 parameters shrinks from 15 MiB to 0.7 MiB in
0.1 s. Pure.
"""

from __future__ import annotations

import hashlib
import zlib
from functools import lru_cache

from dips.errors import RemoteProtocolError
from dips.protocol.manifest import MAX_JSON_BYTES, Manifest

MOST_PACKED = (1 << 20) - 1024  # bytes; of a message of 1 MiB its other fields take the rest
LEVEL = 6  # zlib's: 1 makes an eighth more


class ManifestTooLong(RemoteProtocolError):
    """The text unpacks to more bytes than the reader allows."""


def pack_manifest(manifest: Manifest) -> bytes:
    """Compress a manifest; nothing if it does not fit into one message, since names that do not repeat are no model."""
    text = manifest.to_json()
    packed = pack_text(text) if len(text) <= MAX_JSON_BYTES else b""
    return packed if len(packed) <= MOST_PACKED else b""


@lru_cache(maxsize=1)  # a master sends the run's own to each slave that registers anew
def pack_text(text: str) -> bytes:
    """Compress the JSON of a manifest."""
    return zlib.compress(text.encode(), LEVEL)


def unpack_manifest(packed: bytes, digest: str, most: int = MAX_JSON_BYTES) -> str:
    """Return the JSON; raise RemoteProtocolError if it is torn, longer than `most`, or not what has this digest."""
    text = _inflate(packed, most)
    found = hashlib.sha256(text).hexdigest()
    if found != digest:
        raise RemoteProtocolError(f"expected a manifest of digest {digest[:12]}, as announced, got {found[:12]}")
    return text.decode(errors="replace")


def unpack_text(packed: bytes) -> str:
    """Return the JSON of a master's manifest; raise RemoteProtocolError if it is torn or too long."""
    return _inflate(packed, MAX_JSON_BYTES).decode(errors="replace")


def _inflate(packed: bytes, most: int) -> bytes:
    inflate = zlib.decompressobj()
    try:
        text = inflate.decompress(packed, most + 1)
    except zlib.error as error:
        raise RemoteProtocolError(f"a manifest of {len(packed)} bytes cannot be unpacked: {error}") from error
    if len(text) > most:
        raise ManifestTooLong(f"a manifest of {len(packed)} bytes unpacks to more than {most}")
    if not inflate.eof or inflate.unused_data:
        raise RemoteProtocolError(f"a manifest of {len(packed)} bytes is torn: it unpacks to {len(text)} and no end")
    return text
