"""Finding a rank's cluster file and its agent, attaching to it, training alone without one, ending when it is gone."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from dips.client.ipc import address, messages
from dips.client.ipc.address import AGENT, AGENT_HOME, AGENT_PID, Address, OnThisHost, process_home, process_name
from dips.client.parallel.shard_buffer import HostSum
from dips.client.rank.agent_client import AgentClient, AgentConnection, JobCollectives
from dips.client.rank.steps import OuterState
from dips.config import ClusterFile, Shared, load_cluster
from dips.config.watching import find_changes
from dips.errors import ConfigError, LocalProtocolError
from dips.ids import GENESIS
from dips.protocol.data import BegunRange
from dips.protocol.effects import ManifestWanted
from dips.protocol.manifest import Manifest
from dips.wire.packed_manifest import pack_manifest

# ---- lone agent -----------------------------------------------------------------------------------------------------
# A stand-in for the agent: a training script without an agent trains alone, in no run, and every call works.
#
# So the same script runs on a workstation. DIPS_ALONE=1 asks for it; a rank without a cluster file from its script or
# from an agent is alone, too. Nothing is pulled, pushed or counted; data ranges, if the file has any, are given in
# order, and a checkpoint continues where it stopped.


ALONE = "DIPS_ALONE"
CLUSTER_FILE = "DIPS_CLUSTER_FILE"
LOOK_STEPS = 1 << 40  # inner steps until the ranks ask again: in effect never
WARNING = (
    "OuterLoop trains alone: no agent started this script, so nothing is pulled or pushed. To take part in a run start "
    "it as `dips-client --config cluster.yaml -- …`; DIPS_ALONE=1 says that this is meant"
)


def is_alone(config: str | os.PathLike[str] | None) -> bool:
    """Return whether this script takes part in no run."""
    named = config is not None or CLUSTER_FILE in os.environ or AGENT in os.environ
    return os.environ.get(ALONE) == "1" or not named


def lone_config(config: ClusterFile | None) -> ClusterFile:
    """Return the script's cluster file, or a default one, without transfers."""
    if config is None:
        shared = Shared(run="alone")
        config = ClusterFile(shared=shared, cluster="alone", master="127.0.0.1:0", directory=Path("."), tls=False)
    return config.model_copy(update={"install": "whole", "overlap": "none", "fragments": 1})


class LoneAgent(AgentClient):
    """Answers in place of an agent without a run; has no connection."""

    def __init__(self, ranges: int) -> None:
        self._ranges, self._given = ranges, list[int]()  # ranges given and not used up, in order
        self._next, self._begun = 0, dict[int, BegunRange]()
        self._answers: dict[type, Callable[[Any], messages.Answer]] = {
            messages.Attach: lambda _: messages.Attached(1, 0.0),
            messages.RangeWanted: self._give_range,
            messages.SaveWanted: lambda _: self._save_progress(),
            messages.Resume: self._resume_progress,
            messages.Detach: lambda _: messages.Noted(),
            messages.TransferProgress: lambda _: messages.Noted(),
        }
        self._answers |= dict.fromkeys(
            (messages.PushWanted, messages.PushMoved, messages.PullWanted, messages.PullMoved),
            lambda _: messages.TrainOn("it trains alone", LOOK_STEPS, 0.0),
        )

    def ask_agent(self, question: messages.Question) -> messages.Answer:
        """Return the answer, the same on every rank."""
        return self._answers[type(question)](question)

    def ask_until_answered(self, question: messages.Question) -> messages.Answer:
        """Return the answer; it is never AskAgain."""
        return self.ask_agent(question)

    def notify_agent(self, notice: messages.Notice) -> None:
        """Do nothing, since there is no agent."""

    def report_step(self, step: messages.Stepped, ended_s: float) -> None:
        """Record the position in the data; steps are not counted."""
        if step.left is not None:
            self._use_up(step.left)
            self._begun = {step.begun.number: step.begun} if step.begun else {}

    def report_progress(self, attempt: int, moved: int, total: int, idle_s: float) -> str:
        """Return "": nothing moves."""
        return ""

    def disconnect(self) -> None:
        """Do nothing, since there is no connection."""

    def _give_range(self, wanted: messages.RangeWanted) -> messages.Answer:
        self._use_up(wanted.left or ())
        if self._next >= self._ranges:
            return messages.RangesEnded("all ranges were walked", finished=False)
        self._given.append(self._next)
        self._next += 1
        return messages.RangeGiven(self._given[-1], self._begun.get(self._given[-1]))

    def _use_up(self, left: Sequence[int]) -> None:
        self._given = [number for number in self._given if number in left]

    def _save_progress(self) -> messages.Saved:
        """Return the position: all ranges from the first that is not used up are ahead."""
        ahead = self._given[0] if self._given else self._next
        begun = tuple(self._begun.values())
        return messages.Saved("alone", str(GENESIS), 0, False, 0, 0, (), 0.0, 0, (ahead,), 0, begun)

    def _resume_progress(self, message: messages.Resume) -> messages.Answer:
        self._next = next(iter(message.saved.ahead), self._next)  # a cluster's has any number of ranges ahead
        self._given, self._begun = [], {part.number: part for part in reversed(message.saved.begun)}  # as trained
        return messages.Resumed("it trains alone", LOOK_STEPS)


