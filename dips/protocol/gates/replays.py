"""The gate `replay`: the same parameters were accepted before, so the trainer or its link repeats itself."""

from __future__ import annotations

from dips.protocol.norm_scores import Past
from dips.protocol.verdicts import Finding, Opinion, PushEvidence

DIGESTS_KEPT = 512  # of the last accepted pushes: all that nine clusters bring in 50 rounds


def judge_replay(push: PushEvidence, past: Past) -> Opinion:
    """Gated if its digest is one of the last DIGESTS_KEPT accepted."""
    if push.digest in past.history.digests:
        back = len(past.history.digests) - past.history.digests.index(push.digest)
        return Opinion(Finding.GATED, f"its parameters are those of a push that was accepted {back} pushes ago")
    return Opinion(Finding.PASSED, "its parameters are new")
