"""Each gate beside ten plain lines that say the same, and what it does not see."""

from __future__ import annotations

import random
from dataclasses import replace
from math import isfinite, nan, sqrt
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from dips.protocol.enums import Difference, GateName
from dips.protocol.gates import GATES
from dips.protocol.gates.direction import (
    LEARNED_COSINES,
    LEAST_COSINE,
    LEAST_LEARNING,
    LEAST_USUAL,
    LEAST_WITNESSES,
    LIKE,
    SUSPECT,
    is_against,
    is_suspect,
    is_unlike,
    least_cosine,
)
from dips.protocol.gates.losses import LEARNED, LEAST_LOSS, MARGIN, excess_loss
from dips.protocol.gates.norms import judge_norm_literally, spread_factor
from dips.protocol.gates.replays import DIGESTS_KEPT
from dips.protocol.options import PenaltyOptions
from dips.protocol.penalty import Penalty, accuse
from dips.protocol.records import LayerStatistics, PenaltyRow, ScoreHistory
from dips.protocol.verdicts import Finding, PushEvidence, Settled, Verdict

OPTIONS = PenaltyOptions()


class GateStory:
    """Rounds of a Penalty with these gates; clusters whose rows are not given have warmed up at norm 1."""

    def __init__(self, *gates: str, known: str = "abcd", **changes: object) -> None:
        row = {"n": 40, "mu": 1.0, "sigma": 0.05, "last_norm": 1.0, "warm_left": 0, "gated_in_a_row": 0}
        row |= {"cosine": 0.5, "cosines": 40}
        rows = [PenaltyRow(c, quarantined=False, accepted=40, reference=1.0, **(row | changes)) for c in known]  # type: ignore[arg-type]
        self.penalty = Penalty(PenaltyOptions(gates=tuple(map(GateName, gates))), rows)

    def judge(self, cluster: str, *squares: float, **seen: object) -> Verdict:
        seen = {"own": self.penalty.own_cosine(cluster)} | seen
        return self.penalty.judge_push(PushEvidence(cluster, squares or (1.0,), 1, **seen))  # type: ignore[arg-type]

    def settle(self, *verdicts: Verdict) -> None:
        settled = [Settled(v.evidence.cluster, v) for v in verdicts]
        self.penalty.keep_statistics(*self.penalty.compute_statistics(settled, list("abcd")))

    def round(self, cluster: str, *squares: float, **seen: object) -> Verdict:
        said = self.judge(cluster, *squares, **seen)
        self.settle(said)
        return said


def test_every_name_has_its_gate() -> None:
    assert set(GATES) == set(GateName)


# ---- dips-paper ------------------------------------------------------------------------------------------------------


def test_the_papers_rule_to_the_letter() -> None:
    """E = (G − μ)/σ, μ and σ as §4.1 moves them; flagged when E > β·max(E) of those accepted."""
    rng, penalty = random.Random(1), Penalty(PenaltyOptions(gates=(GateName.DIPS_PAPER,), gate_patience=1000))
    mu, sigma, scores, n, gated = 0.0, 0.0, list[float](), 0, 0
    for _ in range(300):
        g = 1.0 + abs(rng.gauss(0.0, 0.2))
        e = (g - mu) / sigma if n >= 2 else 0.0
        flagged = n >= 2 and bool(scores[2:]) and e > 3.0 * max(scores[-50:])
        said = penalty.judge_push(PushEvidence("a", (g * g,), 1))
        assert said.accepted is not flagged, (said, e)
        penalty.keep_statistics(*penalty.compute_statistics([Settled("a", said)], ["a"]))
        gated += flagged
        if not flagged:
            n, scores = n + 1, [*scores, e]
            mu += max(0.02, 1 / n) * (g - mu)
            sigma = sqrt(0.98 * sigma**2 + 0.02 * (g - mu) ** 2)
    assert 0 < gated < 300


def test_the_papers_rule_gates_a_quiet_history_and_is_disarmed_by_a_loud_one() -> None:
    """What `dips` bounds on both sides: max E near 0 gates what is usual, a score of 100 lets in one of 299."""
    row = PenaltyRow("a", 40, 1.0, 0.1, 1.0, 0, 0, False, 40)
    options = PenaltyOptions(gates=(GateName.DIPS_PAPER,))
    quiet, loud = (Penalty(options, [row], ScoreHistory((e,), ())) for e in (0.01, 100.0))
    assert not quiet.judge_push(PushEvidence("a", (1.02**2,), 1)).accepted
    assert loud.judge_push(PushEvidence("a", (30.0**2,), 1)).accepted
    assert not Penalty(OPTIONS, [row], ScoreHistory((100.0,), ())).judge_push(PushEvidence("a", (30.0**2,), 1)).accepted


# ---- dips ------------------------------------------------------------------------------------------------------------


