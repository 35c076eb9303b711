"""The evidence on a push, the opinion of one gate, and the verdict of the penalty."""

from __future__ import annotations

from enum import StrEnum
from math import isfinite, sqrt

from dips.dataclass import dataclass
from dips.protocol.enums import GateName


class Finding(StrEnum):
    """The decision of one gate on a push."""

    PASSED = "passed"
    FLAGGED = "flagged"  # something speaks against it, not enough to keep it out
    GATED = "gated"


@dataclass(frozen=True, slots=True)
class PushEvidence:
    """The measurements of one push; d = θ − θ_j, acc the sum of those that its round has folded before it."""

    cluster: str
    layer_sq: tuple[float, ...]  # Σd² of each layer, in manifest order
    inner_steps: int  # as reported by its cluster
    finite: bool = True  # whether its parameters are
    exempt: bool = False  # its base is no ancestor of θ: its norm gets no score
    dot: float = 0.0  # Σd·acc over the model
    acc_sq: float = 0.0  # Σacc²
    others: int = 0  # pushes in acc
    strangers: int = 0  # those of which, compared with this push, at least one of both has a stale base
    split: bool = False  # some of these point away from those before them: acc is no reliable reference
    usual: float = 0.0  # mean cosine of the pushes in acc with those before them
    own: float | None = None  # usual cosine of its cluster; None: not known yet (gates/direction.py)
    against: int = 0  # pushes of the round that point away from acc and wait to be judged
    clusters: int = 0  # live clusters
    trusted: int = 0  # other live clusters that were not out of line lately
    moved: float = 0.0  # upper bound of how far θ moved since its base, summed over layers; 0 if it did not, or unknown
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
        """The part of G that is certainly the cluster's own, not the movement of θ since its base."""
        return max(0.0, self.norm - self.moved / sqrt(max(1, self.inner_steps)))

    @property
    def witnesses(self) -> int:
        """Number of pushes in acc that its direction can be compared with: both trained from the present θ."""
        return self.others - self.strangers

    @property
    def cosine(self) -> float | None:
        """Cosine of d and acc; None if either is 0, or no push was folded before."""
        lengths = sqrt(self.acc_sq) * sqrt(sum(self.layer_sq))
        return self.dot / lengths if self.others and lengths > 0.0 and isfinite(self.dot / lengths) else None


@dataclass(frozen=True, slots=True)
class Opinion:
    """The opinion of one gate on one push, with a sentence."""

    finding: Finding
    sentence: str
    score: float = 0.0
    scored: bool = False  # the score enters the history that sets the threshold
    flagged: frozenset[int] = frozenset()  # layers that are left out of the sum, by their places in the manifest


@dataclass(frozen=True, slots=True)
class Verdict:
    """The penalty's decision on one push, and its reason."""

    accepted: bool
    norm: float
    score: float
    reason: str
    evidence: PushEvidence
    tracked: bool = True  # False: it must not change the statistics
    scored: bool = False
    flagged: frozenset[int] = frozenset()  # layers in which an accepted push does not count
    gate: GateName | str | None = None  # the gate that gated it; None: no gate did
    flags: tuple[str, ...] = ()  # sentences against it, although it is accepted
    held: bool = False  # gated by an operator: changes no statistics and does not count for `gate_patience`

    @property
    def is_unmoved(self) -> bool:
        """Whether it was gated because inner steps have changed nothing."""
        return not self.accepted and self.evidence.norm == 0.0 and self.evidence.inner_steps > 0


@dataclass(frozen=True, slots=True)
class Settled:
    """A verdict of a round that has ended."""

    cluster: str
    verdict: Verdict
    tokens: int = 0  # tokens that counted
