"""The gate `replay`: gates a push whose parameters are known already, so that the trainer or its link repeats itself.

Known are the parameters of accepted pushes and of versions as they were pulled, with nothing learned since.
"""

from __future__ import annotations

from dips.protocol.gates.norms import Past
from dips.protocol.verdicts import Finding, Opinion, PushEvidence

DIGESTS_KEPT = 512  # of the last accepted pushes and of the versions made of them: 50 rounds of nine clusters


def judge_replay(push: PushEvidence, past: Past) -> Opinion:
    """Gate a push whose digest is one of the last DIGESTS_KEPT."""
    if push.digest in past.history.digests:
        return Opinion(Finding.GATED, "its parameters are those of a push that was accepted, or of a version it pulled")
    return Opinion(Finding.PASSED, "its parameters are new")
