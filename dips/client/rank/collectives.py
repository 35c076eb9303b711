"""One mouth, one verdict (why.md 25): what rank 0 hears, all ranks hear; what all ranks did, all ranks know.

The group is a gloo group of its own, so verdicts never stand behind the training's collectives. Every call here is made
by all ranks in the same order. A job of one process needs no torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from dips.errors import ConfigError, LocalProtocolError


class JobCollectives:
    """The collectives of one training job."""

    def __init__(self, deadline_s: float = 600.0) -> None:
        """Make the group if torch.distributed is initialised; every rank must come here.

        deadline_s  how long ranks that came to a call wait for those that did not
        """
        self._deadline = timedelta(seconds=deadline_s)
        self.rank, self.world = 0, 1
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=self._deadline) if self.world > 1 else None
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"this job has {os.environ['WORLD_SIZE']} ranks: call torch.distributed.init_process_group first"
            )

    def meet(self, what: str) -> None:
        """Wait for all ranks to come to `what`, the first collective of a call of the training script.

        Raise LocalProtocolError after the deadline: on rank 0 it names the ranks that did not come.
        """
        if self._group is None:
            return
        try:
            dist.monitored_barrier(self._group, timeout=self._deadline, wait_all_ranks=True)
        except RuntimeError as error:
            raise LocalProtocolError(
                f"not all {self.world} ranks came to {what} within {self._deadline.total_seconds():g} s: every rank "
                f"must call the outer loop alike, in the same order. {str(error).splitlines()[0]}"
            ) from error

    def share(self, words: bytes | None) -> bytes:
        """Give rank 0's `words` to all ranks; the others pass None."""
        if self._group is None:
            assert words is not None
            return words
        length = torch.tensor([0 if words is None else len(words)])
        dist.broadcast(length, 0, group=self._group)
        body = torch.empty(int(length[0]), dtype=torch.uint8)
        if words is not None:
            body.copy_(torch.frombuffer(bytearray(words), dtype=torch.uint8))
        dist.broadcast(body, 0, group=self._group)
        return bytes(body.numpy())

    def gather(self, words: bytes) -> list[bytes]:
        """Give every rank's words to all ranks, in the ranks' order."""
        if self._group is None:
            return [words]
        lengths = self.total([len(words) if r == self.rank else 0 for r in range(self.world)])
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        padded[: len(words)] = torch.frombuffer(bytearray(words or b" "), dtype=torch.uint8)[: len(words)]
        heard = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(heard, padded, group=self._group)
        return [bytes(one[:length].numpy()) for one, length in zip(heard, lengths, strict=True)]

    def exchange(self, gives: dict[int, torch.Tensor], takes: dict[int, torch.Tensor]) -> None:
        """Send each tensor of `gives` to its rank, and fill those of `takes` from theirs; return when all is done.

        What one rank gives another takes, with the same number of elements; ranks that share nothing need not come.
        """
        work = [dist.irecv(tensor, rank, group=self._group) for rank, tensor in sorted(takes.items())]
        work += [dist.isend(tensor, rank, group=self._group) for rank, tensor in sorted(gives.items())]
        for one in work:
            assert one is not None, "every rank of the job is in its group"
            one.wait()

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The smallest over all ranks of each number."""
        return self._reduced(numbers, dist.ReduceOp.MIN)

    def total(self, numbers: Sequence[int]) -> list[int]:
        """The sum over all ranks of each number."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def numbered(self, here: bool) -> tuple[int, int]:
        """Number the ranks that say `here` from 0 on: this rank's number (meaningless if not here), and how many."""
        present = self.total([int(here and r == self.rank) for r in range(self.world)])
        return sum(present[: self.rank]), sum(present)

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _reduced(self, numbers: Sequence[int], how: dist.ReduceOp.RedOpType) -> list[int]:
        if self._group is None:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(tensor, op=how, group=self._group)
        return [int(n) for n in tensor]