# ---- orphan ---------------------------------------------------------------------------------------------------------
# Ends a rank whose agent is gone (docs/rationale.md#27): no other process may act for its cluster, so it must not
# continue.
#
# torchrun is signalled when the agent dies (launch.py) and ends its workers; but it may be killed with it, or hang, and
# on other hosts the agent did not start it. So every rank watches its agent in a thread that sleeps in the kernel: by a
# pidfd on the agent's machine, elsewhere by a connection that carries no messages and is closed when the agent ends.


FIND_S = 60.0  # time to reach the agent: hosts of one job do not start at the same moment
GRACE_S = 10.0  # between SIGTERM to this process and its end: time for exit handlers

_watched = False


def watch_agent(address: Address, poll_s: float) -> Callable[[], None]:
    """End this process when its agent ends; return a function that stops the watch.

    On a host other than the agent's, raises Unavailable if it cannot be reached within FIND_S, Denied if it is not this
    job's.
    """
    if os.environ.get(AGENT_HOME) == process_home():
        _watch_process(int(os.environ[AGENT_PID]))
        return lambda: None  # the agent waits for the ranks' launcher, so it ends after them
    if isinstance(address, OnThisHost):
        return lambda: None  # the agent's process is unknown here; rank 0 will find its connection closed
    connection, done = AgentConnection.connect_within(address, poll_s, FIND_S), threading.Event()

    def wait_for_end() -> None:
        connection.wait_until_closed()
        if not done.is_set():
            _end_process(f"at {address}")

    def stop_watching() -> None:
        done.set()
        connection.close()

    threading.Thread(target=wait_for_end, name="agent-watch", daemon=True).start()
    return stop_watching


def _watch_process(pid: int) -> None:
    """Start the watch, once per process for any number of OuterLoops."""
    global _watched
    if _watched:
        return
    _watched = True
    try:
        agent = os.pidfd_open(pid)
    except ProcessLookupError:
        _end_process(f"(process {pid})")
        return

    def wait_for_exit() -> None:
        ended = select.poll()  # select.select takes no descriptor above 1,023, of which a large data set has more
        ended.register(agent, select.POLLIN)
        ended.poll()
        _end_process(f"(process {pid})")

    threading.Thread(target=wait_for_exit, name="agent-watch", daemon=True).start()


def _end_process(which: str) -> None:
    """Send SIGTERM to this process, then exit hard after GRACE_S: a rank blocked in a collective does not handle the
    signal.
    """
    for stream in (sys.stderr, sys.stdout):  # standard error may be a pipe to the agent that is gone
        with suppress(OSError):
            stream.write(f"dips: the agent {which} is gone: this rank ends\n")
            stream.flush()
            break
    threading.Thread(target=_exit_after_grace, daemon=True).start()
    os.kill(os.getpid(), signal.SIGTERM)


def _exit_after_grace() -> None:
    time.sleep(GRACE_S)
    os._exit(128 + signal.SIGTERM)


# ---- joining --------------------------------------------------------------------------------------------------------


_loops = count(1)  # numbers the OuterLoops of this process: each is a separate attempt


def find_config(config: str | os.PathLike[str] | None) -> ClusterFile:
    """Read the cluster file that the script or its agent names; without either, return the config of a script alone."""
    path = config or os.environ.get(CLUSTER_FILE)
    if is_alone(config):
        return lone_config(load_cluster(Path(path)) if path else None)
    if path is None:
        raise ConfigError("no cluster file: start this script as `dips-client --config cluster.yaml -- …`")
    return load_cluster(Path(path))


