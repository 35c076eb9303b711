"""The command `dips history`: lists the versions and rounds in the ledger, or with --audit the operators' requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dips.commands.options import CONFIG, open_ledger
from dips.config import load_run
from dips.ids import VersionId
from dips.plain import to_plain
from dips.protocol.records import OperatorActed
from dips.telemetry.listing import Column, Listing, ListingRow
from dips.view.terminal import NONE, format_count

# ---- history audit --------------------------------------------------------------------------------------------------


AUDIT_COLUMNS = tuple(Column(name, left=True) for name in ("when (UTC)", "who", "what", "of what"))


def show_audit(config: Path, last: int, as_json: bool) -> None:
    """Print the newest `last` rows, oldest first; with `as_json` one object per line."""
    with open_ledger(load_run(config)) as ledger:
        rows = ledger.read_audit(last)
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)))
    else:
        Console().print(draw_audit(rows))


def draw_audit(rows: Sequence[OperatorActed]) -> Listing:
    """Draw the requests, each with its outcome in a line below."""
    return Listing("operators", AUDIT_COLUMNS, [_draw_row(row) for row in rows])


def _draw_row(row: OperatorActed) -> ListingRow:
    when = datetime.fromtimestamp(row.wall, UTC).strftime("%Y-%m-%d %H:%M:%S")
    passed = f"before it {row.passed_over} requests that changed nothing, without rows" if row.passed_over else ""
    return ListingRow(
        (when, row.caller, row.action, row.arguments), (row.outcome, passed), "red" if row.refused else ""
    )


# ---- history --------------------------------------------------------------------------------------------------------


COLUMNS = (
    *(Column(name, left=True) for name in ("round", "ended", "version")),
    *(Column(name) for name in ("loss", "tokens", "seconds", "stale", "‖δ‖")),
)
MOST_RANGES = 20  # runs of data ranges shown per round


def history(
    config: CONFIG,
    as_json: Annotated[bool, typer.Option("--json", help="Print all fields, one JSON object per line.")] = False,
    last: Annotated[int, typer.Option(min=1, help="Show the newest N rounds.")] = 20,
    audit: Annotated[bool, typer.Option("--audit", help="Show the audit log of operators instead of rounds.")] = False,
) -> None:
    """List the rounds and the versions they made, with loss, tokens, seconds since the last round, staleness and gates.

    The loss is the mean over the pushes, weighted by tokens; stale is how many versions the oldest base of a push was
    behind. Reads the ledger; the master may be up or down. A round ends applied (it made a version), unchanged (all
    pushes were gated), skipped (it failed), recovered (`dips recover` made its version from a file) or is unfinished. A
    version that was rolled back is marked undone, with the reason; its children name another parent than the row above
    them. Rebalances and changes by `dips set` are listed between the rounds.

    With --audit: each request of an operator, also refused ones, by the name of its certificate; with plain text on
    loopback no name is known. Requests that changed nothing are only counted beyond a limit.

    Exit codes: 0 done; 65 the file is no ledger; 78 there is none.

    \b
    Example:
      dips history --config dips.yaml --last 50
      dips history --config dips.yaml --audit
      dips history --config dips.yaml --json | jq 'select(.undone)'
    """
    if audit:
        show_audit(config, last, as_json)
        return
    rounds = _rows(config, last)
    if as_json:
        for row in rounds:
            print(json.dumps(to_plain(row), allow_nan=False))  # of a push that was not finite the norm is not, either
    else:
        Console().print(draw_rounds(rounds))


def round_as_data(row: Any) -> dict[str, Any]:
    """Return a round as plain data, with version and parent as text."""
    names = {key: str(value) if (value := getattr(row, key)) else None for key in ("version", "parent")}
    return {**asdict(row), **names}


def _rows(config: Path, last: int) -> list[dict[str, Any]]:
    """Return the newest rounds, oldest first, with the rebalances and changes between them."""
    with open_ledger(load_run(config)) as ledger:
        rounds, rebalances = ledger.read_history(last), ledger.read_rebalances()
        tunings, extensions = ledger.read_tunings(), ledger.read_extensions()
    oldest = rounds[0].round if rounds else 0
    changes = [
        _change_as_data("rebalanced", row, str(row.version), before=dict(row.before), placement=dict(row.placement))
        for row in rebalances
    ]
    changes += [
        _change_as_data(
            "extended", one, one.resumed or None,
            before=asdict(one.before), targets=asdict(one.targets), said=one.targets.describe(),
        )
        for one in extensions
        if one.before is not None
    ]  # fmt: skip
    changes += [
        _change_as_data("tuned", one, None, key=one.change.key, value=None if one.change.off else one.change.value)
        for one in tunings
    ]
    between = [row for row in changes if row["last_round"] >= oldest]
    rows = [(row.round, 0.0, round_as_data(row)) for row in rounds]
    rows += [(row["last_round"], row["wall"], row) for row in between]
    return [row for _, _, row in sorted(rows, key=lambda row: row[:2])]


def _change_as_data(kind: str, row: Any, version: str | None, **told: Any) -> dict[str, Any]:
    """Return what happened between two rounds as plain data, with the keys of a round."""
    return {"kind": kind, "version": version, "last_round": row.last_round, "wall": row.wall, **told}


def draw_rounds(rounds: Sequence[Mapping[str, Any]]) -> Listing:
    """Draw the rounds, each with its contributors and the reason of its end in a line below."""
    rows, before = list[ListingRow](), None
    for r in rounds:
        rows.append(_round_row(r, before))
        before = (
            before if r["kind"] in ("extended", "tuned") else r
        )  # which changed neither the head nor what was placed
    return Listing("rounds", COLUMNS, rows)


def _round_row(r: Mapping[str, Any], before: Mapping[str, Any] | None) -> ListingRow:
    if r["kind"] in ("rebalanced", "extended", "tuned"):
        return _change_row(r)
    undone = r["undone"]
    recovered = r.get("recovered")
    ended = "undone" if undone else "recovered" if recovered else r["kind"]
    cells = (
        f"r{r['round']}",
        ended,
        r["version"] or NONE,
        _format_loss(r),
        format_count(r["tokens"]),
        _format_seconds(r, before),
        _format_staleness(r),
        _format_norm(r),
    )
    why = undone or recovered or r["reason"] or ("not durable" if r["version"] and not r["durable"] else "")
    numbers = [n for outcome in r["outcomes"] for n in outcome["ranges"]]
    notes = (
        f"parent: {r['parent']}" if _has_another_parent(r, before) else "",
        f"from: {_list_contributions(r)}" if r["outcomes"] else "",
        f"ranges: {shorten_ranges(numbers)}" if numbers else "",
        f"{ended}: {why}" if why else "",
        _describe_result(r.get("result")),
    )
    return ListingRow(cells, notes, "dim" if undone else "")


def _describe_result(result: Mapping[str, Any] | None) -> str:
    """Return the result of `master.on_version` for the version, or why it failed."""
    if result is None:
        return ""
    told = ", ".join(f"{name} {value:.6g}" for name, value in result["numbers"].items())
    return f"on_version: {(told or 'done') if result['ok'] else result['reason']}"


def _change_row(r: Mapping[str, Any]) -> ListingRow:
    """Draw what happened between two rounds."""
    version = NONE
    if r["kind"] == "rebalanced":
        version = r["version"]
        told = ", ".join(f"{name} ({len(layers)} layers)" for name, layers in r["placement"].items())
        said = f"from {', '.join(r['before'])} to {told}"
    elif r["kind"] == "extended":
        said = f"until {r['said']}" + (f"; it was finished at {r['version']} and goes on" if r["version"] else "")
    else:
        said = f"{r['key']} = " + ("off" if r["value"] is None else f"{r['value']:.15g}")
    return ListingRow((NONE, r["kind"], version, *[NONE] * 5), (said,))


def _has_another_parent(r: Mapping[str, Any], before: Mapping[str, Any] | None) -> bool:
    """Return whether the parent is not the version of the row above, or that row made no version."""
    return bool(r["parent"]) and (before is None or before.get("version") != r["parent"])


def _format_loss(r: Mapping[str, Any]) -> str:
    told = [(f["tokens"], f["loss"]) for f in r.get("folds", ()) if f["loss"] is not None]
    tokens = sum(weight for weight, _ in told)
    return f"{sum(weight * loss for weight, loss in told) / tokens:.3f}" if tokens else NONE


def _format_seconds(r: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """Return the seconds since the end of the row above."""
    ended, since = r.get("ended"), (before or {}).get("ended")
    return f"{ended - since:.0f}" if ended is not None and since is not None else NONE


def _format_staleness(r: Mapping[str, Any]) -> str:
    folds = r.get("folds", ())
    if not folds or not r["parent"]:
        return NONE
    return str(VersionId.parse(r["parent"]).version - min(f["base"]["version"] for f in folds))


def _format_norm(r: Mapping[str, Any]) -> str:
    return f"{r['delta_norm']:.3g}" + (" clipped" if r["clipped"] else "") if r["version"] else NONE


def _list_contributions(r: Mapping[str, Any]) -> str:
    parts = (
        o["push"]["cluster"] + ("" if o["kind"] == "accepted" else f" ({o['kind']}: {o['reason']})")
        for o in r["outcomes"]
    )
    return ", ".join(parts)


def shorten_ranges(numbers: Sequence[int]) -> str:
    """Format data ranges as runs: 3 4 5 9 → 3–5 9."""
    found: list[list[int]] = []
    for n in sorted(numbers):
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    shown = [str(a) if a == b else f"{a}–{b}" for a, b in found[:MOST_RANGES]]
    return " ".join(shown) + (f" and {len(found) - MOST_RANGES} more" if len(found) > MOST_RANGES else "")
