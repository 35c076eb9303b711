"""Drives an agent's core: rank 0 on one side, the master on the other, and a clock that the test holds."""

from __future__ import annotations

from itertools import count
from random import Random
from typing import Any, TypeVar

from dips.client.agent.account import NO_INCARNATION, Pace, PastIncarnation
from dips.client.agent.core import AgentCore
from dips.client.agent.membership import build_heartbeat
from dips.client.agent.state import (
    Actions,
    AgentSettings,
    AskMaster,
    Channel,
    ClusterIdentity,
    RecordMark,
    SaveIncarnation,
    SendHeartbeat,
    StopTrainer,
)
from dips.client.ipc.messages import (
    Answer,
    AskAgain,
    Attach,
    Attached,
    Message,
    PullMoved,
    PullNow,
    PullWanted,
    PushMoved,
    PushNow,
    PushWanted,
    Stepped,
)
from dips.errors import UnavailableMaster
from dips.ids import GENESIS, VersionId
from dips.protocol.effects import Acknowledged, Committed, Grant, Joined, Outcome, Progress, Result
from dips.protocol.enums import ClusterStanding, OutcomeKind
from dips.protocol.events import ClusterJoined, PullFinished, PullRequested, PushFinished, PushRequested, RoundAwaited
from dips.protocol.heartbeats import ClusterHeartbeat, ClusterHeartbeatAnswer
from dips.protocol.manifest import Manifest

H = 64
HEARTBEAT_S = 2.0  # so a trainer waits 10 s for a master that does not answer
V1 = VersionId(1, 1)
NONE_YET = Progress(0, 1000, None)
MODEL = Manifest.from_shapes([("norm.weight", (8,))])
DIGEST = MODEL.digest
E = TypeVar("E")


def grant(version: VersionId = GENESIS) -> Grant:
    return Grant(version, (), 60.0)


def outcome(kind: OutcomeKind, version: VersionId | None = V1, pull: bool = True) -> Outcome:
    return Outcome(kind, version, "", grant(V1) if pull else None, Progress(40, 1000, None))


