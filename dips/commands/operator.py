"""The commands by which operators change a running run: each is a question to the master's OperatorService."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

from dips.commands.completing import complete_change
from dips.commands.options import (
    AS_JSON,
    CLUSTER,
    CREDENTIALS,
    MASTER,
    SLAVE,
    WHOSE,
    find_master,
    read_version,
    slave_peer,
)
from dips.commands.status import ask_status, ask_view
from dips.errors import Busy, ConfigError, UnavailableMaster
from dips.ids import check_name
from dips.protocol.effects import Acknowledged, Extended, Pending, Refused
from dips.protocol.events import (
    DrainAllAsked,
    DrainAsked,
    ExtensionAsked,
    FinaliseAsked,
    QuarantineAsked,
    ReadmissionAsked,
    RollbackAsked,
    TargetChange,
    TuningAsked,
)
from dips.protocol.options import TunedOption
from dips.protocol.tunable import MAY_BE_OFF, TARGETS, TUNABLE
from dips.protocol.view import RunView
from dips.transport import control
from dips.transport.endpoints import Endpoint
from dips.wire import messages
from dips.wire.generated import operator_pb2
from dips.wire.generated.operator_pb2_grpc import OperatorServiceStub

DEADLINE_S = 15.0  # the master holds a question open for 10 s
ASK_S = 0.5  # pause between two questions


async def ask_master(master: Endpoint, question: object) -> Any:
    """Ask once and return the answer. Raises UnavailableMaster if none comes, ConfigError if it serves another run, and
    the errors of the master.
    """
    if master.run and master.tls is None:
        await ask_status(master)
    channel, request = control.open_channel(master), messages.to_proto(question)
    service = operator_pb2.DESCRIPTOR.services_by_name["OperatorService"]
    method = next(method.name for method in service.methods if method.input_type.name == request.DESCRIPTOR.name)
    try:
        reply = await control.call_method(
            getattr(OperatorServiceStub(channel), method),
            request,
            deadline_s=DEADLINE_S,
            peer=master,
            unavailable=UnavailableMaster,
            explain=True,
        )
        return messages.unwrap_oneof(reply)
    finally:
        await channel.close()


def _require_done(answer: Any, file: TextIO | None = None) -> Any:
    """Return the master's answer; if it refused, print why, to standard output or `file`, and exit."""
    if isinstance(answer, Refused):
        print(f"nothing done: {answer.reason}", file=file)
        raise typer.Exit(1)
    return answer


def _wait_until(master: Endpoint, question: object, wait_s: float, doing: str) -> Any:
    """Ask again until the master's answer is not Pending, at most for `wait_s`; return it. Shows what is waited for."""
    until = time.monotonic() + wait_s
    with Console(stderr=True).status(doing) as line:
        while True:
            answer = asyncio.run(ask_master(master, question))
            if not isinstance(answer, Pending) or time.monotonic() >= until:
                return answer
            line.update(f"{doing}: {answer.reason}")
            time.sleep(ASK_S)


# ---- set options -----------------------------------------------------------------------------------------------------

OFF = "off"


def set_options(
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE...", help="Keys as in the run file; default show all.", autocompletion=complete_change
        ),
    ] = None,
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    as_json: AS_JSON = False,
) -> None:
    """Change options, or the targets of a run, while it runs: without a restart or a lost round.

    The ledger records each change and its author (`dips history --audit`), and for each version the values that it
    was made with. The run file keeps the initial values, and need not be edited. `off` is the file's null; of the
    two clips only one can be set. All other keys need a restart, or are fixed when a run is made.

    Targets (stop.*, data.epochs) are totals; clusters learn them within a heartbeat, and `outer.progress` and learning
    rates then follow the new target. A smaller target is accepted if it is not yet reached; 0 means no end by that
    measure. A finished run continues from its last version: start dips-client again on each cluster.

    \b
    Keys:
      stop.tokens stop.versions stop.wall_s data.epochs: at once
      TUNABLE

    Exit codes: 0 done; 1 refused; 2 no such key; 69 no master answers; 77 you are no operator; 78 the value is
    not possible.

    \b
    Example:
      dips set outer.lr=0.5 --config dips.yaml
      dips set stop.tokens=2000000000 --config dips.yaml
      dips set timing.window_s=30 penalty.beta=4 --config dips.yaml
    """
    peer = find_master(config, master, credentials)
    targets, tuned = _split_changes(changes or ())
    told = sys.stderr if as_json else sys.stdout
    if targets:
        extended = _require_done(asyncio.run(ask_master(peer, ExtensionAsked(0, targets))), told)
        _print_targets(extended, told)
    if tuned or not targets or as_json:
        answer = _require_done(asyncio.run(ask_master(peer, TuningAsked(0, tuned))), told)
        _print_tuned(answer.changes, {change.key for change in tuned}, as_json)


