"""An accelerator that is as late as its streams permit, emulated on the host: what does not wait sees stale bytes.

A `LateDevice` holds back whatever touches the memory of its model: copies, sums, what a collective of the device
brings. Each such call is queued on the stream that is current, as CUDA and its relatives do, and is done no sooner than
something waits for that stream: `synchronize`, an event, a number that is read, a copy that blocks. Host memory is read
and written at once, by torch and by numpy. So a reader of host memory that waited for nothing, or for the other stream,
finds what lay there before; on a real device it does so now and then, here each time.

`ThreadRanks` are the ranks of a job as threads of one process, so a job of four costs milliseconds.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dips.client.parallel import devices
from dips.client.parallel.devices import Accelerator

ON_DEVICE = torch.device("cpu", 0)  # what torch makes here belongs to the emulated device
TIMEOUT_S = 20.0
DONE_LATER = frozenset({"copy_", "add_", "sub_", "mul_", "fill_", "zero_"})  # nobody looks at what they return


class LateStream:
    """What was enqueued and is not done; stands in for a `torch.Stream`."""

    def __init__(self, device: object = None) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self.added = self.done = 0
        _here.streams.append(self)

    def add(self, call: Callable[[], object]) -> None:
        self._waiting.append(call)
        self.added += 1

    def run(self, upto: int | None = None) -> None:
        """Do it, as far as that had been enqueued when `added` was `upto`."""
        end = self.added if upto is None else upto
        while self.done < end:
            call = self._waiting.popleft()
            self.done += 1
            call()

    synchronize = run

    def wait_stream(self, other: LateStream) -> None:
        """Have what is enqueued from now on run after what `other` has been given so far."""
        upto = other.added
        self.add(lambda: other.run(upto))


class LateEvent:
    """A place in a stream; stands in for a `torch.Event`."""

    def __init__(self, device: object = None) -> None:
        self._stream, self._upto = _here.current, 0

    def record(self, stream: LateStream) -> None:
        self._stream, self._upto = stream, stream.added

    def query(self) -> bool:
        return self._stream.done >= self._upto

    def synchronize(self) -> None:
        self._stream.run(self._upto)

    def wait(self, stream: LateStream) -> None:
        stream.add(self.synchronize)


_here: Any = threading.local()  # the device of this thread: `streams`, and the `current` one of them


def emulate_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `Accelerator` use the streams and events above instead of torch's, of which there are none on the host."""

    def synchronize(where: torch.device) -> None:
        for stream in _here.streams:
            stream.run()

    def set_stream(stream: LateStream) -> None:
        _here.current, _here.index = stream, ON_DEVICE.index

    @contextmanager
    def keep_index(where: torch.device) -> Iterator[None]:
        before, _here.index = _here.index, where.index
        yield
        _here.index = before

    accelerator = SimpleNamespace(
        current_stream=lambda where: _here.current,
        set_stream=set_stream,
        synchronize=synchronize,
    )
    late = ModuleType("late_torch")
    others = lambda name: getattr(torch, name)  # noqa: E731
    empty = lambda *shape, pin_memory=False, **options: torch.empty(*shape, **options)  # noqa: E731
    module = lambda where: SimpleNamespace(device=keep_index)  # noqa: E731
    late.__dict__.update(Stream=LateStream, Event=LateEvent, accelerator=accelerator, get_device_module=module)
    late.__dict__.update(empty=empty, __getattr__=others)
    monkeypatch.setattr(devices, "torch", late)


class LateDevice(Accelerator):
    """One rank's device: two streams, and the memory of what was placed on it. Make and enter it in the rank's thread,
    under `emulate_streams`.
    """

    block_items = 40  # several blocks of most tensors

    def __init__(self, model: nn.Module | None = None) -> None:
        _here.streams, self.pinned = [], list[int]()
        super().__init__(ON_DEVICE)
        _here.current, _here.index = LateStream(), ON_DEVICE.index
        self._placed: dict[int, torch.UntypedStorage] = {}
        self._mode = _Late(self)
        for tensor in (*model.parameters(), *model.buffers()) if model is not None else ():
            self.place(tensor.to_local() if hasattr(tensor, "to_local") else tensor)

    def __enter__(self) -> LateDevice:
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)

    @property
    def current(self) -> LateStream:
        return _here.current  # type: ignore[no-any-return]

    def set_index(self, index: int) -> None:
        """Choose the current device of this thread."""
        _here.index = index

    @property
    def index(self) -> int:
        return _here.index  # type: ignore[no-any-return]

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its memory is the device's from now on."""
        storage = tensor.detach().untyped_storage()
        self._placed[storage.data_ptr()] = storage
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device."""
        return tensor.untyped_storage().data_ptr() in self._placed

    def pin_pages(self, array: np.ndarray[Any, np.dtype[np.float32]]) -> bool:
        self.pinned.append(array.ctypes.data)
        return True


class _Late(TorchDispatchMode):
    """Puts off calls of torch that touch a device's memory."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device, options = self._device, kwargs or {}
        tensors = [a for a in torch.utils._pytree.tree_leaves((args, options)) if isinstance(a, torch.Tensor)]
        here = [device.holds(tensor) for tensor in tensors]
        if func.is_view or not any(here):
            made = func(*args, **options)
            return device.place(made) if options.get("device") == ON_DEVICE else made
        name = func.overloadpacket.__name__
        crosses = name == "copy_" and not all(here)
        blocks = crosses and not (args[2] if len(args) > 2 else options.get("non_blocking"))
        if crosses and not blocks and _needs_temporary(*args[:2], on_host=args[here[0]]):
            args = args[0], torch.full((), float("nan"))  # it is read before it is filled, or freed before it is read
            here[0] or _call_now(func, *args)
        if name in DONE_LATER and here[0] | (name == "copy_") and not blocks:
            device.current.add(lambda: _call_now(func, *args, **options))
            return args[0]
        device.current.run()  # a number, or a new tensor, is wanted; a copy blocks
        made = func(*args, **options)
        on_host = options.get("device") == torch.device("cpu")  # a copy to the host: it blocks
        return device.place(made) if isinstance(made, torch.Tensor) and not on_host else made


