"""A cluster of a run without a server, trained by the same slept steps as timed_rank.py: what Di-PS is held against.

    serverless_rank.py CLUSTER MEETING PLAN        (a ServerlessPlan as JSON)

Each of the methods has the part of OuterLoop that `timed_rank.train` uses, so that all are timed by the same lines:

    dp     data parallel: gradients are averaged by an all-reduce after every inner step
    sync   DiLoCo: after H inner steps all clusters average their pseudo-gradients; whoever is early waits
    async  DiLoCo without a server: whoever has taken H inner steps begins an all-reduce, in which a thread of every
           cluster takes part, with zeros unless its cluster has arrived, too (papers: di-ps §5.1, Figure 4b)

All clusters end together: in the all-reduce after their time is over they say so.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.outer_rank import BenchModel, meet
from benchmarks.timed_rank import SleptSteps, TimedPlan, train
from dips.ids import VersionId

OUTER = {"lr": 0.7, "momentum": 0.8, "nesterov": True}
WAIT = timedelta(seconds=120)  # for a peer; longer than a round at the slowest link
METHODS = ("dp", "sync", "async")


@dataclass(frozen=True, slots=True)
class ServerlessPlan:
    """What a rank is told."""

    timed: TimedPlan
    method: str
    rank: int
    address: str  # host:port of rank 0's store
    inner_steps: int  # H


class Synchronous:
    """An outer step with everybody after each H inner steps; with H = 1 and no outer optimizer, data parallel."""

    moving = False

    def __init__(self, model: BenchModel, plan: ServerlessPlan) -> None:
        self._model, self._plan = model, plan
        self._numel = sum(p.numel() for p in model.parameters())
        self._sent = torch.zeros(self._numel + 1)  # the last element: how many have had their time
        self._theta = torch.nn.Parameter(torch.zeros(self._numel))
        self._optimizer = torch.optim.SGD([self._theta], **OUTER)  # type: ignore[arg-type]
        self._since_last = 0
        self._until = monotonic() + plan.timed.train_s
        self.version, self.finished = VersionId(0, 0), False

    def step(self, *, tokens: int) -> None:
        """Count an inner step; after H of them take the outer step."""
        self._since_last += 1
        every = 1 if self._plan.method == "dp" else self._plan.inner_steps
        if self._since_last >= every:
            self._since_last = 0
            self._average()
            self.version = VersionId(self.version.version + 1, self.version.round + 1)

    def _average(self) -> None:
        delta = self._sent[:-1]
        torch.sub(self._theta.data, flatten(self._model), out=delta)
        self._sent[-1] = monotonic() > self._until
        dist.all_reduce(self._sent)
        delta.div_(dist.get_world_size())
        if self._plan.method == "sync":
            self._theta.grad = delta
            self._optimizer.step()
        else:
            self._theta.data.sub_(delta)
        unflatten(self._theta.data, self._model)
        self.finished = bool(self._sent[-1] > 0)

    def close(self) -> None:
        """Nothing is left running."""


class Asynchronous:
    """An outer step with whoever has arrived, in an all-reduce of everybody's threads."""

    def __init__(self, model: BenchModel, plan: ServerlessPlan, store: TCPStore) -> None:
        """`store` is this thread's own: a client of a TCPStore does one thing at a time."""
        self._model, self._plan = model, plan
        self._store = store
        host, port = plan.address.split(":")
        self._threads_store = TCPStore(host, int(port), None, is_master=False, timeout=WAIT)
        numel = sum(p.numel() for p in model.parameters())
        self._theta = torch.nn.Parameter(torch.zeros(numel))
        self._optimizer = torch.optim.SGD([self._theta], **OUTER)  # type: ignore[arg-type]
        self._base = torch.zeros(numel)  # θ that this cluster trains from
        self._changed = threading.Condition()
        self._arrived: torch.Tensor | None = None  # the pseudo-gradient that waits for the next all-reduce
        self._next = 0  # the first all-reduce for which nothing is packed yet
        self._since_last, self._last = 0, False
        self._until = monotonic() + plan.timed.train_s
        self._failed: BaseException | None = None
        self.version, self.finished, self.moving = VersionId(0, 0), False, False
        self._thread = threading.Thread(target=self._run, name="all-reduce", daemon=True)
        self._thread.start()

    def step(self, *, tokens: int) -> None:
        """Count an inner step; after H of them begin an all-reduce, and wait for its result."""
        self._since_last += 1
        if self._since_last < self._plan.inner_steps:
            return
        self._since_last = 0
        self._arrive(self._base - flatten(self._model))
        with self._changed:
            self._base.copy_(self._theta.data)
        unflatten(self._base, self._model)
        self.version = VersionId(self.version.version + 1, self.version.round + 1)
        self.finished = monotonic() > self._until

    def close(self) -> None:
        """Take part until all clusters have had their time; the last of them ends it."""
        if self._store.add("ended", 1) == self._plan.timed.clusters:
            with self._changed:
                self._last = True
                self._store.set(f"go/{self._next}", "")
        self._thread.join(WAIT.total_seconds())
        if self._failed is not None:
            raise self._failed

    def _arrive(self, delta: torch.Tensor) -> None:
        with self._changed:
            self._arrived = delta
            mine = self._next
            self._store.set(f"go/{mine}", "")
            self._changed.wait_for(lambda: (self._next > mine and not self.moving) or self._failed is not None)
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        try:
            while self._reduce_once():
                pass
        except BaseException as error:  # noqa: BLE001 (whoever waits gets it)
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _reduce_once(self) -> bool:
        """Take part in the next all-reduce; return False after the last one."""
        self._threads_store.wait([f"go/{self._next}"], WAIT)
        sent = torch.zeros(self._theta.numel() + 2)  # beside the sum: how many have arrived, and whether it is the last
        with self._changed:
            if self._arrived is not None:
                sent[:-2], sent[-2] = self._arrived, 1.0
            sent[-1] = self._last
            self._arrived, self.moving = None, True
            self._next += 1
        dist.all_reduce(sent)
        with self._changed:
            if sent[-2] > 0:
                self._theta.grad = sent[:-2] / self._plan.timed.clusters
                self._optimizer.step()
            self.moving = False
            self._changed.notify_all()
        return not bool(sent[-1] > 0)