class Play:
    """One core, what it last asked the master, and everything that it recorded."""

    def __init__(
        self,
        overlap: bool = False,
        former: PastIncarnation = NO_INCARNATION,
        max_restarts: int = 0,
        heartbeat_s: float = HEARTBEAT_S,
        pace_steps: int = H,
        **settings: Any,
    ) -> None:
        nonces = count(1)
        self.core = AgentCore(
            AgentSettings(
                ClusterIdentity("run", "west", "digest"), heartbeat_s, 1.0, overlap, max_restarts, **settings
            ),
            Pace(steps=pace_steps),
            lambda: f"nonce{next(nonces)}",
            Random(0),
            former,
        )
        self.s = self.core.state
        self.now = 0.0
        self.asks: dict[Channel, AskMaster] = {}
        self.marks: list[tuple[str, dict[str, Any]]] = []
        self.stops: list[StopTrainer] = []
        self.heartbeats: list[ClusterHeartbeat] = []
        self.saved: list[PastIncarnation] = []
        self.number = count(1)
        self.demands = True  # pushes are demanded, else by the pace

    def do(self, actions: Actions) -> None:
        for action in actions:
            match action:
                case AskMaster():
                    self.asks[action.channel] = action
                case SendHeartbeat():
                    self.heartbeats.append(action.heartbeat)
                case SaveIncarnation():
                    self.saved.append(action.past)
                case RecordMark(kind, fields):
                    self.marks.append((kind, dict(fields)))
                case StopTrainer():
                    self.stops.append(action)

    # ---- rank 0 ----------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> Answer | None:
        answer, actions = self.core.on_message(message, self.now)
        self.do(actions)
        return answer

    def step(self, times: int = 1, tokens: int = 10) -> None:
        for _ in range(times):
            assert self.send(Stepped(self.s.trainer.attempt, tokens, 2.0)) is None

    def want_push(self) -> PushWanted:
        """Demanded, since these stories are about pushes; when one is due is test_pace.py's."""
        return PushWanted(self.s.trainer.attempt, next(self.number), self.demands)

    def look_for_push(self) -> PushWanted:
        """By the pace: the trainer trains on where a demanded push would wait."""
        return PushWanted(self.s.trainer.attempt, next(self.number))

    def attach(self, launch: int = 1, restart: int = 0, pid: int = 7) -> Attach:
        kept = self.s.settings
        return Attach(launch, restart, str(pid), DIGEST, 1, 2, kept.overlap, kept.fragments, kept.on_divergence)

    # ---- the master ------------------------------------------------------------------------------------------------

    def asked(self, kind: type[E], channel: Channel = Channel.SYNC) -> E:
        event = self.asks[channel].event
        assert isinstance(event, kind), f"expected {kind.__name__}, the agent asked {event}"
        return event

    def reply(self, result: Result, channel: Channel = Channel.SYNC) -> None:
        self.do(self.core.on_reply(self.asks[channel], result, self.now))

    def lose_master(self, now: float) -> None:
        """The master does not answer any more."""
        self.do(self.core.on_heartbeat_error(UnavailableMaster("no answer"), now))

    def answer_heartbeat(self, standing: ClusterStanding, term: int = 3, inc: int | None = None) -> None:
        """The answer to a heartbeat of this incarnation, or of incarnation `inc`."""
        heartbeat = build_heartbeat(self.s)
        assert heartbeat is not None
        answer = ClusterHeartbeatAnswer(term, 10.0, standing, None, None, NONE_YET)
        self.do(self.core.on_heartbeat_reply(heartbeat.inc if inc is None else inc, answer, self.now))

    # ---- whole stretches -------------------------------------------------------------------------------------------

    def begin(self, inc: int = 1, ranges: tuple[int, ...] = ()) -> None:
        """Attach, join and pull v0@r0."""
        assert isinstance(self.send(self.attach()), AskAgain)
        self.asked(ClusterJoined)
        self.reply(Joined(3, inc, GENESIS, NONE_YET, ranges))
        assert isinstance(self.send(self.attach()), Attached)
        self.pull(GENESIS)

    def pull(self, version: VersionId, installed: bool = True) -> Answer | None:
        want = PullWanted(self.s.trainer.attempt, next(self.number))
        self.send(want)
        pull = self.asked(PullRequested).pull
        self.reply(grant(version))
        sync = self.s.sync
        verdict = PullNow(pull.inc, pull.seq, grant(version), self.s.fraction, sync.accepted_seq, result=sync.result)
        assert self.send(want) == verdict
        moved = PullMoved(self.s.trainer.attempt, next(self.number), pull.seq, installed, "", 100)
        answer = self.send(moved)
        assert self.asked(PullFinished) == PullFinished(0, pull, installed)
        self.reply(Acknowledged())
        return answer

    def push_until_granted(self) -> PushNow:
        want = self.want_push()
        assert isinstance(self.send(want), AskAgain)
        self.asked(PushRequested)
        self.reply(grant())
        verdict = self.send(want)
        assert isinstance(verdict, PushNow)
        return verdict

    def push_until_committed(self) -> PushMoved:
        verdict = self.push_until_granted()
        moved = PushMoved(self.s.trainer.attempt, next(self.number), verdict.seq, True, "", 100)
        assert isinstance(self.send(moved), AskAgain)
        self.asked(PushFinished)
        self.reply(Committed())
        self.asked(RoundAwaited)
        assert isinstance(self.send(moved), AskAgain)
        return moved

    def push_until_accepted(self) -> PullNow:
        """Push, and return the order to pull what the run made of it."""
        moved = self.push_until_committed()
        self.reply(outcome(OutcomeKind.ACCEPTED))
        order = self.send(moved)
        assert isinstance(order, PullNow)
        return order

    def check_consumed(self, consumed: int) -> None:
        assert self.s.account.consumed_tokens == consumed
