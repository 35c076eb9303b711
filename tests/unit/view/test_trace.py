"""A trace from timelines: one push through all processes, its clocks, and the two formats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from dips.view.trace import RunTrace, make_trace, to_chrome, to_otlp
from tests.traces import check_chrome, check_otlp, read_attributes

PUSH, PULL = "east/1#3", "east/1^3"
RANKS = ((0, 0.7, 0.2), (1, 0.6, 0.0))  # number, and how long before the end its first and last bytes came


def line(at: float, role: str, who: str, kind: str, **fields: object) -> dict[str, Any]:
    return {"at": at, "run": "r", "role": role, "who": who, "kind": kind, **fields}


def order(at: float, number: int, kind: str, took_s: float, late: float = 0.0, **about: object) -> Iterator[Any]:
    """An order to ps0 as its slave and its master note it; the slave's clock is `late` seconds behind."""
    named = {"order": kind, "term": 2, "number": number, **about}
    yield line(at - late, "slave", "ps0", "order", took_s=took_s, **named)
    yield line(at + 0.01, "master", "master", "order", slave="ps0", how="OrderAnswered", took_s=took_s + 0.02, **named)


def one_round(late: float = 0.0, late_cluster: float = 0.0) -> list[dict[str, Any]]:
    """A push of `east` through one slave, its round and its pull; clocks may be behind the master's."""
    east = lambda at, kind, **fields: line(at - late_cluster, "cluster", "east", kind, **fields)  # noqa: E731
    ranks = [{"rank": n, "nbytes": 8, "since_s": since, "until_s": until} for n, since, until in RANKS]
    return [
        line(99, "master", "master", "term_begins", term=2),
        east(99.5, "trainer_attached", attempt=1),
        *order(100.05, 1, "OpenPush", 0.01, late, push=PUSH),
        line(100.1, "master", "master", "push_granted", push=PUSH, base="v3@r3"),
        east(100.2, "push_begin", push=PUSH, base="v3@r3", tokens=64),
        line(101 - late, "slave", "ps0", "push_staged", push=PUSH, nbytes=16, ranks=ranks),
        east(101.1, "push_end", push=PUSH, ok=True, nbytes=16, reason=""),
        line(101.15, "master", "master", "round_opened", round="4", head="v3@r3"),
        line(101.15, "master", "master", "push_committed", push=PUSH, tokens="64"),
        east(101.2, "window_begin", push=PUSH),
        *order(102, 2, "Measure", 0.1, late, push=PUSH, round="4", version="v3@r3"),
        *order(102.2, 3, "Fold", 0.1, late, push=PUSH, round="4"),
        line(102.3, "master", "master", "round_applying", round="4"),
        *order(103, 4, "Apply", 0.5, late, round="4", version="v4@r4"),
        line(103.1, "master", "master", "round_persisting", round="4", version="v4@r4"),
        *order(104, 5, "Persist", 0.8, late, version="v4@r4"),
        line(104.1, "master", "master", "version_committed", version="v4@r4", round="4", tokens="64"),
        *order(104.2, 6, "Commit", 0.05, late, version="v4@r4", pulls=PULL),
        east(104.3, "window_end", push=PUSH),
        east(104.3, "outcome", push=PUSH, outcome="accepted", version="v4@r4"),
        east(104.4, "pull_begin", pull=PULL, version="v4@r4"),
        line(104.8 - late, "slave", "ps0", "pull_released", pull=PULL, reason="closed"),
        east(105, "pull_end", pull=PULL, version="v4@r4", installed=True, nbytes=16, reason=""),
    ]  # fmt: skip


def spans_of(trace: RunTrace, role: str) -> list[tuple[str, str]]:
    return [(span.track, span.name) for span in trace.spans if span.writer[0] == role]


def flows_of(trace: RunTrace) -> set[tuple[str, str, str]]:
    names = [f"{span.writer[1]}: {span.name}" for span in trace.spans]
    return {(flow.name, names[flow.source], names[flow.target]) for flow in trace.flows}