def test_what_theta_moved_since_its_base_is_not_held_against_a_push() -> None:
    """G of 3 where 1 ± 0.05 is usual: gated, but for one that θ may have made three times as long by moving."""
    row = PenaltyRow("a", 40, 1.0, 0.05, 1.0, 0, 0, False, 40, 1.0)
    penalty = Penalty(PenaltyOptions(gates=(GateName.DIPS,)), [row])
    judged = {moved: penalty.judge_push(PushEvidence("a", (36.0,), 4, moved=moved)) for moved in (0.0, 3.0, 4.0, 1e9)}
    assert [said.accepted for said in judged.values()] == [False, False, True, True]
    assert judged[4.0].scored and abs(judged[4.0].score) < 1e-6 and "without what θ moved" in judged[4.0].reason
    assert not penalty.judge_push(PushEvidence("a", (36e4,), 4, moved=1e9)).accepted  # the hard cap knows no base
    assert penalty.judge_push(PushEvidence("a", (4.0,), 4, moved=1.0)).score == 0.0  # nothing is taken off a usual one


def test_the_papers_limit_is_the_largest_score_that_passes() -> None:
    """β times the largest that was accepted, 3 · 2: a norm of 4 has just that score."""
    story = GateStory("dips-paper", sigma=0.5)
    past: Any = SimpleNamespace(
        row=replace(story.penalty.penalty_row("a"), n=2),
        options=PenaltyOptions(),
        history=SimpleNamespace(scores=(2.0,)),
    )
    found = [judge_norm_literally(PushEvidence("a", (g * g,), 1), past).finding for g in (4.0, 4.001)]
    assert found == [Finding.PASSED, Finding.GATED]


def test_equal_norms_have_no_score_in_the_papers_rule() -> None:
    """σ is 0 after one push, and after any number of equal ones: the next passes, whatever its norm is."""
    story = GateStory("dips-paper", known="")
    for norm in (1.0, 1.0, 9.0):
        said = story.round("a", norm * norm)
        assert said.accepted and "no score" in said.reason
    assert "no score" not in story.judge("a", 1.0).reason


# ---- edit ------------------------------------------------------------------------------------------------------------


def test_layers_equal_a_plain_z_test() -> None:
    """z = (G − μ)/σ of each layer, above 3 it is left out and moves nothing; the warm-up flags none."""
    rng, penalty = random.Random(2), Penalty(PenaltyOptions(gates=(GateName.EDIT,)))
    known: list[list[float]] = [[], [], []]  # norms that entered, by layer
    flagged = 0
    for number in range(80):
        norms = [abs(rng.gauss(1.0 + i, 0.1)) * (3.0 if rng.random() < 0.05 and number > 20 else 1.0) for i in range(3)]
        steps = rng.choice((1, 4, 9))
        said = penalty.judge_push(PushEvidence("a", tuple(g * g * steps for g in norms), steps))
        expected = set()
        for i, g in enumerate(norms):
            mu, variance = 0.0, 0.0
            for n, x in enumerate(known[i], 1):
                w = max(0.02, 1 / n)
                mu = w * x + (1 - w) * mu
                variance = 0.98 * variance + 0.02 * (x - mu) ** 2
            sigma = max(sqrt(variance) * spread_factor(len(known[i]), 0.02), 0.02 * mu) if known[i] else 1.0
            if number >= 10 and (g - mu) / sigma > 3.0:
                expected.add(i)
        assert said.accepted is (len(expected) < 3)
        assert said.flagged == (expected if said.accepted else set())
        for i in range(3):
            if i not in expected:
                known[i].append(norms[i])
        flagged += len(expected)
        penalty.keep_statistics(*penalty.compute_statistics([Settled("a", said)], ["a"]))
        assert [layer.n for layer in penalty.penalty_row("a").layers] == list(map(len, known))
    assert flagged > 3


def edit_rows(*layers: LayerStatistics, **changes: object) -> GateStory:
    return GateStory("edit", known="a", layers=layers, **changes)


USUAL = LayerStatistics(40, 1.0, 0.05)


def test_a_push_with_one_good_layer_counts_and_one_without_does_not() -> None:
    """EDiT: a layer that fails weighs 0; all of them, and the parameters roll back."""
    story = edit_rows(USUAL, USUAL)
    said = story.judge("a", 25.0, 1.0)
    assert said.accepted and said.flagged == {0} and said.flags and "1 of 2 layers" in said.reason
    said = story.judge("a", 25.0, 25.0)
    assert not said.accepted and said.gate is GateName.EDIT
    assert story.judge("a", 25.0, 25.0, exempt=True).accepted
    warming = edit_rows(USUAL, USUAL, warm_left=1).judge("a", 25.0, 1.0)
    assert warming.accepted and not warming.flagged


def test_a_layer_that_never_moves_is_no_good_one() -> None:
    """Shared buffers have norm 0 and are in no norm: they do not save a push whose layers all fail."""
    story = edit_rows(USUAL, LayerStatistics())
    assert not story.judge("a", 25.0, 0.0).accepted


def test_a_layer_that_changed_for_good_begins_anew() -> None:
    """Left out `gate_patience` times in a row: its statistics are of the past."""
    story = edit_rows(USUAL, USUAL)
    said = [story.round("a", 25.0, 1.0).flagged for _ in range(10)]
    assert said[:3] == [{0}] * 3 and not any(said[3:])
    assert story.penalty.penalty_row("a").layers[1].n == 50


