"""A status, as the master answers it, for a person to read: listings for a terminal, one line for a log.

Reads plain data and never asks anybody. A field that is missing or null is shown as –: an older master must not break
the picture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from dips.telemetry.listing import Column, Listing, ListingRow

Status = Mapping[str, Any]

NONE = "–"
# What a state looks like; anything else stays plain.
STYLES = {
    **dict.fromkeys(("training", "ready"), "green"),
    **dict.fromkeys(("gone", "lost", "crashing"), "red"),
    **dict.fromkeys(("pushing", "pulling"), "cyan"),
}


# Reasons that say no more than the state and the columns beside it.
DULL = {
    "joining": re.compile("joined"),
    "training": re.compile(r"training|trains on \S+|it has \S+|asks for a push"),
    "pushing": re.compile("its push is being opened"),
    "committed": re.compile("its push is committed"),
    "pulling": re.compile(r"pulling \S+"),
    "ready": re.compile(r"serves \S+"),
    "gone": re.compile("left"),
}
LEFT = "left"  # the reason of a cluster that ended by itself, and its state then
CRASHING = "crashing"  # what a cluster's note begins with while its trainer is dead, and its state then


def render_status(status: Status) -> RenderableType:
    """Draw the whole picture: the run and its round, clusters, slaves; of a run that has no model yet only that."""
    if "waiting" in status:
        return draw_headline(status)
    return Group(draw_headline(status), clusters_listing(status), slaves_listing(status))


class FittedStatus:
    """The same, in the height of the terminal: rows that have no room are counted."""

    def __init__(self, status: Status) -> None:
        self._head, self._listings = draw_headline(status), (clusters_listing(status), slaves_listing(status))

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


def draw_headline(status: Status) -> Text:
    """The run in four lines: θ, the rounds, this one and why it waits, the data; the page; in red what fails."""
    if "waiting" in status:
        return Text(f"run {status.get('run', NONE)} {status['waiting']}", style="bold")
    lines = (
        run_line(status),
        "rounds: " + counts_line(status),
        "round: " + round_line(status),
        "data: " + data_line(status),
    )
    text = Text("\n".join(lines), style="bold")
    if page := status.get("page"):
        text.append(f"\npage: {page}")
    if warning := status.get("pace_warning"):
        text.append(f"\npace: {warning}", style="yellow")
    if tuned := status.get("tuned"):
        text.append(f"\ntuned: {tuned_line(tuned)}")
    for reason in status.get("untuned", ()):
        text.append(f"\nnot tuned, though the ledger has it: {reason}", style="red")
    durability = status.get("durability", {})
    if durability.get("red"):
        text.append(f"\n{durability.get('state', NONE)}: {durability.get('reason') or NONE}", style="red")
    rollback = status.get("rollback") or {}
    if rollback.get("red"):
        text.append(f"\nrollback: {rollback.get('reason') or NONE}", style="red")
    mirror = status.get("ledger_mirror") or {}
    if mirror.get("red"):
        text.append(f"\nmirror of the ledger: {ledger_mirror_line(mirror)}", style="red")
    processed = status.get("on_version") or {}
    if processed.get("red"):
        text.append(f"\non_version, {processed.get('version') or NONE}: {processed.get('reason') or NONE}", style="red")
    track = status.get("track") or {}
    if track.get("red"):
        text.append(f"\ntrack, {track.get('reason') or NONE}", style="red")
    return text


def tuned_line(tuned: Mapping[str, Any]) -> str:
    """What holds otherwise than the run file says, since `dips set` changed it."""
    return ", ".join(f"{key} {'off' if value is None else f'{value:.15g}'}" for key, value in tuned.items())


def ledger_mirror_line(mirror: Mapping[str, Any]) -> str:
    """How far it lags; what is not in it is lost with the master's disk."""
    seconds = _format_number(mirror.get("behind_s"), "{:.0f}")
    lag = f"{mirror.get('behind_transactions', NONE)} transactions, {seconds} s behind"
    return f"{lag}: {mirror.get('reason') or NONE}"


