"""The collectives of a training job: rank 0 talks to the agent, and its answers are broadcast to all ranks
(docs/rationale.md#25).

They run in a separate gloo group, so they never queue behind the training's collectives. Every rank makes the same
calls in the same order. A job of one process needs no torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from dips.errors import ConfigError, LocalProtocolError


class JobCollectives:
    """The collectives of one training job; every method but `close` is collective."""

    def __init__(self, deadline_s: float = 600.0) -> None:
        """Create the group if torch.distributed is initialised; every rank must call this.

        deadline_s  how long a `barrier` waits for ranks that have not reached it
        """
        self._deadline = timedelta(seconds=deadline_s)
        self.rank, self.world_size = 0, 1
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=self._deadline) if self.world_size > 1 else None
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"this job has {os.environ['WORLD_SIZE']} ranks: call torch.distributed.init_process_group first"
            )

    def barrier(self, call: str) -> None:
        """Wait until all ranks have reached `call`, a method of OuterLoop that the training script calls.

        Raises LocalProtocolError after the deadline; on rank 0 it names the missing ranks.
        """
        if self._group is None:
            return
        try:
            dist.monitored_barrier(self._group, timeout=self._deadline, wait_all_ranks=True)
        except RuntimeError as error:
            raise LocalProtocolError(
                f"not all {self.world_size} ranks reached {call} within {self._deadline.total_seconds():g} s: every "
                f"rank must call the outer loop alike, in the same order. {str(error).splitlines()[0]}"
            ) from error

    def broadcast(self, message: bytes | None) -> bytes:
        """Send rank 0's `message` to all ranks and return it; the others pass None."""
        if self._group is None:
            assert message is not None
            return message
        length = torch.tensor([0 if message is None else len(message)])
        dist.broadcast(length, 0, group=self._group)
        body = torch.empty(int(length[0]), dtype=torch.uint8)
        if message is not None:
            body.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        dist.broadcast(body, 0, group=self._group)
        return bytes(body.numpy())

    def all_gather(self, message: bytes) -> list[bytes]:
        """Return every rank's message on all ranks, in rank order."""
        if self._group is None:
            return [message]
        lengths = self.all_sum([len(message) if r == self.rank else 0 for r in range(self.world_size)])
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        padded[: len(message)] = torch.frombuffer(bytearray(message or b" "), dtype=torch.uint8)[: len(message)]
        gathered = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(gathered, padded, group=self._group)
        return [bytes(one[:length].numpy()) for one, length in zip(gathered, lengths, strict=True)]

    def exchange_tensors(self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]) -> None:
        """Send each tensor of `sends` to its rank, and fill those of `receives` from theirs; return when all are
        complete.

        Every send needs a receive of the same number of elements; ranks with neither need not call this. The tensors
        are all on the host, or all on a device that `can_exchange` accepts.
        """
        moved = {tensor.device.type for tensor in (*sends.values(), *receives.values())}
        group = self._group if moved <= {"cpu"} else dist.group.WORLD
        work = [dist.P2POp(dist.irecv, tensor, rank, group=group) for rank, tensor in sorted(receives.items())]
        work += [dist.P2POp(dist.isend, tensor, rank, group=group) for rank, tensor in sorted(sends.items())]
        for one in dist.batch_isend_irecv(work) if work else ():
            one.wait()

    def can_exchange(self, device: torch.device, wanted: bool) -> bool:
        """Return whether the job's own process group can move tensors on every rank's device, so that none go through
        the host.

        wanted  this rank will exchange tensors. If no rank will, the group is not used: its first use costs each rank a
                communicator with all ranks, hundreds of MB of device memory in a large job
        """
        if self._group is None:
            return False
        pairs = (pair.split(":") for pair in dist.get_backend_config().split(","))  # "cpu:gloo,cuda:nccl"
        able = any(pair[0] == device.type != "cpu" and pair[-1] != "gloo" for pair in pairs)
        all_able, none_wants = self.all_min([int(able), int(not wanted)])
        if not all_able or none_wants:
            return False
        dist.all_reduce(torch.zeros(1, device=device))  # the first use of a group must be by all of its ranks
        return True

    def all_min(self, numbers: Sequence[int]) -> list[int]:
        """Return the minimum over all ranks of each number."""
        return self._all_reduce(numbers, dist.ReduceOp.MIN)

    def all_sum(self, numbers: Sequence[int]) -> list[int]:
        """Return the sum over all ranks of each number."""
        return self._all_reduce(numbers, dist.ReduceOp.SUM)

    def number_ranks(self, included: bool) -> tuple[int, int]:
        """Number the `included` ranks from 0; return this rank's number (meaningless if not included) and their
        count.
        """
        present = self.all_sum([int(included and r == self.rank) for r in range(self.world_size)])
        return sum(present[: self.rank]), sum(present)

    def close(self) -> None:
        if self._group is not None:
            with suppress(ValueError):  # the script has destroyed the default group, and this one with it
                dist.destroy_process_group(self._group)
            self._group = None

    def _all_reduce(self, numbers: Sequence[int], op: dist.ReduceOp.RedOpType) -> list[int]:
        if self._group is None:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(tensor, op=op, group=self._group)
        return [int(n) for n in tensor]