def test_a_push_passes_through_all_processes() -> None:
    """Master, slave, cluster and each rank have the push and what followed from it, with arrows between them."""
    trace = make_trace(one_round(), PUSH)
    assert spans_of(trace, "master") == [
        ("orders to ps0", "OpenPush"), ("pushes", f"push {PUSH}"), ("rounds", "round 4"), ("rounds", "window"),
        ("orders to ps0", "Measure"), ("orders to ps0", "Fold"), ("rounds", "apply"), ("orders to ps0", "Apply"),
        ("rounds", "persist"), ("orders to ps0", "Persist"), ("orders to ps0", "Commit"),
    ]  # fmt: skip
    assert spans_of(trace, "slave") == [
        ("shard", "OpenPush"), ("receives", f"push {PUSH}"), ("shard", "Measure"), ("shard", "Fold"),
        ("shard", "Apply"), ("disk", "Persist"), ("shard", "Commit"), ("sends", f"pull {PULL}"),
    ]  # fmt: skip
    assert spans_of(trace, "cluster") == [
        ("outer steps", "push"), ("rank 0", "to ps0"), ("rank 1", "to ps0"), ("outer steps", "window"),
        ("outer steps", "pull"),
    ]  # fmt: skip
    assert flows_of(trace) >= {
        ("grant", f"master: push {PUSH}", "east: push"),
        ("rank", "east: push", "east: to ps0"),
        ("bytes", "east: to ps0", f"ps0: push {PUSH}"),
        ("outcome", f"master: push {PUSH}", "east: pull"),
        ("order", "master: Apply", "ps0: Apply"),
    }
    assert {point.name for point in trace.instants} == {"outcome"}, "of others nothing is in it"
    pushed = next(span for span in trace.spans if span.track == "pushes")
    assert (pushed.begin, pushed.end) == (100.1, 104.1)
    assert {key: pushed.fields[key] for key in ("term", "round", "outcome")} == {
        "term": 2, "round": "4", "outcome": "version_committed",
    }  # fmt: skip


def test_a_rank_sends_as_long_as_its_bytes_came() -> None:
    parts = {s.track: (s.begin, s.end) for s in make_trace(one_round()).spans if s.track.startswith(("rank", "rec"))}
    ranks = {"rank 0": pytest.approx((100.3, 100.8)), "rank 1": pytest.approx((100.4, 101.0))}
    assert parts == {**ranks, "receives": pytest.approx((100.3, 101.0))}


@pytest.mark.parametrize(("late", "late_cluster"), [(5.0, 0.0), (-3.0, 0.0), (0.0, 2.0), (40.0, -40.0)])
def test_a_wrong_clock_is_moved(late: float, late_cluster: float) -> None:
    """A machine minutes behind or ahead is found by what it did while the master, or it, waited for an answer."""
    true = {(s.writer, s.track, s.name, s.subject): s.begin for s in make_trace(one_round()).spans}
    trace = make_trace(one_round(late, late_cluster))
    for span in trace.spans:
        assert span.begin == pytest.approx(true[span.writer, span.track, span.name, span.subject], abs=0.06), span
    moved = {who: offset.seconds for (_, who), offset in trace.offsets.items()}
    assert moved == {"ps0": pytest.approx(late, abs=0.06), "east": pytest.approx(late_cluster, abs=0.06)}


def test_a_run_that_was_thrown_away_moves_no_clock() -> None:
    """`dips init --force` counts terms, orders and pushes anew, and timelines stay: clocks were moved by a day."""
    later = [{**mark, "at": mark["at"] + 86_400} for mark in one_round(late=5.0)]
    assert make_trace([*one_round(late=5.0), *later]).offsets == {}
    more = [{**mark, "at": mark["at"] + 86_400} for mark in order(106, 7, "Measure", 0.1, 5.0, round="5")]
    assert make_trace([*one_round(late=5.0), *later, *more]).offsets["slave", "ps0"].seconds == pytest.approx(5.0)


def test_the_shortest_wait_bounds_a_clock() -> None:
    """An order whose answer came late tells little."""
    lines = [*one_round(late=5.0), *order(110, 7, "Ping", 1.0, 5.0)]
    lines[-1] |= {"at": lines[-1]["at"] + 60.0, "took_s": 61.0}
    assert make_trace(lines).offsets["slave", "ps0"].error_s == pytest.approx(0.01)


def test_a_clock_that_may_be_right_is_left_alone() -> None:
    assert {offset.seconds for offset in make_trace(one_round(0.005, 0.02)).offsets.values()} == {0.0}


