"""One host's part of `dips rebalance`, whether slaves share a disk or not.

The master plans while the run is up (dips/protocol/rebalancing.py). This host copies what its own directories have,
pulls the other layers of its slaves, θ and m, from the slaves that hold them, and stages them durably; then it tells
the digests until all hosts have, and the row is written. It asks all along, which keeps the run from going on to
another version. Whatever fails leaves the run as it was, and is repeated by the same command, which copies nothing
twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any

from dips.client.version_pull import VersionPuller, pulling_name
from dips.commands.operator import ask_master
from dips.commands.options import open_ledger
from dips.config import RunFile, SlaveSection
from dips.differences import differing_options
from dips.errors import Busy, ConfigError, DipsError, UnavailableMaster
from dips.files import PidLock
from dips.ids import VersionId
from dips.master.genesis import check_is_of_run
from dips.protocol.effects import Acknowledged, Pending, RebalancePlanned, Refused
from dips.protocol.events import RebalanceAsked
from dips.protocol.manifest import Manifest
from dips.protocol.placement import moves_between, rebalance_layers
from dips.slave import staging
from dips.slave.machine import available_bytes, memory_of
from dips.store.files import REBALANCE_LOCK
from dips.store.tensorfile import F32
from dips.transport.endpoints import Endpoint

ASK_S = 1.0  # pause between two questions; a lease is ten seconds by default
# Questions of one host at once, each over a connection of its own, for which a master waits with its answer: it lets
# a certificate have 16 connections, and the pull of a slave's layers takes some.
MOST_ASKED = 8
MOST_MOVES = 40  # layers that the plan lists by name

Say = Callable[[str], None]


def rebalance_run(config: RunFile, slaves: Sequence[str], master: Endpoint, wait_s: float, say: Say) -> None:
    """Copy the layers that `slaves` have by the run file's placement into their directories; return when they are their
    own.

    wait_s  the longest time without what is waited for: the master, open pushes, the other hosts
    Errors  ConfigError: no such slave or directory here, too little memory, or the master refuses; UnavailableMaster,
            UnavailableSlave, CorruptSnapshot, FailedDisk: the run is as it was
    """
    sections = [config.slave_section(name) for name in dict.fromkeys(slaves)]
    _require_directories(sections)
    with ExitStack() as held:
        for section in sections:
            busy = f"another `dips rebalance` copies into {section.directory}"
            held.enter_context(closing(PidLock(section.directory / REBALANCE_LOCK, busy=busy, advice="wait for it")))
        asking = asyncio.Semaphore(MOST_ASKED)
        asyncio.run(_move_all([_HostCopy(config, section, master, wait_s, say, asking) for section in sections]))


def _require_directories(sections: Sequence[SlaveSection]) -> None:
    """Raise ConfigError if a directory is missing, or used by two slaves."""
    owners = dict[Any, str]()
    for section in sections:
        if not section.directory.is_dir():
            raise ConfigError(
                f"slaves.{section.name}.directory: {section.directory} is not here: call this command on the host of "
                f"{section.name}, with --slave for the slaves of that host; make the directory if it is to be new"
            )
        owner = owners.setdefault(section.directory.resolve(), section.name)
        if owner != section.name:
            raise ConfigError(
                f"directory: {section.directory} is said to be of {owner} and of {section.name}: each slave has its "
                "own; if they are on two hosts, name the one of this host by --slave"
            )


async def _move_all(copies: Sequence[_HostCopy]) -> None:
    """Stage for one slave at a time, since pullers of one name exclude each other. The first that learns of the row
    ends the waiting of all: the master ends with the row, and the others would get no answer from it.
    """
    staging_one = asyncio.Lock()
    tasks = [asyncio.create_task(copy.move_layers(staging_one)) for copy in copies]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _HostCopy:
    """The copy of one slave's layers."""

    def __init__(
        self, config: RunFile, section: SlaveSection, master: Endpoint, wait_s: float, say: Say,
        asking: asyncio.Semaphore,
    ) -> None:  # fmt: skip
        """`asking` is held while the master is asked."""
        self._config, self._section, self._master, self._wait_s, self._say = config, section, master, wait_s, say
        self._asking = asking
        self._run, self._slaves = config.shared.run, tuple(sorted(one.name for one in config.slaves))
        self._said = ""

    async def move_layers(self, staging_one: asyncio.Lock) -> None:
        """Stage what the master plans until the placement is valid; `staging_one` is held while bytes move."""
        version, digest = None, ""
        while (planned := await self._ask_until(version, digest)) is not None:
            holding = asyncio.create_task(self._hold_head())
            try:
                async with staging_one:
                    version, digest = planned.version, await self._stage_layers(planned)
            finally:
                holding.cancel()
                with suppress(asyncio.CancelledError):
                    await holding
            self._say(f"{version} is staged for {self._section.name}")

    async def _ask_until(self, version: VersionId | None, digest: str) -> RebalancePlanned | None:
        """Ask until the master has a plan, for a digest another one than that, or the placement is valid: None."""
        until = time.monotonic() + self._wait_s
        while True:
            try:
                result = await self._ask(version, digest)
            except (UnavailableMaster, Busy) as error:
                self._say_once(str(error))
                if time.monotonic() >= until:
                    raise
            else:
                match result:
                    case Acknowledged():
                        return None
                    case RebalancePlanned():
                        return result
                    case Refused():
                        raise ConfigError(result.reason)
                    case Pending(reason):
                        self._say_once(reason)
                if time.monotonic() >= until:
                    raise UnavailableMaster(f"given up after {self._wait_s:g} s: {self._said}; repeat the command")
            await asyncio.sleep(ASK_S)

    async def _ask(self, version: VersionId | None, digest: str) -> Any:
        async with self._asking:
            return await ask_master(self._master, RebalanceAsked(0, self._section.name, self._slaves, version, digest))

    async def _hold_head(self) -> None:
        """Keep the lease while the layers move. If it ends all the same, and the head moves, they are copied again."""
        while True:
            await asyncio.sleep(ASK_S)
            try:
                await self._ask(None, "")
            except DipsError as error:
                self._say_once(str(error))

    async def _stage_layers(self, planned: RebalancePlanned) -> str:
        """Make the layers durable in the slave's directory; return the digest of their manifest."""
        directory, name = self._section.directory, self._section.name
        path = directory / str(planned.version)
        held = staging.find_version(path, self._run, name)
        if held is not None and tuple(record.index for record in held.layers) == planned.layers:
            await asyncio.to_thread(staging.read_kept, path, held)
            return held.digest
        loop = asyncio.get_running_loop()
        async with VersionPuller(self._master, pulling_name(self._master, f"rebalance-{name}")) as puller:
            self._require_same_run(puller)
            self._require_memory(puller.manifest, planned.layers)

            def fetch(layers: Mapping[int, tuple[F32, F32]]) -> Mapping[int, tuple[str, str]]:
                pulled = asyncio.run_coroutine_threadsafe(puller.pull_layers(planned.version, layers), loop)
                return pulled.result()

            owner = (self._run, name, planned.sinc)
            part = staging.plan_fetch(owner, planned.version, directory, puller.manifest, planned.layers, fetch)
            return (await asyncio.to_thread(staging.stage_parts, (part,), show=self._say))[name]

    def _require_same_run(self, puller: VersionPuller) -> None:
        """Raise ConfigError if the master would not start with this run file."""
        if puller.run != self._run:
            raise ConfigError(f"shared.run: the master serves run {puller.run!r}, the run file's is {self._run!r}")
        if lines := differing_options(self._config.shared.agreed, puller.shared):
            raise ConfigError(f"{'; '.join(lines)}: put the options back as they are in the run")

    def _require_memory(self, model: Manifest, layers: Sequence[int]) -> None:
        """Raise ConfigError if this machine has too little memory for the slave with these layers."""
        memory = memory_of(self._section, sum(model.layers[i].numel for i in layers), self._config.shared.pull_codec)
        try:
            memory.require_memory(available_bytes(self._section))
        except ConfigError as error:
            raise ConfigError(f"slaves.{self._section.name}: {error}") from error

    def _say_once(self, reason: str) -> None:
        if reason != self._said:
            self._say(reason)
        self._said = reason


