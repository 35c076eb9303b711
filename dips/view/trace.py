"""A run as a trace: spans of master, slaves, clusters and ranks from their timelines, as Chrome JSON and OTLP JSON.

Timelines are lines of wall-clock time, each with its writer (dips/telemetry/timeline.py). What is one span here was one
or two lines: a push from `push_begin` to `push_end`, an order from its line and the seconds that it took. Spans that
belong together have one subject: a push and the pull that follows it (`east/1#3`), or a round (`round 17`). Flows lead
from one process to another: an order from master to slave, a push from cluster to slaves to master.

Clocks of machines differ. Nothing tells by how much, but an order begins and ends at its slave while the master waits
for it, and a push is committed while its agent waits for the answer. As in NTP, the shortest such wait bounds a clock's
offset from the master's; a clock for which 0 is outside the bounds is moved to their middle (`find_offsets`). One
offset holds for a whole timeline: a clock that was set in the meantime is shown wrong before or after.

Ranks write no timeline: a rank's spans are its bytes at each slave, by the clock of that slave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import inf
from typing import Any

from dips.ids import VersionId

Mark = Mapping[str, Any]  # a line of a timeline
Writer = tuple[str, str]  # (role, name)

MASTER, SLAVE, CLUSTER = "master", "slave", "cluster"
ROLES = (MASTER, SLAVE, CLUSTER)  # in the order of their tracks
WRITTEN = ("at", "run", "role", "who", "kind")  # keys of every line
ROUNDS = "rounds"  # the one track whose spans contain each other: a round and its phases


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """Something that one process did from `begin` to `end`, in Unix seconds by the master's clock."""

    writer: Writer
    track: str
    name: str
    begin: float
    end: float
    subject: str  # of a push and its pull, or of a round; "" for what belongs to neither
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TraceFlow:
    """An arrow from a span at a time to the beginning of another one; indexes into `RunTrace.spans`."""

    name: str
    source: int
    at: float  # within the source
    target: int


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far a process's clock is behind the master's, in seconds, and how sure that is."""

    seconds: float
    error_s: float


@dataclass(frozen=True, slots=True)
class RunTrace:
    """Spans in the order of their beginning, flows between them, and by how much clocks were moved."""

    spans: tuple[TraceSpan, ...]
    instants: tuple[TraceSpan, ...]  # of no duration: what happened, beside the spans
    flows: tuple[TraceFlow, ...]
    offsets: Mapping[Writer, ClockOffset]


def make_trace(marks: Iterable[Mark], push: str = "") -> RunTrace:
    """Build the trace of a run, or with `push` (`east/1#3`) of this push, its round and its pull.

    marks   lines of all timelines, in any order; lines without a writer's role are passed over
    Errors  LookupError: no line names this push
    """
    by_writer: dict[Writer, list[Mark]] = defaultdict(list)
    for mark in sorted((m for m in marks if m.get("role") in ROLES), key=lambda m: float(m["at"])):
        by_writer[mark["role"], mark["who"]].append(mark)
    offsets = find_offsets(by_writer)
    spans, instants = list[TraceSpan](), list[TraceSpan]()
    for writer, lines in by_writer.items():
        found, points = _READERS[writer[0]](writer, lines)
        moved_s = offsets[writer].seconds if writer in offsets else 0.0
        spans += [replace(s, begin=s.begin + moved_s, end=s.end + moved_s) for s in found]
        instants += [replace(p, begin=p.begin + moved_s, end=p.end + moved_s) for p in points]
    if push:
        wanted = {push, *(f"round {s.fields['round']}" for s in spans if s.subject == push and "round" in s.fields)}
        spans = [s for s in spans if s.subject in wanted]
        instants = [p for p in instants if p.subject in wanted]
        if not spans:
            raise LookupError(f"no timeline here names the push {push}: expected a name like east/1#3")
    spans.sort(key=lambda s: (s.begin, -s.end))
    return RunTrace(tuple(spans), tuple(sorted(instants, key=lambda p: p.begin)), tuple(_find_flows(spans)), offsets)


def subject_of(mark: Mark) -> str:
    """Return the subject of a line: a push, or the round that it or its version names; "" if there is none.

    A pull has the subject of the push with the same seq, whose outcome it follows.
    """
    if "push" in mark:
        return str(mark["push"])
    if "pull" in mark:
        return str(mark["pull"]).replace("^", "#")
    if "round" in mark:
        return f"round {mark['round']}"
    return f"round {VersionId.parse(mark['version']).round}" if mark.get("version") else ""


# ---- clocks ----------------------------------------------------------------------------------------------------------


def find_offsets(by_writer: Mapping[Writer, Sequence[Mark]]) -> dict[Writer, ClockOffset]:
    """Return the offset of every slave and cluster for which the timelines bound one; the master has none."""
    master = [mark for (role, _), lines in by_writer.items() if role == MASTER for mark in lines]
    orders = _find_unique((_order_key(m, m["slave"]), m) for m in master if m["kind"] == "order")
    committed = _find_unique((m["push"], m) for m in master if m["kind"] == "push_committed")
    bounds: dict[Writer, tuple[float, float]] = {}
    for writer, lines in by_writer.items():
        found = list(
            _bounds_of_slave(writer[1], lines, orders) if writer[0] == SLAVE
            else _bounds_of_cluster(lines, committed) if writer[0] == CLUSTER else ()
        )  # fmt: skip
        if found:
            bounds[writer] = min(found, key=lambda b: abs(b[1] - b[0]))
    return {
        writer: ClockOffset(0.0 if low <= 0.0 <= high else (low + high) / 2, abs(high - low) / 2)
        for writer, (low, high) in bounds.items()
    }


def _find_unique(named: Iterable[tuple[Any, Mark]]) -> dict[Any, Mark]:
    """Return the lines whose name no other one has: `dips init --force` begins to count anew, and timelines stay."""
    found, again = dict[Any, Mark](), set[Any]()
    for name, mark in named:
        again |= {name} & found.keys()
        found[name] = mark
    return {name: mark for name, mark in found.items() if name not in again}


def _bounds_of_slave(
    slave: str, lines: Sequence[Mark], orders: Mapping[tuple[Any, ...], Mark]
) -> Iterator[tuple[float, float]]:
    """Yield bounds by orders: one is carried out at the slave while the master waits for it."""
    done = _find_unique((_order_key(m, slave), m) for m in lines if m["kind"] == "order")
    for name, mark in done.items():
        if (sent := orders.get(name)) is not None:
            yield (sent["at"] - sent["took_s"]) - (mark["at"] - mark["took_s"]), sent["at"] - mark["at"]


def _bounds_of_cluster(lines: Sequence[Mark], committed: Mapping[str, Mark]) -> Iterator[tuple[float, float]]:
    """Yield bounds by commits: the master commits between the agent's question and the answer to it."""
    asked, heard = (
        _find_unique((m["push"], m) for m in lines if m["kind"] == kind) for kind in ("push_end", "window_begin")
    )
    for push, mark in heard.items():
        if push in committed and push in asked:
            at = float(committed[push]["at"])
            yield at - float(mark["at"]), at - float(asked[push]["at"])


