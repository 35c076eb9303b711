"""The command `dips-client`: the agent daemon that runs beside one training job.

This is the only module that creates the agent's sockets, channels, locks and signal handlers.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import uuid
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Annotated, Any

import typer

from dips import daemon
from dips.client.agent import metrics as agent_metrics
from dips.client.agent.account import Pace
from dips.client.agent.agent import Agent, IncarnationFile, MasterLink, listen_for_ranks
from dips.client.agent.core import AgentCore
from dips.client.agent.launch import PR_SET_CHILD_SUBREAPER, set_process_attribute
from dips.client.agent.relay import Relay
from dips.client.agent.state import MOST_PAUSE_S, AgentSettings, AgentState, ClusterIdentity
from dips.client.ipc.address import AGENT_HOME, AGENT_PID, PID_FILE, over_network, process_home
from dips.config import AUTO_LANES, ClusterFile, load_cluster
from dips.errors import ConfigError
from dips.files import PidLock, find_program, keep_files_private, make_private_directory
from dips.http import HttpSubject
from dips.identity.names import PeerRole
from dips.protocol.rank_keys import TRANSFER_RANKS
from dips.telemetry import exits, logs
from dips.telemetry.timeline import Timeline
from dips.transport.endpoints import master_peer

MASTER_CONNECTIONS = 2
# torchrun's ranks rendezvous at a store that outlives restarts. Restarted ranks would find dead ranks' addresses in it
# and fail, too (pytorch/pytorch#135712, seen with torch 2.13 on gloo). With this each restart has a store of its own.
RESTARTS_ANEW = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

command_line = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@command_line.command(context_settings={"allow_interspersed_args": False, **exits.HELP_OPTIONS})
def dips_client(
    config: Annotated[Path, typer.Option("--config", "-c", help="The cluster file (cluster.yaml).")],
    command: Annotated[
        list[str] | None,
        typer.Argument(help="The training command, after `--`; none: others start it.", metavar="-- COMMAND..."),
    ] = None,
    take_over: Annotated[bool, typer.Option("--take-over", help="Replace a running agent of the same name.")] = False,
    log_level: Annotated[
        str | None, typer.Option(help="Override the file's log_level: debug, info, warning or error.")
    ] = None,
) -> None:
    """Run a training command as one cluster of a Di-PS run.

    Example: dips-client --config cluster.yaml -- torchrun --standalone --nproc-per-node 8 train.py

    The training script creates an OuterLoop (dips.client), which finds this agent through environment variables. The
    agent joins the run, renews the cluster's lease, coordinates its pushes and pulls, restarts the command when it
    crashes, and exits with the command's exit code. SIGTERM ends both. Exit code 75: a newer incarnation took over; 77:
    an agent of this name is running (--take-over replaces it), or the master refuses this cluster for good.

    A job on several hosts has one agent, on any of them: with `agent: HOST:PORT` in the cluster file, or with
    DIPS_AGENT=tcp://HOST:PORT, ranks on other hosts connect to it with the job's token (DIPS_AGENT_TOKEN, or the file
    `token`). The agent passes both to the command it starts. Without a command it serves ranks that are started
    elsewhere, until they detach.

    `before_start` in the cluster file is a command that the agent runs before each start of the training command, the
    first one and each after a crash; when it fails, that start has failed.

    `dips check --config cluster.yaml` checks everything that is needed, before accelerators are held.
    """
    file = load_cluster(config)
    if not command and over_network(file) is None:
        raise ConfigError(
            "no training command: write it after `--`; an agent whose ranks are started by others needs the key "
            "`agent`, or DIPS_AGENT=tcp://HOST:PORT, where they find it"
        )
    if command:
        find_program(command[0], "the training command ")
    if file.before_start and not command:
        raise ConfigError(f"{config}: before_start: expected a training command that it precedes: write it after `--`")
    if file.before_start:
        find_program(file.before_start[0], f"{config}: before_start: ")
    fixed = logs.check_level(log_level)
    with closing(_lock_directory(file.directory)):
        raise typer.Exit(asyncio.run(_run_agent(file, config.absolute(), command or [], fixed, take_over)))


def main() -> None:
    """Entry point of the console script."""
    keep_files_private()
    exits.run_command(command_line)


def _lock_directory(directory: Path) -> PidLock:
    """Lock the agent's directory for the life of the process: a second agent would fence the first."""
    make_private_directory(directory, "directory")
    busy = f"directory: {directory} is in use by another agent"
    advice = "one agent for a cluster, or another directory for another cluster"
    return PidLock(directory / PID_FILE, busy=busy, advice=advice)


