"""How a rank finds its cluster file and its agent, and announces itself there."""

from __future__ import annotations

import os
from pathlib import Path

from dips.client.ipc.messages import Attach, Attached
from dips.client.ipc.process import process_name
from dips.client.rank.agent_client import AgentClient
from dips.client.rank.outer_state import OuterState
from dips.config import ClusterFile, load_cluster
from dips.errors import ConfigError, LocalProtocolError


def find_config(config: str | os.PathLike[str] | None) -> ClusterFile:
    """Read the cluster file that the script names, or that its agent was started with."""
    path = config or os.environ.get("DIPS_CLUSTER_FILE")
    if path is None:
        raise ConfigError("no cluster file: start this script as `dips-client --config cluster.yaml -- …`")
    return load_cluster(Path(path))


def attach_trainer(agent_client: AgentClient, manifest: str, transfer_ranks: int) -> OuterState:
    """Announce this start of the trainer to the agent; raise CorruptManifest if the model is not the run's."""
    incarnation, restart = (int(os.environ.get(key, "0")) for key in ("DIPS_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"))
    question = Attach(incarnation, restart, process_name(), manifest, transfer_ranks, transfer_ranks)
    attached = agent_client.ask_until_answered(question)
    if not isinstance(attached, Attached):
        raise LocalProtocolError(f"expected Attached from the agent, got {attached!r}")
    return OuterState(attached.attempt, attached.progress)