def flatten(model: BenchModel) -> torch.Tensor:
    """Return all parameters as one vector."""
    return torch.cat([p.data.reshape(-1) for p in model.parameters()])


def unflatten(flat: torch.Tensor, model: BenchModel) -> None:
    """Copy one vector into all parameters; as views of it, which torch's own function makes, they would train θ."""
    parameters = list(model.parameters())
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data.copy_(part.view_as(parameter))


def main(name: str, meeting: Path, plan: ServerlessPlan) -> None:
    host, port = plan.address.split(":")
    store = TCPStore(host, int(port), None, is_master=plan.rank == 0, timeout=WAIT)
    dist.init_process_group("gloo", store=store, rank=plan.rank, world_size=plan.timed.clusters, timeout=WAIT)
    model, steps = BenchModel(plan.timed.layers, plan.timed.numel), SleptSteps(plan.timed, name)
    dist.all_reduce(torch.zeros(1))  # the connections are made
    meet(meeting, name, plan.timed.clusters, 0)
    outer = Asynchronous(model, plan, store) if plan.method == "async" else Synchronous(model, plan)
    with (meeting / f"{name}.jsonl").open("w", buffering=1) as out:
        while not outer.finished:
            out.write(json.dumps(asdict(train(outer, model, steps))) + "\n")
    outer.close()
    meet(meeting, name, plan.timed.clusters, 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    words = json.loads(sys.argv[3])
    main(sys.argv[1], Path(sys.argv[2]), ServerlessPlan(**{**words, "timed": TimedPlan(**words["timed"])}))
