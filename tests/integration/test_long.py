"""Work that lasts five times the constant that guards it, with real processes: nothing is lost by time alone."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from dips.config import STALL_HEARTBEATS, RunFile, load_run
from dips.errors import DipsError
from dips.ids import PullId
from dips.protocol import events
from dips.protocol.options import TimingOptions
from dips.transport import control
from dips.transport.endpoints import master_peer
from tests.integration import cluster_harness as harness
from tests.integration import train_constant as constant
from tests.integration.test_control import ClusterScript

HERE = Path(__file__).parent
VERSIONS = 4


def tensors() -> dict[str, np.ndarray]:
    return {n: np.zeros(tuple(p.shape), np.float32) for n, p in constant.ConstantModel().named_parameters()}


@dataclass(frozen=True)
class OrderSeen:
    """An order as the master saw it, on the clock of its log."""

    kind: str
    begun_s: float
    took_s: float


def orders_of(log: str) -> list[OrderSeen]:
    said = [json.loads(line) for line in log.splitlines() if '"order ended"' in line]
    ended = [(datetime.fromisoformat(row["timestamp"]).timestamp(), row["kind"], row["took_s"]) for row in said]
    return [OrderSeen(kind, at - took_s, took_s) for at, kind, took_s in ended]


class Puller:
    """A cluster that pulls all the time and reads nothing, as far as the master can tell; ends with the block."""

    def __init__(self, config: RunFile, address: str) -> None:
        self._config, self._address, self._ended = config, address, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._pull()))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    async def _pull(self) -> None:
        async with control.open_channel(master_peer(self._address, None)) as channel:
            cluster = ClusterScript(self._config, channel, "reader")
            for seq in count(1):
                with suppress(DipsError):  # the master is not up yet, or has ended
                    if not cluster.inc:
                        await cluster.join()
                    pull = PullId(cluster.name, cluster.inc, seq)
                    await cluster.ask("RequestPull", events.PullRequested(0, pull, 1))
                    await cluster.ask("FinishPull", events.PullFinished(0, pull, True))
                    await cluster.heartbeat(0, 0)
                if await asyncio.to_thread(self._ended.wait, 0.1):
                    return


@pytest.mark.slow
@pytest.mark.real_commands
@pytest.mark.timeout(400)
@pytest.mark.parametrize("scale", [0.15, 1.0], ids=["6.8 s", "45 s"])
def test_a_disk_that_is_silent_loses_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """Two clusters that push as they please, and one fsync of 4.5 `order_s` for each snapshot, which tells nothing.

    A slave was lost for it, and with it the round (7 of 9): every order waited for the Persist before it. Openings are
    answered within 1 s now. One cluster is too slow for the other's window, so it pushes while that one's version is
    written; a third pulls all the time. With 45 s all timing is the default's; in the shorter run it is scaled.
    """
    fsync_s = 45.0 * scale
    monkeypatch.setenv("SLOW_FSYNC_S", str(fsync_s))
    shared = {
        "heartbeat_s": scale * TimingOptions.heartbeat_s,
        "stop": {"versions": VERSIONS},
        "penalty": {"gates": []},
    }
    with harness.Run(tmp_path, tensors(), shared=shared) as run:
        run.commands["slave"] = [sys.executable, str(HERE / "slow_disk_slave.py")]
        run.commands["master"] = [*run.commands["master"], "--log-level", "debug"]
        run.start_servers()
        command = [sys.executable, str(HERE / "train_tiny.py"), "steps", str(tmp_path / "out")]
        clusters = [run.start_cluster(name, command, steps=steps) for name, steps in (("a", 7), ("b", 100))]
        with Puller(load_run(run.file), run.address):
            for cluster in clusters:
                run.wait(cluster, 60 + 6 * fsync_s)
        rounds = run.history()
        log = (run.directory / "master.log").read_text()
    assert "slave_lost" not in log
    assert [r.kind for r in rounds] == ["applied"] * VERSIONS
    assert {fold.push.cluster for r in rounds for fold in r.folds} == {"a", "b"}
    orders = orders_of(log)
    persists = [order for order in orders if order.kind == "Persist"]
    assert len(persists) == 2 * VERSIONS and min(order.took_s for order in persists) >= fsync_s
    beside = [
        order
        for order in orders
        if order.kind in ("OpenPush", "OpenPull")
        and any(p.begun_s < order.begun_s < p.begun_s + p.took_s for p in persists)
    ]
    for kind in ("OpenPush", "OpenPull"):
        took_s = [order.took_s for order in beside if order.kind == kind]
        assert took_s and max(took_s) < 1.0, (kind, took_s)
        print(
            f"beside a Persist of {fsync_s:g} s: {len(took_s)} × {kind}, the slowest took {1000 * max(took_s):.1f} ms"
        )


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_with_overlap_and_steps_of_five_stalls_every_push_lands(tmp_path: Path) -> None:
    """Granted, moved, committed and pulled at boundaries five stalls apart, which is longer than a hang."""
    stall_s = 0.2 * STALL_HEARTBEATS
    shared = {
        "heartbeat_s": 0.2,
        "stop": {"versions": 2},
        "outer": {"lr": 1.0, "momentum": 0.0, "step": "nesterov", "clip": {}},
        "penalty": {"gates": []},
    }
    with harness.Run(tmp_path, tensors(), shared=shared) as run:
        run.start_servers()
        path, out = str(HERE / "train_overlap.py"), tmp_path / "found"
        command = [sys.executable, path, str(out), str(5 * stall_s), str(2.0**-10)]
        cluster = run.start_cluster("a", command, steps=1, overlap="full")
        run.wait(cluster, 360)
        marks = [json.loads(line) for line in run.timeline("a").read_text().splitlines()]
    assert [m["outcome"] for m in marks if m["kind"] == "outcome"] == ["accepted"] * 2
    ended = [m for m in marks if m["kind"] in ("push_end", "pull_end")]
    assert len(ended) >= 4 and all(m.get("ok", m.get("installed")) for m in ended), ended
