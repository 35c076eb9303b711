"""Checks of what peers claim: the protocols that they speak, their numbers against heartbeats, time and this ledger."""

from __future__ import annotations

from collections.abc import Sequence

from dips.dataclass import dataclass
from dips.errors import ConfigError, RemoteProtocolError
from dips.protocol.effects import Failed
from dips.protocol.events import ClusterJoined, SlaveRegistered
from dips.protocol.releases import why_refused

# ---- compatibility --------------------------------------------------------------------------------------------------
# The check that a peer speaks the run's protocol (docs/protocol.md#releases).


def newest_protocol(event: ClusterJoined | SlaveRegistered) -> int:
    """Return the newest protocol that a peer speaks; a release from before the second names one only."""
    return max(event.protocol, event.newest_protocol)


def find_protocol_mismatch(spoken: int, event: ClusterJoined | SlaveRegistered) -> Failed | None:
    """Return the answer for a peer that does not speak the run's protocol; None if it does."""
    problem = why_refused(spoken, event.protocol, newest_protocol(event))
    peer = f"cluster {event.cluster}" if isinstance(event, ClusterJoined) else f"slave {event.slave}"
    return Failed(ConfigError, f"protocol of {peer}: {problem}") if problem else None


# ---- claims ---------------------------------------------------------------------------------------------------------
# A push is weighted by its tokens, and its norm is divided by its inner steps, so neither is believed without a check.
# There are two bounds: what no cluster can do in the time (the request is refused as the cluster's fault), and what its
# heartbeats have reported so far (the push waits for the next one, so a lost heartbeat costs an honest cluster a moment
# and never a push). Pure.


MOST_TOKENS_PER_S = 1e9  # of one cluster: ten times the throughput of the largest
MOST_STEPS_PER_S = 1e4  # of one cluster: no optimizer steps in less than 100 µs
FORGIVEN_S = 3_600.0  # clusters train on while the clock of a suspended master stands still
MOST_TERMS_AHEAD = 1_000_000  # one for each start of a master, a thousand for each recovery
MOST_AHEAD = 1 << 32  # of seqs and rounds, which rise by one: 13 years at ten a second
SILENT_HEARTBEATS = 2  # after this many missed heartbeats a process may be dead, and another may have taken its name
MOST_LANES = 1_024  # of a slave: each has a thread
MOST_SNAPSHOTS = 65_536  # on a slave's disk; a few are kept, and archives


@dataclass(frozen=True, slots=True)
class ToldProgress:
    """The largest numbers in an incarnation's heartbeats: its tokens, and inner steps since its agent's start."""

    tokens: int = 0
    inner_steps: int = 0

    def raised(self, tokens: int, inner_steps: int) -> ToldProgress:
        """Return the maximum of this and another report; reports may overtake each other."""
        return ToldProgress(max(self.tokens, tokens), max(self.inner_steps, inner_steps))


def why_impossible(tokens: int, inner_steps: int, passed_s: float) -> str:
    """Return why no cluster can have done this in `passed_s` seconds (inf: unknown); empty if one can."""
    for what, claimed, rate in (
        ("tokens", tokens, MOST_TOKENS_PER_S),
        ("inner_steps", inner_steps, MOST_STEPS_PER_S),
    ):
        most = (passed_s + FORGIVEN_S) * rate
        if claimed > most:
            return f"{what}: expected at most {most:.3g} in {passed_s:.0f} s since the last push, got {claimed}"
    return ""


def why_untold(told: ToldProgress, settled: ToldProgress, tokens: int, inner_steps: int) -> str:
    """Return why a push claims more tokens than its cluster's heartbeats reported and no earlier push has settled.

    Empty if it does not.
    """
    if settled.tokens + tokens > told.tokens:
        return f"expected at most {told.tokens - settled.tokens} tokens, as reported so far, got {tokens}"
    if settled.inner_steps + inner_steps > told.inner_steps:
        steps = told.inner_steps - settled.inner_steps
        return f"expected at most {steps} inner steps, as reported so far, got {inner_steps}"
    return ""


def find_absurd_register(event: SlaveRegistered, term: int, next_round: int) -> Failed | None:
    """Return an error if a registration has numbers that no later master can have caused; a forged term must not end
    this one.
    """
    snapshots = (*event.complete, *event.unread)
    held = [v for v in (event.memory, event.prepared, *snapshots[:MOST_SNAPSHOTS]) if v is not None]
    checks: Sequence[tuple[str, int, int]] = (
        ("term_seen", event.term_seen, term + MOST_TERMS_AHEAD),
        ("round", max((v.round for v in held), default=0), next_round + MOST_AHEAD),
        ("lanes", len(event.lanes), MOST_LANES),
        ("snapshots", len(snapshots), MOST_SNAPSHOTS),
    )
    for what, got, most in checks:
        if got > most:
            return Failed(RemoteProtocolError, f"{what} of slave {event.slave}: expected at most {most}, got {got}")
    return None


def find_absurd_seq(seq: int, highest: int) -> Failed | None:
    """Return an error for a seq after which the cluster could never name a push or pull again."""
    if seq > highest + MOST_AHEAD:
        return Failed(RemoteProtocolError, f"seq: expected at most {highest + MOST_AHEAD}, got {seq}")
    return None
