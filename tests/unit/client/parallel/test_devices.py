"""What an accelerator's driver and its kernel must be told, emulated: refusals, forks, copies that would block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dips.client.parallel import devices
from dips.client.parallel.devices import DeferredScalar, Device, map_pages, register_pages
from dips.client.parallel.host import read_tensor, write_pulled
from dips.client.rank import agent_client as collectives_module
from dips.client.rank.agent_client import JobCollectives
from tests.unit.client.parallel.late_device import ON_DEVICE

CUDA = torch.device("cuda", 0)


class CudaRuntime:
    """As CUDA's: an error that nobody took is raised by the next launch, whoever makes it, and by that is gone."""

    def __init__(self, refuses: bool) -> None:
        self._refuses, self._last_error = refuses, 0
        self.registered = list[int]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address and nbytes
        self._last_error = 1 if self._refuses else 0
        self.registered += [] if self._refuses else [address]
        return self._last_error

    def cudaHostUnregister(self, address: int) -> None:
        self.registered.remove(address)

    def launch(self) -> None:
        error, self._last_error = self._last_error, 0
        if error:
            raise RuntimeError("CUDA error: invalid argument")


@pytest.mark.parametrize("refuses", [False, True])
def test_pages_that_a_driver_refuses_cost_nobody_a_kernel(refuses: bool) -> None:
    """torch's pinned memory is used then; the script's next kernel runs."""
    runtime = CudaRuntime(refuses)
    assert register_pages(runtime, map_pages(10), runtime.launch) is not refuses
    runtime.launch()


@pytest.mark.parametrize("refuses", [False, True])
def test_host_memory_is_pinned_where_a_driver_can(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as it lives; a driver that refuses, and a device of another kind, leave it to torch's own memory.
    Nothing is registered for nothing.
    """
    runtime, pinned = CudaRuntime(refuses), list[int]()
    made = lambda numel, dtype, device, pin_memory: pinned.append(numel) or torch.empty(numel, device=device)  # noqa: E731
    monkeypatch.setattr(devices, "torch", SimpleNamespace(
        Stream=lambda device: None, cuda=SimpleNamespace(cudart=lambda: runtime), from_numpy=torch.from_numpy,
        zeros=lambda n, device: runtime.launch(), empty=made, float32=torch.float32,
    ))  # fmt: skip
    for kind, by_driver in (("cuda", not refuses), ("xpu", False)):
        device = devices.Accelerator(torch.device(kind, 0))
        memory = device.allocate_host(10)
        assert memory.shape == (10,) and len(runtime.registered) == by_driver and pinned == [10] * (not by_driver)
        assert device.allocate_host(0).shape == (0,) and len(runtime.registered) == by_driver
        del memory
        assert not runtime.registered
        pinned.clear()
    runtime.launch()


@pytest.mark.parametrize(("dtype", "by_blocks"), [(torch.float32, False), (torch.bfloat16, True)])
def test_what_is_cast_on_its_way_goes_by_blocks(dtype: torch.dtype, by_blocks: bool) -> None:
    """A copy that casts would block the host; one that does not needs no block of the device's memory."""
    device = Device()
    device.accelerated, device.block_items = True, 4
    copy: Any = SimpleNamespace(view=torch.zeros(10, dtype=dtype), host=torch.arange(10.0))
    write_pulled(device, copy)
    assert torch.equal(copy.view.float(), copy.host)
    assert (device._scratch is not None) is by_blocks
    device._scratch, frozen = None, torch.zeros(10)
    read_tensor(device, copy.view, frozen)
    assert torch.equal(frozen, copy.host) and (device._scratch is not None) is by_blocks


def test_a_process_that_is_forked_has_none_of_the_pages() -> None:
    """DataLoader's workers: the kernel's flag `dc` is do-not-copy-on-fork."""
    pages = map_pages(5000)
    pages[:] = 1.0
    assert "dc" in flags_of_pages(pages), "a fork would copy it"
    assert "dc" not in flags_of_pages(np.ones(1 << 20, np.float32)), "what tells them apart"


def flags_of_pages(array: np.ndarray[Any, Any]) -> list[str]:
    """The kernel's flags of the mapping that holds an array."""
    address, found = array.ctypes.data, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                begin, end = (int(part, 16) for part in head.split("-"))
                found = begin <= address < end
            elif found and head == "VmFlags:":
                return line.split()[1:]
    raise AssertionError("no such mapping")


def test_a_loss_of_16_bits_is_converted_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the host that converts goes through memory that is not pinned, and waits for the device."""
    copied: list[list[torch.dtype]] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ == "copy_":
                copied.append([args[0].dtype, args[1].dtype])
            return func(*args, **(kwargs or {}))

    on_device = SimpleNamespace(
        float32=torch.float32,
        empty=lambda shape, dtype, device, pin_memory: torch.empty(shape, dtype=dtype, device=device),
        Event=lambda device: SimpleNamespace(record=lambda stream: None, synchronize=lambda: None),
        accelerator=SimpleNamespace(current_stream=lambda device: None),
    )
    monkeypatch.setattr(devices, "torch", on_device)
    with Copies(), torch.device("meta"):  # the script's default is another device
        loss = DeferredScalar(torch.tensor([2.5], dtype=torch.bfloat16, device="cpu", requires_grad=True))
    assert loss.read() == 2.5 and copied == [[torch.float32, torch.float32]]


def test_one_number_on_a_device_is_not_read_at_once() -> None:
    """A loss or a count; what is on the host, several numbers, and what is no plain tensor is read as it is."""
    there = torch.empty((), device="meta")
    assert devices.is_deferred(there) and devices.is_deferred(there.reshape(1))
    others = (torch.tensor(2.0), 2.0, None, torch.empty(2, device="meta"), torch.nn.Parameter(there))
    assert not any(map(devices.is_deferred, others))


def test_a_graph_that_records_is_asked_of_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch built for CPUs raises when it is asked."""
    assert not devices.is_captured([]) and not devices.is_captured([torch.ones(1)])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert devices.is_captured(iter([SimpleNamespace(device=CUDA)]))  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("backends", "wanted", "others_want", "expected"),
    [
        ("cpu:gloo,cuda:nccl", True, False, True),
        ("cpu:gloo,cuda:nccl", False, True, True),
        ("cpu:gloo,cuda:nccl", False, False, False),
        ("cpu:gloo,cuda:gloo", True, True, False),
    ],
)
def test_a_group_is_used_where_some_rank_has_something_to_exchange(
    monkeypatch: pytest.MonkeyPatch, backends: str, wanted: bool, others_want: bool, expected: bool
) -> None:
    """Else, as with FSDP2 alone, no communicator of all ranks is made on the devices."""
    used: list[torch.Tensor] = []

    class OneOfTwo(JobCollectives):
        def all_min(self, numbers: Any) -> list[int]:
            return [min(pair) for pair in zip(numbers, [1, int(not others_want)], strict=True)]

    collectives = OneOfTwo()
    collectives._group = object()  # type: ignore[assignment]
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(dist, "all_reduce", used.append)
    monkeypatch.setattr(collectives_module, "torch", SimpleNamespace(zeros=lambda n, device: torch.zeros(n)))
    assert collectives.can_exchange(CUDA, wanted) is expected
    assert len(used) == expected
    assert not collectives.can_exchange(ON_DEVICE, True), "gloo moves what lies on the host"


def test_a_job_of_one_needs_no_group() -> None:
    """Whether or not the script has initialised torch.distributed: nothing waits for gloo's threads."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert JobCollectives()._group is None
    finally:
        dist.destroy_process_group()
