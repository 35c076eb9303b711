"""Copies between a rank's device and host memory: activations and shards that wait there (Zorse §4.1.3, §5.4).

*Activations* are what each layer of a part takes. After a micro-batch's forward an OFFLOAD of the plan copies them to
host memory and frees them on the device; a FETCH brings them back ahead of the backward. Their tensors stay as they
are, whoever refers to them: only the memory below is taken away, and given back.

*Shards* are this rank's share of a part's parameters, and the optimizer's state. With more than two ministages a
part's parameters are on the device while it is at work, or the next that is; the state only from the first backward to
the step. Between two steps all of them are in host memory. The optimizer steps on the device.

Copies run on a stream of their own each way, from and to pinned memory. On the CPU they are copies between two arrays.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from dips.client.parallel.adapter import is_dtensor
from dips.client.parallel.devices import FLOAT_BYTES, find_device
from dips.inside.pipeline.memory import EmulatedDevice, HostCategory, MemoryAccount, SavedBytes
from dips.inside.pipeline.orders import BorderTransfer, PipelinePlan, RankAction
from dips.inside.pipeline.parts import PipelinePart
from dips.inside.pipeline.torch_runtime import COPIES, LocalShard, count_gathered, count_gradients, list_shards
from dips.inside.planning.schedules import COMPUTING, Op
from dips.inside.planning.simulate import MemoryCategory

MicrobatchOfPart = tuple[int, int]  # part, and the rank's own number of a micro-batch
PartShards = tuple[int, MemoryCategory]  # of a part: its parameters, or its optimizer's state
SHARDS = (MemoryCategory.PARAMETERS, MemoryCategory.OPTIMIZER)


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A copy under way."""

    event: torch.Event | None  # of an accelerator
    ready_s: float  # when an emulated engine is done with it