def test_a_dropped_push_ends_with_its_drop() -> None:
    lines: Sequence[dict[str, Any]] = [
        line(1, "master", "master", "push_granted", push="west/1#1", base="v0@r0"),
        line(3, "master", "master", "push_dropped", push="west/1#1", reason="its lease ended"),
        line(4, "master", "master", "push_granted", push="west/1#2", base="v0@r0"),
        line(5, "master", "master", "push_committed", push="west/1#2"),
        line(6, "master", "master", "push_dropped", push="west/1#2", reason="rolled back"),
    ]
    spans = make_trace(lines).spans
    assert [(s.subject, s.begin, s.end, s.fields["reason"]) for s in spans] == [
        ("west/1#1", 1, 3, "its lease ended"), ("west/1#2", 4, 6, "rolled back"),
    ]  # fmt: skip


def test_a_round_whose_beginning_is_lost_has_no_span() -> None:
    """A timeline that begins in the middle, or one that a later round follows: phases of what is not open are none."""
    lines = [
        line(1, "master", "master", "round_applying", round="4"),
        line(2, "master", "master", "version_committed", version="v4@r4", round="4"),
        line(3, "master", "master", "round_opened", round="5"),
        line(4, "master", "master", "round_skipped", round="6"),
    ]
    assert make_trace(lines).spans == ()


def test_what_happened_at_once_is_an_instant() -> None:
    """But not the inner steps and those of a pipeline, of which a line comes once or twice a second."""
    lines = [line(at, "cluster", "east", kind, steps=at) for at in range(1, 4) for kind in ("inner", "pipeline")]
    lines += [
        line(5, "cluster", "east", "outcome", push=PUSH, outcome="gated"),
        line(6, "master", "master", "term_begins", term=2),
        line(7, "master", "master", "cluster_silent", cluster="east"),
        line(8, "slave", "ps0", "registered", sinc=3),
        line(9, "slave", "ps0", "pull_released", pull=PULL),  # opened before the timeline begins
    ]
    trace = make_trace(lines)
    assert trace.spans == ()
    drawn = [e for e in to_chrome(trace)["traceEvents"] if e["ph"] == "i"]
    told = {"outcome": "gated", "term": 2, "cluster": "east", "sinc": 3, "pull": PULL}
    assert [(e["name"], e["ts"] / 1e6) for e in drawn] == [
        ("outcome", 5), ("term_begins", 6), ("cluster_silent", 7), ("registered", 8), ("pull_released", 9),
    ]  # fmt: skip
    assert all(told.items() & event["args"].items() for event in drawn) and drawn[2]["args"]["term"] == 2


def test_what_a_cluster_does_lasts_until_it_says_so() -> None:
    """What has no end in the timeline lasts to its last line, and is marked."""
    found = {s.name: (s.begin, s.end, s.fields.get("open", False)) for s in make_trace(one_round()).spans}
    assert found["window"] == (101.2, 104.3, False)
    assert found["trainer, attempt 1"] == (99.5, 105, True)


def test_an_unknown_push_is_named() -> None:
    with pytest.raises(LookupError, match="east/1#9"):
        make_trace(one_round(), "east/1#9")


