"""A status, as the master answers it, for a person to read: listings for a terminal, one line for a log.

Reads plain data and never asks anybody. A field that is missing or null is shown as –: an older master must not break
the picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from dips.telemetry.listing import Column, Listing, ListingRow

Status = Mapping[str, Any]

NONE = "–"
# What a state looks like; anything else stays plain.
STYLES = {"training": "green", "ready": "green", "gone": "red", "lost": "red", "pushing": "cyan", "pulling": "cyan"}


def render_status(status: Status) -> RenderableType:
    """Draw the whole picture: the run and its round, clusters, slaves."""
    return Group(draw_headline(status), clusters_listing(status), slaves_listing(status))


def draw_headline(status: Status) -> Text:
    """The run in three lines: θ, the round and why it waits, the data; and a red one if snapshots fail."""
    lines = run_line(status), "round: " + round_line(status), "data: " + data_line(status)
    text = Text("\n".join(lines), style="bold")
    durability = status.get("durability", {})
    if durability.get("red"):
        text.append(f"\n{durability.get('state', NONE)}: {durability.get('reason') or NONE}", style="red")
    mirror = status.get("ledger_mirror") or {}
    if mirror.get("red"):
        text.append(f"\nmirror of the ledger: {ledger_mirror_line(mirror)}", style="red")
    processed = status.get("on_version") or {}
    if processed.get("red"):
        text.append(f"\non_version, {processed.get('version') or NONE}: {processed.get('reason') or NONE}", style="red")
    return text


def ledger_mirror_line(mirror: Mapping[str, Any]) -> str:
    """How far it lags; what is not in it is lost with the master's disk."""
    seconds = _format_number(mirror.get("behind_s"), "{:.0f}")
    lag = f"{mirror.get('behind_transactions', NONE)} transactions, {seconds} s behind"
    return f"{lag}: {mirror.get('reason') or NONE}"


def mirror_line(mirror: Mapping[str, Any] | None) -> str:
    """How far a slave's mirror lags; what is not in it is lost with that slave's disk."""
    if mirror is None:
        return "no mirror"
    behind = mirror.get("behind_versions")
    if behind == 0:
        return ""
    seconds = _format_number(mirror.get("behind_s"), "{:.0f}")
    lag = f"mirror: {_format_number(behind, '{:d}')} versions, {seconds} s behind"
    return f"{lag}: {mirror['reason']}" if mirror.get("reason") else lag


def run_line(status: Status) -> str:
    """Name the head, the tokens and the rounds so far."""
    rounds, progress = status.get("rounds", {}), status.get("progress", {})
    target = progress.get("tokens_target") or 0
    share = f" ({progress.get('tokens', 0) / target:.0%})" if target else ""
    ended = f"  finished at {status['finished']}" if status.get("finished") else ""
    counted = ", ".join(f"{rounds.get(kind, 0)} {kind}" for kind in ("applied", "unchanged", "skipped"))
    return (
        f"{status.get('run', NONE)}  head {status.get('head', NONE)}  term {status.get('term', NONE)}  "
        f"{format_count(progress.get('tokens'))} tokens{share}  rounds: {counted}{ended}"
    )


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
    """One row for each cluster, its reason under it."""
    columns = _list_columns("cluster", "state", "tokens", "loss", "base", "stale", "acc/gate/skip", "MB/s", "steps")
    return Listing(
        "clusters", columns, [_cluster_row(name, c) for name, c in sorted(status.get("clusters", {}).items())]
    )


def _cluster_row(name: str, c: Mapping[str, Any]) -> ListingRow:
    cells = (
        name,
        _state_text(c),
        format_count(c.get("tokens_accepted")),
        _format_number(c.get("loss"), "{:.3f}"),
        c.get("base") or NONE,
        _format_number(c.get("staleness"), "{:d}"),
        "/".join(str(c.get(kind, 0)) for kind in ("accepted", "gated", "skipped")),
        _format_number(c.get("bytes_per_s"), "{:.1f}", 1e-6),
        format_count(c.get("inner_steps")),
    )
    return ListingRow(cells, (_state_reason(c),))


def slaves_listing(status: Status) -> Listing:
    """One row for each slave, its reason under it."""
    columns = _list_columns("slave", "state", "version", "slots", "pool MB", "persist s", "in MB", "out MB")
    return Listing("slaves", columns, [_slave_row(name, s) for name, s in sorted(status.get("slaves", {}).items())])


def _slave_row(name: str, s: Mapping[str, Any]) -> ListingRow:
    cells = (
        name,
        _state_text(s),
        s.get("version") or NONE,
        f"{s.get('slots_used', 0)}/{s.get('slots', NONE)}",
        f"{_format_number(s.get('pool_used'), '{:.0f}', 1e-6)}/{_format_number(s.get('pool_limit'), '{:.0f}', 1e-6)}",
        _format_number(s.get("persist_s"), "{:.2f}"),
        _format_number(s.get("bytes_in"), "{:.0f}", 1e-6),
        _format_number(s.get("bytes_out"), "{:.0f}", 1e-6),
    )
    return ListingRow(cells, (_state_reason(s), mirror_line(s.get("mirror"))))


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
    state = str(peer.get("state", NONE))
    return Text(state, style=STYLES.get(state, ""))


def _state_reason(peer: Mapping[str, Any]) -> str:
    """Why it is in its state; empty if the state says it all."""
    reason = peer.get("reason") or ""
    if peer.get("quarantined"):
        return f"quarantined by the gate until `dips readmit`; {reason}"
    return reason if reason != str(peer.get("state", NONE)) else ""
