"""What others lose by a death: calls of `step` that waited, and in which no push was under way."""

from __future__ import annotations

import pytest

from benchmarks.recovery import PARTS, RECOVERED, lost_s


def test_a_round_is_no_lost_time() -> None:
    """A call in which a push began is a round, made or skipped; the others' time counts, however short."""
    calls = [call(1.0, 1.001), call(2.0, 3.5), call(4.0, 4.25)]
    assert lost_s(calls, [2.1]) == pytest.approx(0.251)
    assert lost_s(calls, []) == pytest.approx(1.751)


def test_a_busy_machine_is_no_lost_time() -> None:
    """A call that was preempted and waited for nothing is not counted, whatever it took."""
    assert lost_s([call(1.0, 1.5, waits=0), call(2.0, 2.25)], []) == pytest.approx(0.25)


def call(begun: float, ended: float, waits: int = 1) -> dict[str, float]:
    return {"begun": begun, "ended": ended, "waits": waits}


def test_every_recovery_has_its_parts() -> None:
    assert {role: len(parts) >= RECOVERED[role] for role, parts in PARTS.items()} == dict.fromkeys(PARTS, True)
