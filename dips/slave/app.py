"""`dips-slave`: builds one incarnation of a slave, its sockets, threads and clocks, and ends it in order."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from dips import daemon
from dips.codecs import Codec
from dips.config import STALL_HEARTBEATS, RunFile, SlaveSection, load_run
from dips.dataclass import dataclass
from dips.files import keep_files_private, make_private_directory
from dips.http import HttpSubject
from dips.identity.names import PeerRole
from dips.outer import kernels
from dips.outer.kernel_pool import KernelPool, WorkMeter
from dips.outer.versions import Versions
from dips.protocol.effects import Registered
from dips.protocol.heartbeats import WorkProgress
from dips.protocol.rank_keys import TRANSFER_RANKS
from dips.slave import metrics as slave_metrics
from dips.slave.core import SlaveCore
from dips.slave.flow import ZmqFlow
from dips.slave.machine import COPIES_BYTES, TRANSIT_BYTES, available_bytes, memory_of
from dips.slave.metrics import DiskRoom
from dips.slave.ports import Meters, SlaveIdentity, SlaveTiming
from dips.slave.registration import LastProcess
from dips.slave.runtime import ShardThread, SlaveRuntime, SlaveServiceLink
from dips.slave.shard import Shard
from dips.slave.snapshot_mirror import SnapshotMirror
from dips.slave.snapshots import Snapshots
from dips.store.mirror import MirrorStore
from dips.telemetry import exits, logs
from dips.telemetry.timeline import Timeline
from dips.transport import control, seal
from dips.transport.endpoints import Endpoint, master_peer
from dips.transport.gate import Guard
from dips.transport.intake import CONCURRENT_STREAMS
from dips.transport.lane import available_cores
from dips.transport.limits import SLAVE_LIMITS
from dips.wire.generated.slave_pb2_grpc import SlaveServiceStub, add_OrderServiceServicer_to_server

HEALTH_SERVICES = ("", "dips.v1.OrderService")

cli = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=exits.HELP_OPTIONS)

TIMELINE_BYTES = 16 << 20  # of each of its two files: thousands of rounds, and little beside a snapshot
CHUNK_BYTES = 1 << 20  # of one message of the lanes; larger ZeroMQ messages were 3 to 5 times slower


@cli.command()
def serve_command(
    config: Annotated[Path, typer.Option("--config", "-c", help="The run file (dips.yaml).")],
    name: Annotated[str, typer.Option("--name", "-n", help="Which of the run file's slaves this process is.")],
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error, instead of the file's log_level.")
    ] = None,
) -> None:
    """A slave of one run: holds its layers of the global model and takes their outer steps.

    Its memory is allocated once and the sum is printed; its versions are kept in its directory, which no second slave
    may use. It waits for a master that is away; the master decides what it loads. It needs no GPU and no PyTorch.

    Exit codes: 0 stopped by SIGTERM or SIGINT; 74 its disk is full, read-only or broken; 77 the master has never let it
    in: its certificate does not count; 78 the run file, the directory, a port or the memory is not usable; 65, 70, 76
    the master and this slave do not understand each other: see the message.

    Example:  dips-slave --config dips.yaml --name slave-0
    """
    fixed = logs.check_level(log_level)
    run_file = load_run(config)
    section = run_file.slave_section(name)
    log = logs.configure_log("slave", name, fixed or run_file.log_level)
    raise typer.Exit(asyncio.run(serve(run_file, section, log, file=config, fixed_level=fixed is not None)))


def main() -> None:
    """Entry point of the console script."""
    keep_files_private()
    exits.run_command(cli)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one incarnation."""

    section: SlaveSection
    disk: Snapshots
    flow: ZmqFlow
    shard: Shard
    thread: ShardThread
    work: WorkMeter
    mirror: SnapshotMirror | None
    log: logs.Log
    pull_codec: Codec
    room: DiskRoom
    nonce: str
    last: LastProcess
    disk_threads: ThreadPoolExecutor

    def prepare_memory(self, registered: Registered) -> None:
        """Check the memory that the layers need before it is allocated, and bind the layers; on the shard's thread."""
        self.last.keep_nonce(self.nonce)
        manifest = self.shard.learn_manifest(registered)
        if self.thread.standing.sinc == 0:
            numel = sum(manifest.layers[layer].numel for layer in registered.layers)
            memory = memory_of(self.section, numel, self.pull_codec)
            self.log.info("memory", sum=memory.describe_sum())
            memory.require_memory(available_bytes(self.section))
            self.flow.set_layers(manifest, registered.layers)
        self.disk.bind_layers(manifest, registered.layers, registered.genesis, registered.sinc)
        if self.mirror is not None:
            self.mirror.bind_layers(registered.layers)

    def read_metrics(self) -> dict[str, Any]:
        """Return the values for Prometheus, except those of the disk; from any thread."""
        standing, thread, (transit, limit) = self.thread.standing, self.thread, self.flow.transit_bytes
        return {
            "sinc": standing.sinc,
            "version": standing.memory.version if standing.memory else None,
            "round": standing.memory.round if standing.memory else None,
            "pool_used": standing.pool_used,
            "pool_limit": standing.pool_limit,
            "transit_used": transit,
            "transit_limit": limit,
            "staged": len(standing.staged),
            "persist_s": thread.persist_s,
            "apply_s": thread.apply_s,
            "orders": thread.spent,
            "work": self.read_work(),
            "refused": dict(self.flow.refused_frames),
            **self.flow.link_bytes(),
        }

    def read_meters(self) -> Meters:
        """Return the state of this process for a heartbeat; from any thread."""
        mirror = self.mirror.report() if self.mirror is not None else None
        thread, done = self.thread, self.work.nbytes
        return Meters(
            self.flow.bytes_in,
            self.flow.bytes_out,
            thread.persist_s,
            thread.apply_s,
            done,
            mirror,
            *self.room.read_room(),
            self.read_work(),
        )

    def read_work(self) -> WorkProgress | None:
        """Return how far the slave is that reads or restores a snapshot; from any thread."""
        work = self.work.read_progress()
        return None if work is None else WorkProgress(*work)

    def explain_unready(self, reason: str) -> str:
        """Return why the slave serves nothing, with what it reads or restores; empty if it serves."""
        work = self.read_work()
        return f"{reason}; {work.describe_progress()}" if reason and work is not None else reason