def _list_tunable() -> str:
    """Format TUNABLE for the help: keys that take effect at the same moment share a line."""
    moments: dict[str, list[str]] = {}
    for key, moment in TUNABLE.items():
        moments.setdefault(moment, []).append(key)
    return "\n".join(f"      {' '.join(keys)}: {moment}" for moment, keys in moments.items())


set_options.__doc__ = (set_options.__doc__ or "").replace("      TUNABLE", _list_tunable())


def _split_changes(changes: Sequence[str]) -> tuple[tuple[TargetChange, ...], tuple[TunedOption, ...]]:
    targets, tuned = list[TargetChange](), list[TunedOption]()
    for text in changes:
        key, equals, value = text.partition("=")
        if not equals or key not in {**TUNABLE, **TARGETS}:
            raise typer.BadParameter(f"expected KEY=VALUE with one of {', '.join([*TARGETS, *TUNABLE])}, got {text!r}")
        if key in TARGETS:
            targets.append(TargetChange(TARGETS[key], _read_number(key, value)))
        elif value == OFF and key in MAY_BE_OFF:
            tuned.append(TunedOption(key, 0.0, off=True))
        else:
            tuned.append(TunedOption(key, _read_number(key, value)))
    return tuple(targets), tuple(tuned)


def _read_number(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError as error:
        raise typer.BadParameter(f"{key}: expected a number{' or off' if key in MAY_BE_OFF else ''}") from error
    if not 0.0 <= number <= messages.MAX_REAL:  # NaN compares false; the master would call it a broken message
        raise ConfigError(f"{key}: expected a number from 0 to {messages.MAX_REAL:g}, got {value}")
    return number


def _print_targets(answer: Extended, file: TextIO) -> None:
    print(f"the run goes on until {answer.targets.describe()}", file=file)
    if answer.resumed is not None:
        said = f"it was finished at {answer.resumed}, and goes on from there: start dips-client again on each cluster"
        print(said, file=file)


def _print_tuned(changes: Sequence[TunedOption], named: set[str], as_json: bool) -> None:
    """Print all keys that were ever tuned, with their present values."""
    if as_json:
        print(json.dumps({change.key: None if change.off else change.value for change in changes}))
        return
    for change in changes:
        value = OFF if change.off else f"{change.value:.15g}"
        print(f"{change.key} = {value}, {TUNABLE[change.key] if change.key in named else 'as set before'}")
    if not changes:
        print("nothing was set: all is as the run file says")


# ---- stop ------------------------------------------------------------------------------------------------------------

TRIES = 5  # a version may be made between reading the head and the request


def stop(config: WHOSE = None, master: MASTER = None, credentials: CREDENTIALS = None) -> None:
    """End the run with its next version: clusters push once more, pull the last model, and their training ends.

    Nothing is lost, and no inner step is interrupted. The ledger records it as a change of `stop.versions`;
    `dips set stop.versions=0` undoes it, also after the end. Daemons keep answering until they are stopped.

    Exit codes: 0 done, or the run had ended before; 1 refused; 69 no master answers; 77 you are no operator.

    \b
    Example:
      dips stop --config dips.yaml
    """
    peer = find_master(config, master, credentials)
    view, last, answer = asyncio.run(_ask_to_stop(peer))
    if answer is None:
        print(f"the run has ended at {view.head}")
        return
    _require_done(answer)
    print(f"the run ends with version {last}; `dips status --watch` shows when")


async def _ask_to_stop(master: Endpoint) -> tuple[RunView, int, Extended | Refused | None]:
    """Return the run, its last version, and the master's answer; None: the run had ended before.

    A run may make its next version before the master is asked; each further try leaves it twice as many.
    """
    for attempt in range(TRIES):
        view = await ask_view(master)
        last = view.head_version.version + 2**attempt
        if view.finished:
            return view, last, None
        answer = await ask_master(master, ExtensionAsked(0, (TargetChange("versions", float(last)),)))
        if not isinstance(answer, Refused):
            break
    return view, last, answer


# ---- rollback --------------------------------------------------------------------------------------------------------


def rollback(
    version: Annotated[str, typer.Argument(metavar="vN@rM", help="The version, as in `dips history`.")],
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    wait_s: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for all slaves to report their snapshots.")
    ] = 60.0,
) -> None:
    """Make an older version the head again, with its momentum; the run continues from there.

    The master rolls back by itself when a slave has lost its newest snapshots, by at most master.most_rollback outer
    steps. For more steps it waits, shown in red: first check that this slave has its real directory (not an old volume,
    a disk that is not mounted, or another process under its name), and restart it. Use this command only if the newer
    versions are lost for good.

    Also use it to undo by hand, for example an update accepted an hour ago that spoilt the model. Reachable versions
    are the newest ones, those kept by `keep_every`, and those on mirrors; `dips status` and a refusal of this command
    name them. Tokens of the undone versions are subtracted, their data ranges are undone (see requeue), open pushes are
    returned to their clusters, which pull the version and continue. First exclude the cluster that caused it: `dips
    cluster quarantine CLUSTER`.

    Undone versions never return to the run. Their snapshots stay on the disks until a version after the new head is
    durable, so `dips drain` the slaves and copy them first if you want to inspect them.

    While slaves are away the request stays open, also after this command has ended; requesting the head itself cancels
    it.

    Exit codes: 0 it is the head; 1 not every slave offers it, or not within --wait-s; 69 no master answers; 78 the
    master does not know it.

    \b
    Example:
      dips rollback v4100@r4107 --config dips.yaml
    """
    peer = find_master(config, master, credentials)
    answer = _wait_until(peer, RollbackAsked(0, read_version(version)), wait_s, f"back to {version}")
    if isinstance(answer, Acknowledged):
        print(f"{version} is the head: clusters pull it and go on from there")
        return
    print(f"not rolled back: {answer.reason}")
    raise typer.Exit(1)


