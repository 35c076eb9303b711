"""What is known of a push when it is judged, what one gate says of it, and what becomes of it."""

from __future__ import annotations

from enum import StrEnum
from math import isfinite, sqrt

from dips.dataclass import dataclass
from dips.protocol.enums import GateName


class Finding(StrEnum):
    """What a gate says of a push."""

    PASSED = "passed"
    FLAGGED = "flagged"  # something speaks against it, not enough to keep it out
    GATED = "gated"


@dataclass(frozen=True, slots=True)
class PushEvidence:
    """One push as it was measured; d = θ − θ_j, acc the sum of those that its round has folded before it."""

    cluster: str
    layer_sq: tuple[float, ...]  # Σd² of each layer, in manifest order
    inner_steps: int  # as claimed
    finite: bool = True  # its parameters
    exempt: bool = False  # its base is no ancestor of θ: no score of its norm
    dot: float = 0.0  # Σd·acc over the model
    acc_sq: float = 0.0  # Σacc²
    others: int = 0  # pushes in acc
    strangers: int = 0  # of these, none of whose directions can be held against its own: one of both is stale
    split: bool = False  # some of these are at odds with those before them: acc says nothing for certain
    usual: float = 0.0  # mean cosine of those in acc with what was before them
    own: float | None = None  # cosine that is usual for its cluster; None: none is known (gates/direction.py)
    against: int = 0  # pushes of the round that point away from acc and wait to be judged
    clusters: int = 0  # that live
    trusted: int = 0  # other clusters that live and were not out of line lately
    moved: float = 0.0  # how far θ went at most since its base, as a sum over layers; 0 if it is θ, or unknown
    digest: int = 0  # of θ_j
    loss: float | None = None  # mean of its inner steps; None: none was reported

    @property
    def norm(self) -> float:
        """G: Σ over layers ‖d‖₂, over √(inner steps), since paces differ by design; inf if anything is not finite."""
        if not self.finite or not all(isfinite(sq) for sq in self.layer_sq):
            return float("inf")
        return sum(map(sqrt, self.layer_sq)) / sqrt(max(1, self.inner_steps))

    @property
    def own_norm(self) -> float:
        """What of G the cluster made for certain, however θ moved since its base."""
        return max(0.0, self.norm - self.moved / sqrt(max(1, self.inner_steps)))

    @property
    def witnesses(self) -> int:
        """Pushes in acc that its direction can be held against: those that were trained from θ, as it was."""
        return self.others - self.strangers

    @property
    def cosine(self) -> float | None:
        """Of d and acc; None if either is 0, or nothing was folded before."""
        lengths = sqrt(self.acc_sq) * sqrt(sum(self.layer_sq))
        return self.dot / lengths if self.others and lengths > 0.0 and isfinite(self.dot / lengths) else None


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one gate says of one push, in a sentence."""

    finding: Finding
    sentence: str
    score: float = 0.0
    scored: bool = False  # the score is one of those that set the threshold
    flagged: frozenset[int] = frozenset()  # layers that it keeps out of the sum, by their places in the manifest


@dataclass(frozen=True, slots=True)
class Verdict:
    """The penalty's decision on one push, and why."""

    accepted: bool
    norm: float
    score: float
    reason: str
    evidence: PushEvidence
    tracked: bool = True  # False: it must leave the statistics alone
    scored: bool = False
    flagged: frozenset[int] = frozenset()  # layers in which an accepted push does not count
    gate: GateName | str | None = None  # that gated it; None: none did, or it was no matter of opinion
    flags: tuple[str, ...] = ()  # what speaks against it, though it is accepted
    held: bool = False  # gated by an operator's word, which moves no statistics and tries nobody's patience

    @property
    def is_unmoved(self) -> bool:
        """Gated because inner steps have changed nothing."""
        return not self.accepted and self.evidence.norm == 0.0 and self.evidence.inner_steps > 0


@dataclass(frozen=True, slots=True)
class Settled:
    """A verdict whose round has ended."""

    cluster: str
    verdict: Verdict
    tokens: int = 0  # that counted
