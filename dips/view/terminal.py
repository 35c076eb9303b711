"""A run in a terminal: `dips status` as listings, or as one line for a log. Draws what a RunView says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from dips.printable import make_lines_printable, make_printable
from dips.protocol.enums import Severity
from dips.protocol.view import ClusterView, MirrorView, RoundView, RunView, SlaveView
from dips.telemetry.listing import Column, Listing, ListingRow
from dips.view.judging import find_run_concerns, lease_line, protocol_line, sort_concerns

NONE = "–"
# By severity, and by state where that says more of what is good.
STYLES = {Severity.BROKEN: "red", Severity.ATTENTION: "yellow", Severity.GOOD: "green", Severity.PLAIN: ""}
MOVING = frozenset({"pushing", "pulling"})


def render_status(view: RunView) -> RenderableType:
    """Draw the whole picture: the run and its round, clusters, slaves; of a run that has no model yet only that."""
    if view.waiting:
        return draw_headline(view)
    return Group(draw_headline(view), clusters_listing(view), slaves_listing(view))


class FittedStatus:
    """The same, in the height of the terminal: rows that have no room are counted."""

    def __init__(self, view: RunView) -> None:
        self._head = draw_headline(view)
        self._listings = () if view.waiting else (clusters_listing(view), slaves_listing(view))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room, measured = console.height - 1, options.update(height=None)  # a full terminal scrolls by a line
        counts, growing = [1 for _ in self._listings], True
        while growing:  # a row for each listing in turn
            growing = False
            for i, listing in enumerate(self._listings):
                more = [count + (at == i) for at, count in enumerate(counts)]
                if counts[i] < len(listing) and len(console.render_lines(self._draw_rows(more), measured)) <= room:
                    counts, growing = more, True
        yield self._draw_rows(counts)

    def _draw_rows(self, counts: Sequence[int]) -> Group:
        return Group(self._head, *(each.shorten_to(n) for each, n in zip(self._listings, counts, strict=True)))


def draw_headline(view: RunView) -> Text:
    """The run in four lines: θ, the rounds, this one and why it waits, the data; the page; what is wrong with the run.

    What is wrong with a peer stands under its row.
    """
    if view.waiting:
        return Text(make_printable(f"run {view.run} {view.waiting}"), style="bold")
    lines = (
        run_line(view), "rounds: " + counts_line(view), "round: " + round_line(view.round), "data: " + data_line(view),
    )  # fmt: skip
    text = Text(make_lines_printable("\n".join(lines)), style="bold")
    if view.page:
        text.append(f"\npage: {view.page}")
    if lease := lease_line(view.lease):
        text.append(f"\nmaster: {make_printable(lease)}")
    if protocol := protocol_line(view):
        text.append(f"\nprotocol: {make_printable(protocol)}")
    if view.tuned:
        text.append(f"\ntuned: {tuned_line(view.tuned)}")
    for concern in sort_concerns(find_run_concerns(view)):
        text.append(f"\n{make_printable(f'{concern.who}: {concern.what}')}", style=STYLES[concern.severity])
    return text


def tuned_line(tuned: Mapping[str, float | None]) -> str:
    """List options that `dips set` changed, which differ from the run file."""
    return ", ".join(f"{key} {'off' if value is None else f'{value:.15g}'}" for key, value in tuned.items())


def mirror_line(mirror: MirrorView | None) -> str:
    """How far a slave's mirror lags; what is not in it is lost with that slave's disk."""
    if mirror is None or mirror.behind_versions == 0:
        return ""
    lag = f"mirror: {mirror.behind_versions} versions, {mirror.behind_s:.0f} s behind"
    return f"{lag}: {mirror.reason}" if mirror.reason else lag


def run_line(view: RunView) -> str:
    """Name the head and the tokens so far."""
    tokens, target = view.progress.tokens, view.progress.tokens_target
    share = f" ({tokens / target:.0%})" if target else ""
    loss = format_number(view.newest.loss, "{:.3f}")
    ended = f"\nfinished at {view.finished}, last loss {loss}" if view.finished else ""
    return f"{view.run}  head {view.head}  term {view.term}  {format_count(tokens)} tokens{share}{ended}"


def counts_line(view: RunView) -> str:
    """How the rounds so far have ended, and whether clusters meet in them."""
    rounds, met = view.rounds, view.met
    ended = f"{rounds.applied} applied, {rounds.unchanged} unchanged, {rounds.skipped} skipped"
    if sum(not c.reads for c in view.clusters.values()) < 2 or not met.versions:
        return ended
    return f"{ended}; {met.all} of the last {met.versions} with all clusters"


def round_line(round_: RoundView) -> str:
    """Say what the round is doing, and why."""
    number = f"r{round_.round} " if round_.round is not None else ""
    return f"{number}{round_.state}: {round_.reason or NONE}"


def data_line(view: RunView) -> str:
    """Say how many data ranges are used up, or that clusters bring their own."""
    ranges = view.ranges
    if not ranges.total:
        return "the clusters' own, not tracked"
    return f"{ranges.settled} settled, {ranges.leased} leased, {ranges.free} free of {ranges.total} ranges"


def clusters_listing(view: RunView) -> Listing:
    """One row for each cluster, its reason under it; H is that of its last push."""
    columns = _list_columns("cluster", "state", "loss", "tokens", "base", "stale", "acc/gate/skip", "H/steps", "MB/s")
    return Listing("clusters", columns, [_cluster_row(*item) for item in sorted(view.clusters.items())], strict=True)


def _cluster_row(name: str, c: ClusterView) -> ListingRow:
    steps = c.heartbeat.inner_steps if c.heartbeat is not None else None
    cells = (
        name,
        _state_text(c),
        format_number(c.loss, "{:.3f}"),
        format_count(c.tokens_accepted),
        c.base or NONE,
        format_number(c.staleness, "{:d}"),
        f"{c.accepted}/{c.gated}/{c.skipped}",
        f"{format_number(c.last_push_steps, '{:d}')}/{format_count(steps)}",
        format_number(c.bytes_per_s, "{:.1f}", 1e-6),
    )
    flags = [f"flagged, not gated: {said}" for _, said in sorted(c.differs.items())]
    return ListingRow(cells, (c.why, "; ".join(c.remarks), *flags))


def slaves_listing(view: RunView) -> Listing:
    """One row for each slave, its reason under it."""
    columns = _list_columns("slave", "state", "version", "slots", "mirror", "pool MB", "persist s", "in MB", "out MB")
    return Listing("slaves", columns, [_slave_row(*item) for item in sorted(view.slaves.items())], strict=True)


def _slave_row(name: str, s: SlaveView) -> ListingRow:
    h = s.heartbeat
    told = (
        ("–/–", NONE, NONE, NONE)
        if h is None
        else (
            f"{h.pool_used / 1e6:.0f}/{h.pool_limit / 1e6:.0f}", f"{h.persist_s:.2f}",
            f"{h.bytes_in / 1e6:.0f}", f"{h.bytes_out / 1e6:.0f}",
        )
    )  # fmt: skip
    cells = (name, _state_text(s), s.version or NONE, f"{s.slots_used}/{s.slots}", _mirror_cell(s.mirror), *told)
    return ListingRow(cells, (s.why, mirror_line(s.mirror)))


def _mirror_cell(mirror: MirrorView | None) -> str:
    """By how many versions it lags."""
    return "none" if mirror is None else f"-{mirror.behind_versions}" if mirror.behind_versions else "ok"


def _list_columns(*names: str) -> tuple[Column, ...]:
    """The first two are words: who, and in which state."""
    return tuple(Column(name, left=i < 2) for i, name in enumerate(names))


def one_line(view: RunView) -> str:
    """The same for a log file: one line, every state in it."""
    if view.waiting:
        return make_printable(f"run {view.run} {view.waiting}")
    clusters = "; ".join(
        f"{name} {c.word} steps {format_count(c.heartbeat.inner_steps if c.heartbeat else None)} "
        f"loss {format_number(c.loss, '{:.3f}')} on {c.base or NONE} (stale {format_number(c.staleness, '{:d}')})"
        for name, c in sorted(view.clusters.items())
    )
    slaves = "; ".join(f"{name} {s.word} {s.version or NONE}" for name, s in sorted(view.slaves.items()))
    r = view.rounds
    return (
        f"head {view.head}, {r.applied} applied {r.skipped} skipped {r.unchanged} unchanged | "
        f"{clusters or 'no clusters'} | {slaves or 'no slaves'}"
    )


def format_count(value: float | None) -> str:
    """Shorten a count: 1234567 → 1.23M."""
    if value is None:
        return NONE
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.{0 if unit == 'k' else 2}f}{unit}"
    return str(int(value))


def format_number(value: float | None, spec: str, scale: float | None = None) -> str:
    """A number; a dash for one that is not known."""
    if value is None:
        return NONE
    return spec.format(value if scale is None else value * scale)


def _state_text(peer: ClusterView | SlaveView) -> Text:
    style = "cyan" if peer.word in MOVING and peer.severity is Severity.GOOD else STYLES[peer.severity]
    return Text(peer.word, style=style)