# ---- finalise --------------------------------------------------------------------------------------------------------


def finalise(config: WHOSE = None, master: MASTER = None, credentials: CREDENTIALS = None) -> None:
    """End an upgrade: from now on the run uses what the new release has added, and no process of the former one.

    Until then processes of both releases take part, in any order of restarts, and each may go back. `dips status` says
    who is still of the former release. Do this when the new one has proved itself: there is no way back but by the
    ledger's former file, which is kept beside as ledger.formatN.sqlite, and does not know what came since.

    Every slave must serve, and every live cluster and standby speak the new protocol; whoever else comes back with the
    former release is refused.

    Exit codes: 0 done, or there is nothing to finalise; 1 refused; 69 no master answers; 77 you are no operator.

    \b
    Example:
      dips finalise --config dips.yaml
    """
    peer = find_master(config, master, credentials)
    view = asyncio.run(ask_view(peer))
    if view.protocol_newest <= view.protocol:
        print(f"nothing to finalise: the run speaks {view.protocol}, its master no more")
        return
    _require_done(asyncio.run(ask_master(peer, FinaliseAsked(0, view.protocol + 1))))
    print(f"the run speaks {view.protocol + 1}; its ledger's former file is beside it")


# ---- drain -----------------------------------------------------------------------------------------------------------

RETRY_S = 1.0  # pause between two questions to a master that does not answer
LEAST_S = 1.0  # shortest timeout of one question


def drain(
    slave: SLAVE = "",
    every: Annotated[bool, typer.Option("--all", help="All slaves together: one outage instead of one each.")] = False,
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    own: Annotated[
        bool,
        typer.Option("--self", help="Ask as the slave itself, with its certificate from the run file."),
    ] = False,
    wait_s: Annotated[float, typer.Option(min=0, help="Seconds to wait for its open transfers and round.")] = 600.0,
) -> None:
    """Take a slave, or all of them, out of service once nothing is open on it.

    From now on no push or pull begins (clusters train on and ask again); transfers in progress and the open round are
    completed, and the head is on every disk. Then the slave may be stopped, moved or updated without a skipped round.
    It serves again when it is restarted. Stopping a slave without draining it costs the open round, and the versions
    that its disk had no room for.

    Every slave is needed for every round, so --all is the way to upgrade them: stop and start all at once, and the run
    goes on when the last one is back. The request does not outlast the master: upgrade that afterwards.

    With --self the slave's own machine asks, as a preStop hook does: a slave that is not in service while the head is
    on every disk, or whose run has no model yet, may be stopped at once, and a master that does not answer is asked
    again until --wait-s is over.

    A cluster needs no drain: SIGTERM to its dips-client ends the training and returns its unfinished work: its data
    ranges are leased to others, its tokens since the last accepted push count as lost.

    Exit codes: 0 drained; 1 it does not serve, or was not drained within --wait-s (draining continues); 69 no master
    answers; 78 there is no such slave.

    \b
    Example:
      dips drain slave-0 --config dips.yaml && systemctl restart dips-slave@slave-0
      dips drain --all --config dips.yaml
      dips drain slave-0 --config dips.yaml --self --wait-s 240
    """
    if bool(slave) == every:
        raise ConfigError("whom to drain: give a SLAVE or --all, one of them")
    if own:
        if every:
            raise ConfigError("--self: expected the SLAVE whose certificate is used, got --all")
        if config is None or master is not None or credentials is not None:
            raise ConfigError("--self: expected --config, which names the master and the slave's certificate, alone")
        _drain_self(slave, slave_peer(config, slave), wait_s)
        return
    question = DrainAsked(0, check_name(slave, "slave")) if slave else DrainAllAsked(0)
    peer = find_master(config, master, credentials)
    answer = _wait_until(peer, question, wait_s, f"draining {slave or 'all slaves'}")
    if isinstance(answer, Acknowledged):
        said = f"{slave} is" if slave else "all slaves are"
        print(f"{said} drained: stop what you will; a slave serves again when it is started again")
        return
    print(f"not drained: {answer.reason}")
    raise typer.Exit(1)


