"""What a peer says of itself, held against what its heartbeats told, the time that passed and what this ledger knows.

A push's tokens are its weight, its inner steps divide its norm, so neither is believed alone. Two bounds: what no
cluster can do in the time (refused, at its fault), and what its heartbeats have told so far (it waits for the next
one, so that a lost heartbeat costs an honest cluster a moment and never a push). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from dips.dataclass import dataclass
from dips.errors import RemoteProtocolError
from dips.protocol.effects import Failed
from dips.protocol.events import SlaveRegistered

MOST_TOKENS_PER_S = 1e9  # of one cluster: ten times what the largest train
MOST_STEPS_PER_S = 1e4  # of one cluster: no optimizer steps in less than 100 µs
FORGIVEN_S = 3_600.0  # clusters train on while a suspended master's clock stands
MOST_TERMS_AHEAD = 1_000_000  # one for each start of a master, a thousand for each recovery
MOST_AHEAD = 1 << 32  # of seqs and rounds, which count up one by one: at ten a second 13 years
SILENT_HEARTBEATS = 2  # missed by a process that may be dead already: another may bear its name
MOST_LANES = 1_024  # of a slave: each has a thread
MOST_SNAPSHOTS = 65_536  # on a slave's disk; a few are kept


@dataclass(frozen=True, slots=True)
class ToldProgress:
    """The most that heartbeats of an incarnation told: tokens consumed in it, inner steps since its agent's start."""

    tokens: int = 0
    inner_steps: int = 0

    def raised(self, tokens: int, inner_steps: int) -> ToldProgress:
        """What is known after another report; they may overtake each other."""
        return ToldProgress(max(self.tokens, tokens), max(self.inner_steps, inner_steps))


def why_impossible(tokens: int, inner_steps: int, passed_s: float) -> str:
    """Why no cluster can have done so much in `passed_s` seconds (inf: unknown); empty if one can."""
    for what, claimed, rate in (
        ("tokens", tokens, MOST_TOKENS_PER_S),
        ("inner_steps", inner_steps, MOST_STEPS_PER_S),
    ):
        most = (passed_s + FORGIVEN_S) * rate
        if claimed > most:
            return f"{what}: {claimed} were claimed, and {passed_s:.0f} s after the last push at most {most:.3g} can be"
    return ""


def why_untold(told: ToldProgress, settled: ToldProgress, tokens: int, inner_steps: int) -> str:
    """Why heartbeats do not bear out a push that brings so much beside what is settled; empty if they do."""
    if settled.tokens + tokens > told.tokens:
        return f"its heartbeats told of {told.tokens - settled.tokens} tokens so far, the push brings {tokens}"
    if settled.inner_steps + inner_steps > told.inner_steps:
        steps = told.inner_steps - settled.inner_steps
        return f"its heartbeats told of {steps} inner steps so far, the push brings {inner_steps}"
    return ""


def find_absurd_register(event: SlaveRegistered, term: int, next_round: int) -> Failed | None:
    """Refuse what no later master can be the reason of: a forged number must not make this one give way."""
    held = [v for v in (event.memory, event.prepared, *event.complete[:MOST_SNAPSHOTS]) if v is not None]
    checks: Sequence[tuple[str, int, int]] = (
        ("term_seen", event.term_seen, term + MOST_TERMS_AHEAD),
        ("round", max((v.round for v in held), default=0), next_round + MOST_AHEAD),
        ("lanes", len(event.lanes), MOST_LANES),
        ("snapshots", len(event.complete), MOST_SNAPSHOTS),
    )
    for what, got, most in checks:
        if got > most:
            return Failed(RemoteProtocolError, f"{what} of slave {event.slave}: expected at most {most}, got {got}")
    return None


def find_absurd_seq(seq: int, highest: int) -> Failed | None:
    """Refuse a seq after which a cluster could never name a push or pull again."""
    if seq > highest + MOST_AHEAD:
        return Failed(RemoteProtocolError, f"seq: expected at most {highest + MOST_AHEAD}, got {seq}")
    return None
