"""Finding a rank's cluster file and its agent, and attaching to the agent."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path

from dips.client.ipc import address
from dips.client.ipc.messages import Attach, Attached, ManifestSent
from dips.client.ipc.process import process_name
from dips.client.parallel.host_sum import HostSum
from dips.client.rank.agent_client import AgentClient
from dips.client.rank.collectives import JobCollectives
from dips.client.rank.lone_agent import ALONE, CLUSTER_FILE, WARNING, LoneAgent, is_alone, lone_config
from dips.client.rank.orphan import watch_agent
from dips.client.rank.outer_state import OuterState
from dips.config import ClusterFile, load_cluster
from dips.errors import ConfigError, LocalProtocolError
from dips.protocol.effects import ManifestWanted
from dips.protocol.manifest import Manifest
from dips.wire.packed_manifest import pack_manifest

_loops = count(1)  # numbers the OuterLoops of this process: each is a separate attempt


def find_config(config: str | os.PathLike[str] | None) -> ClusterFile:
    """Read the cluster file that the script or its agent names; without either, return the config of a script alone."""
    path = config or os.environ.get(CLUSTER_FILE)
    if is_alone(config):
        return lone_config(load_cluster(Path(path)) if path else None)
    if path is None:
        raise ConfigError("no cluster file: start this script as `dips-client --config cluster.yaml -- …`")
    return load_cluster(Path(path))


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
    agent_client: AgentClient, manifest: Manifest, transfer_ranks: int, keys: tuple[str, ...], frozen_digest: str
) -> OuterState:
    """Announce this start of the trainer to the agent. Raises DifferentModel if the model is not the run's.

    keys           public keys of the ranks that move bytes; none for plain lanes
    frozen_digest  digest of the frozen parameters, or ""; rank 0's counts
    """
    incarnation, restart = (int(os.environ.get(key, "0")) for key in ("DIPS_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"))
    process = f"{process_name()}/{next(_loops)}"
    attach = Attach(incarnation, restart, process, manifest.digest, transfer_ranks, transfer_ranks, keys, frozen_digest)
    attached = agent_client.ask_until_answered(attach)
    if isinstance(attached, ManifestWanted):  # the model is not the run's; the master tells where it differs
        attached = agent_client.ask_until_answered(ManifestSent(attach.process, pack_manifest(manifest)))
    if not isinstance(attached, Attached):
        raise LocalProtocolError(f"expected Attached from the agent, got {attached!r}")
    return OuterState(attached.attempt, attached.progress)
