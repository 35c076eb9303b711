"""A simulated training cluster: an agent with the client's behaviour, and a trainer whose ranks hold shards of θ.

The agent's life and the trainer's attempt end separately. What must stay true on this side of the wire: the same key is
asked again until an answer comes; progress is settled by an Outcome only; all ranks install a version or none does.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dips.ids import PullId, PushId, VersionId
from dips.protocol.beats import ClusterBeat, ClusterBeatAnswer
from dips.protocol.effects import Committed, Failed, Finished, Grant, Joined, Outcome, Pending, Ranges, Refused
from dips.protocol.events import (
    ClusterJoined,
    PullFinished,
    PullRequested,
    PushAborted,
    PushFinished,
    PushRequested,
    RangesRequested,
    RoundAwaited,
)
from dips.sim.fiber import Fiber, Story, Wait, sleep
from dips.sim.transfer import Pulled
from dips.sim.work import Frozen, Work
from dips.slave.ports import F32

if TYPE_CHECKING:
    from dips.sim.site import Site

CALL_S = 2.0  # deadline of one question
PAUSE_S = 0.5  # between two askings of the same question
RANGES_AT_ONCE = 12
PULLS_TRIED = 2  # after an Outcome; then the cluster trains on with what it has


class Agent:
    """One process of the agent, with the trainer that it keeps alive."""

    def __init__(self, site: Site, process: str) -> None:
        self.site, self.world, self.name, self.process = site, site.world, site.name, process
        self.term = 0
        self.inc = 0
        self.seq = 0
        self.joins = 0
        self.range_seq = 0
        self.live = False  # as far as we were told: our life is the present one
        self.ranges: deque[int] = deque()
        self.carried: list[Work] = []  # done by this trainer and not settled
        self.open: Frozen | None = None  # pushed, Outcome unknown
        self.base: VersionId | None = None
        self.theta: dict[int, F32] = {}
        self.held: list[VersionId | None] = [None] * site.ranks  # what each rank installed last
        self.inner_steps = 0
        self.steps_since = 0
        self.not_before = 0.0
        self.tokens_lost = 0
        self.attempt = 0
        self.activity = "idle"
        self.ending: VersionId | None = None  # we were told that the run is over
        self.finished: VersionId | None = None  # and hold its last version
        self.outcome_at = self.world.heap.now  # when it last heard an Outcome, or began
        self.trainer: Fiber | None = None
        self.beats = Fiber(self._beat())
        self._start_trainer()

    # ---- lives -----------------------------------------------------------------------------------------------------

    def die(self) -> None:
        self.beats.kill()
        if self.trainer is not None:
            self.trainer.kill()
        self._lose([*self.carried, *(self.open.work if self.open else ())])

    def trainer_died(self) -> None:
        """Its unfrozen steps are gone; their data ranges are still leased to us and are trained again."""
        assert self.trainer is not None
        self.trainer.kill()
        self.trainer = None
        pushed = set(map(id, self.open.work)) if self.open else set()
        self._redo([w for w in self.carried if id(w) not in pushed])
        self.carried = []
        self.activity = "idle"
        self.world.later(0.5 + 2.0 * self.site.rng.random(), f"{self.name} restarts its trainer", self._restart_trainer)

    def _restart_trainer(self) -> None:
        if self.site.agent is self and self.trainer is None:
            self._start_trainer()

    def _start_trainer(self) -> None:
        self.attempt += 1
        self.theta = {}
        self.held = [None] * self.site.ranks
        self.base = None
        self.outcome_at = self.world.heap.now
        self.trainer = Fiber(self._train())

    def _lose(self, work: list[Work]) -> None:
        for w in work:
            if not w.lost:
                w.lost = True
                self.tokens_lost += w.tokens

    def _redo(self, work: list[Work]) -> None:
        self._lose(work)
        self.ranges.extendleft(w.data_range for w in reversed(work))

    # ---- the agent's own story: beats ------------------------------------------------------------------------------

    def _beat(self) -> Story:
        timing = self.world.options.timing
        while True:
            yield sleep(self.world.heap, timing.beat_s, f"beat of {self.name}")
            if self.inc == 0:
                continue
            rate = self.world.data.rate(self.name, timing.beat_s)
            beat = ClusterBeat(
                self.name, self.inc, "training" if self.trainer else "dead", self.activity, self.attempt,
                self.inner_steps, sum(w.tokens for w in self.carried), self.tokens_lost, 1.0, self.base, 0, 0, rate,
            )  # fmt: skip
            self.world.network.call(self.name, "master", beat, timing.beat_s, partial(self._heard, self.inc))

    def _heard(self, inc: int, answer: Any) -> None:
        if not isinstance(answer, ClusterBeatAnswer) or self.site.agent is not self or inc != self.inc:
            return
        if answer.term < self.term:
            return  # of a master that has a successor
        self.term = answer.term
        self.ending = answer.progress.finished or self.ending
        if answer.standing == "fenced":
            self.world.trace.add(self.world.heap.now, f"{self.name} is fenced and exits")
            self.site.crash()
        elif answer.standing == "gone":
            self.live = False

    # ---- the trainer's story ---------------------------------------------------------------------------------------

    def _train(self) -> Story:
        yield sleep(self.world.heap, 0.3 + self.site.rng.random(), f"{self.name} starts its trainer")
        if self.open is not None and self.live:
            yield from self._settle_former_push(self.open)
        while self.finished is None:
            if not self.live:
                yield from self._join()
            if self.base is None:
                yield from self._refresh(None, tries=1000)
            elif self.ending is not None:
                yield from self._end(Finished(self.ending))
            elif self.ranges:
                yield from self._inner_step()
            else:
                yield from self._lease()
        self.activity = "idle"

    def _inner_step(self) -> Story:
        self.activity = "inner"
        yield sleep(
            self.world.heap, self.site.step_s * (0.7 + 0.6 * self.site.rng.random()), f"inner step of {self.name}"
        )
        self.world.watch.stepped(self)
        work = Work(self.name, self.ranges.popleft(), self.site.rng.randint(1, 5))
        self.world.books.work.append(work)
        self.carried.append(work)
        self.world.descend(self.theta, self.site.rng)
        self.inner_steps += 1
        self.steps_since += 1
        if self.steps_since >= self.world.settings.inner_steps and self.world.heap.now >= self.not_before:
            yield from self._outer_step()

    def _outer_step(self) -> Story:
        """Freeze, push, wait for the Outcome, pull. Whatever breaks, progress stays carried and training goes on."""
        self.activity = "push"
        self.open = frozen = self._freeze()
        answer = yield from self._until(PushRequested(0, frozen.push, frozen.base, self.site.ranks))
        if isinstance(answer, Refused):
            self.not_before = self.world.heap.now + answer.retry_after_s
            self.open = None
            return  # the same seq is asked again: a late copy of this question may yet be granted
        self.seq += 1
        if isinstance(answer, Grant):
            self.world.watch.told(self, answer)
            answer = yield from self._move_and_wait(frozen, answer)
        if self.live:
            self.open = None
        if isinstance(answer, Outcome):
            yield from self._settle(frozen, answer)
        elif isinstance(answer, Finished):
            yield from self._end(answer)

    def _move_and_wait(self, frozen: Frozen, grant: Grant) -> Story:
        """From the grant to the Outcome; whatever else is returned leaves the progress carried."""
        moved = yield self._moved(frozen, grant)
        if not moved:
            return (yield from self._until(PushAborted(0, frozen.push, "a stream gave up")))
        self.activity = "window"
        question = PushFinished(0, frozen.push, frozen.tokens, len(frozen.work), frozen.ranges, 1.0)
        answer = yield from self._until(question)
        if isinstance(answer, Committed):
            answer = yield from self._until(RoundAwaited(0, frozen.push))
        return answer

    def _settle(self, frozen: Frozen, outcome: Outcome) -> Story:
        self._note_outcome(frozen, outcome)
        if outcome.kind == "skipped":
            return
        settled = set(map(id, frozen.work))
        self.carried = [w for w in self.carried if id(w) not in settled]
        self.steps_since = 0
        if outcome.progress.finished is not None:
            yield from self._end(Finished(outcome.progress.finished))
            return
        pull = PullId(self.name, self.inc, frozen.push.seq)
        yield from self._refresh((pull, outcome.pull) if outcome.pull else None, PULLS_TRIED)

    def _settle_former_push(self, frozen: Frozen) -> Story:
        """The trainer died over an open push: abort it, and hear what became of it if it was already committed."""
        yield from self._until(PushAborted(0, frozen.push, "the trainer died"))
        answer = yield from self._until(RoundAwaited(0, frozen.push))
        if not self.live:
            return
        self.open = None
        self.seq = max(self.seq, frozen.push.seq)
        if isinstance(answer, Outcome):
            self._note_outcome(frozen, answer)
            if answer.kind != "skipped":
                self.steps_since = 0
                return
        self._redo(list(frozen.work))

    def _note_outcome(self, frozen: Frozen, outcome: Outcome) -> None:
        self.world.watch.outcome(self, frozen, outcome)
        self.outcome_at = self.world.heap.now

    def _end(self, finished: Finished) -> Story:
        self.world.watch.told(self, finished)
        yield from self._refresh(None, PULLS_TRIED)
        self.finished = finished.version

    # ---- questions to the master -----------------------------------------------------------------------------------

    def _join(self) -> Story:
        """Begin a life: whatever the former one carried is lost, since θ is pulled anew."""
        self.activity = "idle"
        self.joins += 1
        settings = self.world.settings
        question = ClusterJoined(
            0,
            self.name,
            f"{self.process}.{self.joins}",
            settings.run,
            self.world.manifest.to_json(),
            settings.config_digest,
        )
        self._lose([*self.carried, *(self.open.work if self.open else ())])
        self.carried, self.open, self.base, self.tokens_lost = [], None, None, 0
        while True:
            answer = yield self._ask(question)
            if isinstance(answer, Joined) and answer.term >= self.term:
                break
            yield sleep(self.world.heap, PAUSE_S, f"{self.name} joins again")
        self.term, self.inc, self.live = answer.term, answer.inc, True
        self.seq = self.range_seq = self.steps_since = 0
        self.ranges = deque(answer.ranges)
        self.world.watch.told(self, answer)

    def _lease(self) -> Story:
        self.range_seq += 1
        answer = yield from self._until(RangesRequested(0, self.name, self.inc, self.range_seq, RANGES_AT_ONCE))
        if isinstance(answer, Ranges):
            self.ranges.extend(answer.ranges)
        if not self.ranges:
            yield sleep(self.world.heap, 1.0, f"{self.name} has no data")

    def _refresh(self, granted: tuple[PullId, Grant] | None, tries: int) -> Story:
        """Pull until all ranks have installed one version, at most `tries` times."""
        self.activity = "pull"
        for attempt in range(tries):
            if granted is None:
                granted = yield from self._request_pull()
            if not self.live:
                return
            if granted is None:
                continue
            pull, grant = granted
            granted = None
            self.world.watch.told(self, grant)
            landed = yield self._landed(pull, grant)
            installed = self._install(landed)
            yield from self._until(PullFinished(0, pull, installed))
            self.world.watch.pulled(self, installed, attempt + 1)
            if installed:
                return

    def _request_pull(self) -> Story:
        """Ask under one name until it is granted or dropped; a dropped one costs its seq."""
        pull = PullId(self.name, self.inc, self.seq + 1)
        while self.live:
            answer = yield from self._until(PullRequested(0, pull, self.site.ranks))
            if not isinstance(answer, Refused):
                self.seq = pull.seq
                return (pull, answer) if isinstance(answer, Grant) else None
            yield sleep(self.world.heap, answer.retry_after_s, f"{self.name} waits to pull")
        return None

    def _until(self, question: Any) -> Story:
        """Ask the same question until something final is answered; a life that is over hears that it is."""
        while self.live:
            answer = yield self._ask(question)
            if isinstance(answer, Failed) and answer.error == "StaleIncarnation":
                self.live = False
            unheard = answer is None or (isinstance(answer, Failed) and answer.error == "UnavailableMaster")
            if not unheard and not isinstance(answer, Pending):
                return answer
            yield sleep(self.world.heap, PAUSE_S, f"{self.name} asks again")
        return Failed("StaleIncarnation", "told by a beat")

    def _ask(self, question: Any) -> Wait:
        return partial(self.world.network.call, self.name, "master", question, CALL_S)

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def _freeze(self) -> Frozen:
        assert self.base is not None
        push = PushId(self.name, self.inc, self.seq + 1)
        content = {layer: a.copy() for layer, a in self.theta.items()}
        diverged = self.site.diverged > 0
        if diverged:
            self.site.diverged -= 1
            content[0][0] = np.float32("nan") if self.site.rng.random() < 0.5 else np.float32(1e4)
        frozen = Frozen(push, self.base, content, tuple(self.carried), diverged)
        self.world.books.frozen[push] = frozen
        return frozen

    def _moved(self, frozen: Frozen, grant: Grant) -> Wait:
        return partial(self.world.data.push, frozen.push, grant, frozen.content, self.site.ranks)

    def _landed(self, pull: PullId, grant: Grant) -> Wait:
        return partial(self.world.data.pull, pull, grant, self.site.ranks)

    def _install(self, landed: list[Pulled]) -> bool:
        """Every rank that the all-reduce allows copies what it has."""
        allowed = self.agreed(landed)
        if allowed and not self.theta:
            self.theta = {layer: np.zeros(size, np.float32) for layer, size in self.world.sizes.items()}
        for pulled in allowed:
            for layer, where, values in pulled.pieces:
                self.theta[layer][where] = values
            self.held[pulled.rank] = pulled.versions[0]
        if len(allowed) == self.site.ranks:
            self.base = allowed[0].versions[0]
            self.world.watch.installed(self)
        return bool(allowed)

    def agreed(self, landed: list[Pulled]) -> list[Pulled]:
        """The all-reduce (MIN) of (version, whole): all ranks copy or none does."""
        versions = {v for pulled in landed for v in pulled.versions}
        return landed if len(versions) == 1 and all(pulled.whole for pulled in landed) else []
