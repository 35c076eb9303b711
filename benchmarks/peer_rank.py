"""A cluster of a peer, and the peer's coordinator, for goodput.py and peers.py; run by the peer's own interpreter.

    peer_rank.py PLAN        (a PeerPlan as JSON; rank -1 is the coordinator)

    ours      Di-PS's OuterLoop below an agent, for peers.py; it has a master instead of a coordinator
    gloo      synchronous DiLoCo by all-reduce; after a failure all begin again at the newest checkpoint
    torchft   its DiLoCo; the coordinator is the lighthouse
    hivemind  its averager of pseudo-gradients; the coordinator is the first peer of the hash table
    flower    FedAvgM over gRPC; the coordinator is the server

As tests/chaos/train_chaos.py does, it trains nothing: every parameter is the number that cluster and outer step
determine. The first process imports what takes long and forks the one that takes steps, again whenever it ends, so that
whoever must begin anew because another has failed pays no import. After each outer step an OuterStepSeen is appended to
`steps`. Peers import nothing of Di-PS but the numbers of that trainer.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.train_chaos import START, constant

COLLECTIVE = timedelta(seconds=20)  # longer than any cut or stop of the trace, so that those end by themselves
LAYERS = 4  # of ours
AGAIN_S = 0.5  # between two tries
FEWEST = 2  # replicas that torchft trains with
JOIN_MS = 10_000  # that its lighthouse waits for replicas that live and train: longer than a round of theirs
CHECKPOINT = "newest.pt"
ADDRESSES = "addresses.json"  # of hivemind's first peer, in the coordinator's directory
LINK = "w0"  # the device of a host's own link, as in namespaces.py


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """What a rank, or the coordinator, is told."""

    system: str
    rank: int
    clusters: int
    coordinator: str  # host:port
    ip: str  # its own
    numel: int
    inner_steps: int
    step_s: float
    steps: str  # the file
    directory: str  # on its own disk
    meeting: str  # the coordinator's directory
    lr: float
    momentum: float

    @property
    def name(self) -> str:
        return f"c{self.rank}"

    @property
    def meeting_point(self) -> tuple[str, int]:
        host, port = self.coordinator.split(":")
        return host, int(port)


class OuterStepSeen(NamedTuple):
    """One outer step as one cluster saw it."""

    at: float  # Unix seconds
    step: int  # the first is 1
    took_part: bool
    number: float  # θ
    took_s: float  # beyond the inner steps
    moved: int  # bytes on the host's link since it came up, both ways


def write_seen(plan: PeerPlan, step: int, took_part: bool, number: float, took_s: float) -> None:
    links = [row for line in Path("/proc/net/dev").read_text().splitlines() if (row := line.split())[0] == f"{LINK}:"]
    moved = sum(int(row[1]) + int(row[9]) for row in links)
    with Path(plan.steps).open("a") as out:
        out.write(json.dumps(OuterStepSeen(time.time(), step, took_part, number, took_s, moved)) + "\n")


# ---- ours ----------------------------------------------------------------------------------------------------------


def train_ours(plan: PeerPlan) -> None:
    """What a user of Di-PS writes."""
    import torch

    from benchmarks.outer_rank import BenchModel
    from dips.client import OuterLoop

    model = BenchModel(LAYERS, plan.numel // LAYERS)
    with OuterLoop(model) as outer:
        while not outer.finished:
            base, took_s = outer.version, 0.0
            for _ in range(plan.inner_steps):
                time.sleep(plan.step_s)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(constant(plan.name, base.version, base.round))
                begun = time.perf_counter()
                outer.step(tokens=1)
                took_s += time.perf_counter() - begun
            if outer.version != base:
                number = float(next(model.parameters()).detach()[0])
                write_seen(plan, outer.version.version, True, number, took_s)


# ---- gloo with restart ----------------------------------------------------------------------------------------------


def meet_all(plan: PeerPlan, store: Any) -> str:
    """Wait until every rank is here for the same attempt; return its prefix in the store.

    Whoever fails moves to the next attempt; so does one that finds itself in this one, of an earlier life.
    """
    attempt = store.add("attempt", 0)
    if store.add(f"{attempt}/{plan.rank}", 1) > 1:
        store.compare_set("attempt", str(attempt), str(attempt + 1))
        attempt = max(attempt + 1, store.add("attempt", 0))
        store.add(f"{attempt}/{plan.rank}", 1)
    while any(store.add(f"{attempt}/{rank}", 0) == 0 for rank in range(plan.clusters)):
        if store.add("attempt", 0) != attempt:
            raise ConnectionError("another attempt has begun")
        time.sleep(0.1)
    return f"a{attempt}"


def train_gloo(plan: PeerPlan) -> None:
    """One attempt: meet, take the newest checkpoint of all, and take outer steps with everybody until one fails."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    store = TCPStore(*plan.meeting_point, None, is_master=False, wait_for_workers=False, timeout=COLLECTIVE)
    prefix = meet_all(plan, store)
    dist.init_process_group(
        "gloo", store=PrefixStore(prefix, store), rank=plan.rank, world_size=plan.clusters, timeout=COLLECTIVE
    )
    file = Path(plan.directory) / CHECKPOINT
    step, state = _read_checkpoint(file, plan.numel)
    steps = [torch.zeros(1) for _ in range(plan.clusters)]
    dist.all_gather(steps, torch.tensor([float(step)]))
    newest = max(range(plan.clusters), key=lambda rank: float(steps[rank]))
    step = int(steps[newest])
    dist.broadcast(state, newest)
    theta, m = state
    while True:
        time.sleep(plan.inner_steps * plan.step_s)
        begun = time.perf_counter()
        delta = theta - constant(plan.name, step, 0)
        dist.all_reduce(delta)
        delta /= plan.clusters
        m.mul_(plan.momentum).add_(delta)
        theta.sub_(plan.lr * (delta + plan.momentum * m))
        step += 1
        write_seen(plan, step, True, float(theta[0]), time.perf_counter() - begun)
        try:
            torch.save((step, state), file.with_suffix(".part"))
            file.with_suffix(".part").rename(file)
        except (OSError, RuntimeError):  # a full disk: others have this checkpoint, too
            continue


