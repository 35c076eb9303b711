"""A simulated trainer: one attempt of a training job, whose ranks hold shards of θ and move their parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dips.client.ipc import messages
from dips.client.rank.feedback import Feedback
from dips.data.steps import Part, samples_of
from dips.dataclass import replace
from dips.errors import Denied, Diverged, Stale, class_named
from dips.ids import PullId, PushId, VersionId
from dips.protocol.enums import DivergencePolicy
from dips.sim.heap import ChangeSignal, Fiber, Gate, Heap, Story, Wait, sleep
from dips.sim.ports import TrainerAgent, TrainerWorld
from dips.sim.scenario import SimFeed, Site
from dips.sim.streams import HeldVersion, Meter, Pulled, SimTransfer, make_keys, pieces_of
from dips.sim.work import Frozen, Use, Work, WorkInHand
from dips.slave.ports import F32
from dips.wire.chunks import LayerLayout, Piece, encode_body, put_body, split_chunks
from dips.wire.frame import Buffer, Range

# ---- ranks ----------------------------------------------------------------------------------------------------------
# The state of a simulated trainer's ranks: θ in shards, the last installed version, and the error feedback of lossy
# pushes.
#
# The content that a push must leave in the slaves' slots is computed here from the ranks' state, not from the
# transferred bytes: the invariants compare the two.


Arrays = dict[int, F32]  # flat layers by number


class SimRanks:
    """The model as held by `ranks` processes together."""

    def __init__(self, layout: LayerLayout, ranks: int, chunk_bytes: int, lossy: bool, updates: bool = False) -> None:
        self.layout, self.sizes, self.ranks = layout, layout.numel, ranks
        self._pieces = [pieces_of(layout, self.sizes, rank, ranks) for rank in range(ranks)]
        self._updates, self._chunk_bytes = updates, chunk_bytes
        self.theta: Arrays = {}
        self.held: list[VersionId | None] = [None] * ranks  # the version that each rank installed last
        self.base: VersionId | None = None  # the version that all of them installed last
        self.received: Arrays = {}  # θ of `base` as it was pulled
        self._pushed: Arrays = {}  # θ as the last push froze it
        self._host: Arrays = {layer: np.zeros(n, np.float32) for layer, n in self.sizes.items()}
        self._feedback = [self._feedback_of(rank) for rank in range(ranks)] if lossy else []

    def on_verdict(self, verdict: messages.PushNow | messages.PullNow) -> None:
        """Settle the error feedback of the last push, before a transfer."""
        for feedback in self._feedback:
            feedback.settle_last_push(verdict.inc, verdict.accepted)

    def freeze_push(self, theta: Arrays, verdict: messages.PushNow) -> tuple[dict[tuple[int, Range], Buffer], Arrays]:
        """Return every chunk's body by (rank, chunk), and the content of the slots when all have arrived.

        `theta` is the pushed model: the ranks' own, unless a fault is simulated.
        """
        self._pushed = {layer: a.copy() for layer, a in self.theta.items()}
        grant = verdict.grant
        codec = grant.codec
        for layer, a in theta.items():
            self._host[layer][:] = a
        self.on_verdict(verdict)
        for feedback in self._feedback:
            assert not codec.lossy or feedback.has_base(grant.base), f"{self.base} is not {grant.base}"
            feedback.freeze_push(verdict.seq, codec)
        start = self.received if codec.lossy else {layer: np.zeros_like(a) for layer, a in theta.items()}
        content = {layer: a.copy() for layer, a in start.items()}
        sent: dict[tuple[int, Range], Buffer] = {}
        for rank, chunk in self._list_chunks():
            where = slice(*self.layout.place_range(chunk))
            values = self._host[chunk.layer][where]
            body: Buffer = encode_body(codec, values) if not codec.lossy else b""
            if self._feedback:
                body = self._feedback[rank].encode_chunk(chunk, values.view(np.uint8).data)
            sent[rank, chunk] = bytes(body)
            put_body(codec, body, content[chunk.layer][where])
        return sent, content

    def install_pull(self, landed: list[Pulled], version: VersionId, merge: bool) -> bool:
        """Copy the pulled pieces on every rank that the all-reduce allows; return True if any did.

        `merge`: keep the training since the push was frozen: θ ← θ_version + (θ − θ_pushed).
        """
        allowed = self.agree_on_version(landed)
        if allowed and not self.theta:
            self.theta = {layer: np.zeros(size, np.float32) for layer, size in self.sizes.items()}
        for pulled in allowed:
            for layer, where, values in pulled.pieces:
                self._host[layer][where] = values
                theta = self.theta[layer][where]
                theta[:] = values + (theta - self._pushed[layer][where]) if merge else values
            self.held[pulled.rank] = pulled.versions[0] if pulled.versions else version
        if len(allowed) == self.ranks:
            self.base = version
            self.received = {layer: a.copy() for layer, a in self._host.items()}
            for feedback in self._feedback:
                feedback.set_base(version)
        return bool(allowed)

    def held_version(self) -> HeldVersion | None:
        """Return the version to which a pull's updates may be added, held by all ranks; None if there is none."""
        return HeldVersion(self.base, self.received) if self._updates and self.base is not None else None

    def is_finite(self) -> bool:
        """Return whether the model is finite; one that is not is never pushed, except by a fault that the gate must
        detect.
        """
        return all(bool(np.isfinite(a).all()) for a in self.theta.values())

    def may_merge(self) -> bool:
        """Return whether the training since the push was frozen is finite on all ranks."""
        return all(bool(np.isfinite(a - self._pushed[layer]).all()) for layer, a in self.theta.items())

    @staticmethod
    def agree_on_version(landed: list[Pulled]) -> list[Pulled]:
        """Return the ranks that copy, by the all-reduce (MIN) of (version, whole): all or none."""
        versions = {v for pulled in landed for v in pulled.versions}
        return landed if len(versions) == 1 and all(pulled.whole for pulled in landed) else []

    def _list_chunks(self) -> list[tuple[int, Range]]:
        """Return every chunk that slaves will ask for, by rank."""
        return [
            (rank, chunk) for rank, held in enumerate(self._pieces) for chunk in split_chunks(held, self._chunk_bytes)
        ]

    def _feedback_of(self, rank: int) -> Feedback:
        place = self.layout.place_range
        return Feedback([Piece(*p, self._host[p.layer][slice(*place(p))]) for p in self._pieces[rank]])