def _order_key(mark: Mark, slave: str) -> tuple[Any, ...]:
    return slave, mark["term"], mark["number"]


# ---- the master ------------------------------------------------------------------------------------------------------

PHASES = {"round_opened": "window", "round_applying": "apply", "round_persisting": "persist"}
ROUND_ENDS = ("version_committed", "round_unchanged", "round_skipped")


def _read_master(writer: Writer, lines: Sequence[Mark]) -> tuple[list[TraceSpan], list[TraceSpan]]:
    reading = _MasterReading(writer)
    for mark in lines:
        reading.read_mark(mark)
    return reading.spans, reading.instants


@dataclass(slots=True)
class _MasterReading:
    """The state of reading the master's timeline."""

    writer: Writer
    spans: list[TraceSpan] = field(default_factory=list)
    instants: list[TraceSpan] = field(default_factory=list)
    term: object = None
    granted: dict[str, Mark] = field(default_factory=dict)  # by push
    committed: dict[str, Mark] = field(default_factory=dict)
    round_of: dict[str, str] = field(default_factory=dict)  # push → the round that measured it
    opened: Mark | None = None  # the present round
    phase: tuple[str, float] | None = None  # of it, and when it began

    def read_mark(self, mark: Mark) -> None:
        kind, self.term = str(mark["kind"]), mark.get("term", self.term)
        if kind == "order":
            self.spans.append(_span_of_order(self.writer, f"orders to {mark['slave']}", mark))
            if "push" in mark and "round" in mark:
                self.round_of[str(mark["push"])] = str(mark["round"])
        elif kind in PHASES or kind in ROUND_ENDS:
            self._read_round(kind, mark)
        elif kind == "push_granted":
            self.granted[str(mark["push"])] = mark
        elif kind == "push_committed":
            self.committed[str(mark["push"])] = mark
        elif kind == "push_dropped":
            self._end_push(str(mark["push"]), mark, kind)
        else:
            self.instants.append(_instant(self.writer, mark, {"term": self.term}))

    def _read_round(self, kind: str, mark: Mark) -> None:
        at, name = float(mark["at"]), f"round {mark['round']}"
        opened = self.opened if self.opened is not None and self.opened["round"] == mark["round"] else None
        if opened is not None and self.phase is not None:
            self.spans.append(
                TraceSpan(self.writer, ROUNDS, self.phase[0], self.phase[1], at, name, {"term": self.term})
            )
        self.phase = (PHASES[kind], at) if kind in PHASES else None
        if kind == "round_opened":
            self.opened = mark
        elif kind in ROUND_ENDS:
            fields = {"term": self.term, "outcome": kind, **_extra(mark)}
            if opened is not None:
                self.spans.append(TraceSpan(self.writer, ROUNDS, name, float(opened["at"]), at, name, fields))
            for push in [p for p in self.committed if self.round_of.get(p) == str(mark["round"])]:
                self._end_push(push, mark, kind, round=str(mark["round"]))

    def _end_push(self, push: str, mark: Mark, outcome: str, **more: object) -> None:
        """Close the span of a push, from its grant to the end of its round, or to its drop."""
        committed = self.committed.pop(push, None)
        granted = self.granted.pop(push, None) or committed or mark
        fields = {"term": self.term, "outcome": outcome, **_extra(mark, granted, committed or {}), **more}
        if committed is not None:
            fields["committed_at"] = float(committed["at"])
        begin, end = float(granted["at"]), float(mark["at"])
        self.spans.append(TraceSpan(self.writer, "pushes", f"push {push}", begin, end, push, fields))


