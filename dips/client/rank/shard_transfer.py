"""Transfers of this rank's bytes in the background of training, and the ranks' agreement on the result."""

from __future__ import annotations

import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from dips.client.parallel import HostMemory
from dips.client.parallel.blocks import wrap_sum
from dips.client.parallel.host import Layers
from dips.client.parallel.shard_buffer import HostSum
from dips.client.rank import outer_checkpoint, transfer
from dips.client.rank.agent_client import JobCollectives
from dips.client.rank.feedback import Feedback
from dips.client.rank.fragments import FragmentGate, cut_fragments
from dips.client.rank.model_checks import ReplicaCheck
from dips.client.rank.optimizers import UndoWatch
from dips.client.rank.transfer import TransferIdentity, TransferRate, TransferStats
from dips.codecs import Codec
from dips.errors import ConfigError, DipsError, Diverged, LocalProtocolError, Unavailable
from dips.ids import VersionId
from dips.protocol.effects import Grant
from dips.transport import curve
from dips.wire.chunks import Piece
from dips.wire.frame import encode_ranges

# ---- background transfer --------------------------------------------------------------------------------------------
# A transfer in progress: this rank's thread, and the collective that decides whether all ranks are done
# (docs/rationale.md#7).
#
# The caller either waits for its end (`wait`) or trains on and polls it regularly (`poll`). The first rank that fails
# ends the transfer on all ranks.