# ---- underway -------------------------------------------------------------------------------------------------------


# Begins a transfer; its argument is called with the result.
Start = Callable[[Callable[[object], None]], SimTransfer]


class SimBackgroundTransfer:
    """A push or pull ordered by `verdict`. `result` is falsy if it broke or was halted."""

    def __init__(
        self, heap: Heap, verdict: messages.PushNow | messages.PullNow, start: Start, diverged: bool = False
    ) -> None:
        """Start the transfer; `diverged`: the model is not finite, so nothing moves and it is over at once."""
        self._heap, self.verdict = heap, verdict
        self.diverged = self.over = diverged
        self.result: Any = None
        self._changed = ChangeSignal(heap)
        self._steps = 0  # inner steps taken since its start
        self.moving = start(self._on_end)
        self.meter = self.moving.meter

    def _on_end(self, result: object) -> None:
        self.over, self.result = True, result
        self._changed.wake_waiters()

    def on_inner_step(self) -> None:
        """Open the fragments that are due after an inner step."""
        self._steps += 1
        moving, interval = self.moving, max(1, self.verdict.interval)  # simulated rounds are short
        while not self.over and moving.open < moving.fragments and self._steps >= moving.open * interval:
            moving.open_next()

    def open_all(self) -> None:
        """Open all fragments, since training is paused and staggering has no benefit."""
        while not self.over and self.moving.open < self.moving.fragments:
            self.moving.open_next()

    def halt_transfer(self) -> None:
        """End the transfer: nothing more is sent or received."""
        self.moving.cancel()
        self.meter.ended = self._heap.now
        self.over = True

    def next_change(self, at_most_s: float, what: str) -> Wait:
        """Wait for the transfer's end, at most `at_most_s`."""
        return self._changed.wait_for_change(at_most_s, what)


# ---- trainer --------------------------------------------------------------------------------------------------------
# A simulated trainer: one attempt of a training job, whose ranks hold shards of θ and move their own bytes.
#
# Like client/rank/steps.py: rank 0 asks the agent's core and repeats a question until it is answered, every
# verdict reaches all ranks, all ranks install a version or none does, and the real Feedback keeps the error of lossy
# pushes. torchrun notices a dead rank after a while; until then the others wait.


DIVERGED = "its model is not finite"
Talk = messages.PushWanted | messages.PushMoved | messages.PullWanted | messages.PullMoved


