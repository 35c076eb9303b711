"""The timeline of a pipeline's step: in plan.yaml as it is predicted, and as a trace for ui.perfetto.dev, in which what
was measured may stand beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from dips.inside.planning.schedules import ENGINES, Engine, parse_order
from dips.inside.planning.simulate import ActionSpan

PLANNED, MEASURED = "planned", "measured"


def spell_timeline(spans: Sequence[ActionSpan]) -> dict[str, Any]:
    """Return a key of a plan's `pipeline`: of each device action, begin and microseconds, action after action."""
    spelled: dict[str, list[str]] = defaultdict(list)
    for span in spans:
        begin, end = _micros(span.begin_s), _micros(span.end_s)
        spelled[span.device].append(f"{span.action}:{begin}:{end - begin}")
    return {"timeline": {device: " ".join(of) for device, of in spelled.items()}}


def parse_timeline(spelled: Mapping[str, Any]) -> tuple[ActionSpan, ...]:
    """Return what was spelled. Raises ValueError for what `spell_timeline` would not have written."""
    return tuple(_parse_span(str(device), one) for device, text in spelled.items() for one in str(text).split())


def _parse_span(device: str, text: str) -> ActionSpan:
    action, begin, took = text.split(":")
    (parsed,) = parse_order(action)
    return ActionSpan(device, ENGINES[parsed.op], action, int(begin) / 1e6, (int(begin) + int(took)) / 1e6)


def chrome_trace(timelines: Mapping[str, Sequence[ActionSpan]]) -> dict[str, Any]:
    """Return timelines of one step as a trace for ui.perfetto.dev: a process for each device in each of them, those of
    one device beside each other, and a thread for each engine.

    timelines   spans by PLANNED or MEASURED; all begin at 0
    """
    devices = list(dict.fromkeys(span.device for spans in timelines.values() for span in spans))
    pids = {(which, device): pid for pid, (device, which) in enumerate((d, w) for d in devices for w in timelines)}
    tids = {engine: tid for tid, engine in enumerate(Engine)}
    events: list[dict[str, Any]] = []
    for (which, device), pid in pids.items():
        said = {"process_name": {"name": f"{which} {device}"}, "process_sort_index": {"sort_index": pid}}
        events += [{"ph": "M", "name": name, "pid": pid, "tid": 0, "args": args} for name, args in said.items()]
        events += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": str(engine)}}
            for engine, tid in tids.items()
        ]
    for which, spans in timelines.items():
        for span in spans:
            begin, end = _micros(span.begin_s), _micros(span.end_s)
            place = {"pid": pids[which, span.device], "tid": tids[span.engine], "ts": begin, "dur": end - begin}
            events.append({"ph": "X", "name": span.action, "cat": which, **place, "args": {}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)
