"""The steps of `dips recover --lost-ledger`, in order: lock everything, read, ask, stage, write the row, rename.

Until the row is written its work counts for nothing: neither for a master that is started instead, nor for a
repetition, which starts again. After the row a repetition, or the slaves themselves, rename the staged snapshots. The
new ledger is built aside and renamed once the row is in it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from dips.config import RunFile
from dips.errors import ConfigError
from dips.files import lock_holder
from dips.ids import VersionId
from dips.master import genesis
from dips.master import recover as counters
from dips.master.ledger import Ledger, hold_ledger, put_in_place
from dips.master.local_audit import make_local_row
from dips.master.restore import newest_term
from dips.protocol.records import RoundReserved, RunRow
from dips.protocol.seeding import records_of_model
from dips.slave.staging import Rebuild, SlaveFinding
from dips.telemetry.logs import Log

ASIDE = ".recovering"  # in the master's directory: a ledger that is not complete yet


def recover_run(config: RunFile, model: Path, log: Log, agree: Callable[[str], bool]) -> VersionId | None:
    """Make a version from the file, the successor of the run's head; return None if `agree` declined the question.

    Raises ConfigError if a daemon serves or the file is not the model, FailedDisk, FailedMirror: then the run is
    unchanged.
    """
    _require_stopped(config)
    path = genesis.ledger_path(config)
    with ExitStack() as held:
        there = path.exists()  # of an earlier try, whose row is in it
        ledger = held.enter_context(counters.open_ledger(config) if there else _ledger_anew(config, model))
        state = ledger.read_state()
        genesis.check_is_of_run(config, state.row)
        rebuild = Rebuild(config, state.row, ledger.read_digests(), model, log, held)
        head = state.versions[-1].version
        if head in rebuild.finished and ledger.read_history(1)[-1].recovered is not None:
            print(f"note: {head} had its row; its snapshots have their names now")
            return head
        if there:
            raise ConfigError(f"{path}: the ledger is here: start master and slaves, and leave out --lost-ledger")
        found = rebuild.look_at_disks()
        version = VersionId(head.version + 1, state.next_round)
        _print_plan(head, version, model, found)
        if not agree(f"Make {version} of {model}?"):
            return None
        ledger.write_records([RoundReserved(version.round, 0.0)], time.time())
        digests = rebuild.stage_version(version, found, max((peer.inc for peer in state.slaves), default=0))
        without = rebuild.layer_names([layer for one in found if one.momentum_of is None for layer in one.layers])
        records = records_of_model(version, head, state.history, str(model), without, digests, 0.0)
        ledger.write_records([*records, make_local_row("recover", f"{version} of {model}")], time.time())
        genesis.put_initial(_aside(path).parent, config.master.directory)
        genesis.mirror_initial(config)
        ledger.close()  # the last connection moves the WAL into the file
        put_in_place(_aside(path), path)
        rebuild.place_version(version)
    return version


def _require_stopped(config: RunFile) -> None:
    """Raise ConfigError if a daemon of this run is running on this machine; the locks are taken one by one later."""
    locks = [
        ("the master", Path(f"{genesis.ledger_path(config)}.lock")),
        *((f"slave {s.name}", s.lock) for s in config.slaves),
    ]
    serving = [f"{who} (pid {holder})" for who, path in locks if (holder := lock_holder(path))]
    if serving:
        raise ConfigError(f"{' and '.join(serving)} still serve this run: stop the master and all slaves first")


@contextmanager
def _ledger_anew(config: RunFile, model: Path) -> Iterator[Ledger]:
    """Create a ledger aside that begins with the file as version 0; its counters exceed every name on disks and
    mirrors.

    Unlike for `dips init`, a mirror that holds this run is no reason to refuse: its slaves continue from it. A mirror
    that cannot be read is: a daemon that knows a round above the counters would stop the next master.
    """
    path = genesis.ledger_path(config)
    store = genesis.mirror_of(config)
    if store is not None and newest_term(store):
        raise ConfigError(f"{path}: no ledger is here, but its mirror {store.url} has one: start dips-master first")
    print(f"note: no ledger at {path}: history, tokens and data ranges begin anew")
    aside = _aside(path)
    with hold_ledger(path):
        shutil.rmtree(aside.parent, ignore_errors=True)  # left by a try that was killed
        aside.parent.mkdir(parents=True)
        try:
            with closing(Ledger.create(aside, _write_initial(config, model, aside.parent), time.time)) as ledger:
                plan = counters.make_plan(config, ledger)
                if plan.unread:
                    raise ConfigError(
                        f"{'; '.join(plan.unread)}: rounds that only a mirror shows must not be given again; mount it, "
                        "or, if it is lost for good, take it out of the run file"
                    )
                plan.carry_out(ledger)
                yield ledger
        finally:
            shutil.rmtree(aside.parent, ignore_errors=True)


def _write_initial(config: RunFile, model: Path, directory: Path) -> RunRow:
    """Write the file as version 0, and return the ledger's first row; keeps no tensors in memory."""
    tensors = _read_tensors(model)
    manifest = genesis.manifest_of(tensors, config.shared.grouping)
    genesis.write_initial(config, manifest, tensors, directory)
    return genesis.row_of_model(config, manifest, tensors)


def _aside(path: Path) -> Path:
    return path.parent / ASIDE / path.name


def _read_tensors(model: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    try:
        return load_file(model)
    except Exception as error:
        raise ConfigError(f"--model {model}: cannot be read as safetensors: {error}") from error


def _print_plan(head: VersionId, version: VersionId, model: Path, found: Sequence[SlaveFinding]) -> None:
    print(f"{version}, after {head}: parameters of {model}")
    for one in found:
        momentum = f"momentum of {one.momentum_of}" if one.momentum_of else "no snapshot is left: momentum 0"
        mirror = f" (its mirror: {one.lacking})" if one.lacking else ""
        print(f"  {one.slave}: {len(one.layers)} layers, {momentum}{mirror}")