def test_other_layers_than_before_have_no_score() -> None:
    """A run whose manifest has other layers, or that had another gate, measures anew."""
    story = edit_rows(USUAL)
    assert story.round("a", 100.0, 100.0).accepted
    assert len(story.penalty.penalty_row("a").layers) == 2


# ---- direction -------------------------------------------------------------------------------------------------------


def test_a_direction_is_the_cosine_with_the_others_sum() -> None:
    """Against plain vectors: gated if below −0.1 beside two others at least, flagged if 0.4 below its usual 0.5."""
    rng = random.Random(3)
    for _ in range(300):
        d, *others = [[rng.gauss(0.2, 1.0) for _ in range(5)] for _ in range(rng.randint(1, 4))]
        acc = [sum(x) for x in zip(*others, strict=True)] if others else [0.0] * 5
        dot, length = sum(x * y for x, y in zip(d, acc, strict=True)), sqrt(sum(x * x for x in acc))
        seen = {"dot": dot, "acc_sq": length**2, "others": len(others), "usual": 0.5}
        said = GateStory("direction").judge("a", sum(x * x for x in d), **seen)
        away = bool(others) and dot < -0.1 * length * sqrt(sum(x * x for x in d))
        turned = bool(others) and dot < 0.1 * length * sqrt(sum(x * x for x in d))
        assert said.accepted is not (len(others) >= 2 and away)
        assert bool(said.flags) is (turned and (len(others) == 1 or not away))
        if others:
            assert f"cosine {dot / length / sqrt(sum(x * x for x in d)):.2f}" in said.reason


@pytest.mark.parametrize("seen", [{"acc_sq": 0.0}, {"acc_sq": nan}, {"acc_sq": 1.0, "dot": nan}])
def test_a_zero_vector_has_no_direction(seen: dict[str, float]) -> None:
    """A sentence, no NaN: two pushes that cancel, or one of no inner steps."""
    said = GateStory("direction").judge("a", 1.0, others=2, **seen)
    assert said.accepted and "no direction" in said.reason
    zero = GateStory("direction").penalty.judge_push(PushEvidence("a", (0.0,), 0, acc_sq=1.0, others=2))
    assert zero.accepted and "no direction" in zero.reason


def against(cluster: str, others: int = 1, **seen: object) -> dict[str, object]:
    return {"dot": -0.3, "acc_sq": 1.0, "others": others, "usual": 0.5} | seen


def test_what_is_at_a_limit_of_the_gate_is_not_beyond_it() -> None:
    """A cosine at the least one passes, others with the least usual one judge, a suspicion of SUSPECT is one."""
    alike = PushEvidence("a", (1.0,), 1, dot=LEAST_LEARNING, acc_sq=1.0, others=3, usual=0.6)
    assert alike.cosine == least_cosine(alike, suspect=False) == LEAST_LEARNING
    assert not is_against(alike)
    story = GateStory(GateName.DIRECTION)
    passed = story.judge("a", own=None, dot=LEAST_LEARNING, acc_sq=1.0, others=3, usual=0.6)
    assert passed.accepted and not passed.flags
    assert not story.judge("a", own=0.5, dot=-0.9, acc_sq=1.0, others=3, usual=LEAST_USUAL).accepted
    assert not is_unlike(replace(alike, own=LIKE, usual=1.0)) and is_unlike(replace(alike, own=0.99 * LIKE, usual=1.0))
    assert is_suspect(replace(story.penalty.penalty_row("a"), suspicion=SUSPECT))
    (said,) = story.judge("a", own=0.5, dot=-0.9, acc_sq=1.0, others=1, usual=0.6).flags
    assert "of another base" not in said
    (said,) = story.judge("a", own=0.5, dot=-0.9, acc_sq=1.0, others=1, strangers=1, usual=0.6).flags
    assert "1 of another base" in said


def test_a_sum_at_odds_with_itself_gates_nobody() -> None:
    """The bad push came first, a healthy one was flagged beside it: the next healthy one is not outvoted by the two."""
    story = GateStory("direction")
    said = story.judge("c", **against("c", 2, split=True))
    assert said.accepted and "at odds themselves" in said.flags[0]
    assert not story.judge("c", **against("c", 2)).accepted


def test_who_is_out_of_line_with_many_is_suspected_most() -> None:
    """Each push that is flagged speaks against its own cluster and, in equal parts, against those in the sum."""
    story = GateStory("direction")
    bad, b, c = story.judge("a"), story.judge("b", **against("b", 1)), story.judge("c", **against("c", 2, split=True))
    settled = [Settled(v.evidence.cluster, v) for v in (bad, b, c)]
    assert accuse(settled) == {"a": 1.5, "b": 1.5, "c": 1.0}
    gated = story.judge("d", **against("d", 3))
    assert not gated.accepted
    assert accuse([*settled, Settled("d", gated)])["a"] == 1.5, "who was gated was wrong, and accuses nobody"
    story.settle(bad, b, c)
    assert [story.penalty.waits_for_others(x, list("abcd")) for x in "abcd"] == [True, True, True, False]
    for _ in range(3):
        story.settle(*(story.judge(x) for x in "abc"))
    assert not any(story.penalty.waits_for_others(x, list("abcd")) for x in "abcd")