def mirror_line(mirror: Mapping[str, Any] | None) -> str:
    """How far a slave's mirror lags; what is not in it is lost with that slave's disk."""
    behind = mirror.get("behind_versions") if mirror is not None else 0
    if mirror is None or behind == 0:
        return ""
    seconds = _format_number(mirror.get("behind_s"), "{:.0f}")
    lag = f"mirror: {_format_number(behind, '{:d}')} versions, {seconds} s behind"
    return f"{lag}: {mirror['reason']}" if mirror.get("reason") else lag


def run_line(status: Status) -> str:
    """Name the head and the tokens so far."""
    progress = status.get("progress", {})
    target = progress.get("tokens_target") or 0
    share = f" ({progress.get('tokens', 0) / target:.0%})" if target else ""
    loss = _format_number(status.get("last_loss"), "{:.3f}")
    ended = f"\nfinished at {status['finished']}, last loss {loss}" if status.get("finished") else ""
    return (
        f"{status.get('run', NONE)}  head {status.get('head', NONE)}  term {status.get('term', NONE)}  "
        f"{format_count(progress.get('tokens'))} tokens{share}{ended}"
    )


def counts_line(status: Status) -> str:
    """How the rounds so far have ended, and whether clusters meet in them."""
    rounds, met = status.get("rounds", {}), status.get("met") or {}
    ended = ", ".join(f"{rounds.get(kind, 0)} {kind}" for kind in ("applied", "unchanged", "skipped"))
    if len(status.get("clusters", {})) < 2 or not met.get("versions"):
        return ended
    return f"{ended}; {met['all']} of the last {met['versions']} with all clusters"


def round_line(status: Status) -> str:
    """Say what the round is doing, and why."""
    round_ = status.get("round", {})
    number = f"r{round_['round']} " if round_.get("round") is not None else ""
    return f"{number}{round_.get('state', NONE)}: {round_.get('reason') or NONE}"


def data_line(status: Status) -> str:
    """Say how many data ranges are used up, or that clusters bring their own."""
    ranges = status.get("ranges", {})
    if ranges.get("total") is None:
        return NONE
    if not ranges["total"]:
        return "the clusters' own, not tracked"
    counts = ", ".join(f"{ranges.get(kind, NONE)} {kind}" for kind in ("settled", "leased", "free"))
    return f"{counts} of {ranges['total']} ranges"


def clusters_listing(status: Status) -> Listing:
    """One row for each cluster, its reason under it; H is that of its last push."""
    columns = _list_columns("cluster", "state", "loss", "tokens", "base", "stale", "acc/gate/skip", "H/steps", "MB/s")
    rows = [_cluster_row(name, c) for name, c in sorted(status.get("clusters", {}).items())]
    return Listing("clusters", columns, rows, strict=True)


def _cluster_row(name: str, c: Mapping[str, Any]) -> ListingRow:
    cells = (
        name,
        _state_text(c),
        _format_number(c.get("loss"), "{:.3f}"),
        format_count(c.get("tokens_accepted")),
        c.get("base") or NONE,
        _format_number(c.get("staleness"), "{:d}"),
        "/".join(str(c.get(kind, 0)) for kind in ("accepted", "gated", "skipped")),
        f"{_format_number(c.get('last_push_steps'), '{:d}')}/{format_count(c.get('inner_steps'))}",
        _format_number(c.get("bytes_per_s"), "{:.1f}", 1e-6),
    )
    note = str(c.get("note") or "")
    # How it crashes says more than that its trainer is dead.
    flags = [f"flagged, not gated: {said}" for _, said in sorted((c.get("differs") or {}).items())]
    return ListingRow(cells, ("" if _is_crashing(c) else _state_reason(c), note, *flags))


