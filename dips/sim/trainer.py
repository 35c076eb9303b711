"""A simulated trainer: one attempt of a training job, whose ranks hold shards of θ and move their own bytes.

It does what client/outer_loop.py and client/mover.py do: rank 0 talks to the agent's mind and repeats a question until
there is an answer, every verdict reaches all ranks, all ranks install a version or none does, what lossy pushes owe is
kept by the real Feedback. A rank that died is seen by torchrun after a while; until then the others stand still.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, Protocol

import numpy as np

from dips.client.local import (
    Answer,
    Attach,
    Bye,
    Failure,
    Halt,
    Moving,
    Over,
    PullMoved,
    PullNow,
    PullWanted,
    PushMoved,
    PushNow,
    PushWanted,
    Question,
    RangeGiven,
    RangesEnded,
    RangeWanted,
    Stepped,
    TrainOn,
    Wait,
    Welcome,
)
from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Grant
from dips.protocol.manifest import Manifest
from dips.protocol.options import Options
from dips.sim.fiber import Fiber, Gate, Resume, Story, sleep
from dips.sim.fiber import Wait as Waiting
from dips.sim.heap import Chance, Heap, Timer, Trace
from dips.sim.ranks import SimRanks
from dips.sim.scenario import Scenario
from dips.sim.site import Site
from dips.sim.transfer import DataNetwork, Pulled
from dips.sim.transfer import Moving as UnderWay
from dips.sim.work import Books, Frozen, Use, Work
from dips.slave.ports import F32
from dips.wire.frame import Buffer

POLL_S = 1.0  # rank 0 waits no longer for an answer before it asks the same again
Talk = PushWanted | PushMoved | PullWanted | PullMoved


class TrainerWorld(Protocol):
    """What a trainer needs of the world around it."""

    heap: Heap
    chance: Chance
    trace: Trace
    books: Books
    data: DataNetwork
    scenario: Scenario
    options: Options
    manifest: Manifest
    sizes: dict[int, int]

    def later(self, delay_s: float, what: str, action: Callable[[], None]) -> Timer: ...
    def descend(self, theta: dict[int, F32], rng: Random) -> None: ...


class TrainerAgent(Protocol):
    """What a trainer needs of its agent: answers, and somebody who takes note of what it does."""

    gate: Gate

    def hear(self, message: Question | Stepped) -> Answer | None: ...
    def next_change(self, at_most_s: float) -> Waiting: ...
    def ended(self) -> None: ...
    def record_step(self) -> None: ...
    def record_work(self, work: Work) -> None: ...
    def record_push(self, push: PushId) -> None: ...
    def record_push_end(self, push: PushId, moved: bool) -> None: ...
    def record_pull(self, pull: PullId) -> None: ...
    def record_install(self, trainer: SimTrainer) -> None: ...
    def record_pull_end(self, installed: bool, attempt: int) -> None: ...


class SimTrainer:
    """One attempt: from torchrun's start to its end."""

    def __init__(self, world: TrainerWorld, site: Site, agent: TrainerAgent, life: int) -> None:
        self.agent, self.world, self.site, self.life = agent, world, site, life
        self.gate = Gate(agent.gate)  # closed while it hangs
        self.attempt = self._number = self._ranges_asked = self._look_in = 0
        self._ranks = SimRanks(world.sizes, site.ranks, world.options.codec != "fp32")
        self.works: list[Work] = []  # inner steps since the last install: what the next push carries, if not settled
        self.used: list[Use] = []  # data ranges used up since then
        self.range: int | None = None
        self.finished = False
        self.over = False  # it said goodbye
        self.moving: UnderWay | None = None
        self.pull_tries = 0
        self.alive = True
        self._fiber = Fiber(self._train(), self.gate)

    @property
    def theta(self) -> dict[int, F32]:
        return self._ranks.theta

    @property
    def held(self) -> list[VersionId | None]:
        return self._ranks.held

    @property
    def base(self) -> VersionId | None:
        return self._ranks.base

    def kill(self) -> None:
        """All ranks are gone."""
        self.alive = False
        self._fiber.kill()
        if self.moving is not None:
            self.moving.cancel()

    def lose_rank(self, rank: int) -> None:
        """One rank is gone, the others stand still in their next collective until torchrun ends them."""
        self._fiber.kill()
        if self.moving is not None:
            self.moving.lose(rank)

    # ---- the training script ---------------------------------------------------------------------------------------

    def _train(self) -> Story:
        world = self.world
        yield sleep(world.heap, 0.3 + self.site.rng.random(), f"{self.site.name} starts its trainer")
        attach = Attach(self.life, 0, str(self.life), world.manifest.to_json(), self.site.ranks, self.site.ranks)
        welcome = yield from self._persist(attach)
        assert isinstance(welcome, Welcome), welcome
        self.attempt = welcome.attempt
        yield from self._obey(PullWanted(self.attempt, self._next()))
        while not self.finished:
            self._ranges_asked += 1
            given = yield from self._persist(RangeWanted(self.attempt, self._ranges_asked))
            if self.range is not None:
                self.used.append(Use(self.range))
            self.range = given.range if isinstance(given, RangeGiven) else None
            if isinstance(given, RangesEnded):
                if given.finished:
                    yield from self._obey(PushWanted(self.attempt, self._next()))
                break
            yield from self._inner_step()
        self._hear(Bye(self.attempt))
        self.over = True
        self.agent.ended()

    def _inner_step(self) -> Story:
        site = self.site
        yield sleep(self.world.heap, site.step_s * (0.7 + 0.6 * site.rng.random()), f"inner step of {site.name}")
        self.agent.record_step()
        work = Work(site.name, self.range or 0, site.rng.randint(1, 5))
        self.works.append(work)
        self.agent.record_work(work)
        self.world.descend(self.theta, site.rng)
        self._hear(Stepped(self.attempt, work.tokens, 1.0))
        self._look_in -= 1
        if self._look_in <= 0:
            yield from self._obey(PushWanted(self.attempt, self._next()))

    # ---- the talk --------------------------------------------------------------------------------------------------

    def _obey(self, talk: Talk) -> Story:
        """Do what the agent says, until it says to train on."""
        while True:
            verdict = yield from self._persist(talk)
            if isinstance(verdict, PushNow):
                talk = yield from self._push(verdict)
            elif isinstance(verdict, PullNow):
                talk = yield from self._pull(verdict)
            elif isinstance(verdict, TrainOn):
                self._look_in = verdict.steps
                return
            else:
                assert isinstance(verdict, Over), verdict
                self.finished = True
                return

    def _persist(self, question: Question) -> Story:
        while True:
            changed = self.agent.next_change(POLL_S)
            answer = self._hear(question)
            if not isinstance(answer, Wait):
                return answer
            yield changed

    def _hear(self, message: Question | Stepped) -> Answer | None:
        answer = self.agent.hear(message)
        if isinstance(answer, Failure) and not answer.error.startswith("Stale"):
            raise AssertionError(f"{self.site.name}: the agent answers {answer.error}: {answer.message}")
        if isinstance(answer, Failure):  # another attempt took over, or the agent is being ended
            self._fiber.kill()
            return Wait(answer.message)
        return answer

    def _next(self) -> int:
        self._number += 1
        return self._number

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def _push(self, verdict: PushNow) -> Story:
        push = PushId(self.site.name, verdict.inc, verdict.seq)
        self.agent.record_push(push)
        spell = self._freeze(push, verdict)
        start = partial(self.world.data.push, push, verdict.grant, spell, self.site.ranks, self.agent.gate)
        moved = yield from self._move(start)
        nbytes = self.moving.meter.nbytes if self.moving else 0
        self.moving = None
        self.agent.record_push_end(push, bool(moved))
        return PushMoved(self.attempt, self._next(), verdict.seq, bool(moved), "" if moved else "it broke", nbytes)

    def _pull(self, verdict: PullNow) -> Story:
        pull = PullId(self.site.name, verdict.inc, verdict.seq)
        self._ranks.hear(verdict)
        self.agent.record_pull(pull)
        start = partial(self.world.data.pull, pull, verdict.grant, self.site.ranks, self.agent.gate)
        landed = yield from self._move(start)
        nbytes = self.moving.meter.nbytes if self.moving else 0
        self.moving = None
        installed = bool(landed) and self._install(landed, verdict.grant)
        self.pull_tries += 1
        self.agent.record_pull_end(installed, self.pull_tries)
        self.pull_tries = 0 if installed else self.pull_tries
        reason = "" if installed else "it broke"
        return PullMoved(self.attempt, self._next(), verdict.seq, installed, reason, nbytes)

    def _move(self, start: partial[UnderWay]) -> Story:
        """Move, and tell the agent how far; it may know that this leads nowhere. None if it was halted."""
        ended: list[object] = []
        waiting: list[Resume] = []

        def done(result: object) -> None:
            ended.append(result)
            for resume in list(waiting):
                resume(None)

        self.moving = start(done)
        meter = self.moving.meter
        while not ended:
            yield self._either(waiting, POLL_S)
            if not ended and isinstance(self._hear(Moving(self.attempt, meter.nbytes, meter.total)), Halt):
                self.moving.cancel()
                meter.ended = self.world.heap.now
                return None
        return ended[0]

    def _either(self, waiting: list[Resume], seconds: float) -> Waiting:
        """Wait for the end of the transfer, or so long."""

        def begin(resume: Resume) -> None:
            timer = self.world.heap.after(seconds, f"{self.site.name} polls", lambda: first(None))

            def first(value: Any) -> None:
                if first in waiting:
                    waiting.remove(first)
                    timer.cancel()
                    resume(value)

            waiting.append(first)

        return begin

    def _freeze(self, push: PushId, verdict: PushNow) -> partial[Buffer]:
        """Cut the progress, and keep what every slave must hold when all of it has moved."""
        assert self.base is not None
        theta = {layer: a.copy() for layer, a in self.theta.items()}
        diverged = self.site.diverged > 0
        if diverged:
            self.site.diverged -= 1
            theta[0][0] = np.float32("nan") if self.site.rng.random() < 0.5 else np.float32(1e4)
        bodies, content = self._ranks.freeze(theta, verdict)
        settled = self.world.books.settled
        work = tuple(w for w in self.works if id(w) not in settled)
        used = tuple(use for use in self.used if not use.settled)
        frozen = Frozen(push, self.base, content, work, used, diverged, verdict.grant.codec)
        self.world.books.frozen[push] = frozen
        return partial(_body, bodies)

    def _install(self, landed: list[Pulled], grant: Grant) -> bool:
        """Put what was pulled into the model, on all ranks or on none."""
        installed = self._ranks.install(landed, grant.version)
        if installed and self.base == grant.version:
            self.agent.record_install(self)
        return installed


def _body(bodies: dict[tuple[int, int, int], Buffer], rank: int, layer: int, where: slice) -> Buffer:
    return bodies[rank, layer, where.start]
