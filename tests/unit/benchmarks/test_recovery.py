"""What others lose by a death: calls of `step` in which no push was under way."""

from __future__ import annotations

import pytest

from benchmarks.recovery import PARTS, RECOVERED, lost_s


def test_a_round_is_no_lost_time() -> None:
    """A call in which a push began is a round, made or skipped; the others' time counts, however short."""
    calls = [{"begun": 1.0, "ended": 1.001}, {"begun": 2.0, "ended": 3.5}, {"begun": 4.0, "ended": 4.25}]
    assert lost_s(calls, [2.1]) == pytest.approx(0.251)
    assert lost_s(calls, []) == pytest.approx(1.751)


def test_every_recovery_has_its_parts() -> None:
    assert {role: len(parts) >= RECOVERED[role] for role, parts in PARTS.items()} == dict.fromkeys(PARTS, True)
