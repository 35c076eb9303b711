"""Transfers of this rank's bytes in the background of training, and the ranks' agreement; their checkpoint."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import xxhash

from dips.client.ipc.messages import PushResult, Saved
from dips.client.parallel import HostMemory
from dips.client.parallel.blocks import wrap_sum
from dips.client.parallel.host import Layers
from dips.client.parallel.shard_buffer import HostSum
from dips.client.rank import transfer
from dips.client.rank.agent_client import JobCollectives
from dips.client.rank.feedback import Feedback
from dips.client.rank.fragments import FragmentGate, cut_fragments
from dips.client.rank.model_checks import ReplicaCheck
from dips.client.rank.optimizers import UndoWatch
from dips.client.rank.transfer import TransferIdentity, TransferRate, TransferStats
from dips.codecs import Codec
from dips.errors import ConfigError, DipsError, Diverged, LocalProtocolError, Unavailable
from dips.ids import VersionId
from dips.protocol.data import BegunRange
from dips.protocol.effects import Grant
from dips.protocol.enums import OutcomeKind
from dips.transport import seal
from dips.wire.chunks import Piece
from dips.wire.frame import encode_ranges

# ---- background transfer --------------------------------------------------------------------------------------------
# The caller either waits for its end (`wait`) or trains on and polls it regularly (`poll`). The first rank that fails
# ends the transfer on all ranks.


def do_nothing(*_: object) -> None:
    """Do nothing."""


# Takes bytes moved and bytes in all, over all ranks as estimated by this one, and the seconds since this rank has moved
# all of its own; returns why to give up, or "" to continue.
ReportProgress = Callable[[int, int, float], str]


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
        self._total, self._own = total, max(1, own)
        self._moved, self._whole = 0, self._own

    def record_rate(self, rate: TransferRate) -> None:
        self._moved, self._whole = rate.nbytes, rate.total

    def of_all_ranks(self) -> tuple[int, int]:
        """Return bytes moved and bytes in all, over all ranks."""
        return self._moved * self._total // self._own, self._whole * self._total // self._own


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The result agreed on by all ranks: every rank moved all its bytes, or the transfer failed."""

    ok: bool
    reason: str  # of the failure on this rank
    nbytes: int  # over all ranks
    torn: bool = False  # the pull failed after its first fragment was merged
    diverged: bool = False  # the push was not begun: the model is not finite on some rank


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


def open_freely(_: int) -> str:
    """Return "": nothing prevents the fragment from moving."""
    return ""


class BackgroundTransfer:
    """A push or pull of n ≥ 1 fragments that was begun on all ranks; every method but `cancel` is collective.

    For master and slaves it is one transfer, a slow one if its fragments move an interval of inner steps apart:

        push    every interval the next fragment is checked, frozen and offered to the slaves
        pull    every interval the next fragment is requested; fragments that have arrived on all ranks are merged

    While training is paused (`wait`) staggering has no benefit: the remaining fragments move at once. Ranks count the
    same inner steps, so they agree on due fragments without a message.
    """

    def __init__(
        self,
        thread: TransferThread,
        request: TransferRequest,
        collectives: JobCollectives,
        moved: MovedBytes,
        gate: FragmentGate,
        *,
        count_steps: Callable[[], int] = int,
        prepare_fragment: Callable[[int], str] = open_freely,
        on_arrived: Callable[[int], object] = do_nothing,
        is_torn: Callable[[], bool] = bool,
        finish: Callable[[], None] | None = None,
        result: TransferResult | None = None,
    ) -> None:
        """Follow a thread that has begun to move.

        count_steps       returns the inner steps taken
        prepare_fragment  called with a fragment's number before it moves; returns why to end the transfer, or ""
        on_arrived        called with the number of first fragments that have arrived on all ranks
        is_torn           returns whether arrived fragments are already in the model
        finish            remaining work, done in a thread once all ranks have moved all bytes; on all ranks or on none
        result            of a transfer that all ranks agreed not to begin
        """
        self._thread = self._mover = thread  # `finish` runs in another one
        self._request, self._collectives = request, collectives
        self._moved, self._gate, self._result = moved, gate, result
        self._count_steps, self._began = count_steps, count_steps()
        self._prepare_fragment, self._on_arrived = prepare_fragment, on_arrived
        self._is_torn, self._finish = is_torn, finish

    def wait(self, poll_s: float) -> TransferResult:
        """Block until the transfer is over; the ranks meet in a collective at least every `poll_s`."""
        result = self._result
        while result is None and self._gate.open < self._gate.count:
            result = self._open_next()
        while result is None:
            result = self._agree_on_result(poll_s)
        return result

    def poll(self) -> TransferResult | None:
        """Return the result, or None while the transfer moves; does not block on it."""
        result = self._result or self._agree_on_result(0.0)
        while result is None and self.steps_until_due == 0:
            result = self._open_next()
        return result

    def cancel(self) -> None:
        """End the transfer on this rank, independently of the others."""
        self._thread.cancel()

    @property
    def steps_until_due(self) -> int | None:
        """Inner steps after which a poll has something to do; None: at no particular step."""
        return self._gate.steps_until_due(self._count_steps() - self._began)

    def _open_next(self) -> TransferResult | None:
        """Let the next fragment move; return the transfer's result if it must end instead."""
        if reason := self._prepare_fragment(self._gate.open):
            self.cancel()
            return TransferResult(False, reason, self._total_bytes(), diverged=True)
        self._gate.open_next()
        return None

    def _agree_on_result(self, wait_s: float) -> TransferResult | None:
        """Agree with the other ranks whether the transfer is over; return its result, or None."""
        thread, seq = self._thread, self._request.base.seq
        thread.join(wait_s)
        thread.mark_failed(self._request.report_progress(*self._moved.of_all_ranks(), self._mover.idle_s))
        # Same transfer on all ranks (the smallest seq is the largest), no rank failed, all ranks are done.
        done = thread.done  # read before the error: a thread that fails in between does not count as done
        own = [seq, -seq, int(thread.error is None), int(done), self._gate.arrived]
        smallest_seq, minus_largest_seq, all_well, all_done, all_arrived = self._collectives.all_min(own)
        if not all_well or smallest_seq != -minus_largest_seq:
            self.cancel()
            return TransferResult(False, thread.reason, self._total_bytes(), torn=self._is_torn())
        self._on_arrived(all_arrived)
        if not all_done:
            return None
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._thread = TransferThread(lambda _: finish())
            return None
        return TransferResult(True, "", self._total_bytes())

    def _total_bytes(self) -> int:
        return self._moved.of_all_ranks()[1]