async def serve(
    config: RunFile,
    section: SlaveSection,
    log: logs.Log,
    ready: Callable[[str], None] = lambda _: None,
    file: Path | None = None,
    fixed_level: bool = False,
) -> int:
    """Run until stopped; return the exit code. `ready` gets host:port of the control server once it serves.

    `file` is the path of `config` and is watched while the slave runs. With `fixed_level` it does not change the log's
    level.

    Raise ConfigError if the directory, a port or the memory is not usable, another DipsError if the master refuses this
    slave.
    """
    async with AsyncExitStack() as stack:
        daemon.ignore_hangups()  # kernels compile for seconds, and whoever hurries the slaves signals this one, too
        systemd = stack.enter_context(daemon.SystemdLink())
        lanes = len(section.data_lanes(available_cores()))  # for as many clusters as may push at once; more may pull
        peers = f"{section.slots} clusters of {TRANSFER_RANKS} ranks on {lanes} lanes"
        daemon.raise_open_files(section.slots * TRANSFER_RANKS * lanes, peers, log)
        make_private_directory(section.directory, "slaves.directory")
        parts = _build_parts(config, section, log, stack)
        files = config.tls_files(section.name, PeerRole.SLAVE)
        tls = daemon.open_certificates(files, section.name, PeerRole.SLAVE, config.shared.run, log)
        guard = Guard(tls) if tls is not None else None
        report = lambda method, error: log.error("call_failed", method=method, exc_info=error)  # noqa: E731
        server = control.make_server(report, guard, SLAVE_LIMITS)
        checker = await control.serve_health(server, HEALTH_SERVICES)
        host = section.listen.rpartition(":")[0]  # with the brackets of IPv6
        address = f"{host}:{control.bind_server(server, section.listen, 'slaves.listen', guard)}"
        runtime = _make_runtime(config, parts, address, master_peer(section.master, tls), stack)
        add_OrderServiceServicer_to_server(runtime, server)
        await server.start()
        stack.push_async_callback(server.stop, None)  # the runtime ended before: no order under way is answered
        subject = HttpSubject(
            config.shared.run, "slave", parts.read_metrics, slave_metrics.collect,
            lambda: parts.explain_unready(runtime.core.explain_unready()),
            daemon.list_disks(section.directory, section.mirror),
            lambda: slave_metrics.count_snapshots(section.directory),
        )  # fmt: skip
        await daemon.open_http(section.http, config.http_token, tls, subject, log, stack)
        log.info("serving", address=address, lanes=parts.flow.lane_addresses(), directory=str(section.directory))
        systemd.say_ready()
        ready(address)
        if file is not None:
            watching = daemon.watch_file(
                "run file", file, config, load_run, log, runtime.fail,
                fixed_level=fixed_level, ignored=list_foreign_keys(config, section),
            )  # fmt: skip
            stack.callback(watching.cancel)
        await _until_stopped(asyncio.create_task(runtime.run()))
        log.info("stopping")
        await checker.enter_graceful_shutdown()
    log.info("stopped")
    return 0


