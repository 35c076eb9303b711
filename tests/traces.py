"""The rules of the two formats of `dips trace`, as the readers of each state them.

Chrome: "Trace Event Format", JSON Object Format. Perfetto drops slices of a thread that overlap without one containing
the other, and flows whose ends are in no slice. OTLP: an export of traces by the proto3 JSON mapping, with ids
in hex and 64-bit integers as strings.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

PHASES = {
    "M": {"args"},
    "X": {"ts", "dur", "args", "cat"},
    "i": {"ts", "s", "args", "cat"},
    "s": {"ts", "id", "cat"},
    "f": {"ts", "id", "bp", "cat"},
}
VALUES = {"stringValue": str, "intValue": str, "doubleValue": float, "boolValue": bool}


def check_chrome(text: str) -> dict[str, Any]:
    """Return the trace if it is one; AssertionError says which rule it breaks."""
    trace: dict[str, Any] = json.loads(text, parse_constant=refuse_constant)
    assert isinstance(trace["traceEvents"], list) and trace["displayTimeUnit"] in ("ms", "ns")
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert set(event) == {"ph", "name", "pid", "tid"} | PHASES[event["ph"]], event
        numbers = [event[key] for key in ("pid", "tid", "ts", "dur") if key in event]
        assert all(isinstance(number, int) and number >= 0 for number in numbers), event
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for track, spans in slices.items():
        check_nesting(track, spans)
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    assert set(slices) <= named
    check_flows(trace["traceEvents"], slices)
    return trace


def refuse_constant(word: str) -> None:
    raise AssertionError(f"JSON has no {word}")


def check_nesting(track: tuple[int, int], spans: list[tuple[int, int]]) -> None:
    """Slices of one thread follow each other, or one contains the other."""
    open_ends = list[int]()
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], f"on {track} {begin}–{end} overlaps one that ends {open_ends[-1]}"
        open_ends.append(end)


def check_flows(events: list[dict[str, Any]], slices: dict[tuple[int, int], list[tuple[int, int]]]) -> None:
    """Each flow has one beginning and then one end, each in a slice of its thread. Perfetto reads events by their time,
    and those of one time as they stand, so that an end before its beginning is an arrow that nobody sees.
    """
    ends: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for event in (e for e in events if e["ph"] in "sf"):
        ends[event["id"]].append((event["ts"], event["ph"]))
        around = slices[event["pid"], event["tid"]]
        assert any(begin <= event["ts"] <= end for begin, end in around), f"no slice around {event}"
    for number, found in ends.items():
        in_time = [ph for _, ph in sorted(found, key=lambda end: end[0])]
        assert in_time == ["s", "f"], f"flow {number}: {found}"


def check_otlp(text: str) -> list[dict[str, Any]]:
    """Return all spans, each with its resource's attributes as `resource`, if this is an export of traces."""
    export = json.loads(text)
    assert set(export) == {"resourceSpans"}
    spans = list[dict[str, Any]]()
    for resource in export["resourceSpans"]:
        assert set(resource) == {"resource", "scopeSpans"}
        about = read_attributes(resource["resource"]["attributes"])
        assert {"service.name", "service.instance.id"} <= set(about)
        for scope in resource["scopeSpans"]:
            assert set(scope) == {"scope", "spans"} and set(scope["scope"]) == {"name"}
            spans += [{**span, "resource": about} for span in scope["spans"]]
    for span in spans:
        check_span(span)
    known = {(span["traceId"], span["spanId"]) for span in spans}
    assert len(known) == len(spans)
    for span in spans:
        assert "parentSpanId" not in span or (span["traceId"], span["parentSpanId"]) in known, span
        assert all((link["traceId"], link["spanId"]) in known for link in span.get("links", ())), span
    return spans


def check_span(span: dict[str, Any]) -> None:
    required = {"traceId", "spanId", "name", "kind", "startTimeUnixNano", "endTimeUnixNano", "attributes", "resource"}
    assert required <= set(span) <= required | {"parentSpanId", "links"}
    assert re.fullmatch("[0-9a-f]{32}", span["traceId"]) and re.fullmatch("[0-9a-f]{16}", span["spanId"])
    begin, end = span["startTimeUnixNano"], span["endTimeUnixNano"]
    assert isinstance(begin, str) and isinstance(end, str) and int(begin) <= int(end)
    assert span["kind"] in range(1, 6) and span["name"]
    read_attributes(span["attributes"])


def read_attributes(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    read = {}
    for attribute in attributes:
        assert set(attribute) == {"key", "value"}
        ((kind, value),) = attribute["value"].items()
        assert isinstance(value, VALUES[kind]), attribute
        assert kind != "intValue" or int(value) < 1 << 63
        read[attribute["key"]] = value
    return read