def _needs_temporary(target: torch.Tensor, source: torch.Tensor, on_host: torch.Tensor) -> bool:
    """Whether torch casts or packs in other memory of the host. CUDA waits for that memory, torch_npu does not."""
    return target.dtype is not source.dtype or not on_host.is_contiguous()


def _call_now(func: Any, *args: Any, **options: Any) -> None:
    with _disable_current_modes():
        func(*args, **options)


class ThreadRanks:
    """One rank of a job whose ranks are threads: what `JobCollectives` does."""

    def __init__(self, rank: int, meeting: Meeting, device: LateDevice | None = None) -> None:
        """`device`: the ranks' process group has a backend for it, as nccl is for CUDA; None: gloo alone."""
        self.rank, self.world_size, self._meeting, self._device = rank, meeting.ranks, meeting, device

    def all_gather(self, message: bytes) -> list[bytes]:
        return self._meeting.exchange(self.rank, message)

    def all_min(self, numbers: Sequence[int]) -> list[int]:
        return [min(column) for column in zip(*self._meeting.exchange(self.rank, list(numbers)), strict=True)]

    def all_sum(self, numbers: Sequence[int]) -> list[int]:
        return [sum(column) for column in zip(*self._meeting.exchange(self.rank, list(numbers)), strict=True)]

    def number_ranks(self, included: bool) -> tuple[int, int]:
        present = self.all_sum([int(included and r == self.rank) for r in range(self.world_size)])
        return sum(present[: self.rank]), sum(present)

    def can_exchange(self, device: torch.device, wanted: bool) -> bool:
        return self._device is not None and device == ON_DEVICE and any(self._meeting.exchange(self.rank, wanted))

    def exchange_tensors(self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]) -> None:
        """On a device: what is sent is what the current stream has made of it, what is received arrives late."""
        if self._device is not None:
            self._device.current.run()
        with _disable_current_modes():
            copies = {peer: tensor.clone() for peer, tensor in sends.items()}
        for peer, tensor in copies.items():
            self._meeting.send(self.rank, peer, tensor)
        for peer, tensor in sorted(receives.items()):
            tensor.copy_(self._meeting.receive(peer, self.rank), non_blocking=True)


class Meeting:
    """Where the threads of a job meet. A rank that fails breaks it, so that none waits for ever."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = threading.Barrier(ranks, timeout=TIMEOUT_S)
        self._told: list[Any] = [None] * ranks
        self._mail: dict[tuple[int, int], deque[torch.Tensor]] = {}
        self._arrived = threading.Condition()

    def exchange(self, rank: int, told: Any) -> list[Any]:
        self._told[rank] = told
        self._barrier.wait()
        heard = list(self._told)
        self._barrier.wait()
        return heard

    def send(self, source: int, target: int, tensor: torch.Tensor) -> None:
        with self._arrived:
            self._mail.setdefault((source, target), deque()).append(tensor)
            self._arrived.notify_all()

    def receive(self, source: int, target: int) -> torch.Tensor:
        with self._arrived:
            assert self._arrived.wait_for(lambda: self._mail.get((source, target)) or self._barrier.broken, TIMEOUT_S)
            return self._mail[source, target].popleft()

    def abort(self) -> None:
        self._barrier.abort()
        with self._arrived:
            self._arrived.notify_all()


def run_ranks(ranks: int, play: Callable[[int, Meeting], Any]) -> list[Any]:
    """What each rank's thread returned; the error of the first that failed."""
    meeting, found, errors = Meeting(ranks), [None] * ranks, []

    def run(rank: int) -> None:
        try:
            found[rank] = play(rank, meeting)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return found