def test_a_suspect_that_is_foreign_to_the_others_is_gated() -> None:
    """After a bad push was kept out nobody has to undo it: the next is not opposite, but has far less than the others'
    cosine. Such gates keep it suspected; one push like the others' passes, and in three it is trusted again.
    """
    story = GateStory("direction")
    foreign = {"dot": 0.1, "acc_sq": 1.0, "others": 3, "usual": 0.6}
    assert story.judge("a", **foreign).accepted, "data of another kind, never out of line"
    assert not story.round("a", **against("a", 3)).accepted
    for _ in range(9):
        said = story.round("a", **foreign)
        assert not said.accepted and "at least 0.30 after it was out of line" in said.reason
    healthy = [story.round("a", **(foreign | {"dot": 0.4})).accepted for _ in range(3)]
    assert all(healthy) and story.judge("a", **foreign).accepted


def test_stale_pushes_are_no_witnesses() -> None:
    """What θ moved since an old base is in d: it agrees with whatever is as stale, and with nothing fresh."""
    story = GateStory("direction")
    for seen in (against("a", 3, strangers=3), against("a", 3, strangers=2), against("a", 4, strangers=3)):
        said = story.judge("a", **seen)
        assert said.accepted and f"{seen['strangers']} of another base, too few" in said.flags[0]
        assert accuse([Settled("a", said)]) == {"a": 0.0}, "and nobody is accused by what cannot be compared"
    assert not story.judge("a", **against("a", 3, strangers=1)).accepted


def test_who_was_gated_counts_only_beside_witnesses() -> None:
    """Alone its push would be the whole outer step. It is not locked out: suspicion ends, later the more it was bad."""
    story, alone = GateStory("direction"), {"clusters": 4, "trusted": 3}
    assert story.judge("a", **alone).accepted
    assert not story.round("a", **against("a", 3)).accepted
    said = [story.round("a", **alone) for _ in range(5)]
    assert [v.accepted for v in said] == [False, False, False, True, True]
    assert "0 of its round can speak for this one: too few" in said[0].reason
    for _ in range(9):
        story.round("b", **against("b", 3))
    assert [story.round("b", **alone).accepted for _ in range(6)] == [False] * 5 + [True]


def test_without_others_who_could_speak_nobody_is_kept_waiting_for_them() -> None:
    """Two clusters, or suspects only: what cannot be vouched for is judged as ever."""
    story = GateStory("direction")
    assert not story.round("a", **against("a", 3)).accepted
    assert story.judge("a", clusters=4, trusted=1).accepted
    assert story.judge("a", clusters=9, trusted=3).accepted and not story.judge("a", clusters=9, trusted=4).accepted
    penalty = story.penalty
    assert (penalty.count_trusted("b", list("abcd")), penalty.count_trusted("a", list("abcd"))) == (2, 3)


def test_others_that_have_little_in_common_gate_nobody() -> None:
    """Data unlike each other's: the others' own cosines are within the noise."""
    said = GateStory("direction").judge("a", **against("a", 3, usual=0.05))
    assert said.accepted and "little in common: 0.05" in said.flags[0]


def test_who_does_not_train_is_a_suspect() -> None:
    """Pushes that are θ itself are gated by their norm, the same a version later is how θ moved, backwards."""
    story = GateStory("direction")
    assert not story.round("a", 0.0).accepted
    assert story.penalty.penalty_row("a").suspicion == 1.0
    assert not story.judge("a", clusters=4, trusted=3).accepted
    for _ in range(2):
        story.round("a", 0.0)
    row = story.penalty.penalty_row("a")
    assert row.quarantined and row.warm_left == 0, "no warm-up makes a norm of 0 usual"


def beside(cosine: float, usual: float = 0.6, others: int = 3) -> dict[str, object]:
    return {"dot": cosine, "acc_sq": 1.0, "others": others, "usual": usual}


def meet(story: GateStory, cluster: str, cosine: float, usual: float = 0.6) -> Verdict:
    """A push with this cosine to the sum of three others, as a round gathers it."""
    return story.round(cluster, **beside(cosine, usual))


def test_data_of_another_kind_gates_nobody_and_is_flagged() -> None:
    """Another alphabet: cosines that begin as the others' and fall to −0.24, as measured, where theirs fall to 0.5."""
    rng, story = random.Random(5), GateStory("direction", known="")
    for number in range(60):
        for cluster in "abc":
            assert meet(story, cluster, max(0.5, 0.9 - 0.02 * number)).accepted
        said = meet(story, "d", max(-0.24, 0.5 - 0.04 * number) + rng.gauss(0.0, 0.05))
        assert said.accepted and not said.flags, (number, said)
        assert not story.penalty.waits_for_others("d", list("abcd")), "nor is anybody suspected for it"
    found = story.penalty.find_differences()
    assert {c: list(differences) for c, differences in found.items()} == {"d": [Difference.DIRECTION]}
    assert "data of another kind" in found["d"][Difference.DIRECTION]