def _drain_self(slave: str, peer: Endpoint, wait_s: float) -> None:
    """Return when the slave may end. Prints each new reason for waiting on a line of its own, for a log."""
    until, said = time.monotonic() + wait_s, ""
    while True:
        try:
            answer = asyncio.run(_ask_until(peer, slave, until))
        except (UnavailableMaster, Busy, TimeoutError) as error:
            answer = Pending(str(error) or f"{peer} did not answer in time")
            time.sleep(min(RETRY_S, max(0.0, until - time.monotonic())))
        if not isinstance(answer, Pending):
            break
        if answer.reason != said:
            print(f"waits: {answer.reason}", flush=True)
            said = answer.reason
        if time.monotonic() >= until:
            print(f"not drained within {wait_s:g} s: {answer.reason}")
            raise typer.Exit(1)
    why = "drained" if isinstance(answer, Acknowledged) else answer.reason
    print(f"{slave} may be stopped: {why}")


async def _ask_until(peer: Endpoint, slave: str, until: float) -> Any:
    """Ask with a timeout, since the master holds a question open for longer than a hook may have left."""
    async with asyncio.timeout(max(LEAST_S, until - time.monotonic())):
        return await ask_master(peer, DrainAsked(0, slave))


# ---- cluster ---------------------------------------------------------------------------------------------------------

cluster_words = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Exclude a cluster from the outer step, or readmit it."
)


@cluster_words.command()
def quarantine(
    cluster: CLUSTER,
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    reason: Annotated[str, typer.Option(help="The reason, shown by `dips status` and the ledger.")] = "",
) -> None:
    """Exclude a cluster from the outer step while you investigate it.

    The cluster keeps training and pulling, so that it stays close to the run; all its pushes are gated, and its
    statistics do not change. The ledger keeps the quarantine, also over restarts, until `dips cluster readmit`. To
    exclude a cluster completely, revoke its certificate (`dips certs revoke`) or remove it from the run file's list
    `clusters`.

    Exit codes: 0 done; 69 no master answers; 77 you are no operator; 78 the master does not know the cluster.

    \b
    Example:
      dips cluster quarantine west --reason "its data is being checked" --config dips.yaml
    """
    peer = find_master(config, master, credentials)
    asyncio.run(ask_master(peer, QuarantineAsked(0, check_name(cluster, "cluster"), reason)))
    print(f"{cluster} is quarantined")


@cluster_words.command()
def readmit(
    cluster: CLUSTER,
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
) -> None:
    """Lift the quarantine of a cluster: an operator's, the gate's, or both.

    A cluster whose pushes are gated penalty.gate_patience times in a row, while the others' are accepted, is
    quarantined: it trains and pulls, and its pushes are judged by statistics that it cannot change. When you have fixed
    the cause (its data, its learning rate), this command lets it warm up again: its next penalty.warmup_rounds pushes
    are accepted, except for the finite check and the hard cap. After an operator's quarantine its next push is judged
    as before. The ledger records it.

    Exit codes: 0 done; 1 it is not quarantined; 69 no master answers; 77 you are no operator; 78 the master does not
    know it.

    \b
    Example:
      dips cluster readmit west --config dips.yaml
    """
    peer = find_master(config, master, credentials)
    _require_done(asyncio.run(ask_master(peer, ReadmissionAsked(0, check_name(cluster, "cluster")))))
    print(f"{cluster} is readmitted")
