"""`dips-master`: builds one term of the master, its sockets, threads and clocks, and shuts it down in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from grpc import aio
from grpc_health.v1 import health

from dips import daemon
from dips.config import RunFile, host_port, is_loopback, load_run
from dips.config.watching import LOOK_S
from dips.errors import ConfigError, DipsError
from dips.files import keep_files_private, make_private_directory
from dips.http import HttpSubject
from dips.identity.names import MASTER_NAME, PeerRole
from dips.master import genesis, operate, restore, standby, waiting
from dips.master.core import MasterCore, Step
from dips.master.journal import SEGMENTS_KEPT, Journal
from dips.master.ledger import Ledger, lack_room
from dips.master.page import MasterPage
from dips.master.runtime import (
    BASE,
    ClusterServicer,
    ManifestDesk,
    MasterOutside,
    OperatorServicer,
    Runtime,
    SlaveServicer,
    StatusServicer,
)
from dips.master.supervisor import Supervisor
from dips.protocol import events
from dips.protocol.coordinator import Coordinator
from dips.protocol.effects import Effect
from dips.protocol.events import Event
from dips.protocol.manifest import Manifest
from dips.protocol.membership import Judge
from dips.protocol.operator import REQUESTS, cut_text
from dips.protocol.records import RunRow
from dips.tasks import start_task
from dips.telemetry import exits, logs
from dips.telemetry.timeline import Timeline
from dips.transport import control
from dips.transport.gate import Guard
from dips.transport.tls import TlsSource
from dips.view import prometheus
from dips.wire import messages
from dips.wire.generated.cluster_pb2_grpc import add_ClusterServiceServicer_to_server
from dips.wire.generated.operator_pb2_grpc import add_OperatorServiceServicer_to_server
from dips.wire.generated.slave_pb2_grpc import add_SlaveServiceServicer_to_server
from dips.wire.generated.status_pb2_grpc import add_StatusServiceServicer_to_server

KEY = "master.listen"
SERVICES = ("", "dips.v1.ClusterService", "dips.v1.SlaveService", "dips.v1.StatusService", "dips.v1.OperatorService")
# Open at once, for the limit of open files. An agent opens two, a slave two, and the master one to each slave.
CLUSTERS, AGENT_CONNECTIONS, SLAVE_CONNECTIONS = 1000, 2, 3
GRACE_S = 2.0  # grace for open calls at the end
# Keys of the run file that are read again behind a wait: of a standby those that `dips rebalance` changes, and before
# the run has begun all that its beginning fixes.
CHANGED_BY_REBALANCE = ("slaves", "clusters")
FREE_UNTIL_BEGUN = ("shared", *CHANGED_BY_REBALANCE)

cli = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=exits.HELP_OPTIONS)
cli.command("replay")(operate.replay_command)
cli.command("recover")(operate.recover_command)


@cli.callback(invoke_without_command=True)
def serve_command(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="The run file (dips.yaml)."),
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(help="debug (every event and order), info, warning or error, instead of the file's log_level."),
    ] = None,
    stands_by: Annotated[
        bool,
        typer.Option("--standby", help="Wait until the master that serves is lost, then take its place."),
    ] = False,
) -> None:
    """The master of one run: decides which push counts and when the global model takes its next outer step.

    It holds no parameters. Its durable state is <master.directory>/ledger.sqlite, made once by `dips init`;
    started again on the same directory it goes on from the last version, and clusters and slaves reconnect to it.
    One master for a run: a second one on the same ledger refuses to start. The master starts and supervises slaves
    whose `supervisor` is `exec`; SIGTERM stops them, too.

    With --standby, on another machine and with the same `master.mirror`, it takes the place of a master that is lost,
    and opens no port before. Both machines may run this command; clusters and slaves dial a name that leads to both.

    Its decisions and their inputs are in <master.directory>/journal-*.jsonl (the newest eight).

    Exit codes: 0 stopped by SIGTERM or SIGINT; 65 the ledger is damaged; 74 the ledger could not be written; 75 a later
    master exists, or beside a standby the mirror was not reached for 8 s; 78 the run file or the ledger is not usable,
    or the run was rebalanced. Start it again after 74; look at the message after the others.

    \b
    Example:
      dips init --config dips.yaml --factory dips.demo.model:build --seed 1
      dips-master --config dips.yaml
    """
    if context.invoked_subcommand is not None:
        return
    if config is None:
        raise typer.BadParameter("which run? name its run file", param_hint="--config")
    fixed = logs.check_level(log_level)
    run_file = load_run(config)
    log = logs.configure_log("master", run_file.shared.run, fixed or run_file.log_level)
    raise typer.Exit(asyncio.run(serve(run_file, config, log, fixed_level=fixed is not None, stands_by=stands_by)))


def main() -> None:
    """Entry point of the console script."""
    keep_files_private()
    exits.run_command(cli)


async def serve(
    config: RunFile,
    file: Path,
    log: logs.Log,
    ready: Callable[[str], None] = lambda _: None,
    fixed_level: bool = False,
    stands_by: bool = False,
) -> int:
    """Serve until stopped; return the exit code. `ready` is called with host:port once calls are answered.

    `file` is the path of `config`: it is watched while the master runs, and the slaves that the master starts read it.
    With `fixed_level` the file does not change the log's level. With `stands_by` it first waits until the master that
    serves is lost.

    Raise ConfigError or Corrupt if the run file, the ledger or the port is not usable.
    """
    async with AsyncExitStack() as stack:
        daemon.ignore_hangups()  # a standby may wait for months, and whoever hurries the master signals it, too
        systemd = stack.enter_context(daemon.SystemdLink())

        def announce(address: str) -> None:
            systemd.say_ready()
            ready(address)

        slaves = len(config.slaves)
        connections = CLUSTERS * AGENT_CONNECTIONS + slaves * SLAVE_CONNECTIONS
        daemon.raise_open_files(connections, f"{CLUSTERS} clusters and {slaves} slaves", log)
        make_private_directory(config.master.directory, "master.directory")
        files = config.tls_files(MASTER_NAME, PeerRole.MASTER)
        tls = daemon.open_certificates(files, MASTER_NAME, PeerRole.MASTER, config.shared.run, log)
        if not stands_by:
            restore.restore_if_lost(config, log)
        elif not await standby.stand_by(config, tls, log, stack, systemd.say_ready):
            return 0
        else:
            config = _read_again(config, file, log, CHANGED_BY_REBALANCE)
        guard = Guard(tls, config.clusters) if tls is not None else None
        report = partial(_report_call, log)
        if not genesis.ledger_path(config).exists():
            read = partial(_read_keys, config, file, FREE_UNTIL_BEGUN)
            found = await waiting.wait_for_ledger(read, tls, guard, log, announce, report)
            if found is None:
                return 0
            config = _read_again(config, file, log, FREE_UNTIL_BEGUN)
            if guard is not None:
                guard.change_clusters(config.clusters)
            config = config.model_copy(update={"master": config.master.model_copy(update={"listen": found})})
        exits.end_as_first_process()  # while the ledger is read: a wait took its handler of SIGTERM with it
        (config.master.directory / BASE).unlink(missing_ok=True)  # of a killed process: the ledger may need its room
        ledger = Ledger.open(genesis.ledger_path(config), wall=time.time)
        stack.callback(ledger.close)
        row = _check_agrees(config, ledger)
        timeline = Timeline(config.master.directory, config.shared.run, "master", MASTER_NAME)
        stack.callback(timeline.close)
        outside = MasterOutside(ledger, tls)
        stack.push_async_callback(outside.close)
        server = control.make_server(report, guard)
        stack.push_async_callback(server.stop, GRACE_S)
        host, _ = config.master.listen.rsplit(":", 1)
        address = f"{host}:{control.bind_server(server, config.master.listen, KEY, guard)}"
        page = MasterPage(config.shared.agreed)
        runtime = _build_runtime(config, ledger, outside, log, timeline, stack, page, stands_by)
        checker = await _add_services(
            server, runtime, guard, row, _describe_run(config, row), _name_page(config), genesis.ledger_path(config)
        )
        await server.start()
        await _serve_http(config, tls, runtime, page, log, stack)
        supervisor = _make_supervisor(config, file, runtime, log)
        outside.begin_processes(config, file, log, runtime.fail)
        daemon.handle_end_signals(runtime.stop)
        log.info("serving", address=address, ledger=str(genesis.ledger_path(config)))
        announce(address)
        reload = MasterReload(guard, runtime, log)
        stack.callback(start_task(reload.keep_expelling(), runtime.fail).cancel)
        watching = daemon.watch_file(
            "run file", file, config, load_run, log, runtime.fail, fixed_level=fixed_level,
            changeable=CHANGEABLE, ignored=OTHERS, apply=reload.apply_changes,
        )  # fmt: skip
        stack.callback(watching.cancel)
        code = await runtime.run()
        await supervisor.stop_supervising(stop=code == 0)
        await checker.enter_graceful_shutdown()
    log.info("stopped", code=code)
    return code


def _read_again(config: RunFile, file: Path, log: logs.Log, keys: Sequence[str]) -> RunFile:
    """Return the configuration with what the file says now under these keys: a master may have waited for months."""
    try:
        return _read_keys(config, file, keys)
    except ConfigError as error:
        log.warning("run file", problem=f"the changed file is not used: {error}")
        return config


def _read_keys(config: RunFile, file: Path, keys: Sequence[str]) -> RunFile:
    new = load_run(file)
    return config.model_copy(update={key: getattr(new, key) for key in keys})


def _report_call(log: logs.Log, method: str, error: BaseException) -> None:
    log.error("call failed", method=method, exc_info=error)


def _build_runtime(
    config: RunFile, ledger: Ledger, outside: MasterOutside, log: logs.Log, timeline: Timeline, stack: AsyncExitStack,
    page: MasterPage, stands_by: bool,
) -> Runtime:  # fmt: skip
    """Begin a term and build the state machines from the ledger's state."""
    term, now, timing = ledger.start_term(), time.monotonic(), config.timing_options()
    journal = Journal(config.master.directory, config.shared.run, term, SEGMENTS_KEPT, log)
    stack.callback(journal.close)
    state = ledger.read_state()
    outside.begin_mirror(config, term, log, bound=stands_by)
    _warn_of_other_targets(config, ledger, log)
    timeline.record_mark("term_begins", term=term)
    log.info("term begins", term=term, head=str(state.versions[-1].version), next_round=state.next_round)
    coordinator = Coordinator(state, Manifest.from_json(state.row.manifest), config.make_options(), now)
    for reason in coordinator.build_view(now).untuned:
        log.warning("what the ledger has tuned cannot be", reason=reason)
    page.recall_ledger(ledger, state)
    step = page.watch_steps(_logged_step(coordinator, journal, log))
    core = MasterCore(coordinator, Judge.from_state(timing, state, now), timing, now, step=step)
    return Runtime(
        core, outside, clock=time.monotonic, log=log, timeline=timeline, journal=journal, left_s=outside.left_s,
        explain_end=outside.explain_end,
    )  # fmt: skip


