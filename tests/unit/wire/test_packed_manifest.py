"""A manifest on its way to the agent is small, whole and the one that was announced, or it is refused."""

from __future__ import annotations

import random
import zlib

import pytest

from benchmarks.large_model import large_shapes
from dips.client.ipc.messages import MOST_BYTES, ManifestSent, encode_message
from dips.errors import CorruptManifest, RemoteProtocolError
from dips.protocol.manifest import MAX_JSON_BYTES, Manifest
from dips.wire import packed_manifest
from dips.wire.packed_manifest import pack_manifest, unpack_manifest

SMALL = Manifest.from_shapes([("norm.weight", (8,))])


def test_a_manifest_of_50000_parameters_fits_into_one_message() -> None:
    """Names repeat: it takes a fifth of what a message may."""
    large = Manifest.from_shapes(large_shapes())
    packed = pack_manifest(large)
    assert sum(len(layer.parameters) for layer in large.layers) >= 50_000
    assert 0 < len(encode_message(ManifestSent("7", packed))) < MOST_BYTES // 4
    assert unpack_manifest(packed, large.digest) == large.to_json()


def test_names_that_do_not_repeat_are_not_sent() -> None:
    """What would not fit into a message is left out, so that the agent can say so."""
    rng = random.Random(1)
    shapes = [(f"{rng.getrandbits(800):x}", (1,)) for _ in range(12_000)]
    assert pack_manifest(Manifest.from_shapes(shapes)) == b""


@pytest.mark.parametrize("limit", ["MAX_JSON_BYTES", "MOST_PACKED"])
def test_a_manifest_that_just_fits_is_sent(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """As text that the reader allows, and as bytes that a message takes; with one more it is left out."""
    packed = pack_manifest(SMALL)
    size = len(packed) if limit == "MOST_PACKED" else len(SMALL.to_json())
    for most, sent in ((size, packed), (size - 1, b"")):
        monkeypatch.setattr(packed_manifest, limit, most)
        assert pack_manifest(SMALL) == sent


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (b"", "torn"),
        (b"junk", "cannot be unpacked"),
        (pack_manifest(SMALL)[:-1], "torn"),
        (pack_manifest(SMALL) + b"x", "torn"),
        (zlib.compress(bytes(MAX_JSON_BYTES + 1)), "unpacks to more than"),
        (zlib.compress(bytes(MAX_JSON_BYTES)), "as announced"),
    ],
)
def test_anything_else_is_refused(packed: bytes, words: str) -> None:
    """Torn, followed by more, a bomb, or of another digest."""
    with pytest.raises(RemoteProtocolError, match=words):
        unpack_manifest(packed, SMALL.digest)


def test_a_manifest_is_bounded_before_it_is_read() -> None:
    """JSON beyond the limit is refused by its length, and no shorter one."""
    with pytest.raises(CorruptManifest, match="at most"):
        Manifest.from_json(" " * (MAX_JSON_BYTES + 1))
    with pytest.raises(CorruptManifest) as refused:
        Manifest.from_json(" " * MAX_JSON_BYTES)
    assert "at most" not in str(refused.value)