def _span_of_order(writer: Writer, track: str, mark: Mark) -> TraceSpan:
    begin, end = float(mark["at"]) - float(mark["took_s"]), float(mark["at"])
    return TraceSpan(writer, track, str(mark["order"]), begin, end, subject_of(mark), _extra(mark))


# ---- a slave ---------------------------------------------------------------------------------------------------------

ON_DISK = ("Persist", "Retire", "KeepSeed")  # orders that run beside the others


def _read_slave(writer: Writer, lines: Sequence[Mark]) -> tuple[list[TraceSpan], list[TraceSpan]]:
    spans, instants = list[TraceSpan](), list[TraceSpan]()
    opened: dict[str, float] = {}  # pull → end of the order that opened it
    for mark in lines:
        kind, at = str(mark["kind"]), float(mark["at"])
        if kind == "order":
            spans.append(_span_of_order(writer, "disk" if mark["order"] in ON_DISK else "shard", mark))
            opening = mark["pull"] if mark["order"] == "OpenPull" else mark.get("pulls", "")
            opened |= dict.fromkeys(filter(None, opening.split(",")), at)
        elif kind == "push_staged":
            spans += _spans_of_staged(writer, mark)
        elif kind == "pull_released" and mark["pull"] in opened:
            begin = opened.pop(mark["pull"])
            spans.append(TraceSpan(writer, "sends", f"pull {mark['pull']}", begin, at, subject_of(mark), _extra(mark)))
        else:
            instants.append(_instant(writer, mark, {}))
    return spans, instants


def _spans_of_staged(writer: Writer, mark: Mark) -> Iterator[TraceSpan]:
    """Yield a push as this slave received it, and each rank's part, which stands in the tracks of its cluster."""
    push, at = str(mark["push"]), float(mark["at"])
    cluster = (CLUSTER, push.split("/")[0])
    parts = mark.get("ranks", ())
    begin = min((at - part["since_s"] for part in parts), default=at)
    yield TraceSpan(writer, "receives", f"push {push}", begin, at, push, {"push": push, "nbytes": mark["nbytes"]})
    for part in parts:
        fields = {"push": push, "rank": part["rank"], "nbytes": part["nbytes"], "slave": writer[1]}
        since, until = at - part["since_s"], at - part["until_s"]
        yield TraceSpan(cluster, f"rank {part['rank']}", f"to {writer[1]}", since, until, push, fields)