def _warn_of_other_targets(config: RunFile, ledger: Ledger, log: logs.Log) -> None:
    """Warn if `stop` or `epochs` of the file were edited since `dips init`, without effect: the ledger has them."""
    ours, known = config.make_options().targets, [e.targets for e in ledger.read_extensions()]
    if known and ours not in known:
        log.warning("targets", file=ours.describe(), run=known[-1].describe(), remedy="dips set changes the run's")


def _logged_step(coordinator: Coordinator, journal: Journal, log: logs.Log) -> Step:
    """Return the Coordinator's step with its journal and the debug log."""
    decide = partial(journal.step_journaled, coordinator)

    def step_logged(event: Event, now: float) -> list[Effect]:
        effects = decide(event, now)
        log.debug("event", was=event, effects=len(effects))
        return effects

    return step_logged


def _make_supervisor(config: RunFile, file: Path, runtime: Runtime, log: logs.Log) -> Supervisor:
    """Supervise the slaves that the run file assigns to this master."""
    ours = [slave for slave in config.slaves if slave.supervisor == "exec"]
    supervisor = Supervisor(
        file.absolute(), ours, config.master.directory, config.timing_options(),
        lambda: runtime.build_view().slaves, lambda: runtime.compute_s, log, runtime.fail,
    )  # fmt: skip
    if ours:
        runtime.on_slave_heartbeat = supervisor.on_slave_heartbeat
        supervisor.start()
    return supervisor