class _Compared(float):
    """A number that counts how often numbers are compared."""

    times = 0

    def __lt__(self, other: float) -> bool:
        _Compared.times += 1
        return float(self) < other


def test_what_is_unlike_is_found_in_a_run_of_many_names() -> None:
    """Each status asks for it, on the master's loop: a run that had seen 10,000 names stood for seconds at each, since
    each name was compared with all others."""
    row = PenaltyRow("", 40, 1.0, 0.1, 1.0, 0, 0, False, 40, cosines=40)
    rows = [replace(row, cluster=f"c{i}", cosine=_Compared(0.1 if i == 7 else 0.5 + i / 1000)) for i in range(300)]
    penalty = Penalty(PenaltyOptions(gates=(GateName.DIRECTION,)), rows)
    _Compared.times = 0
    assert list(penalty.find_differences()) == ["c7"]
    assert _Compared.times < 30 * len(rows), "by pairs it is 150 times"


def test_where_nobody_is_alike_nobody_is_unlike() -> None:
    """Four kinds of data: what the others share is within the noise, so it says nothing of the one that has less."""
    story = GateStory("direction", cosine=0.08, cosines=40)
    story.penalty._rows["d"] = replace(story.penalty.penalty_row("d"), cosine=0.02)
    assert "d" not in story.penalty.find_differences()


def test_who_always_was_unlike_the_others_is_gated_when_it_turns() -> None:
    """By 0.4 from what is usual for it, twice in a row; who was like them, at −0.1 and once, as ever."""
    story = GateStory("direction", cosine=0.05, cosines=40)
    assert not meet(story, "a", -0.3).flags and "usually -0.02" in meet(story, "a", -0.5).flags[0]
    assert [meet(story, "a", -0.6).accepted for _ in range(3)] == 3 * [False]
    like = GateStory("direction", cosine=0.5, cosines=40)
    assert like.judge("a", **beside(-0.09)).accepted and not meet(like, "a", -0.11).accepted
    assert not meet(like, "a", 0.2).accepted, "a suspect that was like the others needs half of what they have"


@pytest.mark.parametrize(
    ("of_others", "own", "found"),
    [
        ({}, {}, {Difference.DIRECTION, Difference.LOSS}),
        ({}, {"cosines": LEARNED_COSINES - 1, "losses": LEARNED - 1}, set()),
        ({}, {"cosine": LIKE * 0.5, "loss_shift": MARGIN}, set()),
        ({"cosine": LEAST_USUAL}, {"loss_shift": 0.0}, {Difference.DIRECTION}),
        ({"cosines": LEARNED_COSINES - 1}, {"loss_shift": 0.0}, set()),
    ],
)
def test_a_difference_is_shown_as_soon_as_it_is_learned(
    of_others: dict[str, object], own: dict[str, object], found: set[Difference]
) -> None:
    """By as few others as may speak against a push; what is just usual, or is not known yet, is none."""
    known = "abcd"[: LEAST_WITNESSES + 1]
    story = GateStory("direction", "loss", known=known, **({"cosines": LEARNED_COSINES} | of_others))
    changes: dict[str, Any] = {
        "cosine": 0.0,
        "cosines": LEARNED_COSINES,
        "losses": LEARNED,
        "loss_shift": 2 * MARGIN,
    } | own
    story.penalty._rows["a"] = replace(story.penalty.penalty_row("a"), **changes)
    assert set(story.penalty.find_differences().get("a", {})) == found


def test_a_usual_cosine_is_known_when_it_is_learned() -> None:
    found = [GateStory("direction", cosines=n).penalty.own_cosine("a") for n in (LEARNED_COSINES - 1, LEARNED_COSINES)]
    assert found == [None, 0.5]


def test_others_with_little_in_common_hold_nobody_to_their_usual_cosine() -> None:
    """From LEAST_USUAL on, half of it is asked of a cluster that was like them."""
    found = [meet(GateStory("direction", cosine=0.64, cosines=40), "a", 0.0, usual=x) for x in (LEAST_USUAL, 0.099)]
    assert [bool(verdict.flags) for verdict in found] == [True, False]


def test_who_was_like_the_others_and_turns_is_gated_before_it_is_opposite() -> None:
    """Pushes turned by 45° towards zeros had −0.04 to −0.10, where 0.64 was usual; followed, that was usual soon."""
    story = GateStory("direction", cosine=0.64, cosines=40)
    first = meet(story, "a", -0.04)
    assert first.accepted and "usually 0.64; gated if its next one is so, too" in first.flags[0]
    assert [meet(story, "a", cosine).accepted for cosine in (-0.06, 0.08, 0.04, 0.02)] == 4 * [False]
    assert meet(story, "b", 0.25).accepted, "0.4 below what is usual is not yet foreign"
    assert not meet(GateStory("direction", cosine=0.64, cosines=40), "a", 0.2, usual=0.3).flags, "all have less"
    assert meet(GateStory("direction", cosine=0.64, cosines=40), "a", LEAST_COSINE).accepted, "healthy ones had more"