def _read_checkpoint(file: Path, numel: int) -> tuple[int, Any]:
    """The outer steps that were taken, and θ and the momentum, f32[2, numel]."""
    import torch

    if file.exists():
        step, state = torch.load(file)
        return int(step), state
    return 0, torch.stack([torch.full((numel,), START), torch.zeros(numel)])


def serve_store(plan: PeerPlan) -> None:
    """Hold the store by which ranks meet."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(*plan.meeting_point, None, is_master=True, wait_for_workers=False)
    threading.Event().wait()
    del store


# ---- torchft --------------------------------------------------------------------------------------------------------


def train_torchft(plan: PeerPlan) -> None:
    """A replica group of one rank, that heals from the others when it comes back."""
    socket.gethostname = lambda: plan.ip  # by which others fetch its checkpoint: names are not resolved on these hosts
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
    from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

    model = torch.nn.Linear(plan.numel, 1, bias=False)
    parameter = model.weight
    with torch.no_grad():
        parameter.fill_(START)
    store = TCPStore(plan.ip, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=COLLECTIVE), min_replica_size=FEWEST, use_async_quorum=False, init_sync=False,
        rank=0, world_size=1,
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        replica_id=plan.name, timeout=COLLECTIVE, quorum_timeout=2 * COLLECTIVE, store_addr=plan.ip,
        store_port=store.port, hostname=plan.ip, lighthouse_addr=f"http://{plan.coordinator}",
    )  # fmt: skip
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    outer = torch.optim.SGD(model.parameters(), lr=plan.lr, momentum=plan.momentum, nesterov=True)
    with DiLoCo(manager, [model], inner, outer, sync_every=plan.inner_steps):
        while True:
            before = manager.current_step()
            for _ in range(plan.inner_steps):
                time.sleep(plan.step_s)
                with torch.no_grad():
                    parameter.fill_(constant(plan.name, before, 0))
                begun = time.perf_counter()
                inner.step()
            took_s, step = time.perf_counter() - begun, manager.current_step()
            if step > before:
                took_part = manager.is_participating() and step == before + 1
                write_seen(plan, step, took_part, float(parameter.detach()[0, 0]), took_s)


def serve_lighthouse(plan: PeerPlan) -> None:
    """The lighthouse, by which replica groups find each other."""
    from torchft._torchft import LighthouseServer  # type: ignore[import-not-found]

    lighthouse = LighthouseServer(bind=plan.coordinator, min_replicas=FEWEST, join_timeout_ms=JOIN_MS)
    threading.Event().wait()
    del lighthouse


# ---- hivemind -------------------------------------------------------------------------------------------------------


def train_hivemind(plan: PeerPlan) -> None:
    """A peer that averages pseudo-gradients with whom it finds, and takes the outer step by itself."""
    import hivemind  # type: ignore[import-not-found]
    import torch

    first = Path(plan.meeting) / ADDRESSES
    while not first.exists():
        time.sleep(0.1)
    table = hivemind.DHT(json.loads(first.read_text()), start=True, host_maddrs=[f"/ip4/{plan.ip}/tcp/0"])
    averager = hivemind.averaging.DecentralizedAverager(
        [torch.zeros(plan.numel)], table, start=True, prefix="outer", target_group_size=plan.clusters
    )
    theta, m = torch.full((plan.numel,), START), torch.zeros(plan.numel)
    step = 0
    while True:
        time.sleep(plan.inner_steps * plan.step_s)
        begun = time.perf_counter()
        with averager.get_tensors() as (delta,):
            delta.copy_(theta - constant(plan.name, step, 0))
        group = averager.step(timeout=COLLECTIVE.total_seconds(), allow_retries=True)
        if group is None:
            continue
        with averager.get_tensors() as (delta,):
            m.mul_(plan.momentum).add_(delta)
            theta.sub_(plan.lr * (delta + plan.momentum * m))
        step += 1
        write_seen(plan, step, len(group) > 1, float(theta[0]), time.perf_counter() - begun)


def serve_table(plan: PeerPlan) -> None:
    """The peer of the hash table that the others know first."""
    import hivemind

    host, port = plan.meeting_point
    table = hivemind.DHT(start=True, host_maddrs=[f"/ip4/{host}/tcp/{port}"])
    part = Path(plan.meeting) / f"{ADDRESSES}.part"
    part.write_text(json.dumps([str(address) for address in table.get_visible_maddrs()]))
    part.rename(part.with_suffix(""))
    threading.Event().wait()


# ---- Flower ---------------------------------------------------------------------------------------------------------


def train_flower(plan: PeerPlan) -> None:
    """A client; what it waits for between two calls of `fit` is the outer step."""
    import numpy as np
    from flwr.client import NumPyClient, start_client  # type: ignore[import-not-found]

    class Client(NumPyClient):  # type: ignore[misc,unused-ignore]
        """Returns its number after the time of its inner steps."""

        step, ended = 0, 0.0

        def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
            if self.ended:
                self.step += 1
                write_seen(plan, self.step, True, float(parameters[0][0]), time.perf_counter() - self.ended)
            time.sleep(plan.inner_steps * plan.step_s)
            self.ended = time.perf_counter()
            return [np.full(plan.numel, constant(plan.name, self.step, 0), np.float32)], plan.inner_steps, {}

    start_client(server_address=plan.coordinator, client=Client().to_client(), insecure=True)


def serve_flower(plan: PeerPlan) -> None:
    """The server; rounds go on with those that are left."""
    import numpy as np
    from flwr.common import ndarrays_to_parameters  # type: ignore[import-not-found]
    from flwr.server import ServerConfig, start_server  # type: ignore[import-not-found]
    from flwr.server.strategy import FedAvgM  # type: ignore[import-not-found]

    strategy = FedAvgM(
        fraction_evaluate=0.0, min_fit_clients=FEWEST, min_available_clients=plan.clusters - 1,
        initial_parameters=ndarrays_to_parameters([np.full(plan.numel, START, np.float32)]),
        server_learning_rate=plan.lr, server_momentum=plan.momentum,
    )  # fmt: skip
    start_server(server_address=plan.coordinator, config=ServerConfig(num_rounds=1 << 20), strategy=strategy)


# ---- all ------------------------------------------------------------------------------------------------------------

COORDINATORS: dict[str, Callable[[PeerPlan], None]] = {
    "gloo": serve_store,
    "torchft": serve_lighthouse,
    "hivemind": serve_table,
    "flower": serve_flower,
}
RANKS: dict[str, Callable[[PeerPlan], None]] = {
    "ours": train_ours,
    "gloo": train_gloo,
    "torchft": train_torchft,
    "hivemind": train_hivemind,
    "flower": train_flower,
}
SLOW_IMPORTS = {"ours": "torch", "gloo": "torch", "torchft": "torch", "hivemind": "torch", "flower": "flwr"}


def fork_forever(work: Callable[[PeerPlan], None], plan: PeerPlan) -> None:
    """Do it in a fork, again whenever that ends, until this process is told to end."""
    os.environ["OMP_NUM_THREADS"] = "1"
    importlib.import_module(SLOW_IMPORTS[plan.system])
    while True:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                work(plan)
            except Exception as error:  # noqa: BLE001 (whatever a failure of others raises here)
                print(f"{time.time():.1f}: {type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os.waitpid(child, 0)
        time.sleep(AGAIN_S)


def end_all(number: int, _: object) -> None:
    """End this process and all below it, hivemind's daemons too: Processes gave us a session of our own."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end_all)
    words = PeerPlan(**json.loads(sys.argv[1]))
    if words.rank < 0:
        COORDINATORS[words.system](words)
    else:
        fork_forever(RANKS[words.system], words)
