"""docs/guides/threats.md: every test that it names exists, and the numbers are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dips.transport import lane, limits
from tests.unit.test_track_record import is_there

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/guides/threats.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)))


@pytest.mark.parametrize(("file", "test"), NAMED, ids=lambda word: word)
def test_a_test_that_is_named_exists(file: str, test: str) -> None:
    """A threat that is said to be stopped has something that shows it."""
    assert is_there(f"{file}::{test}" if test else file)


def test_many_are_named() -> None:
    assert len(NAMED) >= 20


def test_the_numbers_are_those_of_the_code() -> None:
    assert f"a master takes {limits.MOST_CONNECTIONS:,}, a slave {limits.MOST_SLAVE_CONNECTIONS}" in TEXT
    assert f"a lane {lane.MOST_CONNECTIONS:,}" in TEXT
    assert f"{limits.HANDSHAKE_MS // 1000} s for a handshake, {lane.HANDSHAKE_MS // 1000} s on lanes" in TEXT
    flood = f"{limits.PEER_CALLS_PER_S:g} calls a second of one peer, {limits.PEER_CALLS_AT_ONCE:,.0f} at once"
    assert flood in TEXT and f"{limits.CALLS_PER_S:,.0f} of all" in TEXT
    messages = f"{limits.PEER_MESSAGES} arrive at once, of all {limits.MESSAGES}; {limits.MOST_STREAMS} calls"
    assert f"{limits.MASTER_LIMITS.request_bytes >> 20} MiB; of one peer {messages}" in TEXT
    assert f"{limits.PEER_CONNECTIONS} connections of a certificate" in TEXT
    assert f"{limits.MOST_STREAMS} calls of a connection" in TEXT