@pytest.mark.parametrize("turned", [-0.37, -0.4, -0.43, -0.6])
def test_the_push_that_turned_does_not_make_it_usual(turned: float) -> None:
    """It counts, since one may be bad luck; the next one as bad is held against what was usual before, and gated."""
    story = GateStory("direction", cosine=0.05, cosines=40)
    assert meet(story, "a", turned).flags
    assert [meet(story, "a", turned).accepted for _ in range(6)] == 6 * [False]
    assert story.penalty.penalty_row("a").cosine == 0.05


def test_flags_make_nobody_unlike_the_others() -> None:
    """Pushes that point away and are not gated, since the others are at odds or outnumbered, are no kind of data."""
    story = GateStory("direction")
    for seen in ({"split": True}, {"against": 3}):
        for _ in range(4):
            assert story.round("a", **against("a", 3, **seen)).flags
    assert not story.round("a", **against("a", 3)).accepted
    assert "a" not in story.penalty.find_differences()


def test_who_joins_is_not_held_to_the_others_cosines() -> None:
    """Five pushes make one usual; what points away in them as far as a turned sign does is gated."""
    story = GateStory("direction", known="abc")
    assert meet(story, "x", -0.2).accepted and not meet(story, "x", -0.4).accepted
    assert story.penalty.penalty_row("x").cosines == 1 and story.penalty.own_cosine("x") is None


def test_joiners_wait_for_those_who_are_known() -> None:
    """In a run that has just begun nobody knows better, so nobody waits."""
    story = GateStory("direction", known="ab")
    assert story.penalty.waits_for_others("new", ["a", "b", "new"])
    assert not story.penalty.waits_for_others("new", ["new"])
    assert not GateStory("direction", known="").penalty.waits_for_others("new", ["a", "new"])
    assert not GateStory("dips", known="ab").penalty.waits_for_others("new", ["a", "new"])


# ---- loss ------------------------------------------------------------------------------------------------------------


def falling(number: int) -> float:
    """A loss as a run's falls."""
    return 1.6 + 2.0 * 0.9**number


def play_levels(
    levels: dict[str, float], rounds: int, together: bool = False
) -> tuple[GateStory, dict[str, list[Verdict]]]:
    """Clusters whose losses are so many times the usual, from the run's first push on."""
    rng, story, said = random.Random(4), GateStory("loss", known=""), {c: list[Verdict]() for c in levels}
    for number in range(rounds):
        for c, level in levels.items():
            said[c].append(story.judge(c, loss=falling(number) * level * rng.gauss(1.0, 0.01)))
            if not together:
                story.settle(said[c][-1])
        if together:
            story.settle(*(verdicts[-1] for verdicts in said.values()))
    return story, said


def test_a_loss_is_held_against_the_others_median_and_its_own_distance() -> None:
    """Against plain lists: loss over the others' median, over the mean of its own such shares, the newest 0.2 of it."""
    rng, story = random.Random(4), GateStory("loss", known="")
    last, usual, known, risen = dict[str, float](), dict.fromkeys("abcd", 0.0), dict.fromkeys("abcd", 0), set[str]()
    gated, compared = 0, 0
    for number in range(40):
        for c, level in {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.3}.items():
            spoilt = 1.4 if c == "a" and 25 <= number < 30 else 1.0
            loss = falling(number) * level * spoilt * rng.gauss(1.0, 0.01)
            said = story.round(c, loss=loss)
            others = [x for k, x in last.items() if k != c]
            excess = loss / median(others) - 1.0 if others else 0.0
            if number >= 11:  # everybody has ten distances, and has warmed up
                above = excess > (1.0 + max(0.0, usual[c])) * (1.0 + MARGIN) - 1.0
                assert said.accepted is not (above and c in risen), (number, c, said)
                risen = risen | {c} if above else risen - {c}
                compared += 1
            last[c], gated = loss, gated + (not said.accepted)
            if said.accepted and others:
                weight = max(0.2, 1.0 / (known[c] + 1))
                usual[c], known[c] = usual[c] + weight * (excess - usual[c]), known[c] + 1
    assert (gated, compared) == (4, 29 * 4), "of five bad pushes all but the first"
    assert usual["d"] == pytest.approx(story.penalty.penalty_row("d").loss_shift) == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("level", [1.1, 1.2, 1.3, 1.5, 1.9])
def test_data_that_always_was_harder_gates_nobody_and_is_flagged(level: float, together: bool) -> None:
    """Sixty pushes, from the run's first: what is usual is learned in the first warm-up, that of joiners by joiners."""
    story, said = play_levels({"a": 1.0, "b": 1.0, "c": 1.0, "d": level}, 60, together)
    assert all(v.accepted for verdicts in said.values() for v in verdicts)
    differences = story.penalty.find_differences()
    assert set(differences) == ({"d"} if level > 1.0 + MARGIN else set())
    if differences:
        assert "harder data" in differences["d"][Difference.LOSS]