@dataclass(slots=True)
class FragmentMerge:
    """The state of a pull whose fragments are merged as they arrive."""

    version: VersionId
    gate: FragmentGate
    merged: int = 0  # fragments that are merged, or will be installed with all others
    finite: bool = True  # merging gives finite values; if False the version is installed instead


# ---- shard transfer -------------------------------------------------------------------------------------------------
# A transfer runs in its own thread; meanwhile the ranks meet in a collective at least every `poll_s`, so none of them
# waits for anything outside the cluster, and the first rank that fails ends it for all. The host buffer is allocated
# once and holds the frozen or the pulled parameters; nothing else is written into it while a transfer runs.


ROUNDED = "rounded"  # name of the rounding errors in a checkpoint


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
        self._merge: FragmentMerge | None = None  # merge of the last pull, if its fragments were staggered
        self._undo_watch, self._optimizer_steps = self._watches[-1], optimizer_steps
        self._collectives, self._stall_s = collectives, stall_s
        self._memory, self._replica_check = memory, ReplicaCheck(memory, collectives, warn)
        memory.on_installed = self._undo_watch.on_installed
        self._feedback = Feedback(memory.pieces) if codec.lossy or pull_codec.lossy else None
        self._takes_updates = pull_codec.lossy
        # This rank's number among the ranks that move bytes, the same in both directions.
        self.rank, self.ranks = collectives.number_ranks(bool(memory.pieces))
        self.keys = seal.new_keys()  # this rank's keys in this attempt
        shown = self.keys.public if memory.pieces else ""
        self.public_keys = tuple(key.decode() for key in collectives.all_gather(shown.encode()) if key)
        digests = collectives.all_gather(str(memory.digest_layout()).encode())
        self.layout = xxhash.xxh3_64_intdigest(b" ".join(digests)) >> 1
        """A digest of what each rank holds, the same on all ranks, below 2^63."""
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
            return self._move_nothing(request, result=TransferResult(False, reason, 0, diverged=True))
        self._replica_check.check_push()
        grant, feedback = request.grant, self._feedback
        if feedback is not None:
            feedback.settle_last_push(request.base.inc, request.accepted)
        if grant.codec.lossy and (feedback is None or not feedback.has_base(grant.base)):
            why = f"{grant.codec} was granted for differences to {grant.base}, not held here"
            return self._move_nothing(request, failure=why)
        gate = self._make_gate(interval, staggered=keep)
        self._freeze_layers(request, self._fragments[0] if gate.count > 1 else None, keep)
        encode = None if feedback is None else feedback.encode_chunk
        moved = MovedBytes(self._total[grant.codec], _wire_bytes(grant.codec, self._memory.pieces))
        thread = self._start_thread(partial(transfer.push_pieces, encode=encode), request, moved, gate)
        return BackgroundTransfer(
            thread, request, self._collectives, moved, gate,
            count_steps=self._count_steps, prepare_fragment=partial(self._freeze_fragment, request),
        )  # fmt: skip

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

    def _make_gate(self, interval: int, staggered: bool) -> FragmentGate:
        """Return the gate of a transfer that begins now: all layers are one fragment unless it is staggered."""
        fragments = self._fragments if staggered else (tuple(self._memory.layers),)
        return FragmentGate(fragments, self._memory.pieces, interval)

    def _count_steps(self) -> int:
        return self._inner_steps

    def _start_thread(
        self, move: Callable[..., TransferStats], request: TransferRequest, moved: MovedBytes, gate: FragmentGate
    ) -> TransferThread:
        """Start moving this rank's pieces; on a rank without pieces nothing moves."""
        pieces, stall_s = self._memory.pieces, self._stall_s

        def run_move(cancel: threading.Event) -> TransferStats:
            return move(
                request.grant, request.base, pieces,
                stall_s=stall_s, cancel=cancel, progress=moved.record_rate, gate=gate,
            )  # fmt: skip

        return TransferThread(run_move if pieces else None)

    def _move_nothing(
        self, request: TransferRequest, failure: str = "", result: TransferResult | None = None
    ) -> BackgroundTransfer:
        """Return a transfer that moves nothing.

        failure  it has failed on this rank for this reason, and will fail on the others when they meet
        result   it is over on all ranks
        """
        thread, gate = TransferThread(None), self._make_gate(0, staggered=False)
        thread.mark_failed(failure)
        silent = replace(request, report_progress=lambda *_: "")
        return BackgroundTransfer(thread, silent, self._collectives, MovedBytes(0, 0), gate, result=result)

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

    # ---- pull --------------------------------------------------------------------------------------------------------

    def begin_pull(self, request: TransferRequest, merge: bool = False, interval: int = 0) -> BackgroundTransfer:
        """Start pulling this rank's pieces of the version into host memory; the model is not changed.

        Fragments are merged as they arrive: if a later one fails, the model is torn.

        merge     `merge_version` will follow: the kept copy is subtracted beside training
        interval  inner steps after which the next fragment is requested
        """
        self._memory.finish_install()  # a lazy install may still read the host memory
        self._memory.await_readers()  # a pull that follows another at once would overtake a slower rank's install
        if self._feedback is not None:
            self._feedback.settle_last_push(request.base.inc, request.accepted)
        held = self._feedback.restore_base() if self._feedback is not None and self._takes_updates else None
        move = partial(transfer.pull_pieces, held=held)
        gate = self._make_gate(interval, staggered=merge)
        moved = MovedBytes(self._total[Codec.FP32], _wire_bytes(request.grant.codec, self._memory.pieces))
        thread, self._merge = self._start_thread(move, request, moved, gate), None
        begun = partial(BackgroundTransfer, thread, request, self._collectives, moved, gate)
        if gate.count == 1:
            return begun(finish=self._memory.subtract_in_place if merge else None)
        merging = self._merge = FragmentMerge(request.grant.version, gate)
        on_arrived = partial(self._merge_arrived, merging)
        return begun(count_steps=self._count_steps, on_arrived=on_arrived, is_torn=lambda: merging.merged > 0)

    def _merge_arrived(self, merging: FragmentMerge, arrived: int) -> None:
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
                merging.gate.open_all()  # training is useless until the whole version has arrived
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

    def free(self) -> None:
        """Free the host memory after the last transfer."""
        self._feedback = None
        self._memory.free()

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

    def checkpoint_tensors(self, result: PushResult | None = None) -> dict[str, torch.Tensor]:
        """Return this rank's own tensors for a checkpoint: error feedback with its base, and rounding errors of 16-bit
        parameters.

        result  of the last push that is known to be settled: no pull may have followed it
        """
        if self._feedback is not None and result is not None and result.kind == OutcomeKind.ACCEPTED:
            self._feedback.settle_result(result.inc, result.seq)
        owed = save_feedback(self._feedback) if self._feedback is not None else {}
        rounded = self._memory.remainders.take_state()
        return owed if rounded is None else {**owed, ROUNDED: rounded}

    def find_misfit(self, saved: Mapping[str, torch.Tensor]) -> str:
        """Return what some rank lacks in the tensors saved for it, the same on all ranks; "" if none does.

        A rank lacks tensors if other ranks saved them, rank 0 alone saved, or the codec was another. In another layout
        as many numbers may be those of other elements: compare `layout`, too.
        """
        wanted = count_feedback(self._feedback) if self._feedback is not None else {}
        rounded = saved[ROUNDED].numel() if ROUNDED in saved else 0
        if not self._memory.fits_remainders(rounded):
            wanted[ROUNDED] = self._memory.remainders.allocated_numel
        found = {name: saved[name].numel() if name in saved else None for name in wanted}
        lacking = [f"{n} numbers of {name}, got {found[name]}" for name, n in wanted.items() if found[name] != n]
        by_rank = self._collectives.all_gather("".join(lacking[:1]).encode())
        return next((f"rank {rank} expected {told.decode()}" for rank, told in enumerate(by_rank) if told), "")

    def restore_tensors(self, version: VersionId, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore the tensors of `checkpoint_tensors`; legal if `find_misfit` returns ""."""
        if self._feedback is not None:
            restore_feedback(self._feedback, version, saved)
        self._memory.restore_remainders(saved.get(ROUNDED))

    def checksum(self, *, buffers: bool = False) -> int:
        """Return the checksum of the parameters that all ranks would push now, and of `buffers`; the same in every
        layout. Collective.
        """
        self._check_parameters()
        return wrap_sum(self._collectives.all_sum([self._memory.sum_bits(buffers=buffers)])[0])


def _wire_bytes(codec: Codec, pieces: Sequence[Piece]) -> int:
    return sum(piece.nbytes for piece in encode_ranges(codec.dtype, (piece.range for piece in pieces)))


# ---- feedback checkpoint --------------------------------------------------------------------------------------------


NAMES = ("base", "owed")


def save_feedback(feedback: Feedback) -> dict[str, torch.Tensor]:
    """Return copies of base and debt; empty for a rank that pushes nothing."""
    parts = zip(NAMES, feedback.checkpoint_arrays(), strict=True)
    return {name: torch.cat([torch.from_numpy(a) for a in arrays]) for name, arrays in parts if arrays}


def count_feedback(feedback: Feedback) -> dict[str, int]:
    """Return the number of elements of each tensor of `save_feedback`, by name."""
    sizes = [a.size for a in feedback.checkpoint_arrays()[0]]
    return dict.fromkeys(NAMES, sum(sizes)) if sizes else {}


def restore_feedback(feedback: Feedback, version: VersionId, saved: Mapping[str, torch.Tensor]) -> None:
    """Restore the tensors of `save_feedback`; names and sizes must be those of `count_feedback`."""
    sizes = [a.size for a in feedback.checkpoint_arrays()[0]]
    base, owed = ([t.numpy() for t in saved[name].split(sizes)] if sizes else [] for name in NAMES)
    feedback.restore_debt(version, base, owed)


# ---- outer checkpoint -----------------------------------------------------------------------------------------------


STATE_FORMAT = 1  # format of the state_dict; any other is refused


def make_state(
    saved: Saved, inner_steps: int, checksum: int, rank: int, tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Build the state_dict; this rank's number is appended to the names of its own tensors."""
    own = {f"{name}.rank{rank}": tensor for name, tensor in tensors.items()}
    taken = {"steps": inner_steps, "checksum": checksum}  # Saved has its own `inner_steps`, since the last push
    begun = tuple(number for part in saved.begun for number in astuple(part))
    return {"format": STATE_FORMAT, **taken, **asdict(saved), "begun": begun, **own}


def read_saved(state: Mapping[str, Any]) -> Saved:
    """Return the agent's part. Raises LocalProtocolError for another format."""
    if state.get("format") != STATE_FORMAT:
        raise LocalProtocolError(
            f"expected an outer state of format {STATE_FORMAT}, got {state.get('format')!r}; load it with the Di-PS "
            "that saved it, or leave it out: then the cluster pulls the run's newest version"
        )
    values = {f.name: _restore_tuple(state[f.name]) for f in fields(Saved)}
    flat = values["begun"]
    return Saved(**{**values, "begun": tuple(BegunRange(*flat[i : i + 3]) for i in range(0, len(flat), 3))})


def read_tensors(state: Mapping[str, Any], rank: int) -> dict[str, torch.Tensor]:
    """Return the tensors of one rank, by the names passed to `make_state`."""
    suffix = f".rank{rank}"
    return {name.removesuffix(suffix): tensor for name, tensor in state.items() if name.endswith(suffix)}


def _restore_tuple(value: Any) -> Any:
    """Turn lists into the tuples that were saved: torch.distributed.checkpoint returns lists."""
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else value