def list_foreign_keys(config: RunFile, section: SlaveSection) -> tuple[str, ...]:
    """Return patterns of the run file's keys which the slave of this section does not use."""
    return ("clusters", "limits.*", "master.*", *(f"slaves.{s.name}.*" for s in config.slaves if s is not section))


def _build_parts(config: RunFile, section: SlaveSection, log: logs.Log, stack: AsyncExitStack) -> Parts:
    """Build everything that ends with this incarnation; the stack closes it in reverse: flow, shard's thread, kernels,
    work on the disk, and its directory's lock, since the next process there removes what is not finished.
    """
    run, name = config.shared.run, section.name
    work = WorkMeter()
    disk = Snapshots(section.directory, run, name, section.initial_model, log, work)
    stack.callback(disk.close)
    disk_threads = ThreadPoolExecutor(2, "disk")  # an order's work, and the snapshot that a registration reads
    stack.callback(disk_threads.shutdown)
    workers = available_cores()
    threads = ThreadPoolExecutor(workers, "kernel")
    stack.callback(threads.shutdown)
    begun = time.monotonic()
    kernels.warm_up()
    log.info("kernels_ready", threads=workers, took_s=round(time.monotonic() - begun, 3))
    executor = ThreadPoolExecutor(1, "shard")
    stack.callback(executor.shutdown)
    flow = ZmqFlow(
        run,
        name,
        section.data_lanes(available_cores()),
        CHUNK_BYTES,
        TRANSIT_BYTES,
        CONCURRENT_STREAMS,
        STALL_HEARTBEATS * config.shared.heartbeat_s,
        key=seal.new_keys() if config.tls else None,  # in memory only; sent with Register
        copies_bytes=COPIES_BYTES,
        log=log,
    )
    stack.callback(flow.close)
    timeline = Timeline(section.directory, run, "slave", name, TIMELINE_BYTES)
    stack.callback(timeline.close)
    thread = ShardThread(executor, time.monotonic, log, timeline.record_mark)
    versions = Versions(
        KernelPool(kernels, threads, workers, work), section.slots, section.pinned, config.shared.pull_codec,
    )  # fmt: skip
    shard = Shard(name, versions, disk, flow, thread.on_flow_event, lambda registered: parts.prepare_memory(registered))
    thread.own_shard(shard)
    parts = Parts(
        section, disk, flow, shard, thread, work, _mirror(config, section, log, work, stack), log,
        config.shared.pull_codec, DiskRoom(section.directory), uuid.uuid4().hex,
        LastProcess(section.directory, section.lock, log), disk_threads,
    )  # fmt: skip
    return parts


def _mirror(
    config: RunFile, section: SlaveSection, log: logs.Log, work: WorkMeter, stack: AsyncExitStack
) -> SnapshotMirror | None:
    if section.mirror is None:
        return None
    run, name = config.shared.run, section.name
    store = MirrorStore(section.mirror, run, name, of=section.directory)
    if store.shares_disk():
        log.warning(
            "mirror_on_the_same_disk", mirror=store.url, problem=f"lost with {section.directory}; is it mounted?"
        )
    mirror = SnapshotMirror(
        store, section.directory, run, name, log, time.monotonic, work,
    )  # fmt: skip
    stack.callback(mirror.close)
    mirror.start()
    return mirror


def _make_runtime(config: RunFile, parts: Parts, address: str, master: Endpoint, stack: AsyncExitStack) -> SlaveRuntime:
    section = parts.section
    channel, heartbeat_channel = control.open_channel(master), control.open_channel(master)
    stack.push_async_callback(channel.close)
    stack.push_async_callback(heartbeat_channel.close)
    reached, *lanes = section.reached_at([address, *parts.flow.lane_addresses()])
    identity = SlaveIdentity(
        config.shared.run,
        section.name,
        parts.nonce,
        reached,
        tuple(lanes),
        section.master,
        parts.flow.public_key,
        parts.last.read_nonce(),
    )
    core = SlaveCore(
        identity,
        SlaveTiming(config.shared.heartbeat_s),
        lambda: parts.thread.standing,
        parts.flow.list_transfers,
        parts.read_meters,
        Random(),
    )
    link = SlaveServiceLink(SlaveServiceStub(channel), SlaveServiceStub(heartbeat_channel), master)
    return SlaveRuntime(core, parts.thread, link, parts.log, parts.mirror, parts.disk_threads)


async def _until_stopped(running: asyncio.Task[None]) -> None:
    """Return at SIGTERM or SIGINT; raise the error with which the slave ends by itself."""
    stop = asyncio.Event()
    stopped = asyncio.create_task(stop.wait())
    try:
        with daemon.end_signals(stop.set):
            await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        for task in (running, stopped):
            task.cancel()
        await asyncio.gather(running, stopped, return_exceptions=True)


if __name__ == "__main__":
    main()