async def _run_agent(config: ClusterFile, path: Path, command: list[str], level: str | None, take_over: bool) -> int:
    log = logs.configure_log("client", config.cluster, level or config.log_level)
    set_process_attribute(PR_SET_CHILD_SUBREAPER, 1)  # workers whose torchrun was killed become ours, to be killed too
    _raise_open_files(config, log)
    timeline = Timeline(config.directory, config.shared.run, "cluster", config.cluster)
    files = config.tls_files(config.cluster, PeerRole.CLUSTER)
    tls = daemon.open_certificates(files, config.cluster, PeerRole.CLUSTER, config.shared.run, log)
    master = MasterLink(master_peer(config.master, tls), config.shared.agreed)
    identity = ClusterIdentity(config.shared.run, config.cluster, config.shared.digest)
    incarnations = IncarnationFile(config.directory, config.shared.run, config.cluster, log)
    settings = AgentSettings(
        identity,
        config.shared.heartbeat_s,
        MOST_PAUSE_S,
        config.overlap == "full",
        config.max_restarts,
        take_over=take_over,
        on_divergence=config.on_divergence,
        fragments=config.fragments,
        before_start=config.before_start or (),
        before_start_s=config.collective_s,
    )
    pace = Pace(**config.pace.model_dump())
    core = AgentCore(settings, pace, lambda: uuid.uuid4().hex, random.Random(), incarnations.read_former())
    relay = Relay(config.relay, log) if config.relay else None
    rewrite = relay.rewrite_grant if relay else lambda grant: grant
    find_problem = tls.find_problem if tls is not None else lambda: ""
    hold_s, save = config.poll_s / 2, incarnations.save_incarnation
    agent = Agent(hold_s, core, master, timeline, log, rewrite, save, find_problem)
    known = {"DIPS_CLUSTER_FILE": str(path), AGENT_PID: str(os.getpid()), AGENT_HOME: process_home()}
    known |= {name: os.environ.get(name, value) for name, value in RESTARTS_ANEW.items()}
    async with AsyncExitStack() as stack:
        systemd = stack.enter_context(daemon.SystemdLink())
        stack.callback(timeline.close)
        stack.push_async_callback(master.close)
        if relay:
            stack.push_async_callback(asyncio.to_thread, relay.close)
        daemon.handle_end_signals(agent.terminate)
        subject = _describe_http(config, core.state, relay)
        await daemon.open_http(config.http, config.http_token, tls, subject, log, stack)
        watching = daemon.watch_file(
            "cluster file", path, config, load_cluster, log, agent.fail, fixed_level=level is not None, on_hangup=False
        )
        stack.callback(watching.cancel)
        found = await stack.enter_async_context(listen_for_ranks(config, agent.ranks, log))
        systemd.say_ready()
        return await agent.run(command, {**known, **found})


def _raise_open_files(config: ClusterFile, log: logs.Log) -> None:
    """Raise the limit on open files: one for each rank on another host; with a relay one to the rank and one to the
    slave for each lane.
    """
    ranks = TRANSFER_RANKS
    remote = ranks if over_network(config) is not None else 0
    relayed = 2 * ranks * AUTO_LANES if config.relay else 0
    peers = f"{ranks} ranks{f', relayed to {AUTO_LANES} lanes' if relayed else ''}"
    daemon.raise_open_files(MASTER_CONNECTIONS + remote + relayed, peers, log)


def _describe_http(config: ClusterFile, state: AgentState, relay: Relay | None) -> HttpSubject:
    def read_state() -> dict[str, Any]:
        return {**agent_metrics.read_metrics(state, time.monotonic()), **agent_metrics.read_relay(relay)}

    def explain_unready() -> str:
        return "" if state.joined else f"not joined: {state.sync.reason}"

    directories = {"directory": config.directory}
    return HttpSubject(config.shared.run, "agent", read_state, agent_metrics.collect, explain_unready, directories)


if __name__ == "__main__":
    main()
