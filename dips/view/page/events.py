"""The master's notes as lines for a person: its severity, about whom, and what happened.

A kind without a line here is shown by its own words, so that a new one is never lost; ROUTINE is on the timeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dips.protocol.enums import ClusterCause, Severity
from dips.view.page.text import clean_text

ROUTINE = frozenset(
    {"push_granted", "push_committed", "round_opened", "round_applying", "round_persisting", "version_committed"}
) | {"version_durable"}


@dataclass(frozen=True, slots=True)
class PageEvent:
    at: float  # Unix seconds
    severity: Severity
    who: str
    what: str
    times: int = 1  # in a row


_GOOD, _PLAIN, _ATTENTION, _BROKEN = Severity.GOOD, Severity.PLAIN, Severity.ATTENTION, Severity.BROKEN
# kind → severity, the field that names who it is about, and the sentence
LINES: Mapping[str, tuple[Severity, str, str]] = {
    "cluster_joined": (_GOOD, "cluster", "joined at {head}"),
    "cluster_gone": (_ATTENTION, "cluster", "is gone: {reason}"),
    "cluster_readmitted": (_GOOD, "cluster", "was readmitted by an operator"),
    "cluster_diverged": (_ATTENTION, "cluster", "gave up a push that was not finite"),
    "push_gated": (_ATTENTION, "push", "push gated: {reason}"),
    "push_dropped": (_PLAIN, "push", "push dropped: {reason}"),
    "claim_refused": (_ATTENTION, "push", "push refused: {reason}"),
    "round_skipped": (_ATTENTION, "", "round {round} was skipped: {reason}"),
    "round_unchanged": (_ATTENTION, "", "round {round} changed nothing: each of its {gated} pushes was gated"),
    "rolled_back": (_BROKEN, "", "rolled back to {head}: {reason}"),
    "persist_failed": (_ATTENTION, "", "the snapshot of {head} failed: {reason}"),
    "degraded": (_BROKEN, "", "goes on without snapshots: {reason}"),
    "stopped": (_BROKEN, "", "stopped: {reason}"),
    "durable_again": (_GOOD, "", "{version} is on every disk again"),
    "slave_ready": (_GOOD, "slave", "serves {version}"),
    "slave_lost": (_BROKEN, "slave", "is lost: {reason}"),
    "slave_drains": (_PLAIN, "slave", "is being drained"),
    "slave_drained": (_PLAIN, "slave", "is drained"),
    "mirror_fails": (_ATTENTION, "slave", "mirror fails: {reason}"),
    "mirror_works_again": (_GOOD, "slave", "mirror works again"),
    "order_refused": (_ATTENTION, "slave", "refused an order: {reason}"),
    "run_finished": (_GOOD, "", "the run is finished at {version}: {reason}"),
    "run_extended": (_PLAIN, "", "an operator extended the run"),
    "blind": (_ATTENTION, "", "the master itself was held up for {gap_s} s"),
}


def describe_note(kind: str, fields: Mapping[str, str], at: float) -> PageEvent | None:
    """Return the line of a note; None for what happens in every round that goes well."""
    if kind in ROUTINE:
        return None
    known = {key: clean_text(value) for key, value in fields.items()}
    if kind not in LINES:
        told = ", ".join(f"{key} {value}" for key, value in known.items())
        return PageEvent(at, _PLAIN, "", clean_text(f"{kind.replace('_', ' ')}: {told}"))
    severity, who, sentence = LINES[kind]
    if kind == "cluster_gone" and known.get("cause") == ClusterCause.LEFT:
        severity, sentence = _PLAIN, "left"
    name = cluster_of_push(known.get(who, "")) if who == "push" else known.get(who, "")
    return PageEvent(at, severity, name, clean_text(sentence.format_map(_OrDash(known))))


def cluster_of_push(push: str) -> str:
    """`west/3#17` → `west`."""
    return push.partition("/")[0]


class _OrDash(dict[str, str]):
    """A field that a note does not have is shown as a dash."""

    def __missing__(self, key: str) -> str:
        return "–"