def test_who_always_had_harder_data_is_gated_when_it_gets_worse() -> None:
    """Its own past is what it is held against: shuffled targets of its own data are as bad as anybody's."""
    story, _ = play_levels({"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.3}, 40)
    said = [story.round("d", loss=1.3 * 1.25 * falling(40)) for _ in range(12)]
    assert [v.accepted for v in said] == [True] + 11 * [False]
    assert said[0].flags and "gated if its next one is, too" in said[0].flags[0]
    assert said[1].gate is GateName.LOSS and "usually +37 %" in said[1].reason
    assert story.round("d", loss=1.3 * falling(40)).accepted


def test_a_joiner_learns_what_is_usual_for_it() -> None:
    """Harder data that joins late is learned likewise, up to twice the others' loss; beyond that it is no data."""
    story = warm_losses("abc")
    assert all(story.round("x", loss=2.6).accepted for _ in range(30))
    row = story.penalty.penalty_row("x")
    assert row.loss_shift == pytest.approx(0.3) and Difference.LOSS in story.penalty.find_differences()["x"]
    assert [story.round("y", loss=5.0).accepted for _ in range(5)] == [True] + 4 * [False]
    assert all(story.round("z", loss=loss).accepted for loss in (2.0, *9 * [3.4])), "ten make it, not the first"


def test_who_was_kept_out_by_another_gate_has_not_risen() -> None:
    """θ forgets what is kept out, so its loss rises: that alone must not keep it out for good."""
    story = warm_losses()
    story.penalty._options = PenaltyOptions(gates=(GateName.DIPS, GateName.LOSS))
    assert [story.round("a", 25.0, loss=2.0 + 0.2 * i).accepted for i in range(4)] == 4 * [False]
    assert story.round("a", loss=2.9).accepted and not story.round("a", loss=2.9).accepted


@pytest.mark.parametrize("huge", [1e308, -1e308, nan, 1e-320])
def test_losses_at_the_ends_of_what_can_be_said_stay_numbers(huge: float) -> None:
    """Sums and shares of them overflow to inf and NaN, which the ledger would read back as another verdict."""
    story = warm_losses("abc")
    for cluster in "abcx":
        for loss in (huge, -huge, 2.0):
            story.round(cluster, loss=loss)
            row = story.penalty.penalty_row(cluster)
            assert isfinite(row.loss_shift) and row.loss is not None and isfinite(row.loss)


def warm_losses(known: str = "abcd", **own: object) -> GateStory:
    """Clusters that have warmed up and reported 2.0 last."""
    return GateStory("loss", known=known, **({"loss": 2.0, "losses": 40} | own))


def test_what_is_usual_is_learned_from_so_many_losses_and_no_more() -> None:
    """One push fewer, and a cluster may still be of data that are harder by a factor."""
    learned, learning = (
        warm_losses(losses=n).judge("a", loss=2.0 * (1 + MARGIN) + 0.1) for n in (LEARNED, LEARNED - 1)
    )
    assert learned.flags and "usually" in learned.flags[0]
    assert not learning.flags and "is learned, 1 pushes left" in learning.reason


def test_a_loss_far_above_the_others_is_gated_and_one_below_is_not() -> None:
    story = warm_losses()
    assert not story.judge("a", loss=2.0 * (1 + MARGIN) - 0.01).flags
    assert story.round("a", loss=2.0 * (1 + MARGIN) + 0.1).flags, "one may be bad luck"
    said = story.judge("a", loss=2.0 * (1 + MARGIN) + 0.1)
    assert not said.accepted and said.gate is GateName.LOSS and "others' median 2" in said.reason
    assert story.judge("a", loss=0.5).accepted
    assert "no loss" in story.judge("a").reason


def test_a_loss_just_at_the_margin_has_not_risen() -> None:
    """It passes without a flag, and the next one above is the first."""
    story = warm_losses(loss_rises=True)
    said = story.round("a", loss=2.0 * (1 + MARGIN))
    assert said.accepted and not said.flags
    assert story.round("a", loss=2.0 * (1 + MARGIN) + 0.1).flags


def test_harder_data_becomes_usual_while_it_is_accepted() -> None:
    """A cluster that is always 14 % above the others may be 28 % above them later, one that never was may not."""
    story = warm_losses(loss_rises=True)
    for _ in range(60):
        assert story.round("a", loss=2.28).accepted
    assert story.penalty.penalty_row("a").loss_shift == pytest.approx(0.14, rel=0.01)
    assert story.judge("a", loss=2.56).accepted and not story.judge("b", loss=2.56).accepted


def test_losses_that_fall_fast_make_nobody_usually_better() -> None:
    """Each push is below what the others reported last, until losses stop falling: then nobody is worse than usual."""
    story, loss = warm_losses(), 2.0
    for _ in range(30):
        for c in "abcd":
            loss *= 0.9
            assert story.round(c, loss=loss).accepted
    assert story.penalty.penalty_row("a").loss_shift < -MARGIN
    for _ in range(3):
        assert all(story.round(c, loss=loss).accepted for c in "abcd")


def test_one_other_is_too_few_to_say() -> None:
    """Two clusters cannot outvote each other: flagged, never gated."""
    said = warm_losses("ab", loss_rises=True).judge("a", loss=9.0)
    assert said.accepted and "too few" in said.flags[0]
    assert not warm_losses("abc", loss_rises=True).judge("a", loss=9.0).accepted
    assert "no others' losses" in warm_losses("a").judge("a", loss=9.0).reason


def test_joiners_losses_are_nobodys_measure() -> None:
    """What fresh models report is far above: it must not move the median that a bad push is held against."""
    story = warm_losses("ab")
    for c in "xyz":
        story.round(c, loss=9.0)
    said = story.judge("a", loss=5.0)
    assert said.accepted and said.flags, "one other that has warmed up, whoever else has joined"


def test_a_world_that_gets_harder_gates_only_until_all_have_said_so() -> None:
    """New data for everybody, half again as hard: losses of gated pushes are remembered, so the median follows."""
    story = warm_losses()
    said = [story.round(c, loss=3.0).accepted for _ in range(3) for c in "abcd"]
    assert all(said[4:]) and said.count(False) <= 3


def test_an_operator_may_make_a_distance_usual() -> None:
    """Gated three times in a row: quarantined, no warm-up; readmitted, its next losses are its usual ones."""
    story = warm_losses()
    assert story.round("a", loss=4.0).flags
    for _ in range(OPTIONS.gate_patience):
        assert not story.round("a", loss=4.0).accepted
    row = story.penalty.penalty_row("a")
    assert row.quarantined and row.warm_left == 0
    story.penalty.readmit_cluster("a")
    assert [story.round("a", loss=4.0).accepted for _ in range(5)] == [True] * 5
    assert story.penalty.penalty_row("a").loss_shift == pytest.approx(1.0)


@pytest.mark.parametrize("loss", [0.0, -1.0, 1e300])
def test_losses_that_have_no_shares_are_sentences(loss: float) -> None:
    """A median of 0, a negative one, a huge one: no division by zero, no NaN."""
    said = GateStory("loss", loss=loss).judge("a", loss=2.0)
    assert said.reason and "nan" not in said.reason


def test_shares_are_of_a_median_that_is_large_enough() -> None:
    """From LEAST_LOSS on; below it there are none."""
    assert excess_loss(2.0, [LEAST_LOSS]) == pytest.approx(2.0 / LEAST_LOSS)
    assert excess_loss(2.0, [0.99 * LEAST_LOSS]) is None


# ---- replay ----------------------------------------------------------------------------------------------------------


def test_the_same_parameters_count_once() -> None:
    """A digest that was accepted is refused, whoever brings it; one that was gated, or is too old, is forgotten."""
    story = GateStory("replay")
    assert story.round("a", digest=7).accepted
    for cluster in "ab":
        said = story.judge(cluster, digest=7)
        assert not said.accepted and said.gate is GateName.REPLAY and "those of a push that was accepted" in said.reason
    for digest in range(100, 100 + DIGESTS_KEPT):
        story.round("b", digest=digest)
    assert len(story.penalty.history.digests) == DIGESTS_KEPT
    assert story.judge("a", digest=7).accepted


def test_a_frozen_trainer_is_quarantined_and_comes_back() -> None:
    """It pushes what it pushed: gated from the second on; what is new again counts."""
    story = GateStory("replay")
    said = [story.round("a", digest=7).accepted for _ in range(5)]
    assert said == [True, False, False, False, False]
    assert story.penalty.penalty_row("a").quarantined
    assert story.round("a", digest=8).accepted and not story.penalty.penalty_row("a").quarantined


def test_without_the_gate_nothing_is_kept() -> None:
    """Digests, losses and layers are not of a run that does not look at them."""
    story = GateStory("dips")
    story.round("a", digest=7, loss=2.0, dot=-1.0, acc_sq=1.0, others=1)
    row = story.penalty.penalty_row("a")
    assert (story.penalty.history.digests, row.loss, row.suspicion, row.layers) == ((), None, 0.0, ())


# ---- together --------------------------------------------------------------------------------------------------------


def test_the_first_gate_that_keeps_a_push_out_decides() -> None:
    """All sentences of those that let it pass are told."""
    story = GateStory("dips", "direction", "replay")
    said = story.judge("a", others=1, dot=-0.5, acc_sq=1.0, digest=1)
    assert said.accepted and said.scored and said.reason.count(";") == 2 and len(said.flags) == 1
    assert story.judge("a", 100.0, **against("a", 3, dot=-5.0)).gate is GateName.DIPS
    assert GateStory("direction", "dips").judge("a", 100.0, **against("a", 3, dot=-3.0)).gate is GateName.DIRECTION


@pytest.mark.parametrize("gate", list(GateName))
def test_every_opinion_is_a_sentence(gate: GateName) -> None:
    """Of a push without a past, without others and without anything that is optional."""
    story = GateStory(gate, known="")
    for push in (PushEvidence("a", (), 0), PushEvidence("a", (1.0,), 1), PushEvidence("a", (1.0,), 1, exempt=True)):
        opinion = GATES[gate](push, story.penalty._past_of(story.penalty.penalty_row("a")))
        assert opinion.finding is Finding.PASSED and opinion.sentence
