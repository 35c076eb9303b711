"""Twenty moments of a push and twenty of a pull at which a rank can be told to die: only in the trainer of a test.

The training process wraps the library's own functions (production code has no switches) and counts: the moment is
logical, the third chunk of ten, not some milliseconds.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dips.client.ipc.messages import PullMoved, PullWanted, PushMoved, PushWanted
from dips.client.parallel import HostMemory
from dips.client.rank import shard_transfer, transfer
from dips.client.rank.agent_client import AgentClient, AgentConnection
from tests.chaos.train_chaos import CHUNK_BYTES, LAYERS, SHAPES

CHUNKS = sum(-(-4 * torch.Size(shape).numel() // CHUNK_BYTES) for shape in SHAPES.values())
TENTHS = [f"chunk {tenth * CHUNKS // 10} of {CHUNKS}" for tenth in range(1, 10)]

POINTS = {
    "push": [
        "asked", "granted", "frozen", "welcomed by one slave", "welcomed by both", "first WANT", *TENTHS,
        f"chunk {CHUNKS} of {CHUNKS}", "DONE of one slave", "DONE of both", "told the agent", "awaits the outcome",
    ],
    "pull": [
        "asked", "granted", "begun", "welcomed by one slave", "welcomed by both", "first WANT", *TENTHS,
        f"chunk {CHUNKS} of {CHUNKS}", "DONE of one slave", "DONE of both", "half installed", "installed, not told",
    ],
}  # fmt: skip
assert all(len(set(names)) == 20 for names in POINTS.values()) and LAYERS

WAITING_S = 0.03  # a rank without a line stands in the broadcast of what rank 0 hears

_count: dict[str, int] = {}


def die_at(kind: str, incarnation: int, died: Path) -> None:
    """Have this process kill itself at the `incarnation`-th point of `kind`; lives beyond the last live on."""
    if incarnation <= len(POINTS[kind]):
        _die(kind, POINTS[kind][incarnation - 1], died, POINTS[kind][incarnation - 1])


def deaths(kind: str, ranks: int) -> list[str]:
    """How the ranks of a job die, one after the other: at each point each of them."""
    return [f"rank {rank}: {name}" for name in POINTS[kind] for rank in range(ranks)]


def die_in_turn(kind: str, rank: int, ranks: int, died: Path) -> None:
    """As `die_at`, if the next of the job's deaths is this rank's; `died` tells how many there were."""
    planned = deaths(kind, ranks)
    past = len(died.read_text().splitlines()) if died.exists() else 0
    if past < len(planned) and planned[past].startswith(f"rank {rank}: "):
        _die(kind, planned[past].partition(": ")[2], died, planned[past], silent=rank > 0)


def _die(kind: str, name: str, died: Path, said: str, silent: bool = False) -> None:
    """`silent`: this rank has no line to the agent; what others say to it, it hears of by a broadcast."""

    def reach(reached: str) -> None:
        if reached == name:
            with died.open("a") as file:
                file.write(said + "\n")
            os.kill(os.getpid(), signal.SIGKILL)

    (_watch_push if kind == "push" else _watch_pull)(reach)
    if silent:
        _before(AgentClient, "ask_agent", lambda _, said: _unheard(reach, said))


def _unheard(reach: Callable[[str], None], said: object) -> None:
    match said:
        case PushWanted() | PullWanted():
            reach("asked")
        case PushMoved():
            reach("told the agent")
            threading.Timer(WAITING_S, reach, ["awaits the outcome"]).start()
        case PullMoved():
            reach("installed, not told")


def _watch_push(reach: Callable[[str], None]) -> None:
    cls = transfer.PushTransfer
    _before(shard_transfer.ShardTransfer, "begin_push", lambda *_: reach("granted"))
    _before(shard_transfer.transfer, "push_pieces", lambda *_: reach("frozen"))
    _after(cls, "on_welcome", lambda *_: _by_slave("welcome", reach, "welcomed by {}"))
    _before(cls, "on_want", lambda *_: reach("first WANT"))
    _after(cls, "on_processed", lambda own, *_: _chunk(reach, own))
    _after(cls, "finish_part", lambda *_: _by_slave("done", reach, "DONE of {}"))
    _after(AgentConnection, "send_message", lambda _, said: reach("asked") if isinstance(said, PushWanted) else None)
    _after(
        AgentConnection,
        "send_message",
        lambda _, said: reach("told the agent") if isinstance(said, PushMoved) else None,
    )
    _after(
        AgentConnection,
        "receive_answer",
        lambda _, question: reach("awaits the outcome") if question == PushMoved.__name__ else None,
    )


def _watch_pull(reach: Callable[[str], None]) -> None:
    cls = transfer.PullTransfer
    _before(shard_transfer.ShardTransfer, "begin_pull", lambda *_: reach("granted"))
    _before(shard_transfer.transfer, "pull_pieces", lambda *_: reach("begun"))
    _after(cls, "on_welcome", lambda *_: _by_slave("welcome", reach, "welcomed by {}"))
    _before(cls, "on_chunk", lambda *_: reach("first WANT"))
    _before(cls, "on_processed", lambda own, *_: _chunk(reach, own))
    _after(cls, "finish_part", lambda *_: _by_slave("done", reach, "DONE of {}"))
    _before(
        AgentConnection,
        "send_message",
        lambda _, said: reach("installed, not told") if isinstance(said, PullMoved) else None,
    )
    _after(AgentConnection, "send_message", lambda _, said: reach("asked") if isinstance(said, PullWanted) else None)
    _half_install(reach)


def _half_install(reach: Callable[[str], None]) -> None:
    own = HostMemory.install_shard

    def install(self: Any) -> None:
        copies = [copy for layer in self._params for copy in layer]
        with torch.no_grad():
            for copy in copies[: len(copies) // 2]:
                copy.view.copy_(copy.host)
        reach("half installed")
        own(self)

    HostMemory.install_shard = install  # type: ignore[method-assign]


def _by_slave(key: str, reach: Callable[[str], None], name: str) -> None:
    _count[key] = _count.get(key, 0) + 1
    reach(name.format("one slave" if _count[key] == 1 else "both"))


def _chunk(reach: Callable[[str], None], own: Any) -> None:
    """The chunks of a rank that moves a part of the model are counted in tenths, too."""
    _count["chunk"] = _count.get("chunk", 0) + 1
    ranges = [r for part in own._parts for r in part.share.ranges]
    all_chunks = sum(-(-4 * r.length // CHUNK_BYTES) for r in ranges)
    for tenth in range(1, 11):
        if max(1, tenth * all_chunks // 10) == _count["chunk"]:
            reach(f"chunk {tenth * CHUNKS // 10} of {CHUNKS}")


def _before(owner: Any, name: str, look: Callable[..., object]) -> None:
    own = getattr(owner, name)

    def wrapped(*args: Any, **keys: Any) -> Any:
        look(*args)
        return own(*args, **keys)

    setattr(owner, name, wrapped)


def _after(owner: Any, name: str, look: Callable[..., object]) -> None:
    own = getattr(owner, name)

    def wrapped(*args: Any, **keys: Any) -> Any:
        result = own(*args, **keys)
        look(*args)
        return result

    setattr(owner, name, wrapped)