def _describe_run(config: RunFile, row: RunRow) -> dict[str, Any]:
    """Return the options and the model that every cluster must agree with; `dips check` compares them."""
    return {
        "run": row.run,
        "shared": config.shared.agreed,
        "config_digest": row.config_digest,
        "manifest": row.manifest,
    }


def _name_page(config: RunFile) -> str | None:
    """Return the page's URL for a browser, with the address as in the run file even if it means every interface."""
    address = config.master.http
    if address is None:
        return None
    return f"{'http' if is_loopback(host_port(address)[0]) else 'https'}://{address}/"


async def _add_services(
    server: aio.Server,
    runtime: Runtime,
    guard: Guard | None,
    row: RunRow,
    agreed: dict[str, Any],
    page: str | None,
    ledger: Path,
) -> health.aio.HealthServicer:
    add_ClusterServiceServicer_to_server(ClusterServicer(runtime, ManifestDesk(row.manifest)), server)
    add_SlaveServiceServicer_to_server(SlaveServicer(runtime), server)
    begin = partial(waiting.check_repeated, row)
    operators = OperatorServicer(runtime, begin, guard, lack_room=partial(lack_room, ledger))
    add_OperatorServiceServicer_to_server(operators, server)
    add_StatusServiceServicer_to_server(StatusServicer(runtime, agreed, page, guard), server)
    return await control.serve_health(server, SERVICES)


