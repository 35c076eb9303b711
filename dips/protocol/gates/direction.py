"""The gate `direction`: a push that points away from the sum of its round's others is out of line.

Who has just joined, or was out of line before, is measured last (held_pushes.py), beside the sum of all others; the
rest beside what lies before them. Who gates must be sure to be right though a third of the clusters be wrong: more than
that third in the sum, two at least, that have something in common, not at odds among themselves, and more than those
that point away from it. Else a push is flagged, which makes its cluster and those in the sum wait next time, and the
better known come first.

Only fresh pushes, trained from θ as it is, are witnesses of each other. d = θ − θ_j of an older base holds what θ moved
since then, often more than what was learned: stale pushes agree with each other, a frozen trainer's too, and with no
fresh one, whoever is right.

A bad push that was kept out does no harm, so the others need not undo it, and the next one of its cluster is no longer
opposite to theirs, only foreign to them: a suspect must have half of the cosine that the others have among themselves.
A cluster is held against its own past: data of another kind, another language, has little in common with the others',
and its cosines scatter about 0. What its pushes usually have is learned from the first LEARNED_COSINES, and followed;
who has far less than the others have among themselves is shown as unlike them (differences.py), and gated only if it
has turned by TURNED from there twice in a row. So is who was like them, from where a suspect's push is foreign, and at
once where it is opposite. What is out of line teaches nothing. Limits: a cluster that is unlike the others may turn its
sign unseen, as may who joins with it turned; a push that is half honest has enough in common with the others; what
turns slowly is followed.

Alone in its round a push is a whole outer step: a suspect whose last push was gated counts only beside enough
witnesses, as long as there are enough clusters that could be. What is gated for want of them accuses nobody, so
suspicion ends after some pushes.
"""

from __future__ import annotations

from dips.protocol.norm_scores import Past
from dips.protocol.records import PenaltyRow
from dips.protocol.verdicts import Finding, Opinion, PushEvidence

LEAST_COSINE = -0.1  # healthy ones were at least −0.06, most above 0.10; flipped ones at most −0.18, shuffled −0.27
TURNED = 0.4  # below what is usual for a cluster: four times what the cosines of healthy ones scatter by about it
LIKE = 0.7  # of the others' usual cosine: healthy ones of like data have 0.8 and more, harder data 0.6 and less
LEARNED_COSINES = 5  # that make one usual
LEAST_LEARNING = -0.3  # until then: another alphabet had −0.24 at least beside clusters that had trained without it
LEAST_USUAL = 0.1  # of the others' cosines: below, as with data of other kinds, what they share is within the noise
SHARE_OF_USUAL = 0.5  # of the others' cosines, for suspects; shuffled ones had 0.1 to 0.45, healthy ones 0.8 and more
SUSPECT = 0.5  # from here a cluster's pushes wait for the others': two of them without another word
LEAST_WITNESSES = 2  # that gate: two clusters cannot outvote each other
WRONG_SHARE = 3  # one of so many clusters may be wrong


def judge_direction(push: PushEvidence, past: Past) -> Opinion:
    """Gated if it points away from the sum of enough others; a suspect's, if its cosine is far below theirs."""
    suspect = is_suspect(past.row)
    convicted = suspect and past.row.gated_in_a_row > 0
    if convicted and lacks_witnesses(push) and push.trusted >= enough_witnesses(push):
        said = f"its last push was gated, and {push.witnesses} of its round can speak for this one: too few"
        return Opinion(Finding.GATED, said)
    if not push.others:
        return Opinion(Finding.PASSED, "no others in its round to compare its direction with")
    cosine = push.cosine
    if cosine is None:
        return Opinion(Finding.PASSED, "no direction: its pseudo-gradient or the others' sum is 0")
    said = f"cosine {cosine:.2f} with the sum of {push.others} other{'s' * (push.others > 1)} of its round"
    least = least_cosine(push, suspect)
    if cosine >= least:
        return Opinion(Finding.PASSED, said)
    if suspect:
        said = f"{said}, at least {least:.2f} after it was out of line"
    if lacks_witnesses(push):
        among = f", {push.strangers} of another base" * (push.strangers > 0)
        return Opinion(Finding.FLAGGED, f"{said}{among}, too few to say who is right")
    if push.usual < LEAST_USUAL:
        return Opinion(Finding.FLAGGED, f"{said}, which have little in common: {push.usual:.2f}")
    if push.split:
        return Opinion(Finding.FLAGGED, f"{said}, which are at odds themselves")
    if push.against >= push.others:
        return Opinion(Finding.FLAGGED, f"{said}, fewer than the {push.against} that wait and point its way")
    if not suspect and (is_unlike(push) or cosine >= LEAST_COSINE):
        return Opinion(Finding.FLAGGED, f"{said}, usually {push.own:.2f}; gated if its next one is so, too")
    return Opinion(Finding.GATED, said)


def own_usual(row: PenaltyRow) -> float | None:
    """The cosine that is usual for a cluster; None while it is learned."""
    return row.cosine if row.cosines >= LEARNED_COSINES else None


def least_cosine(push: PushEvidence, suspect: bool) -> float:
    """Below which a push is out of line: opposite, or turned from what is usual for it, beside others that have not."""
    if push.own is None:
        return LEAST_LEARNING
    if is_unlike(push):
        return min(LEAST_COSINE, push.own - TURNED)
    foreign = SHARE_OF_USUAL * push.usual
    if suspect:
        return max(0.0, foreign)
    return max(LEAST_COSINE, min(push.own - TURNED, foreign)) if push.usual >= LEAST_USUAL else LEAST_COSINE


def is_unlike(push: PushEvidence) -> bool:
    """Whether its cluster always had far less in common with the others than these have with each other."""
    return push.own is not None and push.own < LIKE * push.usual


def enough_witnesses(push: PushEvidence) -> int:
    """More than the clusters that may be wrong."""
    return max(LEAST_WITNESSES, push.clusters // WRONG_SHARE + 1)


def lacks_witnesses(push: PushEvidence) -> bool:
    """Whether too few pushes in the sum can be compared with it, or most cannot."""
    return push.witnesses < max(enough_witnesses(push), push.strangers)


def is_against(push: PushEvidence) -> bool:
    """Whether it points away from those before it, most of which can be compared with it."""
    if push.cosine is None or push.witnesses < max(1, push.strangers):
        return False
    return push.cosine < least_cosine(push, suspect=False)


def is_suspect(row: PenaltyRow) -> bool:
    """Whether its direction was out of line lately."""
    return row.suspicion >= SUSPECT