class SimTrainer:
    """One attempt, from torchrun's start to its end."""

    def __init__(self, world: TrainerWorld, site: Site, agent: TrainerAgent, launch: int, restart: int) -> None:
        self.agent, self.world, self.site, self.launch, self.restart = agent, world, site, launch, restart
        self.gate = Gate(agent.gate)  # closed while the trainer hangs
        self.attempt = self._number = self._ranges_asked = self._look_in = 0
        self._ranks = SimRanks(
            world.data.layout,
            site.ranks,
            world.scenario.chunk_bytes,
            lossy=world.options.codec.lossy,
            updates=world.scenario.pull_codec.lossy,
        )
        self.keys: tuple[str, ...] = ()  # keys of its ranks
        self.in_hand = WorkInHand()
        self.range: int | None = None
        self._feed = SimFeed(world.scenario.samples) if world.scenario.samples else None
        self.finished = False
        self.over = False  # it has detached
        self.out: SimBackgroundTransfer | None = None  # the transfer in flight
        self._talk: Talk | None = None  # under overlap: the question that the agent has not answered
        self._soon = 1  # inner steps until the transfer in flight is polled again
        self.pull_tries = 0
        self._rank_s = world.scenario.calls.rank_s
        self._step_label, self._poll_label = f"inner step of {site.name}", f"{site.name} polls"
        self.alive = True
        self._fiber = Fiber(self._run_training(), self.gate)

    @property
    def theta(self) -> dict[int, F32]:
        return self._ranks.theta

    @property
    def held_versions(self) -> list[VersionId | None]:
        return self._ranks.held

    @property
    def pulled_theta(self) -> dict[int, F32]:
        return self._ranks.received

    @property
    def base(self) -> VersionId | None:
        return self._ranks.base

    def kill_ranks(self) -> None:
        """Kill all ranks."""
        self.alive = False
        self._fiber.kill()
        if self.out is not None:
            self.out.moving.cancel()

    def lose_rank(self, rank: int) -> None:
        """Kill one rank; the others wait in their next collective until torchrun ends them."""
        self._fiber.kill()
        if self.out is not None:
            self.out.moving.lose_rank(rank)

    # ---- the training script ---------------------------------------------------------------------------------------

    def _run_training(self) -> Story:
        world = self.world
        yield sleep(world.heap, 0.3 + self.site.rng.random(), f"{self.site.name} starts its trainer")
        manifest, ranks = world.manifest.digest, self.site.ranks
        name = f"{self.launch}.{self.restart}"
        self.keys = make_keys(f"{self.site.name}.{name}", ranks)
        attach = messages.Attach(
            self.launch, self.restart, name, manifest, ranks, ranks,
            self.site.overlap, self.site.fragments, DivergencePolicy.RESET, self.keys,
        )  # fmt: skip
        welcome = yield from self._ask_until_answered(attach)
        assert isinstance(welcome, messages.Attached), welcome
        self.attempt = welcome.attempt
        yield from self._follow_agent(messages.PullWanted(self.attempt, self._next_range()))
        while not self.finished:
            self._ranges_asked += 1
            left = self._feed.left if self._feed else None
            given = yield from self._ask_until_answered(messages.RangeWanted(self.attempt, self._ranges_asked, left))
            if self.range is not None and self._feed is None:
                self.in_hand.used.append(Use(self.range))
            self.range = given.range if isinstance(given, messages.RangeGiven) else None
            if isinstance(given, messages.RangesEnded):
                if self._feed and self._feed.left and not given.finished:
                    yield from self._train_samples(self._feed, whole=False)
                    continue
                yield from self._settle_transfer()
                if (given.finished or given.unsettled) and not self.finished:
                    verdict = messages.PushWanted(self.attempt, self._next_range(), demanded=given.unsettled)
                    yield from self._follow_agent(verdict)
                if given.unsettled:
                    self._ranges_asked -= 1
                    continue
                break
            if self._feed is None:
                yield from self._inner_step()
            else:
                self._feed.add_range(given)
                yield from self._train_samples(self._feed, whole=True)
        if self.out is not None:
            self.out.halt_transfer()
        self._send_message(messages.Detach(self.attempt))
        self.over = True
        self.agent.on_trainer_end()

    def _train_samples(self, feed: SimFeed, whole: bool) -> Story:
        """Take the inner steps for which the given ranges have samples."""
        while not self.finished and (parts := feed.take_step(whole=whole)):
            yield from self._inner_step(parts)

    def _inner_step(self, parts: tuple[Part, ...] = ()) -> Story:
        site = self.site
        yield sleep(self.world.heap, site.draw_step_s(), self._step_label)
        self.agent.record_step()
        tokens = samples_of(parts) or self.world.model.draw_tokens(site)
        work = Work(site.name, self.range or 0, tokens, parts=parts)
        self.in_hand.used += [Use(part.number) for part in parts if part.end == part.of]
        self.in_hand.works.append(work)
        self.agent.record_work(work)
        loss = self.world.model.take_inner_step(site, self.theta, self.agent.progress)
        left, begun = (self._feed.left, self._feed.begun) if self._feed else (None, None)
        self._send_message(messages.Stepped(self.attempt, work.tokens, loss, True, left, begun))
        if self.out is not None:
            self.out.on_inner_step()
        self._look_in -= 1
        if self._look_in <= 0:
            question = messages.PushWanted(self.attempt, 0 if self.out or self._talk else self._next_range())
            yield from self._poll_transfer(question) if site.overlap else self._follow_agent(question)

    # ---- questions to the agent --------------------------------------------------------------------------------------

    def _follow_agent(self, talk: Talk) -> Story:
        """Carry out the agent's orders, without training, until it answers to train on."""
        while True:
            verdict = yield from self._ask_until_answered(talk)
            begun = self._begin_transfer(verdict)
            if begun is None:
                return
            self.out = begun
            talk = yield from self._finish_transfer(begun)

    def _poll_transfer(self, question: messages.PushWanted) -> Story:
        """Under overlap, continue the transfer in flight, or ask whether one is due; wait for neither."""
        if self.out is not None:
            if not self._is_over(self.out):
                self._look_in = self._soon
                return
            self._talk = self._install_result(self.out)
        self._talk = self._talk or question
        answer = self._send_message(replace(self._talk, at_once=True))
        if isinstance(answer, messages.AskAgain):
            self._look_in = self._soon = answer.steps
            return
        self._talk, self.out = None, self._begin_transfer(answer)
        if self.out is not None and isinstance(answer, messages.PullNow) and not answer.merge:
            talk = yield from self._finish_transfer(self.out)  # a step before the install would be lost
            yield from self._follow_agent(talk)
        elif self.out is not None:
            self._look_in = self._soon

    def _settle_transfer(self) -> Story:
        """Wait until no transfer is in flight."""
        if self.out is not None:
            self._talk = yield from self._finish_transfer(self.out)
        if self._talk is not None:
            talk, self._talk = self._talk, None
            yield from self._follow_agent(talk)

    def _begin_transfer(self, verdict: messages.Answer | None) -> SimBackgroundTransfer | None:
        """Begin the transfer that the agent ordered; None if it ordered none."""
        match verdict:
            case messages.PushNow():
                return self._begin_push(verdict)
            case messages.PullNow():
                return self._begin_pull(verdict)
            case messages.TrainOn():
                self._look_in = verdict.steps
                if self._feed is not None:
                    self._feed.note_recalls(verdict.recalls)
            case _:
                assert isinstance(verdict, messages.Over), verdict
                self.finished = True
        return None

    def _finish_transfer(self, out: SimBackgroundTransfer) -> Story:
        """Wait until the transfer is over, and return the question that reports its result."""
        out.open_all()
        while not out.over:
            yield out.next_change(self._rank_s, self._poll_label)
            self._is_over(out)
        return self._install_result(out)

    def _is_over(self, out: SimBackgroundTransfer) -> bool:
        """Report the transfer's progress to the agent, which may halt it; return whether it is over."""
        over, meter = out.over, out.meter
        idle_s = self.world.heap.now - meter.ended if over and meter.ended is not None else 0.0
        answer = self._send_message(messages.TransferProgress(self.attempt, meter.nbytes, meter.total, idle_s))
        if isinstance(answer, messages.Halt) and not over:
            out.halt_transfer()
        return out.over

    def _install_result(self, out: SimBackgroundTransfer) -> Talk:
        """Install a pulled version after the transfer is over on all ranks, and return the report."""
        self.out = None
        verdict, nbytes, ok = out.verdict, out.meter.nbytes, bool(out.result)
        if isinstance(verdict, messages.PushNow):
            if not out.diverged:
                self.agent.record_push_end(PushId(self.site.name, verdict.inc, verdict.seq), ok)
            reason = "" if ok else DIVERGED if out.diverged else "it broke"
            number = self._next_range()
            return messages.PushMoved(self.attempt, number, verdict.seq, ok, reason, nbytes, diverged=out.diverged)
        merge = verdict.merge and self._ranks.may_merge()
        installed = ok and self._install_pull(out.result, verdict.grant.version, merge)
        self.pull_tries += 1
        self.agent.record_pull_end(installed, self.pull_tries)
        self.pull_tries = 0 if installed else self.pull_tries
        reason = "" if installed else "it broke"
        merged = installed and merge
        if installed and verdict.merge:
            self.agent.record_merge(merged)
        return messages.PullMoved(
            self.attempt, self._next_range(), verdict.seq, installed, reason, nbytes, merged=merged
        )

    def _ask_until_answered(self, question: messages.Question) -> Story:
        while True:
            answer = self._send_message(question)
            if not isinstance(answer, messages.AskAgain):
                return answer
            yield self.agent.next_change(self._rank_s)

    def _send_message(self, message: messages.Question | messages.Stepped) -> messages.Answer | None:
        answer = self.agent.handle_message(message)
        if not isinstance(answer, messages.ErrorReply):
            return answer
        error = class_named(answer.error)
        if error is None or not issubclass(error, Stale | Denied | Diverged):
            raise AssertionError(f"{self.site.name}: the agent answers {answer.error}: {answer.message}")
        self._fiber.kill()  # another attempt took over, or the agent is ending, for example after divergence
        self.agent.on_trainer_failed(self)
        return messages.AskAgain(answer.message)

    def _next_range(self) -> int:
        self._number += 1
        return self._number

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def _begin_push(self, verdict: messages.PushNow) -> SimBackgroundTransfer:
        push = PushId(self.site.name, verdict.inc, verdict.seq)
        if not self._ranks.is_finite():
            kept_back = SimTransfer(self.site.name, Meter(self.world.heap.now), self.agent.gate)
            return SimBackgroundTransfer(self.world.heap, verdict, lambda _: kept_back, diverged=True)
        self.agent.record_push(push)
        spell = self._freeze_push(push, verdict)
        site, gate = self.site, self.agent.gate
        start = partial(self.world.data.begin_push, push, verdict.grant, spell, self.keys, gate, site.fragments)
        return SimBackgroundTransfer(self.world.heap, verdict, start)

    def _begin_pull(self, verdict: messages.PullNow) -> SimBackgroundTransfer:
        pull = PullId(self.site.name, verdict.inc, verdict.seq)
        self._ranks.on_verdict(verdict)
        self.agent.record_pull(pull)
        start = partial(
            self.world.data.begin_pull,
            pull,
            verdict.grant,
            self.keys,
            self.agent.gate,
            self._ranks.held_version(),
            self.site.fragments if verdict.merge else 1,
        )
        return SimBackgroundTransfer(self.world.heap, verdict, start)

    def _freeze_push(self, push: PushId, verdict: messages.PushNow) -> partial[Buffer]:
        """Cut the progress, and record what every slave must hold when the push has moved."""
        assert self.base is not None
        theta = self.theta if self.site.overlap else {layer: a.copy() for layer, a in self.theta.items()}
        diverged = self.site.diverged > 0
        if diverged:  # under overlap in the model itself: values that are not finite cannot be merged
            self.site.diverged -= 1
            nan = self.site.rng.random() < 0.5 or self.site.overlap
            theta[0][0] = np.float32("nan") if nan else np.float32(1e4)
        theta = self.world.model.prepare_push(self.site, push, theta)
        bodies, content = self._ranks.freeze_push(theta, verdict)
        work, used = self.in_hand.freeze_work(self.world.books)
        frozen = Frozen(push, self.base, content, work, used, diverged, verdict.grant.codec)
        self.world.books.frozen[push] = frozen
        return partial(_chunk_body, bodies)

    def _install_pull(self, landed: list[Pulled], version: VersionId, merge: bool) -> bool:
        """Install a pulled version on all ranks or on none.

        It replaces all earlier training; a merge replaces only the training before the push was frozen.
        """
        installed = self._ranks.install_pull(landed, version, merge)
        if installed and self.base == version:
            self.in_hand.lose_work("a pull overwrote it", frozen_only=merge)
            self.agent.record_install()
            self.world.model.on_install(self.site, self.attempt, self.theta, self.pulled_theta)
        return installed


def _chunk_body(bodies: dict[tuple[int, Range], Buffer], rank: int, chunk: Range) -> Buffer:
    return bodies[rank, chunk]
