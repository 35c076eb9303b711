"""The command `dips up`: starts a complete run on this machine."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from dips.client.agent.agent import END_GRACE_S
from dips.commands.new import CLUSTER, RUN
from dips.commands.options import OPERATOR, operator_peer
from dips.config import ClusterFile, RunFile, load_cluster, load_run
from dips.errors import ConfigError, FailedMirror
from dips.files import explain_unwritable, find_program
from dips.local import run as local
from dips.local.run import LocalProcess, LocalProcesses, ProcessEnded, exit_on_sigterm
from dips.master.genesis import ledger_path, mirror_of
from dips.master.restore import newest_term
from dips.transport.endpoints import Endpoint
from dips.view import terminal

MODEL_FILE = "model.py"
DEFAULT_FACTORY = "model:build"
LOOK_EVERY_S = 0.5
TELL_EVERY_S = 10.0  # pause between two lines of status


def up(
    command: Annotated[list[str], typer.Argument(help="The training command, after `--`.", metavar="-- COMMAND...")],
    config: Annotated[Path, typer.Option("--config", "-c", help="The run file.")] = Path(RUN),
    cluster: Annotated[Path | None, typer.Option(help="The cluster file; default: cluster.yaml beside it.")] = None,
    factory: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help=f"Make the first model by this function; default: {DEFAULT_FACTORY}."
        ),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Read the first model from this safetensors file, fp32.")] = None,
    seed: Annotated[int, typer.Option(help="Seed for torch.manual_seed before the factory is called.")] = 0,
) -> None:
    """Start master, slaves and one training cluster on this machine, and stop them all when the training ends.

    Needs dips.yaml, shared.yaml and cluster.yaml, as `dips new` writes them. A run that does not exist yet is made
    first (`dips init`); an existing run continues from its last version, also if its ledger is in its mirror alone.
    Output of the training command is printed here, with a line of status every ten seconds; each process writes
    logs/NAME.log beside the run file (`dips logs`).

    More clusters may join from other terminals: dips-client --config OTHER.yaml -- COMMAND. Ctrl-C stops all processes
    in order, and loses nothing that was committed; the same command continues the run. On several machines start the
    daemons one by one (docs/guides/several-machines.md).

    Exit codes: that of the training command; 130 after Ctrl-C; 78 if a file is wrong or a port is in use.

    \b
    Example:
      dips up -- python train.py          (in a directory that `dips new` made)
      dips up --factory mymodel:build -- torchrun --standalone --nproc-per-node 2 train.py
    """
    run_file, cluster_path = _load_run(config), cluster or config.with_name(CLUSTER)
    cluster_file = load_cluster(cluster_path)
    find_program(command[0], "the training command ")
    if not (ledger_path(run_file).exists() or _is_mirrored(run_file)):
        _make_run(config, factory, model, seed)
    with explain_unwritable(logs := config.with_name(local.LOGS)):
        logs.mkdir(exist_ok=True)
    exit_on_sigterm()
    try:
        code = _train(config, run_file, cluster_path, cluster_file, command)
    except KeyboardInterrupt:
        print("stopped; every process has ended. The same command goes on from the last version")
        code = 128 + signal.SIGINT
    raise typer.Exit(code)


def _load_run(config: Path) -> RunFile:
    if not config.exists():
        raise ConfigError(f"expected the run file {config}: `dips new DIRECTORY` writes one, --config names another")
    return load_run(config)


def _is_mirrored(run_file: RunFile) -> bool:
    """Whether the ledger lies in its mirror, from which the master restores it. False if the mirror cannot be read:
    `dips init` says why.
    """
    store = mirror_of(run_file)
    try:
        return store is not None and newest_term(store) > 0
    except FailedMirror:
        return False


def _make_run(config: Path, factory: str | None, model: Path | None, seed: int) -> None:
    directory = None
    if factory is None and model is None:
        if not config.with_name(MODEL_FILE).exists():
            raise ConfigError(
                f"this run has no first model yet: expected --factory MODULE:FUNCTION, --model FILE, or {MODEL_FILE} "
                f"with a function build() beside {config}"
            )
        factory, directory = DEFAULT_FACTORY, config.parent.absolute()  # where that module is found
    source = [
        *(["--factory", factory, "--seed", str(seed)] if factory else []),
        *(["--model", str(model)] if model else []),
    ]
    try:
        said = local.run_word("init", "--config", str(config.absolute()), *source, directory=directory)
        print(said.partition("\n")[0])
    except ProcessEnded as ended:
        print(f"error: {ended}", file=sys.stderr)
        raise typer.Exit(ended.code or 1) from ended


def _train(config: Path, run_file: RunFile, cluster_path: Path, cluster_file: ClusterFile, command: list[str]) -> int:
    """Run all processes until the cluster's agent has ended; return its exit code."""
    master = operator_peer(run_file, OPERATOR)
    with LocalProcesses() as running:
        local.start_master(running, config)
        for section in run_file.slaves:
            if section.supervisor != "exec":  # the master starts slaves of "exec"
                local.start_slave(running, config, section.name)
        agent = local.start_cluster(running, config, cluster_path, cluster_file.cluster, command, show=True)
        print(f"started {', '.join(running.processes)}; master at {run_file.master.listen}, logs in "
              f"{config.with_name(local.LOGS)}")  # fmt: skip
        try:
            _watch_agent(running, agent, master)
        except (KeyboardInterrupt, SystemExit):
            agent.ask_to_end()  # before the daemons, so that it can leave the run at the master
            agent.end_by(time.monotonic() + END_GRACE_S)
            raise
        _tell_status(master)
    code = agent.exit_code() or 0
    if code == 0:
        print(f"next: dips history --config {config}; dips export --config {config} --output model.safetensors")
    return code


def _watch_agent(running: LocalProcesses, agent: LocalProcess, master: Endpoint) -> None:
    """Wait until the agent has ended; print the status regularly."""
    told = time.monotonic()
    while agent.exit_code() is None:
        _check_daemons(running, agent)
        if time.monotonic() - told >= TELL_EVERY_S:
            told = time.monotonic()
            _tell_status(master)
        time.sleep(LOOK_EVERY_S)


def _tell_status(master: Endpoint) -> None:
    if (status := local.read_status(master)) is not None:
        with suppress(OSError):  # as what the training shows (LocalProcess)
            print(f"status: {terminal.one_line(status)}", flush=True)


def _check_daemons(running: LocalProcesses, agent: LocalProcess) -> None:
    """Exit with the code of a daemon that has ended, and print the end of its log."""
    for process in running.processes.values():
        code = process.exit_code()
        if process is not agent and code is not None:
            print(f"error: {process.name} ended with exit code {code}; {process.log_tail()}", file=sys.stderr)
            raise typer.Exit(code or 1)
