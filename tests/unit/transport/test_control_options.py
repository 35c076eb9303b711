"""gRPC passes over options that it does not know, without a word: a misspelt one is its default."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc._cython import cygrpc

from dips.transport import control
from dips.transport.limits import MASTER_LIMITS

OPTIONS = [*control._SERVER_OPTIONS, *control._CHANNEL_OPTIONS, *MASTER_LIMITS.to_options()]
NAMES = sorted({name for name, _ in OPTIONS})


@pytest.fixture(scope="module")
def library() -> bytes:
    return Path(cygrpc.__file__).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_grpc_knows_the_option(library: bytes, name: str) -> None:
    """Its name stands in the library that is installed."""
    assert name.encode() in library


def test_a_name_is_looked_up_as_often_as_its_server_is_tried() -> None:
    """A master's or slave's pod that starts again has another address behind its name: it was found after up to 30 s,
    when the leases of all clusters had run out.
    """
    options = dict(control._CHANNEL_OPTIONS)
    assert options["grpc.dns_min_time_between_resolutions_ms"] <= options["grpc.max_reconnect_backoff_ms"]