def test_chrome_reads_it() -> None:
    """Slices nest, flows begin and end in slices, and every process and rank has a name."""
    trace = check_chrome(json.dumps(to_chrome(make_trace(one_round(late=5.0)))))
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"].endswith("_name")}
    assert names >= {"master", "slave ps0", "cluster east", "rank 0", "rank 1", "rounds", "orders to ps0", "events"}
    assert "rounds (2)" not in names, "a round's last phase ends with it"
    assert trace["otherData"]["clock_offsets_s"]["slave ps0"] == pytest.approx(5, abs=0.06)
    told = {e["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert told == {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


@pytest.mark.parametrize("pulled", [104.4, 104.0])
def test_an_arrow_leaves_and_arrives_within_its_slices(pulled: float) -> None:
    """An outcome leaves the push's end at the master, or as soon as its cluster pulls; all arrows of one clock are
    drawn, those that arrive as they leave, too.
    """
    lines = one_round()
    next(mark for mark in lines if mark["kind"] == "pull_begin")["at"] = pulled
    trace = make_trace(lines)
    events = check_chrome(json.dumps(to_chrome(trace)))["traceEvents"]
    ends = {ph: [e for e in events if e["ph"] == ph] for ph in ("s", "f")}
    assert {ph: [e["ts"] for e in of if e["name"] == "outcome"] for ph, of in ends.items()} == {
        "s": [min(104.1, pulled) * 1e6], "f": [pulled * 1e6],
    }  # fmt: skip
    assert len(ends["s"]) == len(ends["f"]) == len(trace.flows)


def test_an_arrow_that_would_arrive_before_it_leaves_is_left_out() -> None:
    """Clocks that differ by less than they can be compared by have a target over before its source begins."""
    trace = make_trace(one_round())
    flow = next(flow for flow in trace.flows if flow.name == "bytes")
    begin, spans = trace.spans[flow.source].begin, list(trace.spans)
    spans[flow.target] = replace(spans[flow.target], begin=begin - 3e-4, end=begin - 2e-4)
    drawn = to_chrome(replace(trace, spans=tuple(spans)))["traceEvents"]
    assert 0 < sum(event["ph"] == "f" for event in drawn) < len(trace.flows)
    check_chrome(json.dumps({"traceEvents": drawn, "displayTimeUnit": "ms", "otherData": {}}))


def test_orders_beside_each_other_have_lanes() -> None:
    """A Persist goes on while the next orders run: the second lane of a track, not a slice that Perfetto drops."""
    lines = [
        line(9, "master", "master", "order", slave="a", order="Persist", took_s=8, number=1, term=1, version="v1@r1"),
        line(5, "master", "master", "order", slave="a", order="OpenPush", took_s=1, number=2, term=1, push="w/1#1"),
        line(10, "master", "master", "order", slave="a", order="OpenPush", took_s=4, number=3, term=1, push="w/1#2"),
    ]
    trace = check_chrome(json.dumps(to_chrome(make_trace(lines))))
    lane = {e["args"]["number"]: e["tid"] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert lane[2] == lane[3] != lane[1], "nor below the one during which they run"


def test_a_span_lies_below_what_led_to_it() -> None:
    """The first arrow in its trace, or else the span of the push or round at the master; further arrows are links."""
    spans = check_otlp(json.dumps(to_otlp(make_trace(one_round()), "r"), allow_nan=False))
    names = {s["spanId"]: (s["resource"]["service.instance.id"], s["name"]) for s in spans}
    below = {names[s["spanId"]]: names.get(s.get("parentSpanId")) for s in spans}
    push = "master", f"push {PUSH}"
    expected = {
        push: None,
        ("east", "push"): push,
        ("east", "to ps0"): ("east", "push"),
        ("ps0", push[1]): ("east", "to ps0"),
        ("east", "window"): push,
        ("east", "pull"): push,
        ("master", "OpenPush"): push,
        ("ps0", "OpenPush"): ("master", "OpenPush"),
        ("master", "round 4"): None,
        ("master", "Apply"): ("master", "round 4"),
        ("ps0", "Apply"): ("master", "Apply"),
    }
    assert expected.items() <= below.items()
    links = [(names[s["spanId"]], [names[link["spanId"]] for link in s["links"]]) for s in spans if "links" in s]
    assert links == [(("ps0", push[1]), [("east", "to ps0")])]
    without = make_trace([mark for mark in one_round() if mark["role"] != "master"], PUSH)
    tops = [s["name"] for s in check_otlp(json.dumps(to_otlp(without, "r"))) if "parentSpanId" not in s]
    assert tops == ["OpenPush", "Apply"], "the first of each, where the master's timeline is not here"


def test_opentelemetry_reads_it() -> None:
    """A push is one trace over all processes, below the master's span; what is no number is text."""
    lines = [*one_round(), line(106, "cluster", "east", "push_begin", push="east/1#4", loss=float("nan"), norm=inf)]
    spans = check_otlp(json.dumps(to_otlp(make_trace(lines), "r"), allow_nan=False))
    of_push = [s for s in spans if s["name"] in (f"push {PUSH}", "push", "to ps0", "OpenPush", "Measure", "pull")]
    ids = {s["traceId"] for s in of_push if s["startTimeUnixNano"] < "106"}
    assert len(ids) == 1
    roots = [s for s in spans if s["traceId"] in ids and "parentSpanId" not in s]
    assert [(s["name"], s["resource"]["service.name"]) for s in roots] == [(f"push {PUSH}", "dips-master")]
    assert {s["resource"]["service.name"] for s in spans if s["traceId"] in ids} == {
        "dips-master", "dips-slave", "dips-cluster",
    }  # fmt: skip
    (last,) = [s for s in spans if s["startTimeUnixNano"] == "106000000000"]
    assert {read_attributes(last["attributes"])[key] for key in ("dips.loss", "dips.norm")} == {"nan", "inf"}
    drawn = json.loads(json.dumps(to_chrome(make_trace(lines)), allow_nan=False))["traceEvents"]
    assert [(e["args"]["loss"], e["args"]["norm"]) for e in drawn if "loss" in e.get("args", ())] == [("nan", "inf")]