# ---- the plan, for a person ------------------------------------------------------------------------------------------


def show_plan(after: RunFile) -> None:
    """Print the moves from the ledger's slaves to those of `after`, and each slave's memory sum. Raise ConfigError if
    the run file is not the run's, or has more slaves than the model has layers.
    """
    with open_ledger(after) as ledger:
        row = ledger.run_row()
    check_is_of_run(after, row)
    model = Manifest.from_json(row.manifest)
    placement = rebalance_layers(model, row.placement, [section.name for section in after.slaves])
    moves = moves_between(row.placement, placement)
    print(f"run {row.run}: the layers lie on {', '.join(name for name, _ in row.placement)}")
    for move in moves[:MOST_MOVES]:
        layer = model.layers[move.layer]
        print(f"  {layer.name}: {move.source} → {move.target}, {_megabytes(2 * layer.nbytes)}")
    if len(moves) > MOST_MOVES:
        print(f"  and {len(moves) - MOST_MOVES} more")
    moved = sum(2 * model.layers[move.layer].nbytes for move in moves)
    print(f"moved: {len(moves)} of {len(model.layers)} layers, {_megabytes(moved)} of θ and m")
    for name, layers in placement:
        numel = sum(model.layers[layer].numel for layer in layers)
        memory = memory_of(after.slave_section(name), numel, after.shared.pull_codec)
        print(f"{name}: {len(layers)} layers, memory {memory.describe_sum()}")


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
