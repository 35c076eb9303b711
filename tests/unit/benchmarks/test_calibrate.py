"""Fitting a simulated run to measured cells: seconds of phases, and what a fit finds again of its own simulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import calibrate
from benchmarks.calibrate import CellTimes, Fit, TransferFit, _median_phases, fit_cells, nominal_s, play, predict
from benchmarks.endtoend import Cell, CellSeen
from benchmarks.timed_rank import Stretch

CELL = Cell("aligned", (1.0, 0.5), fourth=0.2)
FIT = Fit(TransferFit(0.1, 0.8), TransferFit(0.05, 0.9), rest_s=0.3, latency_s=0.02)


def test_phases_are_those_that_ended_while_the_stretches_lasted(tmp_path: Path) -> None:
    """Each from its begin; a begin without an end, and what was before, count for nothing."""
    marks = [(90, "push_begin"), (99, "push_end")]
    for at in (100, 110):
        marks += [(at, "push_begin"), (at + 2, "push_end"), (at + 2, "window_begin"), (at + 5, "window_end")]
        marks += [(at + 5, "pull_begin"), (at + 6, "pull_end")]
    marks += [(116.5, "push_begin"), (118, "push_end"), (119, "push_begin")]
    file = tmp_path / "timeline.jsonl"
    file.write_text("".join(json.dumps({"at": at, "kind": kind}) + "\n" for at, kind in marks))
    stretches = [Stretch(ended=106.0, planned_s=5.0, calls=[1.0]), Stretch(ended=116.0, planned_s=9.0, calls=[1.0])]
    assert _median_phases(file, stretches) == {"push": 2.0, "wait": 3.0, "pull": 1.0}


@pytest.mark.slow
def test_a_fit_finds_again_what_its_own_simulation_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers exactly, the latency nearly; tokens and standstill are then those of the simulation."""
    monkeypatch.setattr(calibrate, "SIMULATED_H", 0.08)
    played = play(CELL, FIT)
    phases = {
        member.cluster: {
            "push": FIT.push.seconds(nominal_s(CELL, member.cluster)), "wait": member.wait_s,
            "pull": FIT.pull.seconds(nominal_s(CELL, member.cluster)),
        }
        for member in played.clusters
    }  # fmt: skip
    stretches = {name: [Stretch(calls=[FIT.rest_s + sum(of.values())])] for name, of in phases.items()}
    found = fit_cells({CELL: CellTimes(CellSeen(stretches), phases)})
    waits = {member.cluster: member.wait_s for member in play(CELL, found).clusters}
    assert waits == pytest.approx({name: of["wait"] for name, of in phases.items()}, abs=0.1)
    assert (found.push.fixed_s, found.push.share) == pytest.approx((0.1, 0.8))
    assert (found.pull.fixed_s, found.pull.share) == pytest.approx((0.05, 0.9))
    assert found.rest_s == pytest.approx(0.3) and found.latency_s == pytest.approx(0.02, abs=0.004)
    wanted = predict(CELL, played)
    assert predict(CELL, play(CELL, found)) == pytest.approx(wanted, rel=0.02)
    assert 0 < wanted["tokens a second"] < sum(1 / s for s in CELL.steps_s.values())
