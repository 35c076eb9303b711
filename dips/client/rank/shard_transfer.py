"""Transfers of this rank's bytes in a push or pull, and the ranks' agreement on the result (docs/rationale.md#7, #25).

A transfer runs in its own thread; meanwhile the ranks meet in a collective at least every `poll_s`, so none of
them waits for anything outside the cluster, and the first rank that fails ends it for all. The host buffer is allocated
once and holds the frozen or the pulled parameters; nothing else is written into it while a transfer runs.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from dips.client.parallel import HostMemory
from dips.client.parallel.checksum import wrap_sum
from dips.client.parallel.host import Layers
from dips.client.parallel.host_sum import HostSum
from dips.client.rank import feedback_checkpoint, transfer
from dips.client.rank.background_transfer import (
    BackgroundTransfer,
    EndedTransfer,
    ThreadedTransfer,
    TransferResult,
    TransferThread,
)
from dips.client.rank.collectives import JobCollectives
from dips.client.rank.feedback import Feedback
from dips.client.rank.fragments import FragmentGate, cut_fragments
from dips.client.rank.replica_check import ReplicaCheck
from dips.client.rank.staggered import Stagger, StaggeredMerge, StaggeredTransfer
from dips.client.rank.transfer_types import TransferIdentity, TransferRate, TransferStats
from dips.client.rank.undo_watch import UndoWatch
from dips.codecs import Codec
from dips.errors import Diverged, LocalProtocolError
from dips.ids import VersionId
from dips.protocol.effects import Grant
from dips.transport import curve
from dips.transport.shares import Piece
from dips.wire.chunks import encode_ranges

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
        owed = feedback_checkpoint.save_feedback(self._feedback) if self._feedback is not None else {}
        rounded = self._memory.remainders.take_state()
        return owed if rounded is None else {**owed, ROUNDED: rounded}

    def find_misfit(self, saved: Mapping[str, torch.Tensor]) -> str:
        """Return what some rank lacks in the tensors saved for it, the same on all ranks; "" if none does.

        A rank lacks tensors if other ranks saved them, rank 0 alone saved, or the codec was another.
        """
        owed = feedback_checkpoint.count_feedback(self._feedback) if self._feedback is not None else {}
        rounded = self._memory.remainders.allocated_numel
        wanted = {**owed, ROUNDED: rounded} if rounded else owed
        found = {name: saved[name].numel() if name in saved else None for name in wanted}
        lacking = [f"{n} numbers of {name}, got {found[name]}" for name, n in wanted.items() if found[name] != n]
        by_rank = self._collectives.all_gather("".join(lacking[:1]).encode())
        return next((f"rank {rank} expected {told.decode()}" for rank, told in enumerate(by_rank) if told), "")

    def restore_tensors(self, version: VersionId, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore the tensors of `checkpoint_tensors`; legal if `find_misfit` returns ""."""
        if self._feedback is not None:
            feedback_checkpoint.restore_feedback(self._feedback, version, saved)
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