# ---- a cluster -------------------------------------------------------------------------------------------------------

# Kind of the line that begins a span → (its name, the kind that ends it).
PAIRS = {
    "push_begin": ("push", "push_end"),
    "window_begin": ("window", "window_end"),
    "pull_begin": ("pull", "pull_end"),
    "trainer_attached": ("trainer", "trainer_gone"),
}


OFTEN = frozenset({"inner", "pipeline"})  # once or twice a second: steps are what lies between pulls and pushes


def _read_cluster(writer: Writer, lines: Sequence[Mark]) -> tuple[list[TraceSpan], list[TraceSpan]]:
    spans, instants = list[TraceSpan](), list[TraceSpan]()
    open_since: dict[str, Mark] = {}  # by the kind that ends it
    last = float(lines[-1]["at"])
    for mark in lines:
        kind = str(mark["kind"])
        if kind in PAIRS:
            open_since[PAIRS[kind][1]] = mark
        elif kind in open_since:
            spans.append(_span_of_pair(writer, open_since.pop(kind), float(mark["at"]), _extra(mark)))
        elif kind not in OFTEN:
            instants.append(_instant(writer, mark, {}))
    spans += [_span_of_pair(writer, begun, last, {"open": True}) for begun in open_since.values()]
    return spans, instants


def _span_of_pair(writer: Writer, begun: Mark, end: float, more: Mapping[str, object]) -> TraceSpan:
    name = PAIRS[begun["kind"]][0]
    title = f"trainer, attempt {begun['attempt']}" if name == "trainer" else name
    track = "trainer" if name == "trainer" else "outer steps"
    return TraceSpan(writer, track, title, float(begun["at"]), end, subject_of(begun), {**_extra(begun), **more})


_READERS = {MASTER: _read_master, SLAVE: _read_slave, CLUSTER: _read_cluster}


def _instant(writer: Writer, mark: Mark, more: Mapping[str, object]) -> TraceSpan:
    at = float(mark["at"])
    return TraceSpan(writer, "events", str(mark["kind"]), at, at, subject_of(mark), {**more, **_extra(mark)})


def _extra(*marks: Mark) -> dict[str, object]:
    return {key: value for mark in marks for key, value in mark.items() if key not in WRITTEN}


# ---- flows -----------------------------------------------------------------------------------------------------------


def _find_flows(spans: Sequence[TraceSpan]) -> Iterator[TraceFlow]:
    """Yield flows: orders, a push's grant, its bytes to each slave, its commit, and the pull that follows its round."""
    orders: dict[tuple[Any, ...], int] = {}
    of_push: dict[tuple[str, str], int] = {}  # (subject, place in the story) → span
    parts: list[int] = []
    for i, span in enumerate(spans):
        if span.track.startswith("orders to "):
            orders[_order_key(span.fields, str(span.fields["slave"]))] = i
        elif span.track == "pushes":
            of_push[span.subject, "master"] = i
        elif span.name in ("push", "pull"):
            of_push[span.subject, span.name] = i
        elif span.track == "receives":
            of_push[span.subject, f"at {span.writer[1]}"] = i
        elif span.track.startswith("rank "):
            parts.append(i)
    for i, span in enumerate(spans):
        if span.writer[0] == SLAVE and "number" in span.fields:
            sent = orders.get(_order_key(span.fields, span.writer[1]))
            if sent is not None:
                yield TraceFlow("order", sent, spans[sent].begin, i)
    for (subject, place), i in of_push.items():
        if place != "master":
            continue
        push, pull = of_push.get((subject, "push")), of_push.get((subject, "pull"))
        if push is not None:
            yield TraceFlow("grant", i, spans[i].begin, push)
        if pull is not None:
            yield TraceFlow("outcome", i, spans[i].end, pull)
    for i in parts:
        push = of_push.get((spans[i].subject, "push"))
        received = of_push.get((spans[i].subject, f"at {spans[i].fields['slave']}"))
        if push is not None:
            yield TraceFlow("rank", push, spans[push].begin, i)
        if received is not None:
            yield TraceFlow("bytes", i, spans[i].begin, received)