def do_nothing(*_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The result agreed on by all ranks: every rank moved all its bytes, or the transfer failed."""

    ok: bool
    reason: str  # of the failure on this rank
    nbytes: int  # over all ranks
    torn: bool = False  # the pull failed after its first fragment was merged
    diverged: bool = False  # the push was not begun: the model is not finite on some rank


class BackgroundTransfer(ABC):
    """A push or pull that was begun on all ranks."""

    @abstractmethod
    def wait(self, poll_s: float) -> TransferResult:
        """Block until the transfer is over; the ranks meet in a collective at least every `poll_s`. Collective."""

    @abstractmethod
    def poll(self) -> TransferResult | None:
        """Return the result, or None while the transfer moves; does not block on it. Collective."""

    @abstractmethod
    def cancel(self) -> None:
        """End the transfer on this rank, independently of the others."""

    @property
    def steps_until_due(self) -> int | None:
        """Inner steps after which a poll has something to do; None: at no particular step."""
        return None


class EndedTransfer(BackgroundTransfer):
    """A transfer that all ranks agreed not to begin."""

    def __init__(self, result: TransferResult) -> None:
        self._result = result

    def wait(self, poll_s: float) -> TransferResult:
        return self._result

    def poll(self) -> TransferResult | None:
        return self._result

    def cancel(self) -> None:
        pass  # nothing moves


class ThreadedTransfer(BackgroundTransfer):
    """A transfer that moves in its own thread."""

    def __init__(
        self,
        thread: TransferThread,
        seq: int,
        total: Callable[[], int],
        collectives: JobCollectives,
        report_progress: Callable[[], str],
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Follow a thread that has begun to move.

        total            returns the bytes over all ranks; called when the transfer is over
        report_progress  returns why to give up, or ""
        finish           remaining work, done in a thread once all ranks have moved all bytes; on all ranks or on none
        """
        self._thread, self._seq, self._total, self._collectives = thread, seq, total, collectives
        self._report_progress, self._finish = report_progress, finish

    def wait(self, poll_s: float) -> TransferResult:
        while (result := self._agree_on_result(poll_s)) is None:
            pass
        return result

    def poll(self) -> TransferResult | None:
        return self._agree_on_result(0.0)

    def cancel(self) -> None:
        self._thread.cancel()

    def _agree_on_result(self, wait_s: float) -> TransferResult | None:
        """Agree with the other ranks whether the transfer is over; return its result, or None."""
        thread = self._thread
        thread.join(wait_s)
        thread.mark_failed(self._report_progress())
        # Same transfer on all ranks (the smallest seq is the largest), no rank failed, all ranks are done.
        done = thread.done  # read before the error: a thread that fails in between does not count as done
        own = [self._seq, -self._seq, int(thread.error is None), int(done), self._own_count()]
        smallest_seq, minus_largest_seq, all_well, all_done, least_count = self._collectives.all_min(own)
        if not all_well or smallest_seq != -minus_largest_seq:
            self.cancel()
            return TransferResult(False, thread.reason, self._total())
        self._on_least_count(least_count)
        if not all_done:
            return None
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._thread = TransferThread(lambda _: finish())
            return None
        return TransferResult(True, "", self._total())

    def _own_count(self) -> int:
        """Return a count of this rank; the least count over all ranks is passed to `_on_least_count`."""
        return 0

    def _on_least_count(self, count: int) -> None:
        """Process the least count over all ranks."""


class TransferThread:
    """One rank's transfer in a thread; an unexpected error is raised after the ranks have agreed to give up."""

    def __init__(self, work: Callable[[threading.Event], object] | None) -> None:
        """Start the thread; `work` takes the event that cancels it, None: this rank moves nothing."""
        self.error: BaseException | None = None
        self._ended_at: float | None = None
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None
        if work is not None:
            self._thread = threading.Thread(target=self._run_work, args=(work,), name="dips-transfer", daemon=True)
            self._thread.start()

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    @property
    def idle_s(self) -> float:
        """Seconds since the thread ended; 0 while it runs."""
        return 0.0 if self._ended_at is None else time.monotonic() - self._ended_at

    @property
    def reason(self) -> str:
        return f"{type(self.error).__name__}: {self.error}" if self.error else "another rank failed"

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def mark_failed(self, reason: str) -> None:
        """Mark the transfer as failed for `reason`, unless that is empty or it has failed already."""
        if reason and self.error is None:
            self.error = Unavailable(reason)

    def cancel(self) -> None:
        """Cancel the transfer and wait for its end. Raises its error if it is a ConfigError or a bug, which would
        recur.
        """
        own = self.error
        self._cancel.set()
        if self._thread is not None:
            self._thread.join()
        if own is not None and (isinstance(own, ConfigError) or not isinstance(own, DipsError)):
            raise own
        self.error = own  # drop TransferCancelled, which this call has caused

    def _run_work(self, work: Callable[[threading.Event], object]) -> None:
        try:
            work(self._cancel)
        except BaseException as error:  # noqa: BLE001 (raised by cancel(), in the training thread)
            self.error = error
        self._ended_at = time.monotonic()


# ---- staggered ------------------------------------------------------------------------------------------------------
# A push or pull whose fragments move an interval of inner steps apart; for master and slaves it is one slow transfer.
#
#     push    every interval the next fragment is checked, frozen and offered to the slaves
#     pull    every interval the next fragment is requested; fragments that have arrived on all ranks are merged
#
# While training is paused (`wait`) staggering has no benefit: the remaining fragments move at once. Ranks count the
# same inner steps, so they agree on due fragments without a message.


def open_freely(_: int) -> str:
    """Return "": nothing prevents the fragment from moving."""
    return ""


@dataclass(frozen=True, slots=True)
class Stagger:
    """The schedule of one transfer's fragments, and the callbacks for each fragment."""

    gate: FragmentGate
    interval: int  # inner steps between two fragments
    count_steps: Callable[[], int]  # returns the inner steps taken
    prepare_fragment: Callable[[int], str] = (
        open_freely  # called before it moves; returns why to end the transfer, or ""
    )
    on_arrived: Callable[[int], Any] = do_nothing  # called with the number of first fragments on all ranks
    is_torn: Callable[[], bool] = bool  # whether arrived fragments are already in the model


class StaggeredTransfer(ThreadedTransfer):
    """A transfer that opens its fragments one after the other; every method but `cancel` is collective."""

    def __init__(self, *args: Any, stagger: Stagger) -> None:
        """Follow a thread as ThreadedTransfer does."""
        super().__init__(*args)
        self._stagger, self._began = stagger, stagger.count_steps()

    def wait(self, poll_s: float) -> TransferResult:
        gate, result = self._stagger.gate, None
        while result is None and gate.open < gate.count:
            result = self._open_next()
        return result or super().wait(poll_s)

    def poll(self) -> TransferResult | None:
        result = super().poll()
        while result is None and self.steps_until_due == 0:
            result = self._open_next()
        return result

    @property
    def steps_until_due(self) -> int | None:
        gate, taken = self._stagger.gate, self._stagger.count_steps() - self._began
        return max(0, gate.open * self._stagger.interval - taken) if gate.open < gate.count else None

    def _open_next(self) -> TransferResult | None:
        """Let the next fragment move; return the transfer's result if it must end instead."""
        stagger = self._stagger
        if reason := stagger.prepare_fragment(stagger.gate.open):
            self.cancel()
            return TransferResult(False, reason, self._total(), diverged=True)
        stagger.gate.open_next()
        return None

    def _own_count(self) -> int:
        return self._stagger.gate.arrived

    def _on_least_count(self, count: int) -> None:
        self._stagger.on_arrived(count)

    def _agree_on_result(self, wait_s: float) -> TransferResult | None:
        result = super()._agree_on_result(wait_s)
        return result if result is None or result.ok else replace(result, torn=self._stagger.is_torn())


@dataclass(slots=True)
class StaggeredMerge:
    """The state of a pull whose fragments are merged as they arrive."""

    version: VersionId
    gate: FragmentGate
    merged: int = 0  # fragments that are merged, or will be installed with all others
    finite: bool = True  # merging gives finite values; if False the version is installed instead

    def open_all(self) -> None:
        """Open all fragments, since training is useless until the whole version has arrived."""
        while self.gate.open < self.gate.count:
            self.gate.open_next()


# ---- shard transfer -------------------------------------------------------------------------------------------------
# Transfers of this rank's bytes in a push or pull, and the ranks' agreement on the result (docs/rationale.md#7, #25).
#
# A transfer runs in its own thread; meanwhile the ranks meet in a collective at least every `poll_s`, so none of them
# waits for anything outside the cluster, and the first rank that fails ends it for all. The host buffer is allocated
# once and holds the frozen or the pulled parameters; nothing else is written into it while a transfer runs.


# Takes bytes moved and bytes in all, over all ranks as estimated by this one, and the seconds since this rank has moved
# all of its own; returns why to give up, or "" to continue.
ReportProgress = Callable[[int, int, float], str]
Move = Callable[..., TransferStats]
ROUNDED = "rounded"  # name of the rounding errors in a checkpoint


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """A transfer as the agent ordered it."""

    grant: Grant
    base: TransferIdentity
    report_progress: ReportProgress
    accepted: int = 0  # seq of this incarnation's last accepted push: settles the error feedback


class MovedBytes:
    """An estimate of the bytes moved by all ranks, from this rank's own share."""

    def __init__(self, total: int, own: int) -> None:
        """Start with the expected bytes of all ranks and of this one; updates take fewer bytes than the parameters."""
        self._total, self._own = total, own
        self._moved, self._whole = 0, own

    def record_rate(self, rate: TransferRate) -> None:
        self._moved, self._whole = rate.nbytes, rate.total

    def of_all_ranks(self) -> tuple[int, int]:
        """Return bytes moved and bytes in all, over all ranks."""
        return self._moved * self._total // self._own, self._whole * self._total // self._own


class ShardTransfer:
    """This rank's share of every transfer of the job; every method is collective."""

    def __init__(
        self,
        memory: HostMemory,
        collectives: JobCollectives,
        stall_s: float,
        codec: Codec = Codec.FP32,
        pull_codec: Codec = Codec.FP32,
        optimizer_steps: Callable[[], int] = lambda: 0,
        fragments: int = 1,
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        """Set up the transfers of this rank.

        codec, pull_codec  the run's codecs: a lossy one takes 8 B more per parameter that this rank moves
        optimizer_steps    returns how often the inner optimizer has stepped
        fragments          number of groups of layers in which pushes and merges are staggered
        warn               takes a warning for the operator, the same on all ranks
        Errors             ConfigError: more fragments than layers
        """
        self._fragments = cut_fragments([memory.layer_numel(layer) for layer in memory.layers], fragments)
        # One per fragment that is merged by itself, and the last for installs of the whole model.
        self._watches = [UndoWatch() for _ in range(fragments + 1 if fragments > 1 else 1)]
        self._inner_steps = 0
        self._merge: StaggeredMerge | None = None  # merge of the last pull, if its fragments were staggered
        self._undo_watch, self._optimizer_steps = self._watches[-1], optimizer_steps
        self._collectives, self._stall_s = collectives, stall_s
        self._memory, self._replica_check = memory, ReplicaCheck(memory, collectives, warn)
        memory.on_installed = self._undo_watch.on_installed
        self._feedback = Feedback(memory.pieces) if codec.lossy or pull_codec.lossy else None
        self._takes_updates = pull_codec.lossy
        # This rank's number among the ranks that move bytes, the same in both directions.
        self.rank, self.ranks = collectives.number_ranks(bool(memory.pieces))
        self.keys = curve.new_keys()  # this rank's keys in this attempt
        shown = self.keys.public if memory.pieces else ""
        self.public_keys = tuple(key.decode() for key in collectives.all_gather(shown.encode()) if key)
        totals = collectives.all_sum([_wire_bytes(each, memory.pieces) for each in Codec])
        self._total = dict(zip(Codec, totals, strict=True))  # of all ranks

    def sum_host_bytes(self, keeps: bool) -> HostSum:
        """Return the host memory that this rank needs beside the model."""
        owed = 2 * sum(piece.array.nbytes for piece in self._memory.pieces) if self._feedback is not None else 0
        return replace(self._memory.sum_host_bytes(keeps), owed=owed)

    # ---- push --------------------------------------------------------------------------------------------------------

    def begin_push(self, request: TransferRequest, keep: bool = False, interval: int = 0) -> BackgroundTransfer:
        """Freeze this rank's pieces and send them to the slaves.

        keep      keep a copy of the shard for `merge_version`; 4 B more per parameter of this rank's shard
        interval  inner steps after which the next fragment is frozen, if the shard is kept
        Errors    the same on all ranks. LocalProtocolError: the model's memory was replaced since it was laid out.
                  ConfigError: replicas differ between ranks
        """
        self._memory.finish_install()
        self._check_parameters()
        if reason := self._find_not_finite():
            return EndedTransfer(TransferResult(False, reason, 0, diverged=True))
        self._replica_check.check_push()
        grant, feedback = request.grant, self._feedback
        if feedback is not None:
            feedback.settle_last_push(request.base.inc, request.accepted)
        if grant.codec.lossy and (feedback is None or not feedback.has_base(grant.base)):
            return self._failed_transfer(
                request, f"{grant.codec} was granted for differences to {grant.base}, not held here"
            )
        stagger = self._make_stagger(interval) if keep else None
        self._freeze_layers(request, self._fragments[0] if stagger else None, keep)
        encode = None if feedback is None else feedback.encode_chunk
        total, move = self._total[grant.codec], partial(transfer.push_pieces, encode=encode)
        if stagger is not None:
            stagger = replace(stagger, prepare_fragment=partial(self._freeze_fragment, request))
        return self._begin_move(move, self._memory.pieces, total, request, stagger=stagger)

    def _freeze_fragment(self, request: TransferRequest, number: int) -> str:
        """Freeze a later fragment of an open push; return where the model is not finite, "" if it is."""
        self._check_parameters()
        reason = self._find_not_finite()
        if not reason:
            self._freeze_layers(request, self._fragments[number], keep=True)
        return reason

    def _freeze_layers(self, request: TransferRequest, layers: Layers, keep: bool) -> None:
        self._memory.gather_pieces(layers)
        if keep:
            self._memory.keep_pushed_shard(layers)
        if self._feedback is not None:
            self._feedback.freeze_push(request.base.seq, request.grant.codec, self._memory.find_pieces(layers))

    def _make_stagger(self, interval: int) -> Stagger | None:
        """Return the schedule of a staggered transfer that begins now; None if all layers move at once."""
        if len(self._fragments) == 1:
            return None
        return Stagger(FragmentGate(self._fragments, self._memory.pieces), interval, lambda: self._inner_steps)

    def check_finite(self, consequence: str) -> None:
        """Raise Diverged, the same on all ranks, if the model is not finite on one of them."""
        if reason := self._find_not_finite():
            raise Diverged(f"the model diverged: {reason}; {consequence}")

    def _find_not_finite(self) -> str:
        """Return where the model is not finite on any rank; "" if it is on all, at the cost of one number per rank."""
        found = self._memory.find_not_finite()
        (all_finite,) = self._collectives.all_min([int(not found)])
        if all_finite:
            return ""
        by_rank = enumerate(self._collectives.all_gather(found.encode()))
        return next(f"{name.decode()} is not finite on rank {rank}" for rank, name in by_rank if name)

    def _check_parameters(self) -> None:
        by_rank = self._collectives.all_gather(self._memory.find_replaced_parameter().encode())
        replaced = [f"rank {rank}: {name.decode()}" for rank, name in enumerate(by_rank) if name]
        if replaced:
            raise LocalProtocolError(  # the remedy comes first, since crash messages are truncated
                "call fully_shard first, then OuterLoop (as well as whatever swaps modules, and "
                f"load_state_dict(assign=True)): {replaced[0]} was replaced after OuterLoop was made, so what it would "
                "push or pull is not what is trained"
            )

    def _failed_transfer(self, request: TransferRequest, reason: str) -> BackgroundTransfer:
        """Return a transfer that has failed on this rank, and will fail on the others when they meet."""
        thread = TransferThread(None)
        thread.mark_failed(reason)
        return ThreadedTransfer(thread, request.base.seq, lambda: 0, self._collectives, lambda: "")

    # ---- pull --------------------------------------------------------------------------------------------------------

    def begin_pull(self, request: TransferRequest, merge: bool = False, interval: int = 0) -> BackgroundTransfer:
        """Start pulling this rank's pieces of the version into host memory; the model is not changed.

        Fragments are merged as they arrive: if a later one fails, the model is torn.

        merge     `merge_version` will follow: the kept copy is subtracted beside training
        interval  inner steps after which the next fragment is requested
        """
        self._memory.finish_install()  # a lazy install may still read the host memory
        self._check_parameters()
        if self._feedback is not None:
            self._feedback.settle_last_push(request.base.inc, request.accepted)
        held = self._feedback.restore_base() if self._feedback is not None and self._takes_updates else None
        move = partial(transfer.pull_pieces, held=held)
        stagger = self._make_stagger(interval) if merge else None
        self._merge = None
        if stagger is not None:
            merging = self._merge = StaggeredMerge(request.grant.version, stagger.gate)
            on_arrived = partial(self._merge_arrived, merging)
            stagger = replace(stagger, on_arrived=on_arrived, is_torn=lambda: merging.merged > 0)
        finish = self._memory.subtract_in_place if merge and stagger is None else None
        total = self._total[Codec.FP32]
        return self._begin_move(move, self._memory.pieces, total, request, stagger=stagger, finish=finish)

    def _merge_arrived(self, merging: StaggeredMerge, arrived: int) -> None:
        """Merge the fragments that have arrived on all ranks since the last call.

        If one cannot be merged, the others are requested at once, and then the version is installed instead.
        """
        for number in range(merging.merged, arrived):
            layers, watch = self._fragments[number], self._watches[number]
            self._begin_install(merging.version, layers, watch)
            merging.finite = merging.finite and self._merge_layers(layers)
            if merging.finite:
                watch.take_after(self._optimizer_steps())
            else:
                merging.open_all()
            merging.merged = number + 1
        if not merging.finite and merging.merged == len(self._fragments):
            self._memory.install_shard()

    def _merge_layers(self, layers: Layers = None) -> bool:
        """Merge on this rank; return False if the result is not finite on some rank: then all ranks must install."""
        (finite,) = self._collectives.all_min([int(self._memory.merge_shard(layers))])
        return bool(finite)

    def install_version(self, version: VersionId) -> None:
        """Copy the version pulled by all ranks into the model's own memory; optimizer moments are unchanged.

        With `install: lazy` this only begins: `on_inner_step` and `finish_install` complete it. Replicated parts were
        pulled once per cluster, and are exchanged between the ranks here.
        """
        self._begin_install(version)
        self._memory.install_shard()
        self._undo_watch.take_after(self._optimizer_steps(), self._memory.pending)

    def merge_version(self, version: VersionId) -> bool:
        """Merge the pulled version into a model that has trained on: θ_local ← θ_version + (θ_local − θ_pushed); return
        True.

        Legal after a push that was kept (docs/rationale.md#36). If a summand is not finite on any rank, the sum would
        never be finite again: then all ranks install the version instead, and this returns False.
        """
        if self._merge is not None:  # fragments were merged while they were pulled
            return self._merge.finite
        self._begin_install(version)
        finite = self._merge_layers()
        if not finite:
            self._memory.install_shard()
        self._undo_watch.take_after(self._optimizer_steps(), self._memory.pending)
        return finite

    def on_inner_step(self) -> None:
        """Complete a lazy install after an inner step, and check that no optimizer has undone the last install."""
        self._inner_steps += 1
        self._memory.on_inner_step()
        optimizer_steps = self._optimizer_steps()
        for watch in self._watches:
            watch.on_inner_step(optimizer_steps)

    def finish_install(self) -> None:
        """Complete the install of the pulled version."""
        self._memory.finish_install()

    @property
    def torn(self) -> bool:
        """Whether an install failed half-way, so that the model mixes two versions."""
        return self._memory.torn

    def _begin_install(self, version: VersionId, layers: Layers = None, watch: UndoWatch | None = None) -> None:
        """Build each rank's whole shard from the pieces, which hold `version`: the base of differences from now on."""
        self._check_parameters()  # training may have gone on since the pull began
        (watch or self._undo_watch).take_before(self._memory.named_views(layers))
        if self._feedback is not None:
            self._feedback.set_base(version, self._memory.find_pieces(layers))
        self._memory.scatter_pieces(layers)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's own tensors for a checkpoint: error feedback with its base, and rounding errors of 16-bit
        parameters.
        """
        owed = outer_checkpoint.save_feedback(self._feedback) if self._feedback is not None else {}
        rounded = self._memory.remainders.take_state()
        return owed if rounded is None else {**owed, ROUNDED: rounded}

    def find_misfit(self, saved: Mapping[str, torch.Tensor]) -> str:
        """Return what some rank lacks in the tensors saved for it, the same on all ranks; "" if none does.

        A rank lacks tensors if other ranks saved them, rank 0 alone saved, or the codec was another.
        """
        owed = outer_checkpoint.count_feedback(self._feedback) if self._feedback is not None else {}
        rounded = self._memory.remainders.allocated_numel
        wanted = {**owed, ROUNDED: rounded} if rounded else owed
        found = {name: saved[name].numel() if name in saved else None for name in wanted}
        lacking = [f"{n} numbers of {name}, got {found[name]}" for name, n in wanted.items() if found[name] != n]
        by_rank = self._collectives.all_gather("".join(lacking[:1]).encode())
        return next((f"rank {rank} expected {told.decode()}" for rank, told in enumerate(by_rank) if told), "")

    def restore_tensors(self, version: VersionId, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore the tensors of `checkpoint_tensors`; legal if `find_misfit` returns ""."""
        if self._feedback is not None:
            outer_checkpoint.restore_feedback(self._feedback, version, saved)
        self._memory.remainders.restore_state(saved.get(ROUNDED))

    def checksum(self) -> int:
        """Return the checksum of the parameters that all ranks would push now, the same in every layout. Collective."""
        self._check_parameters()
        return wrap_sum(self._collectives.all_sum([self._memory.sum_bits()])[0])

    # ---- the transfer itself -----------------------------------------------------------------------------------------

    def _begin_move(
        self,
        move: Move,
        pieces: Sequence[Piece],
        total: int,
        request: TransferRequest,
        finish: Callable[[], None] | None = None,
        stagger: Stagger | None = None,
    ) -> BackgroundTransfer:
        """Start moving `pieces`, this rank's share of `total` bytes over all ranks.

        finish  called in a thread once every rank has moved all bytes
        """
        grant, base = request.grant, request.base
        moved = MovedBytes(total, max(1, _wire_bytes(grant.codec, pieces)))

        options = {} if stagger is None else {"gate": stagger.gate}

        def run_move(cancel: threading.Event) -> TransferStats:
            return move(
                grant, base, pieces, stall_s=self._stall_s, cancel=cancel, progress=moved.record_rate, **options
            )

        def report_progress() -> str:
            return request.report_progress(*moved.of_all_ranks(), thread.idle_s)

        thread = TransferThread(run_move if pieces else None)
        made = thread, base.seq, lambda: moved.of_all_ranks()[1], self._collectives, report_progress, finish
        return ThreadedTransfer(*made) if stagger is None else StaggeredTransfer(*made, stagger=stagger)


def _wire_bytes(codec: Codec, pieces: Sequence[Piece]) -> int:
    return sum(piece.nbytes for piece in encode_ranges(codec.dtype, (piece.range for piece in pieces)))
