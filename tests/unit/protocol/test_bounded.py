"""Days of rounds leave the Coordinator as small as the first of them (docs/architecture.md#invariant-11)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.protocol import codec, effects, events
from dips.protocol.coordinator import Coordinator
from dips.protocol.data import Intervals
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.protocol.options import Options, PenaltyOptions, TimingOptions
from dips.protocol.records import LedgerState, RunRow, ScoreHistory, VersionRow
from tests.push_digest import digest_push

ROUNDS, EVERY_S = 2_300, 200.0  # five days
FULL = 2_000  # rounds after which every history is as long as it may become
LEFT = 100  # bytes by which the text of one state may be longer than that of another: digits of its numbers
CLUSTERS = ("a", "b")


class BoundedRun:
    """One slave and two clusters that do the least: every question is asked, every order carried out at once."""

    def __init__(self) -> None:
        manifest = Manifest((Layer("l", (Parameter("l.w", (4,)),)),))
        row = RunRow("r", "c", manifest.to_json(), (("s", (0,)),), ("0" * 32,), (2.0,))
        state = LedgerState(row, 1, 1, (), (), (), (), (), ScoreHistory((), ()), (), Intervals(), None)
        state = genesis(state)
        options = Options(penalty=PenaltyOptions(warmup_rounds=1), timing=TimingOptions(window_s=1.0), lineage_kept=100)
        self.machine, self.now, self.req = Coordinator(state, manifest, options, 0.0), 0.0, 0
        self.seq = dict.fromkeys(CLUSTERS, 0)
        self.ask(lambda r: events.SlaveRegistered(r, "s", "n", "r", "s:1", ("s:2",), 1, GENESIS, None, (), 2, ""))
        for name in CLUSTERS:
            self.ask(lambda r, name=name: events.ClusterJoined(r, name, "n", "r", manifest.digest, "c"))
            self.pull(name, self.next(name))

    def ask(self, make: Callable[[int], events.Event]) -> Any:
        self.req += 1
        return self.step(make(self.req))

    def step(self, event: events.Event) -> Any:
        """Step, carry out every order that follows, and return the last answer to a question."""
        self.now += 0.01
        answer, waiting = None, [event]
        while waiting:
            for effect in self.machine.step(waiting.pop(0), self.now):
                if isinstance(effect, effects.Order):
                    waiting.append(events.OrderAnswered("s", 1, effect.number, answer_to(effect.body)))
                elif isinstance(effect, effects.Reply):
                    answer = effect.result
        return answer

    def next(self, name: str) -> int:
        self.seq[name] += 1
        return self.seq[name]

    def pull(self, name: str, seq: int) -> None:
        for _ in range(2):
            answer = self.ask(lambda r: events.PullRequested(r, PullId(name, 1, seq), 1))
        assert isinstance(answer, effects.Grant), answer
        self.ask(lambda r: events.PullFinished(r, PullId(name, 1, seq), True))

    def round(self) -> None:
        """Both push and one pull follows each Outcome."""
        head = VersionId.parse(self.machine.build_view(self.now).head)
        pushes = [PushId(name, 1, self.next(name)) for name in CLUSTERS]
        for push in pushes:
            for _ in range(2):
                answer = self.ask(lambda r, push=push: events.PushRequested(r, push, head, 1))
            assert isinstance(answer, effects.Grant), answer
        for push in pushes:
            self.step(events.PushStaged("s", 1, push, 16))
            self.ask(lambda r, push=push: events.PushFinished(r, push, 8, 1, (), 1.0))
        self.now += EVERY_S
        self.step(events.Ticked())
        for push in pushes:
            answer = self.ask(lambda r, push=push: events.RoundAwaited(r, push))
            assert isinstance(answer, effects.Outcome), answer
            self.ask(lambda r, push=push: events.PullFinished(r, PullId(push.cluster, 1, push.seq), True))


def genesis(state: LedgerState) -> LedgerState:
    return replace(state, versions=(VersionRow(GENESIS, GENESIS, True, 0, False),))


def answer_to(body: effects.OrderBody) -> events.Answer:
    match body:
        case effects.Measure():
            return events.Measured((0.01,), True, digest=digest_push(body.push))
        case effects.Fold():
            return events.Folded((0.01,))
        case effects.Apply():
            return events.Prepared(body.version)
        case effects.Persist():
            return events.Persisted(body.version, "d" * 32)
        case _:
            return events.Done()


def largest(spelled: Any, path: str = "") -> Iterator[tuple[int, str]]:
    """Sizes of everything that the state holds, with where it is held."""
    if isinstance(spelled, dict):
        for name, item in spelled.items():
            yield len(json.dumps(item)), f"{path}.{name}"


@pytest.mark.timeout(300)
def test_the_state_of_a_long_run_is_bounded() -> None:
    """After 2,300 rounds nothing that the Coordinator holds is larger than after 2,000, but for counters.

    A byte that each round left behind would be seen.
    """
    run = BoundedRun()
    sizes = list[int]()
    for number in range(1, ROUNDS + 1):
        run.round()
        if number in (FULL, ROUNDS):
            sizes.append(len(codec.encode_text(run.machine.capture_state())))
            print(
                number, sizes[-1], sorted(largest(codec.encode_value(run.machine.capture_state())[1]), reverse=True)[:4]
            )
    assert run.machine.build_view(run.now).rounds.applied == ROUNDS
    assert sizes[1] < sizes[0] + LEFT < sizes[0] + ROUNDS - FULL