async def _serve_http(
    config: RunFile, tls: TlsSource | None, runtime: Runtime, page: MasterPage, log: logs.Log, stack: AsyncExitStack
) -> None:
    """Serve probes, metrics and the page, if the run file has an address for them."""
    section = config.master

    def read_status() -> dict[str, Any]:
        return {"view": runtime.build_view(), "meters": runtime.meters, "wall": time.time()}

    subject = HttpSubject(
        config.shared.run, "master", read_status, prometheus.collect, runtime.explain_unready,
        daemon.list_disks(section.directory, section.mirror),
    )  # fmt: skip
    routes = page.make_routes(runtime) if section.http is not None else ()
    await daemon.open_http(section.http, config.http_token, tls, subject, log, stack, routes)


def _check_agrees(config: RunFile, ledger: Ledger) -> RunRow:
    """Return the run's row after checking that ledger and run file are of one run; raise ConfigError naming both if
    not.
    """
    row = ledger.run_row()
    genesis.check_is_of_run(config, row)
    genesis.check_placement(config, row)
    return row


# ---- reloading -------------------------------------------------------------------------------------------------------
# The guard refuses the next call of a cluster whose certificate was revoked, has expired or is on no list any more;
# here it is expelled: the slaves drop its transfers, and its questions are answered, within a second and not at the end
# of its lease. A changed `clusters` has the same effect at once.


CHANGEABLE = ("clusters",)
OTHERS = ("slaves.*",)  # keys that the slaves watch themselves
RUN_FILE = "run file"  # the caller in the ledger's audit
OPERATOR_SERVICE = "/dips.v1.OperatorService/"
NOBODY = "no certificate"


class MasterReload:
    """Applies changes of the run file (`apply_changes`), expels clusters (`keep_expelling`); on the master's loop."""

    def __init__(
        self,
        guard: Guard | None,
        runtime: Runtime,
        log: logs.Log,
        wall: Callable[[], float] = time.time,
        look_s: float = LOOK_S,
    ) -> None:
        """`look_s` is between two looks at the certificates of admitted clusters."""
        self._guard, self._runtime, self._log, self._wall, self._look_s = guard, runtime, log, wall, look_s
        if guard is not None:
            guard.on_refused = self.report_refusal

    def apply_changes(self, config: RunFile, keys: list[str], told: str) -> None:
        """Apply the changes of the keys CHANGEABLE and record them in the ledger's audit."""
        if "clusters" in keys and self._guard is not None:
            self._guard.change_clusters(config.clusters)
            self._expel_clusters(self._guard)
        self._report_act(RUN_FILE, "reload", told, "done", refused=False)

    def report_refusal(self, who: str, method: str, request: Any, reason: str) -> None:
        """Record a call of an operator that the guard refused in the ledger's audit."""
        if method.startswith(OPERATOR_SERVICE):
            action, arguments = _spell_request(method.removeprefix(OPERATOR_SERVICE), request)
            self._report_act(who or NOBODY, action, arguments, reason, refused=True)

    async def keep_expelling(self) -> None:
        """Expel clusters until cancelled; any other exception is a bug, after which none would be expelled."""
        while self._guard is not None:
            self._expel_clusters(self._guard)
            await asyncio.sleep(self._look_s)

    def _expel_clusters(self, guard: Guard) -> None:
        for cluster, reason in guard.take_expelled():
            self._log.warning("cluster expelled", cluster=cluster, reason=reason)
            self._runtime.put_event(events.ClusterExpelled(cluster, reason))

    def _report_act(self, who: str, action: str, arguments: str, outcome: str, *, refused: bool) -> None:
        event = events.OperatorReported(who, action, arguments, outcome, refused, self._wall())
        self._runtime.put_event(event)


def _spell_request(method: str, request: Any) -> tuple[str, str]:
    """Return action and arguments of a request that does not come to the Coordinator, as it would record them."""
    for asked, kind in REQUESTS.items():
        if asked.__name__ == type(request).__name__:
            with suppress(DipsError):
                return kind.action, cut_text(kind.spell(messages.from_proto(request, asked, req=0)))
    return method.lower(), "not to be read"


if __name__ == "__main__":
    main()
