"""The gate `direction`: gates a push that points away from the sum of the other pushes of its round.

Pushes of clusters that have just joined or were out of line before are measured last (round.py), against the sum
of all others; the rest are measured against the pushes folded before them. Up to a third of the clusters may be wrong,
so a push is gated only if the sum contains more pushes than that third, at least two, that have something in common,
are not at odds among themselves, and outnumber the pushes that point away from it. Otherwise the push is flagged: its
cluster and those in the sum wait next time, and better known clusters are measured first.

Only fresh pushes, trained from the present θ, are witnesses for each other. For an older base, d = θ − θ_j also
contains the movement of θ since then, often larger than the learned part: stale pushes agree with each other, even with
those of a frozen trainer, and with no fresh one, whichever is right.

A bad push that was kept out does no harm, so the other pushes need not undo it, and the next bad push of its cluster is
no longer opposite to theirs but unrelated: a suspect therefore needs half of the cosine that the others have among
themselves. A cluster is compared with its own past, since data of another kind or language has little in common with
that of the others, with cosines that scatter about 0. Its usual cosine is learned from the first LEARNED_COSINES
pushes, then followed. A cluster whose usual cosine is far below the others' is shown as unlike them (differences.py)
and gated only if its cosine falls TURNED below its usual one twice in a row. A cluster that is like the others is gated
if it is also below a suspect's limit twice in a row, and at once if its push is opposite. Pushes that are out of line
do not change what is usual.

Limits: a cluster that is unlike the others may flip its sign unseen, as may one that is flipped from its first push; a
push that is half honest has enough in common with the others; a slow turn is followed.

A push that is alone in its round is a whole outer step: if the last push of a suspect was gated, the next counts only
with enough witnesses, as long as there are enough clusters that could be witnesses. A push that is gated for lack of
witnesses does not raise suspicion, so suspicion ends after some pushes.
"""

from __future__ import annotations

from dips.protocol.gates.norms import Past
from dips.protocol.records import PenaltyRow
from dips.protocol.verdicts import Finding, Opinion, PushEvidence

LEAST_COSINE = -0.1  # healthy pushes had at least −0.06, most above 0.10; flipped ones at most −0.18, shuffled −0.27
TURNED = 0.4  # below a cluster's usual cosine: four times the scatter of healthy clusters about it
LIKE = (
    0.7  # of the others' usual cosine: healthy clusters with like data had at least 0.8, with harder data at most 0.6
)
LEARNED_COSINES = 5  # pushes from which a cluster's usual cosine is learned
LEAST_LEARNING = -0.3  # limit while it is learned: another alphabet had −0.24 at least beside trained clusters
LEAST_USUAL = 0.1  # of the others' cosines: below, as for data of several kinds, what they share is within the noise
SHARE_OF_USUAL = 0.5  # of the others' cosines, for suspects; shuffled ones had 0.1 to 0.45, healthy ones 0.8 and more
SUSPECT = 0.5  # suspicion from which a cluster's pushes wait for the others': for two pushes if nothing is added
LEAST_WITNESSES = 2  # least witnesses to gate: two clusters cannot outvote each other
WRONG_SHARE = 3  # one of so many clusters may be wrong


def judge_direction(push: PushEvidence, past: Past) -> Opinion:
    """Gate a push that points away from the sum of enough others; a suspect's, if its cosine is far below theirs."""
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
    """Return the usual cosine of a cluster; None while it is learned."""
    return row.cosine if row.cosines >= LEARNED_COSINES else None


def least_cosine(push: PushEvidence, suspect: bool) -> float:
    """Return the cosine below which a push is out of line: opposite, or far below what is usual for its cluster."""
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
    """Return the least number of witnesses: more than the clusters that may be wrong."""
    return max(LEAST_WITNESSES, push.clusters // WRONG_SHARE + 1)


def lacks_witnesses(push: PushEvidence) -> bool:
    """Whether too few pushes in the sum are comparable with this one, or most are not."""
    return push.witnesses < max(enough_witnesses(push), push.strangers)


def is_against(push: PushEvidence) -> bool:
    """Whether the push points away from the pushes folded before it, most of which are comparable with it."""
    if push.cosine is None or push.witnesses < max(1, push.strangers):
        return False
    return push.cosine < least_cosine(push, suspect=False)


def is_suspect(row: PenaltyRow) -> bool:
    """Whether recent pushes of the cluster were out of line."""
    return row.suspicion >= SUSPECT