def slaves_listing(status: Status) -> Listing:
    """One row for each slave, its reason under it."""
    columns = _list_columns("slave", "state", "version", "slots", "mirror", "pool MB", "persist s", "in MB", "out MB")
    rows = [_slave_row(name, s) for name, s in sorted(status.get("slaves", {}).items())]
    return Listing("slaves", columns, rows, strict=True)


def _slave_row(name: str, s: Mapping[str, Any]) -> ListingRow:
    cells = (
        name,
        _state_text(s),
        s.get("version") or NONE,
        f"{s.get('slots_used', 0)}/{s.get('slots', NONE)}",
        _mirror_cell(s.get("mirror")),
        f"{_format_number(s.get('pool_used'), '{:.0f}', 1e-6)}/{_format_number(s.get('pool_limit'), '{:.0f}', 1e-6)}",
        _format_number(s.get("persist_s"), "{:.2f}"),
        _format_number(s.get("bytes_in"), "{:.0f}", 1e-6),
        _format_number(s.get("bytes_out"), "{:.0f}", 1e-6),
    )
    return ListingRow(cells, (_state_reason(s), mirror_line(s.get("mirror"))))


def _mirror_cell(mirror: Mapping[str, Any] | None) -> str:
    """By how many versions it lags."""
    if mirror is None:
        return "none"
    return "ok" if mirror.get("behind_versions") == 0 else f"-{_format_number(mirror.get('behind_versions'), '{:d}')}"


def _list_columns(*names: str) -> tuple[Column, ...]:
    """The first two are words: who, and in which state."""
    return tuple(Column(name, left=i < 2) for i, name in enumerate(names))


def one_line(status: Status) -> str:
    """The same for a log file: one line, every state in it."""
    clusters = "; ".join(
        f"{name} {c.get('state', NONE)} steps {format_count(c.get('inner_steps'))} "
        f"loss {_format_number(c.get('loss'), '{:.3f}')} on {c.get('base') or NONE} "
        f"(stale {_format_number(c.get('staleness'), '{:d}')})"
        for name, c in sorted(status.get("clusters", {}).items())
    )
    slaves = "; ".join(
        f"{name} {s.get('state', NONE)} {s.get('version') or NONE}"
        for name, s in sorted(status.get("slaves", {}).items())
    )
    rounds = status.get("rounds", {})
    return (
        f"head {status.get('head', NONE)}, {rounds.get('applied', 0)} applied {rounds.get('skipped', 0)} skipped "
        f"{rounds.get('unchanged', 0)} unchanged | {clusters or 'no clusters'} | {slaves or 'no slaves'}"
    )


def format_count(value: float | None) -> str:
    """Shorten a count: 1234567 → 1.23M."""
    if value is None:
        return NONE
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.{0 if unit == 'k' else 2}f}{unit}"
    return str(int(value))


def _format_number(value: float | None, spec: str, scale: float | None = None) -> str:
    if value is None:
        return NONE
    return spec.format(value if scale is None else value * scale)


def _state_text(peer: Mapping[str, Any]) -> Text:
    state = CRASHING if _is_crashing(peer) else str(peer.get("state", NONE))
    if state == "gone" and peer.get("reason") == LEFT:
        state = LEFT  # it said goodbye: nothing is wrong
    return Text(state, style=STYLES.get(state, ""))


def _is_crashing(peer: Mapping[str, Any]) -> bool:
    """Its trainer is dead, or starts again after a crash."""
    waits = peer.get("state") == "idle" and peer.get("trainer") == "dead"
    return waits and str(peer.get("note") or "").startswith(CRASHING)


def _state_reason(peer: Mapping[str, Any]) -> str:
    """Why it is in its state; empty if the state says it all."""
    reason, dull = str(peer.get("reason") or ""), DULL.get(str(peer.get("state")))
    if peer.get("quarantine"):
        return f"quarantined by an operator: {peer['quarantine']}; {reason}"
    if peer.get("quarantined"):
        return f"quarantined by the gate until `dips cluster readmit`; {reason}"
    return "" if dull and dull.fullmatch(reason) else reason