# Keys of the cluster file that all ranks must have alike, besides the options that the run has agreed on.
ALIKE = ("cluster", "overlap", "fragments", "on_divergence")


def compare_files(config: ClusterFile, alone: bool, collectives: JobCollectives) -> None:
    """Raise ConfigError, the same on all ranks, if they were given different cluster files, as on hosts with a file of
    their own. Collective.
    """
    own: dict[str, Any] = {"trains alone": alone, **{key: getattr(config, key) for key in ALIKE}}
    own |= {"shared": config.shared.agreed, "tls": bool(config.tls)}
    told = [json.loads(text) for text in collectives.all_gather(json.dumps(own).encode())]
    for rank, other in enumerate(told):
        for key, ours, theirs in find_changes(told[0], other):
            raise ConfigError(
                f"{key}: {ours} on rank 0, {theirs} on rank {rank}: the ranks of a job need the same cluster file; "
                f"{CLUSTER_FILE} names it, or the script"
            )


def watch_run(config: ClusterFile, alone: bool) -> Callable[[], None]:
    """End this process when its agent ends; return a function that stops the watch. Does nothing for a script alone."""
    return (lambda: None) if alone else watch_agent(address.find_address(config), config.poll_s)


def find_agent(config: ClusterFile, collectives: JobCollectives, alone: bool) -> AgentClient:
    """Return the client of this job's agent, or the LoneAgent of a script alone."""
    if not alone:
        return AgentClient(collectives, address.find_address(config), config.poll_s)
    if os.environ.get(ALONE) != "1" and collectives.rank == 0:
        warnings.warn(WARNING, stacklevel=3)
    return LoneAgent(config.shared.data.ranges)


def warn_of_coarse(name: str) -> None:
    """Warn of a 16-bit parameter that is trained without fp32 masters, as far as known."""
    warnings.warn(
        f"{name}: a parameter of 16 bits without fp32 masters. What a pull rounds away is kept (4 B of host memory "
        "per parameter), and optimizer steps below half a unit in its last place are lost: load the model as float32 "
        '(transformers: dtype=torch.float32 instead of "auto") and train it under autocast or MixedPrecisionPolicy, or '
        "give the optimizer that has masters, OuterLoop(model, optimizer=optimizer)",
        stacklevel=3,
    )


def tell_memory(collectives: JobCollectives, needed: HostSum, alone: bool) -> None:
    """Print once for the job the host memory of rank 0 and of the rank that needs most. Collective."""
    most = -collectives.all_min([-needed.total_bytes])[0]
    if collectives.rank == 0 and not alone:
        others = f"; the rank that needs most: {most / 1e6:.1f} MB" if most > needed.total_bytes else ""
        sys.stderr.write(f"OuterLoop: host memory beside the model, rank 0: {needed.describe_sum()}{others}\n")


def attach_trainer(
    agent_client: AgentClient,
    config: ClusterFile,
    manifest: Manifest,
    transfer_ranks: int,
    keys: tuple[str, ...],
    frozen_digest: str,
) -> OuterState:
    """Announce this start of the trainer to the agent. Raises DifferentModel if the model is not the run's.

    config         the cluster file as the ranks have read it
    keys           public keys of the ranks that move bytes; none for plain lanes
    frozen_digest  digest of the frozen parameters, or ""; rank 0's counts
    """
    incarnation, restart = (int(os.environ.get(key, "0")) for key in ("DIPS_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"))
    process = f"{process_name()}/{next(_loops)}"
    attach = messages.Attach(
        incarnation, restart, process, manifest.digest, transfer_ranks, transfer_ranks,
        config.overlap == "full", config.fragments, config.on_divergence, keys, frozen_digest,
    )  # fmt: skip
    attached = agent_client.ask_until_answered(attach)
    if isinstance(attached, ManifestWanted):  # the model is not the run's; the master tells where it differs
        attached = agent_client.ask_until_answered(messages.ManifestSent(attach.process, pack_manifest(manifest)))
    if not isinstance(attached, messages.Attached):
        raise LocalProtocolError(f"expected Attached from the agent, got {attached!r}")
    return OuterState(attached.attempt, attached.progress)
