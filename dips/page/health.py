"""Whether all is well, in one word, one sentence and the few things that ask for a look: what is read first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import median
from typing import Any

from dips.page.events import Gravity
from dips.page.memory import RoundMemory
from dips.page.text import clean_text
from dips.protocol.moves import ClusterState

MOST_CONCERNS = 12  # listed; more are counted
LATE_ROUNDS = 5.0  # a head older than so many usual rounds is late
LEAST_LATE_S = 60.0  # but no younger one
LEAST_ROUNDS = 3  # from which the usual time is known


class HealthLevel(StrEnum):
    """The word beside the big sign."""

    WELL = "well"
    WAITING = "waiting"  # nobody trains yet
    FINISHED = "finished"
    ATTENTION = "attention"  # it goes on, and something needs a look
    BROKEN = "broken"  # no version can be made


@dataclass(frozen=True, slots=True)
class Concern:
    """One thing to look at."""

    gravity: Gravity
    who: str
    what: str


def judge_health(
    status: Mapping[str, Any],
    clusters: Mapping[str, Any],
    slaves: Mapping[str, Any],
    rounds: list[RoundMemory],
    head_age_s: float | None,
) -> dict[str, Any]:
    """`clusters` and `slaves` as the page lists them."""
    concerns = list(_find_concerns(status, clusters, slaves, rounds, head_age_s))
    concerns.sort(key=lambda concern: concern.gravity is not Gravity.BROKEN)
    level = _level_of(status, clusters, concerns)
    return {
        "level": level.value,
        "title": _title_of(level, status, len(concerns)),
        "detail": _detail_of(clusters, slaves),
        "concerns": [
            {"gravity": c.gravity.value, "who": clean_text(c.who), "what": clean_text(c.what)}
            for c in concerns[:MOST_CONCERNS]
        ],
        "more": max(0, len(concerns) - MOST_CONCERNS),
    }


def _level_of(status: Mapping[str, Any], clusters: Mapping[str, Any], concerns: list[Concern]) -> HealthLevel:
    if any(c.gravity is Gravity.BROKEN for c in concerns):
        return HealthLevel.BROKEN
    if concerns:
        return HealthLevel.ATTENTION
    if status.get("finished"):
        return HealthLevel.FINISHED
    return HealthLevel.WELL if clusters["live"] else HealthLevel.WAITING


def _is_trained(status: Mapping[str, Any]) -> bool:
    """Whether a cluster is here and not idle."""
    still = (ClusterState.IDLE, ClusterState.GONE)
    return any(cluster.get("state") not in still for cluster in status.get("clusters", {}).values())


def _title_of(level: HealthLevel, status: Mapping[str, Any], concerns: int) -> str:
    match level:
        case HealthLevel.WELL:
            return "All is well"
        case HealthLevel.WAITING:
            return "Ready: no cluster trains yet"
        case HealthLevel.FINISHED:
            return f"The run is finished at {status['finished']}"
        case HealthLevel.ATTENTION:
            goes_on = "Training goes on" if _is_trained(status) else "No cluster trains"
            return f"{goes_on}; {'one thing needs' if concerns == 1 else f'{concerns} things need'} a look"
        case HealthLevel.BROKEN:
            return "No new version can be made"


def _detail_of(clusters: Mapping[str, Any], slaves: Mapping[str, Any]) -> str:
    return (
        f"{clusters['live']} of {clusters['count']} clusters here, {slaves['ready']} of {slaves['count']} slaves ready"
    )


def _find_concerns(
    status: Mapping[str, Any],
    clusters: Mapping[str, Any],
    slaves: Mapping[str, Any],
    rounds: list[RoundMemory],
    head_age_s: float | None,
) -> Iterator[Concern]:
    if not status.get("finished"):
        for row in slaves["rows"]:
            if row["gravity"] in (Gravity.ATTENTION, Gravity.BROKEN):
                # Every slave holds layers of its own: without one there is no round.
                gravity = Gravity.ATTENTION if row["word"] in ("ready", "silent") else Gravity.BROKEN
                yield Concern(gravity, row["name"], f"{row['word']}: {row['why']}")
        for row in clusters["rows"]:
            if row["gravity"] is Gravity.ATTENTION:
                yield Concern(Gravity.ATTENTION, row["name"], f"{row['word']}: {row['why'] or row['note']}")
        if (late := _explain_lateness(clusters, rounds, head_age_s)) is not None:
            yield Concern(Gravity.ATTENTION, "head", late)
        if rounds and rounds[-1].kind == "skipped":
            yield Concern(Gravity.ATTENTION, f"round {rounds[-1].round}", f"skipped: {rounds[-1].reason}")
    if warning := status.get("pace_warning"):
        yield Concern(Gravity.ATTENTION, "pace", str(warning))
    durability = status.get("durability") or {}
    if durability.get("red"):
        gravity = Gravity.BROKEN if durability.get("state") == "stopped" else Gravity.ATTENTION
        yield Concern(gravity, "snapshots", f"{durability.get('state')}: {durability.get('reason') or '–'}")
    rollback = status.get("rollback") or {}
    if rollback.get("red"):
        yield Concern(Gravity.BROKEN, "rollback", str(rollback.get("reason") or "–"))
    for key, who in (("ledger_mirror", "mirror of the ledger"), ("on_version", "on_version"), ("track", "track")):
        part = status.get(key) or {}
        if part.get("red"):
            yield Concern(Gravity.ATTENTION, who, str(part.get("reason") or "–"))
    if (journal := status.get("journal")) is not None and not journal.get("writing", 1):
        yield Concern(Gravity.ATTENTION, "journal", "its disk fails it: the run goes on without evidence")


def _explain_lateness(clusters: Mapping[str, Any], rounds: list[RoundMemory], head_age_s: float | None) -> str | None:
    """A head that is much older than the usual time between versions, while somebody is here."""
    made = [r.end for r in rounds if r.version is not None]
    if head_age_s is None or not clusters["live"] or len(made) <= LEAST_ROUNDS:
        return None
    usual_s = median(b - a for a, b in pairwise(made))
    if head_age_s <= max(LEAST_LATE_S, LATE_ROUNDS * usual_s):
        return None
    return f"no new version for {head_age_s:.0f} s; usually it takes {usual_s:.0f} s"
