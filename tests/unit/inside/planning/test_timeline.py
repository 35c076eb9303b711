"""A step's timeline in plan.yaml, and as a trace."""

from __future__ import annotations

import json

import pytest

from dips.inside.planning.schedules import ENGINES, Engine, Op, ScheduleName, parse_order
from dips.inside.planning.simulate import ActionSpan, PassSeconds, make_chain, simulate
from dips.inside.planning.timeline import MEASURED, PLANNED, chrome_trace, parse_timeline, spell_timeline
from tests.traces import check_chrome


def test_a_timeline_comes_back_from_the_plan() -> None:
    """Each action on its engine, to the microsecond; what is no action is refused."""
    seconds = [PassSeconds(0.1, 0.2, 0.0123456), PassSeconds(0.15, 0.1, 0.1)]
    spans = simulate(make_chain(ScheduleName.COMPACT_ZB, seconds, [0.01], 3)).spans
    found = parse_timeline(spell_timeline(spans)["timeline"])
    begins, wanted = ({(s.device, s.action): s.begin_s for s in of} for of in (found, spans))
    assert begins == pytest.approx(wanted, abs=1e-6)
    assert {(s.device, s.action, s.engine) for s in found} == {(s.device, s.action, s.engine) for s in spans}
    assert sum(s.end_s - s.begin_s for s in found) == pytest.approx(3 * 0.6623456, abs=1e-4)
    assert set(ENGINES) == set(Op)
    for wrong in ("0F0", "0F0:1", "0X0:1:2", "0F0:1:x"):
        with pytest.raises(ValueError):
            parse_timeline({"a": wrong})


def test_what_was_measured_stands_beside_the_plan() -> None:
    """A process for each device in each timeline, those of one device one after the other, all from 0 on; a device that
    is only measured is there, too.
    """
    planned = [
        ActionSpan("a", Engine.COMPUTE, "0F0", 0.0, 0.5), ActionSpan("b", Engine.NETWORK, "1UNSHARD", 0.1, 0.2)
    ]  # fmt: skip
    measured = [
        ActionSpan("b", Engine.COMPUTE, "1F0", 0.75, 1.0),
        ActionSpan("a", Engine.COMPUTE, "0F0", 0.0, 0.25),
        ActionSpan("c", Engine.COPY, "copy", 0.0, 1e-7),
    ]
    trace = check_chrome(json.dumps(chrome_trace({PLANNED: planned, MEASURED: measured})))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert [names[pid] for pid in sorted(names)] == [f"{which} {d}" for d in "abc" for which in (PLANNED, MEASURED)]
    drawn = {(names[e["pid"]], e["name"]): (e["ts"], e["dur"]) for e in trace if e["ph"] == "X"}
    assert drawn["measured b", "1F0"] == (750_000, 250_000) and drawn["planned a", "0F0"] == (0, 500_000)
    (only,) = {names[event["pid"]] for event in check_chrome(json.dumps(chrome_trace({PLANNED: planned[:1]})))[
        "traceEvents"
    ]}  # fmt: skip
    assert only == "planned a"


def test_an_engine_does_what_the_simulator_lets_it_do() -> None:
    """The table is that of the machines."""
    played = simulate(make_chain(ScheduleName.GPIPE, [PassSeconds(1.0, 1.0, 1.0)] * 2, [0.1], 2))
    assert all(span.engine is ENGINES[parse_order(span.action)[0].op] for span in played.spans)