class CopyEngine:
    """Copies between device and host memory beside computation, one after another each way, as devices have it."""

    def __init__(self, where: torch.device, byte_s: float = 0.0) -> None:
        """Make the engine; `byte_s` seconds a byte are slept where a copy is waited for, on an emulated device."""
        # A device here has a stream of its own.
        self._ways = {op: find_device([torch.empty(0, device=where)]) for op in (Op.OFFLOAD, Op.FETCH)}
        self._byte_s, self._free_s = byte_s, dict.fromkeys(self._ways, 0.0)
        self._unused: dict[int, list[torch.Tensor]] = defaultdict(list)  # host memory by size

    def begin(self, op: Op, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> PendingCopy:
        """Begin to copy into the first of each pair from the second, after all that was computed so far.

        op  OFFLOAD: to host memory; FETCH: back
        """
        device = self._ways[op]
        with device.background_copies(), torch.no_grad():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event = device.record_event()
        nbytes = sum(target.nbytes for target, _ in pairs)
        self._free_s[op] = max(self._free_s[op], time.monotonic()) + nbytes * self._byte_s
        return PendingCopy(event, self._free_s[op])

    def wait(self, copy: PendingCopy) -> None:
        """Let what is computed from now on find the copy."""
        if (left_s := copy.ready_s - time.monotonic()) > 0:
            time.sleep(left_s)
        if copy.event is not None:
            self._ways[Op.FETCH].wait_for_event(copy.event, all_streams=False)

    def synchronize(self) -> None:
        """Wait until every copy is complete."""
        for device in self._ways.values():
            device.synchronize()

    def is_done(self, copy: PendingCopy) -> bool:
        return time.monotonic() >= copy.ready_s and (copy.event is None or bool(copy.event.query()))

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return u8[nbytes] of host memory, pinned for an accelerator; what was given back is used again."""
        if self._unused[nbytes]:
            return self._unused[nbytes].pop()
        return self._ways[Op.OFFLOAD].allocate_host(-(-nbytes // FLOAT_BYTES)).view(torch.uint8)[:nbytes]

    def give_back(self, memory: torch.Tensor) -> None:
        """Keep memory that `allocate` returned for its next call."""
        self._unused[memory.nbytes].append(memory)

    def free_unused(self) -> None:
        """Free the memory that was given back, when copies of other sizes will follow."""
        self.synchronize()  # a device that is behind may still read it
        self._unused.clear()


# ---- activations -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class KeptActivations:
    """The inputs of a part's layers, of one micro-batch."""

    storages: list[torch.UntypedStorage]
    sizes: list[int]
    host: list[torch.Tensor] = field(default_factory=list)
    leaving: PendingCopy | None = None  # to host memory, and the device's is not free yet
    coming: PendingCopy | None = None


class OffloadedActivations:
    """The activations of a rank's parts and micro-batches."""

    def __init__(self, engine: CopyEngine, tell: Callable[[MicrobatchOfPart, int, int], None]) -> None:
        """Make it.

        tell  called with what `keep` was told them by, when their bytes change that are away from the device, and in
              host memory
        """
        self._engine, self._tell = engine, tell
        self._kept: dict[MicrobatchOfPart, KeptActivations] = {}

    def keep(self, key: MicrobatchOfPart, tensors: Iterable[torch.Tensor]) -> None:
        """Take over a micro-batch's activations, by its part and number, after its forward."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._kept[key] = KeptActivations([*storages.values()], [storage.nbytes() for storage in storages.values()])

    def offload(self, key: MicrobatchOfPart) -> None:
        """Begin to copy them to host memory, and free what was copied before: in the plan its copy is over.

        A host that is ahead of its accelerator does not know that yet; without this nothing would be freed in time.
        """
        for earlier, of in self._kept.items():
            if of.leaving is not None:
                self._free(earlier, of)
        kept = self._kept[key]
        kept.host = [self._engine.allocate(size) for size in kept.sizes]
        kept.leaving = self._engine.begin(Op.OFFLOAD, [*zip(kept.host, map(_bytes_of, kept.storages), strict=True)])
        self._tell(key, 0, sum(kept.sizes))

    def fetch(self, key: MicrobatchOfPart) -> None:
        """Begin to bring them back, if they are in host memory."""
        kept = self._kept[key]
        if not kept.host or kept.coming is not None:
            return
        if kept.leaving is not None:
            self._free(key, kept)
        for storage, size in zip(kept.storages, kept.sizes, strict=True):
            storage.resize_(size)
        self._tell(key, 0, sum(kept.sizes))
        kept.coming = self._engine.begin(Op.FETCH, [*zip(map(_bytes_of, kept.storages), kept.host, strict=True)])

    def arrive(self, key: MicrobatchOfPart) -> None:
        """Wait until they are back, for the backward."""
        if key not in self._kept:
            return
        self.fetch(key)
        kept = self._kept[key]
        if kept.coming is not None:
            self._engine.wait(kept.coming)

    def drop(self, key: MicrobatchOfPart) -> None:
        """Forget them after the backward."""
        kept = self._kept.pop(key, None)
        for memory in kept.host if kept is not None else ():
            self._engine.give_back(memory)

    def free_copied(self) -> None:
        """Free what has arrived in host memory."""
        for key, kept in self._kept.items():
            if kept.leaving is not None and self._engine.is_done(kept.leaving):
                self._free(key, kept)

    def _free(self, key: MicrobatchOfPart, kept: KeptActivations) -> None:
        assert kept.leaving is not None
        self._engine.wait(kept.leaving)
        kept.leaving = None
        for storage in kept.storages:
            storage.resize_(0)
        self._tell(key, sum(kept.sizes), sum(kept.sizes))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return u8[n] that shares a storage, whatever else it is seen as."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# ---- shards ----------------------------------------------------------------------------------------------------------


class OffloadedShards:
    """Parameters and optimizer state of a rank's parts, in host memory while their part is idle.

    On the device are the parameters of two parts and the state of one, what is about to leave included: what is asked
    for comes when there is room, at the latest when it is waited for.
    """

    def __init__(
        self,
        engine: CopyEngine,
        where: torch.device,
        parts: Mapping[int, nn.Module],
        optimizers: Mapping[int, torch.optim.Optimizer],
        account: MemoryAccount,
    ) -> None:
        """Take the shards of all parts, by their numbers, to host memory."""
        self._engine, self._where = engine, where
        self._parts, self._optimizers, self._account = parts, optimizers, account
        self._host: dict[tuple[PartShards, str], torch.Tensor] = {}
        # The device's tensors, without memory while they are away: a graph may refer to them, by views of parameters.
        self._on_device: dict[tuple[PartShards, str], torch.Tensor] = {}
        self._here: set[PartShards] = {(number, category) for number in parts for category in SHARDS}
        self._wanted: list[PartShards] = []  # asked for, and there was no room yet
        self._coming: dict[PartShards, PendingCopy] = {}
        self._leaving: dict[PartShards, tuple[PendingCopy, list[torch.Tensor]]] = {}  # with what is freed then
        for number in parts:
            self.offload(number)
        self.finish()

    def fetch(self, number: int, category: MemoryCategory = MemoryCategory.PARAMETERS) -> None:
        """Bring parameters or optimizer state of a part to the device, beside computation, when there is room."""
        if (number, category) not in self._here and (number, category) not in self._wanted:
            self._wanted.append((number, category))
            self.advance()

    def arrive(self, number: int, category: MemoryCategory = MemoryCategory.PARAMETERS) -> None:
        """Wait until parameters or optimizer state of a part are on the device."""
        shards = (number, category)
        if shards not in self._here:
            self._wanted = [one for one in self._wanted if one != shards]
            self._free(list(self._leaving))
            self.advance()
            self._bring(shards)
        if (coming := self._coming.pop(shards, None)) is not None:
            self._engine.wait(coming)

    def offload(self, number: int, stepped: bool = True) -> None:
        """Take a part's shards to host memory.

        stepped  its optimizer has stepped since they were fetched; otherwise host memory still has them
        """
        self._wanted = [one for one in self._wanted if one[0] != number]
        for shards in ((number, category) for category in SHARDS if (number, category) in self._here):
            self.arrive(*shards)
            gone, pairs = list[torch.Tensor](), list[tuple[torch.Tensor, torch.Tensor]]()
            for name, shard in self._list(shards):
                host, here = self._host_of(shards, name, shard.data), shard.data
                if here.untyped_storage().nbytes() == here.nbytes:  # its own, and no part of another's
                    self._on_device[shards, name] = here
                gone.append(here)
                pairs += [(host, here)] if stepped else []
                shard.put(host)
            self._here.remove(shards)
            self._leaving[shards] = self._engine.begin(Op.OFFLOAD, pairs), gone
        self.advance()

    def advance(self) -> None:
        """Free the device's memory of what has arrived in host memory, and bring what there is room for."""
        self._free([one for one, (copy, _) in self._leaving.items() if self._engine.is_done(copy)])
        # One after another: activations, which are needed sooner, wait for one copy of shards at most.
        while self._wanted and all(map(self._engine.is_done, self._coming.values())):
            category = self._wanted[0][1]
            busy = (*self._leaving, *(self._here if category is MemoryCategory.OPTIMIZER else ()))
            if any(of is category for _, of in busy):
                break
            self._bring(self._wanted.pop(0))

    def finish(self) -> None:
        """Wait until all that leaves is in host memory, as it is between two steps."""
        self._free(list(self._leaving))
        self._engine.synchronize()
        self.advance()

    def _free(self, leaving: Iterable[PartShards]) -> None:
        """Free the device's memory of what leaves; what is computed from now on finds it in host memory.

        That the copy is over need not be known here: an accelerator's `wait` only orders what comes later behind it.
        """
        for shards in leaving:
            copy, tensors = self._leaving.pop(shards)
            self._engine.wait(copy)
            for gone in tensors:
                if gone.untyped_storage().nbytes() == gone.nbytes:
                    gone.untyped_storage().resize_(0)
            self._account.hold(shards[1], shards[0], 0)

    def _bring(self, shards: PartShards) -> None:
        pairs = []
        for name, shard in self._list(shards):
            host, here = self._host_of(shards, name, shard.data), self._on_device.get((shards, name))
            if host.data_ptr() != shard.data.data_ptr():  # a checkpoint was loaded
                host.copy_(shard.data)
            if here is None or here.shape != host.shape or here.dtype != host.dtype:
                here = torch.empty_like(host, device=self._where)
            here.untyped_storage().resize_(here.nbytes)
            pairs.append((here, host))
            shard.put(here)
        self._here.add(shards)
        self._account.hold(shards[1], shards[0], sum(here.nbytes for here, _ in pairs))
        self._coming[shards] = self._engine.begin(Op.FETCH, pairs)

    def _list(self, shards: PartShards) -> Iterator[tuple[str, LocalShard]]:
        """Yield the tensors of a part in a category, as they are now."""
        number, category = shards
        if category is MemoryCategory.PARAMETERS:
            yield from list_shards(self._parts[number])
        elif number in self._optimizers:
            yield from list_states(self._optimizers[number])

    def _host_of(self, shards: PartShards, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return the host memory of a tensor, in its shape; allocated once."""
        memory = self._host.get((shards, name))
        if memory is None or memory.nbytes != like.nbytes:
            memory = self._host[shards, name] = self._engine.allocate(like.nbytes)
            self._account.hold(HostCategory.OFFLOADED, (shards, name), like.nbytes)
        return memory.view(like.dtype).view(like.shape)


def list_states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, LocalShard]]:
    """Yield the optimizer's tensors of this rank that are as large as a parameter, by names of their own."""
    for p, parameter in enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                yield f"{p}.{key}", LocalShard(value._local_tensor if is_dtensor(value) else value)


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Bring to the parameters' device what was made while they were in host memory: a gradient that no backward gave
    (tied.py), and the count of steps of a loaded checkpoint, which a fused optimizer wants beside them.
    """
    for group in optimizer.param_groups:
        fused = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if parameter.grad is not None and parameter.grad.device != parameter.device:
                parameter.grad = parameter.grad.to(parameter.device)
            if fused and isinstance(step := state.get("step"), torch.Tensor):
                state["step"] = step.to(parameter.device)


# ---- a rank's device -------------------------------------------------------------------------------------------------


class RankDevice:
    """The memory, copies and speed of a rank's device."""

    def __init__(
        self,
        plan: PipelinePlan,
        name: str,
        where: torch.device,
        emulated: EmulatedDevice,
        parts: Mapping[int, PipelinePart],
        optimizers: Mapping[int, torch.optim.Optimizer],
    ) -> None:
        """Enter a rank's parts, by their numbers, in its account; take their shards to host memory if the plan says so.

        name  of the device in the plan
        """
        self._own, self._emulated, self._offload = find_device([torch.empty(0, device=where)]), emulated, plan.offload
        self._parts, self._optimizers = parts, optimizers
        self.account = MemoryAccount(name, emulated.memory_bytes)
        self._engine = CopyEngine(where, emulated.copy_byte_s)
        self._activations = OffloadedActivations(self._engine, self._tell_moved)
        self._saved: dict[int, int] = {}  # bytes that a micro-batch's forward keeps, by part; measured at the first
        self._counted: SavedBytes | None = None  # of the forward under way, if it is measured
        self._given: list[torch.Tensor] = []  # the batch: counted nowhere, and never offloaded
        self._trains, self._shape = True, object()
        self._stepped = set[int]()  # since they were fetched
        for number, part in parts.items():
            self.account.hold(MemoryCategory.PARAMETERS, number, sum(s.data.nbytes for _, s in list_shards(part)))
        self._shards: OffloadedShards | None = None
        if plan.moves_shards:
            self._shards = OffloadedShards(self._engine, where, parts, optimizers, self.account)

    def begin_step(self, batch: Iterable[torch.Tensor], trains: bool, shape: object) -> None:
        """Begin a step or an evaluation on a batch; with another `shape` than before activations are measured anew."""
        self._given, self._trains = list(batch), trains
        if shape != self._shape:
            self._shape = shape
            self._saved.clear()
            self._engine.free_unused()
        self.account.begin_step()

    def end_step(self) -> None:
        """Wait until all shards are in host memory, if they were; nothing is on its way any more."""
        self._given = []
        self.account.drop(HostCategory.BORDERS)
        if self._shards is not None:
            self._shards.finish()

    # ---- around actions ----------------------------------------------------------------------------------------------

    @contextmanager
    def computing(self, number: int, op: Op, microbatch: int) -> Iterator[None]:
        """Compute F, I, W or B of a part, which takes as long as it would on the emulated device."""
        part = self._parts[number]
        if op is Op.F and self._trains and number not in self._saved:
            self._counted = SavedBytes((*part.parameters(), *part.buffers(), *self._given))
        with self.counting(), self._emulated.stretched(self._own):
            yield
        if op is Op.F:
            self._take_activations(number, microbatch)

    @contextmanager
    def counting(self, *kept: torch.Tensor) -> Iterator[None]:
        """Count what autograd keeps of a forward and of its loss, and what is kept besides, if that is measured now."""
        if self._counted is None:
            yield
            return
        for tensor in kept:
            self._counted.add(tensor)
        with self._counted.counting():
            yield

    def _take_activations(self, number: int, microbatch: int) -> None:
        """Keep what the layers took if it may be offloaded, and count what is kept besides by autograd."""
        part = self._parts[number]
        taken, part.taken = part.taken, []
        if self._offload and self._trains:
            here = (*part.parameters(), *part.buffers(), *self._given)
            known = {tensor.untyped_storage().data_ptr() for tensor in here}
            taken = [tensor for tensor in taken if tensor.untyped_storage().data_ptr() not in known]
            self._activations.keep((number, microbatch), taken)
        if self._counted is not None:
            for tensor in taken if self._offload else taken[:1]:  # torch's stage keeps what the first layer took
                self._counted.add(tensor)

    def prepare(self, action: RankAction) -> None:
        """Play a FETCH or OFFLOAD; before another action wait until what it needs is on the device."""
        op, number, microbatch = action
        if microbatch is not None:
            self._prepare_activations(op, (number, microbatch))
        if self._shards is None or (op in COPIES and microbatch is not None):
            return
        if op is Op.FETCH:
            self._shards.fetch(number)
        elif op is Op.OFFLOAD:
            self._shards.offload(number, number in self._stepped)
            self._stepped.discard(number)
        elif op in COMPUTING or op is Op.UNSHARD:
            self._shards.arrive(number)
            if op in (Op.I, Op.B):
                self._shards.fetch(number, MemoryCategory.OPTIMIZER)

    def _prepare_activations(self, op: Op | BorderTransfer, key: MicrobatchOfPart) -> None:
        if op is Op.FETCH:
            self._activations.fetch(key)
        elif op is Op.OFFLOAD:
            self._activations.offload(key)
        elif op in (Op.I, Op.B):
            self._activations.arrive(key)

    def await_shards(self, number: int) -> None:
        """Wait until what a part's optimizer steps with is on the device, if it is taken away at times."""
        if self._shards is not None:
            for category in SHARDS:
                self._shards.arrive(number, category)

    def step_optimizer(self, number: int, late: bool) -> None:
        """Step the optimizer of a part whose gradients are whole; `late`: when all is computed."""
        optimizer = self._optimizers[number]
        self.account.hold(MemoryCategory.GRADIENTS, number, count_gradients(self._parts[number]))
        follow_parameters(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        self.account.hold(MemoryCategory.GRADIENTS, number, count_gradients(self._parts[number]))
        states = sum(shard.data.nbytes for _, shard in list_states(optimizer))
        self.account.hold(MemoryCategory.OPTIMIZER, number, states)
        if self._shards is None:
            return
        if late:
            self._shards.offload(number)
        else:
            self._stepped.add(number)

    def on_played(self, action: RankAction, border_bytes: int) -> None:
        """Bring the account of an action's part up to date."""
        op, number, microbatch = action
        part, hold = self._parts[number], self.account.hold
        hold(HostCategory.BORDERS, number, border_bytes)
        hold(MemoryCategory.GATHERED, number, count_gathered(part))
        if op is Op.F and self._trains:
            if self._counted is not None:
                self._saved[number], self._counted = self._counted.nbytes, None
            hold(MemoryCategory.ACTIVATIONS, (number, microbatch), self._saved[number])
        if op in (Op.I, Op.W, Op.B, Op.REDUCE):
            hold(MemoryCategory.GRADIENTS, number, count_gradients(part))
        if op in (Op.W, Op.B) and microbatch is not None:
            self._activations.drop((number, microbatch))
            hold(MemoryCategory.ACTIVATIONS, (number, microbatch), 0)
            hold(HostCategory.OFFLOADED, (number, microbatch), 0)
        if self._offload:
            self._activations.free_copied()
        if self._shards is not None:
            self._shards.advance()

    def _tell_moved(self, key: tuple[int, int], away: int, in_host: int) -> None:
        self.account.hold(MemoryCategory.ACTIVATIONS, key, self._saved[key[0]] - away)
        self.account.hold(HostCategory.OFFLOADED, key, in_host)