# ---- Chrome ----------------------------------------------------------------------------------------------------------


def to_chrome(trace: RunTrace) -> dict[str, Any]:
    """Return the trace in Chrome's JSON Object Format, which Perfetto opens: processes, threads, slices and flows.

    Slices of a thread must not overlap unless one contains the other, so a track with spans beside each other becomes
    several threads of one name.
    """
    pids = {writer: pid for pid, writer in enumerate(_list_writers(trace), 1)}
    placed, threads = _place_spans(trace, pids)
    events: list[dict[str, Any]] = []
    for writer, pid in pids.items():
        role, name = writer
        said = role if role == MASTER else f"{role} {name}"
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": said}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
    for (writer, track, lane), tid in threads.items():
        said = track if lane == 0 else f"{track} ({lane + 1})"
        events.append({"ph": "M", "name": "thread_name", "pid": pids[writer], "tid": tid, "args": {"name": said}})
        order = {"sort_index": tid}
        events.append({"ph": "M", "name": "thread_sort_index", "pid": pids[writer], "tid": tid, "args": order})
    for span, tid in zip(trace.spans, placed, strict=True):
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.track,
                "pid": pids[span.writer],
                "tid": tid,
                "ts": _micros(span.begin),
                "dur": _micros(span.end) - _micros(span.begin),
                "args": {"subject": span.subject, **_plain(span.fields)},
            }
        )
    for point in trace.instants:
        tid = threads[point.writer, point.track, 0]
        args = {"subject": point.subject, **_plain(point.fields)}
        place = {"pid": pids[point.writer], "tid": tid, "ts": _micros(point.begin)}
        events.append({"ph": "i", "s": "t", "name": point.name, "cat": point.track, **place, "args": args})
    for number, flow in enumerate(trace.flows, 1):
        source, target = trace.spans[flow.source], trace.spans[flow.target]
        left, arrived = _find_ends(flow, source, target)
        if arrived < left:
            continue  # nobody would see it
        for ph, span, tid, at in (
            ("s", source, placed[flow.source], left),
            ("f", target, placed[flow.target], arrived),
        ):
            bound = {"bp": "e"} if ph == "f" else {}
            place = {"pid": pids[span.writer], "tid": tid, "ts": _micros(at)}
            events.append({"ph": ph, "id": number, "name": flow.name, "cat": "flow", **place, **bound})
    offsets = {_say(writer): offset.seconds for writer, offset in trace.offsets.items()}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clock_offsets_s": offsets}}


def _find_ends(flow: TraceFlow, source: TraceSpan, target: TraceSpan) -> tuple[float, float]:
    """Return when a flow leaves its source and arrives at its target, each within its span, and in this order.

    Perfetto drops an arrow that arrives before it leaves, as from a master's span that is still open when its cluster
    pulls already. Where clocks have the target over before its source begins, it arrives before it leaves all the same.
    """
    left = min(flow.at, max(source.begin, target.begin))
    return left, min(max(target.begin, left), target.end)


def _list_writers(trace: RunTrace) -> list[Writer]:
    found = {span.writer for span in (*trace.spans, *trace.instants)}
    return sorted(found, key=lambda writer: (ROLES.index(writer[0]), writer[1]))


def _place_spans(trace: RunTrace, pids: Mapping[Writer, int]) -> tuple[list[int], dict[tuple[Writer, str, int], int]]:
    """Return the thread of each span, and the threads: (writer, track, lane) → number, in the order of names."""
    lanes: dict[tuple[Writer, str], list[list[float]]] = defaultdict(list)  # open ends of each lane, innermost last
    chosen = [(span.writer, span.track, _choose_lane(lanes[span.writer, span.track], span)) for span in trace.spans]
    wanted = {*chosen, *((point.writer, point.track, 0) for point in trace.instants)}
    in_order = sorted(wanted, key=lambda key: (pids[key[0]], _in_numbers(key[1]), key[2]))
    threads = {key: tid for tid, key in enumerate(in_order, 1)}
    return [threads[key] for key in chosen], threads


def _choose_lane(lanes: list[list[float]], span: TraceSpan) -> int:
    """Return the first lane that is free from the span's beginning, or whose open span contains it, where that may."""
    for lane, ends in enumerate(lanes):
        while ends and ends[-1] <= span.begin:
            ends.pop()
        if not ends or (span.track == ROUNDS and span.end <= ends[-1]):
            ends.append(span.end)
            return lane
    lanes.append([span.end])
    return len(lanes) - 1


