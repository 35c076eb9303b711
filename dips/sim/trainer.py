"""A simulated trainer: one attempt of a training job, whose ranks hold shards of θ and move their own bytes.

It does what client/outer_loop.py and client/mover.py do: rank 0 talks to the agent's mind and repeats a question until
there is an answer, every verdict reaches all ranks, all ranks install a version or none does, what lossy pushes owe is
kept by the real Feedback. A rank that died is seen by torchrun after a while; until then the others stand still.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dips.client.ipc.messages import (
    Answer,
    AskAgain,
    Attach,
    Attached,
    Bye,
    ErrorReply,
    Halt,
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
    TransferProgress,
)
from dips.client.rank.feedback import Feedback
from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Grant
from dips.sim.fiber import Fiber, Gate, Resume, Story, sleep
from dips.sim.fiber import Wait as Waiting
from dips.sim.flow import CHUNKS, share
from dips.sim.transfer import Moving as UnderWay
from dips.sim.transfer import Pulled
from dips.sim.work import Frozen, Use, Work
from dips.slave.ports import F32
from dips.transport.shares import Piece
from dips.wire import codecs
from dips.wire.chunks import Range
from dips.wire.frame import Buffer

if TYPE_CHECKING:
    from dips.sim.cluster import Agent

POLL_S = 1.0  # rank 0 waits no longer for an answer before it asks the same again
Talk = PushWanted | PushMoved | PullWanted | PullMoved


class Trainer:
    """One attempt: from torchrun's start to its end."""

    def __init__(self, agent: Agent, life: int) -> None:
        self.agent, self.world, self.site, self.life = agent, agent.world, agent.site, life
        self.gate = Gate(agent.gate)  # closed while it hangs
        self.attempt = self._number = self._ranges_asked = self._look_in = 0
        self.theta: dict[int, F32] = {}
        self.held: list[VersionId | None] = [None] * self.site.ranks  # what each rank installed last
        self.base: VersionId | None = None
        self.works: list[Work] = []  # inner steps since the last install: what the next push carries, if not settled
        self.used: list[Use] = []  # data ranges used up since then
        self.range: int | None = None
        self.finished = False
        self.over = False  # it said goodbye
        self.moving: UnderWay | None = None
        self.pull_tries = 0
        self.alive = True
        self._host: dict[int, F32] = {layer: np.zeros(n, np.float32) for layer, n in self.world.sizes.items()}
        self._feedback = [self._feedback_of(rank) for rank in range(self.site.ranks)] if self._lossy else []
        self._fiber = Fiber(self._train(), self.gate)

    @property
    def _lossy(self) -> bool:
        return self.world.options.codec != "fp32"

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
        assert isinstance(welcome, Attached), welcome
        self.attempt = welcome.attempt
        yield from self._obey(PullWanted(self.attempt, self._next()))
        rest = False  # the data is used up, and some of what was trained is to be pushed yet
        while not self.finished:
            self._ranges_asked += not rest
            given = yield from self._persist(RangeWanted(self.attempt, self._ranges_asked))
            if self.range is not None:
                self.used.append(Use(self.range))
            self.range = given.range if isinstance(given, RangeGiven) else None
            if isinstance(given, RangesEnded):
                rest = given.unsettled
                if given.finished or rest:
                    yield from self._obey(PushWanted(self.attempt, self._next(), demanded=rest))
                if rest:
                    continue
                break
            yield from self._inner_step()
        self._hear(Bye(self.attempt))
        self.over = True
        self.agent.ended()

    def _inner_step(self) -> Story:
        site = self.site
        yield sleep(self.world.heap, site.step_s * (0.7 + 0.6 * site.rng.random()), f"inner step of {site.name}")
        self.world.watch.stepped(self.agent)
        work = Work(site.name, self.range or 0, site.rng.randint(1, 5))
        self.world.books.did(work)
        self.works.append(work)
        self.agent.earned(work)
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
            if not isinstance(answer, AskAgain):
                return answer
            yield changed

    def _hear(self, message: Question | Stepped) -> Answer | None:
        answer = self.agent.hear(message)
        if isinstance(answer, ErrorReply) and not answer.error.startswith("Stale"):
            raise AssertionError(f"{self.site.name}: the agent answers {answer.error}: {answer.message}")
        if isinstance(answer, ErrorReply):  # another attempt took over, or the agent is being ended
            self._fiber.kill()
            return AskAgain(answer.message)
        return answer

    def _next(self) -> int:
        self._number += 1
        return self._number

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def _push(self, verdict: PushNow) -> Story:
        push = PushId(self.site.name, verdict.inc, verdict.seq)
        self.world.watch.granted(self.agent, push)
        spell = self._freeze(push, verdict)
        start = partial(self.world.data.push, push, verdict.grant, spell, self.site.ranks, self.agent.gate)
        moved = yield from self._move(start)
        nbytes = self.moving.meter.nbytes if self.moving else 0
        self.moving = None
        self.world.watch.push_moved(self.agent, push, bool(moved))
        return PushMoved(self.attempt, self._next(), verdict.seq, bool(moved), "" if moved else "it broke", nbytes)

    def _pull(self, verdict: PullNow) -> Story:
        pull = PullId(self.site.name, verdict.inc, verdict.seq)
        for feedback in self._feedback:
            feedback.settle_last_push(verdict.inc, verdict.accepted)
        self.world.watch.pulling(self.agent, pull)
        start = partial(self.world.data.pull, pull, verdict.grant, self.site.ranks, self.agent.gate)
        landed = yield from self._move(start)
        nbytes = self.moving.meter.nbytes if self.moving else 0
        self.moving = None
        installed = bool(landed) and self._install(landed, verdict.grant)
        self.pull_tries += 1
        self.world.watch.pulled(self.agent, installed, self.pull_tries)
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
            if not ended and isinstance(self._hear(TransferProgress(self.attempt, meter.nbytes, meter.total)), Halt):
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
        bodies, content = self._spelled(theta, verdict)
        settled = self.world.books.settled
        work = tuple(w for w in self.works if id(w) not in settled)
        used = tuple(use for use in self.used if not use.settled)
        frozen = Frozen(push, self.base, content, work, used, diverged, verdict.grant.codec)
        self.world.books.frozen[push] = frozen
        return partial(_body, bodies)

    def _spelled(
        self, theta: dict[int, F32], verdict: PushNow
    ) -> tuple[dict[tuple[int, int, int], Buffer], dict[int, F32]]:
        """Every chunk's body, and what a slave's slot holds when all are in it."""
        codec = codecs.named(verdict.grant.codec)
        for layer, a in theta.items():
            self._host[layer][:] = a
        for feedback in self._feedback:
            feedback.settle_last_push(verdict.inc, verdict.accepted)
            assert not codec.lossy or feedback.has_base(verdict.grant.base), f"{self.base} is not {verdict.grant.base}"
            feedback.freeze_push(verdict.seq, codec.name)
        base = self._base_of(verdict.grant) if codec.lossy else None
        content = base or {layer: np.zeros_like(a) for layer, a in theta.items()}
        bodies: dict[tuple[int, int, int], Buffer] = {}
        for layer, rank, where in self._chunks():
            values = self._host[layer][where]
            body: Buffer = codec.encode(values) if not codec.lossy else b""
            if self._feedback:
                chunk = Range(layer, 0, where.start, where.stop - where.start)
                body = self._feedback[rank].encode_chunk(chunk, values.view(np.uint8).data)
            bodies[rank, layer, where.start] = bytes(body)
            with np.errstate(all="ignore"):
                codec.put(body, content[layer][where])
        return bodies, content

    def _base_of(self, grant: Grant) -> dict[int, F32]:
        """θ of the granted base, from the twin: what the slaves put into the slot."""
        assert grant.base is not None
        return self.world.lineage.twin.arrays(grant.base)

    def _chunks(self) -> list[tuple[int, int, slice]]:
        found = []
        for layer, size in self.world.sizes.items():
            for rank in range(self.site.ranks):
                whole = share(size, rank, self.site.ranks)
                for number in range(CHUNKS):
                    part = share(whole.stop - whole.start, number, CHUNKS)
                    if part.stop > part.start:
                        found.append((layer, rank, slice(whole.start + part.start, whole.start + part.stop)))
        return found

    def _feedback_of(self, rank: int) -> Feedback:
        cuts = [(layer, share(size, rank, self.site.ranks)) for layer, size in self.world.sizes.items()]
        return Feedback([Piece(l, 0, c.start, c.stop - c.start, self._host[l][c]) for l, c in cuts if c.stop > c.start])

    def _install(self, landed: list[Pulled], grant: Grant) -> bool:
        """Every rank that the all-reduce allows copies what it has."""
        allowed = self.agreed(landed)
        if allowed and not self.theta:
            self.theta = {layer: np.zeros(size, np.float32) for layer, size in self.world.sizes.items()}
        for pulled in allowed:
            for layer, where, values in pulled.pieces:
                self.theta[layer][where] = values
                self._host[layer][where] = values
            self.held[pulled.rank] = pulled.versions[0] if pulled.versions else grant.version
        if len(allowed) == self.site.ranks:
            self.base = grant.version
            for feedback in self._feedback:
                feedback.set_base(grant.version)
            self.agent.overwritten(self)
            self.world.watch.installed(self.agent)
        return bool(allowed)

    def agreed(self, landed: list[Pulled]) -> list[Pulled]:
        """The all-reduce (MIN) of (version, whole): all ranks copy or none does."""
        versions = {v for pulled in landed for v in pulled.versions}
        return landed if len(versions) == 1 and all(pulled.whole for pulled in landed) else []


def _body(bodies: dict[tuple[int, int, int], Buffer], rank: int, layer: int, where: slice) -> Buffer:
    return bodies[rank, layer, where.start]