def _in_numbers(track: str) -> tuple[str, int]:
    """Sort `rank 10` behind `rank 9`."""
    word, _, number = track.rpartition(" ")
    return (word, int(number)) if number.isdigit() else (track, -1)


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


# ---- OTLP ------------------------------------------------------------------------------------------------------------

INTERNAL = 1  # SpanKind of OTLP


def to_otlp(trace: RunTrace, run: str) -> dict[str, Any]:
    """Return the trace as an OTLP JSON ExportTraceServiceRequest: a trace for each push and each round.

    A span's parent is the source of the first flow that leads to it in its trace, else the trace's first span at the
    master; flows from other traces are links. Spans that belong to no push and no round are left out.

    run  name of the run, the attribute `dips.run` of every process
    """
    ids = [_hex_id(f"{run} {i} {s.writer} {s.track} {s.name} {s.begin!r}", 8) for i, s in enumerate(trace.spans)]
    roots: dict[str, int] = {}
    for i, span in enumerate(trace.spans):
        known = roots.get(span.subject)
        if known is None or (_is_root(span) and not _is_root(trace.spans[known])):
            roots[span.subject] = i
    parents: dict[int, int] = {i: roots[s.subject] for i, s in enumerate(trace.spans) if roots[s.subject] != i}
    links: dict[int, list[int]] = defaultdict(list)
    by_flow = set[int]()
    for flow in trace.flows:
        same = trace.spans[flow.source].subject == trace.spans[flow.target].subject
        if same and flow.target in parents and flow.target not in by_flow:
            parents[flow.target] = flow.source
            by_flow.add(flow.target)
        else:
            links[flow.target].append(flow.source)
    resources = []
    for writer in _list_writers(trace):
        spans = [
            _otlp_span(trace, i, ids, run, parents.get(i), links[i])
            for i, span in enumerate(trace.spans)
            if span.writer == writer and span.subject
        ]
        if spans:
            about = {
                "service.name": f"dips-{writer[0]}",
                "service.instance.id": writer[1],
                "dips.run": run,
            }
            scope = {"scope": {"name": "dips"}, "spans": spans}
            resources.append({"resource": {"attributes": _attributes(about)}, "scopeSpans": [scope]})
    return {"resourceSpans": resources}


def _is_root(span: TraceSpan) -> bool:
    return span.writer[0] == MASTER and (span.track == "pushes" or span.name == span.subject)


def _otlp_span(
    trace: RunTrace, i: int, ids: Sequence[str], run: str, parent: int | None, links: Sequence[int]
) -> dict[str, Any]:
    span = trace.spans[i]
    made: dict[str, Any] = {
        "traceId": _hex_id(f"{run} {span.subject}", 16),
        "spanId": ids[i],
        "name": span.name,
        "kind": INTERNAL,
        "startTimeUnixNano": str(_micros(span.begin) * 1000),
        "endTimeUnixNano": str(_micros(span.end) * 1000),
        "attributes": _attributes({"dips.track": span.track, **{f"dips.{k}": v for k, v in span.fields.items()}}),
    }
    if parent is not None:
        made["parentSpanId"] = ids[parent]
    if links:
        made["links"] = [{"traceId": _hex_id(f"{run} {trace.spans[j].subject}", 16), "spanId": ids[j]} for j in links]
    return made


def _attributes(fields: Mapping[str, object]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _otlp_value(value)} for key, value in fields.items() if value is not None]


def _otlp_value(value: object) -> dict[str, Any]:
    """By the proto3 JSON mapping, 64-bit integers are strings."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float) and abs(value) < inf:
        return {"doubleValue": value}
    return {"stringValue": str(value)}


def _hex_id(text: str, nbytes: int) -> str:
    return blake2b(text.encode(), digest_size=nbytes).hexdigest()


def _plain(fields: Mapping[str, object]) -> dict[str, object]:
    """Numbers that JSON has no word for (a loss that is not finite) as text."""
    return {k: str(v) if isinstance(v, float) and not abs(v) < inf else v for k, v in fields.items()}


def _say(writer: Writer) -> str:
    return writer[0] if writer[0] == MASTER else f"{writer[0]} {writer[1]}"
