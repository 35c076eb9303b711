"""The ledger's mirror: everything that was told lies there, a mirror that fails holds nothing up, a lost ledger comes
back."""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import structlog

from dips.config import RunFile, load_run
from dips.errors import ConfigError, Corrupt, CorruptLedger, FailedMirror, StaleTerm
from dips.master import genesis, recover, restore
from dips.master.ledger import Ledger
from dips.master.ledger_mirror import LedgerMirror
from dips.master.restore import SPARE, MirroredLedger
from dips.protocol.enums import RoundResult
from dips.protocol.records import IncarnationGiven, LedgerState, RangesLeased, Record, RoundEnded, RoundReserved
from dips.protocol.view import LedgerMirrorView
from dips.store.files import ASIDE
from dips.store.mirror import MirrorStore
from dips.transport.backoff import Backoff
from tests.power_cut import PowerCut, fell_behind
from tests.run_files import write_run_file
from tests.waiting import until

INITIAL = (genesis.INITIAL_SHARED, genesis.INITIAL_VERSION)
LOG = structlog.get_logger()
TENSORS = {"a.w": np.ones(2, np.float32), "b.w": np.ones(2, np.float32)}


@pytest.fixture
def config(tmp_path: Path) -> RunFile:
    """A run of two slaves whose ledger is mirrored to another directory."""
    (tmp_path / "mirror").mkdir()
    config = load_run(write_run_file(tmp_path, mirror="mirror"))
    genesis.make_run(config, TENSORS)
    return config


def transactions() -> Iterator[list[Record]]:
    """One transaction after another, of every day."""
    for n in itertools.count(1):
        yield [RoundReserved(n, 1.0), IncarnationGiven("cluster", "west", n, f"n{n}")]
        yield [RangesLeased("west", n, 1, (n,)), RoundEnded(n, RoundResult.SKIPPED, "x", (), (), float("nan"))]


class Term:
    """A master's term, as far as its ledger goes."""

    def __init__(self, config: RunFile, patience_s: float = 5.0) -> None:
        self.ledger = Ledger.open(genesis.ledger_path(config), wall=time.time)
        self.term, self.written = self.ledger.start_term(), 0
        self.copy = config.master.directory / ".mirrored.sqlite"
        self.lock = threading.Lock()  # in the daemon both run on the ledger's thread
        store = genesis.mirror_of(config)
        assert store is not None
        self.mirror = LedgerMirror(store, "r", self.term, self.take_base, patience_s, time.monotonic, LOG)
        began = time.monotonic()
        self.kept_up = self.mirror.start()
        self.started_s = time.monotonic() - began

    def take_base(self) -> tuple[int, Path]:
        with self.lock:
            self.ledger.copy_to(self.copy)
            return self.written, self.copy

    def write(self, records: list[Record]) -> None:
        """Durable here and, unless it lags, in the mirror on return."""
        wall = time.time()
        with self.lock:
            self.ledger.write_records(records, wall)
            self.written += 1
        asyncio.run(self.mirror.follow(self.written, records, wall))

    def end(self) -> LedgerState:
        """As kill -9 leaves it; return what its ledger knew."""
        self.mirror.close()
        self.mirror._thread.join(10.0)
        assert not self.mirror._thread.is_alive(), "it waits for nothing more, a failing mirror's next try included"
        state = self.ledger.read_state()
        self.ledger.close()
        return state


def lose(config: RunFile) -> None:
    shutil.rmtree(config.master.directory)


def restored(config: RunFile) -> LedgerState:
    restore.restore_if_lost(config, LOG)
    ledger = Ledger.open(genesis.ledger_path(config))
    try:
        return ledger.read_state()
    finally:
        ledger.close()


def like(state: LedgerState, other: LedgerState) -> bool:
    """The same run, but for what a restored ledger raises."""
    raised: dict[str, Any] = {"term": 0, "next_round": 0, "rounds": (), "unknown_rounds": (), "incarnations_above": 0}
    return replace(state, **raised) == replace(other, **raised)


def test_a_lost_ledger_comes_back_with_everything_that_was_told(config: RunFile) -> None:
    """Base and transactions give the same state; the initial model is there again; nothing is given twice."""
    term = Term(config)
    assert term.kept_up and term.started_s < 5.0, "it begins as soon as its base is there"
    for records in itertools.islice(transactions(), 9):
        term.write(records)
    assert term.mirror.view() == LedgerMirrorView()
    knew = term.end()
    lose(config)
    state = restored(config)
    assert like(state, knew)
    assert state.term == knew.term + SPARE + 1
    assert state.unknown_rounds == ((knew.next_round, knew.next_round + SPARE),)
    assert state.next_round == knew.next_round + SPARE + 1
    assert state.incarnations_above == 5 + SPARE
    assert (config.master.directory / genesis.INITIAL).exists()
    assert [p.name for p in config.master.directory.iterdir() if p.name.startswith(".")] == []
    again = Term(config)  # and from what this one mirrors, another one
    assert again.kept_up
    again.write([RoundReserved(state.next_round, 1.0)])
    knew = again.end()
    lose(config)
    assert restored(config).next_round == knew.next_round + SPARE + 1


def test_bases_replace_what_came_before(config: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new base after so many transactions; older files go, and restoring gives the same."""
    monkeypatch.setattr("dips.master.ledger_mirror.LOGS_TO_A_BASE", 4)
    term = Term(config)
    for records in itertools.islice(transactions(), 11):
        term.write(records)
    store = genesis.mirror_of(config)
    assert store is not None
    until(lambda: len(store.list_names("ledger")) <= 5, "the mirror is pruned")
    knew = term.end()
    lose(config)
    assert like(restored(config), knew)


def test_transactions_are_counted_anew_after_a_base(config: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base is as long as the ledger: one for each transaction would be more than any mirror can take."""
    monkeypatch.setattr("dips.master.ledger_mirror.LOGS_TO_A_BASE", 4)
    term = Term(config)
    for records in itertools.islice(transactions(), 7):
        term.write(records)
    term.end()
    store = genesis.mirror_of(config)
    assert store is not None
    base, *logs = store.list_names("ledger")
    assert base in ("0000000001-0000000004.base", "0000000001-0000000005.base"), "the fifth may be written meanwhile"
    assert logs == [f"0000000001-{n:010d}.log" for n in range(int(base[11:21]) + 1, 8)]


def test_a_mirror_that_is_gone_holds_nothing_up_and_catches_up(config: RunFile, tmp_path: Path) -> None:
    """Transactions go on, red with the reason; when it is back, what was missed is there, in order."""
    term = Term(config)
    every = transactions()
    term.write(next(every))
    (tmp_path / "mirror").rename(tmp_path / "away")
    away = time.monotonic()
    term.write(next(every))
    began = time.process_time()
    for records in itertools.islice(every, 3):
        term.write(records)
    assert time.process_time() - began < 5
    view = term.mirror.view()
    assert view.red and view.behind_transactions == 4 and "is not there: mount it" in view.reason
    assert 0.0 < view.behind_s < time.monotonic() - away
    (tmp_path / "away").rename(tmp_path / "mirror")
    until(lambda: not term.mirror.view().red, "it has caught up")
    term.write(next(every))
    knew = term.end()
    lose(config)
    assert like(restored(config), knew)


def test_each_outage_of_a_mirror_begins_with_the_shortest_pause(
    config: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed long ago, many times, does not keep the mirror of today waiting."""
    first_s, pauses = 0.001, list[float]()
    ask = Backoff.next_pause_s

    def next_pause_s(backoff: Backoff) -> float:
        pauses.append(ask(backoff))
        return pauses[-1]

    monkeypatch.setattr("dips.master.ledger_mirror.BACKOFF_S", (first_s, 10.0))
    monkeypatch.setattr(Backoff, "next_pause_s", next_pause_s)
    term, every = Term(config), transactions()
    for _ in range(2):
        pauses.clear()
        (tmp_path / "mirror").rename(tmp_path / "away")
        term.write(next(every))
        until(lambda: len(pauses) >= 3, "it has failed again and again")
        assert pauses[0] <= first_s < pauses[2]
        (tmp_path / "away").rename(tmp_path / "mirror")
        until(lambda: not term.mirror.view().red, "it has caught up")
    term.end()


def test_a_mirror_far_behind_gets_a_new_base(config: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is bounded: what does not fit comes with a base."""
    monkeypatch.setattr("dips.master.ledger_mirror.MOST_QUEUED", 3)
    monkeypatch.setattr("dips.master.ledger_mirror.BACKOFF_S", (0.05, 0.05))
    (tmp_path / "mirror").rename(tmp_path / "away")
    term = Term(config, patience_s=0.05)
    assert not term.kept_up
    every = transactions()
    for records in itertools.islice(every, 11):
        term.write(records)
        assert len(term.mirror._queue) <= 3
    assert term.mirror.view().behind_transactions == 11
    (tmp_path / "away").rename(tmp_path / "mirror")
    until(lambda: not term.mirror.view().red, "it has caught up")
    store = genesis.mirror_of(config)
    assert store is not None and store.list_names("ledger") == ["0000000001-0000000011.base"]
    (tmp_path / "mirror").rename(tmp_path / "away")
    for records in itertools.islice(every, 5):
        term.write(records)
    assert term.mirror.view().behind_transactions == 5
    (tmp_path / "away").rename(tmp_path / "mirror")
    until(lambda: not term.mirror.view().red, "it has caught up")
    knew = term.end()
    lose(config)
    assert like(restored(config), knew)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """One for each copy of the ledger that was made for its mirror, which is tried again at once."""
    made, copy_to = list[Path](), Ledger.copy_to

    def copy_counted(ledger: Ledger, path: Path) -> None:
        made.append(path)
        copy_to(ledger, path)

    monkeypatch.setattr("dips.master.ledger_mirror.BACKOFF_S", (0.001, 0.001))
    monkeypatch.setattr(Ledger, "copy_to", copy_counted)
    return made


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """One for each pause after a try that failed."""
    pauses, ask = list[float](), Backoff.next_pause_s

    def next_pause_s(backoff: Backoff) -> float:
        pauses.append(ask(backoff))
        return pauses[-1]

    monkeypatch.setattr(Backoff, "next_pause_s", next_pause_s)
    return pauses


def test_a_mirror_that_is_away_costs_no_copies_of_the_ledger(
    config: RunFile, tmp_path: Path, copied: list[Path], failures: list[float]
) -> None:
    """While it was away each try, every half minute for days, copied the whole ledger, and no round went on meanwhile:
    of 165 MB some 500 GB a day."""
    (tmp_path / "mirror").rename(tmp_path / "away")
    term = Term(config, patience_s=0.01)
    until(lambda: len(failures) >= 2, "it has failed again and again")
    assert not copied
    (tmp_path / "away").rename(tmp_path / "mirror")
    until(lambda: not term.mirror.view().red, "it has caught up")
    assert len(copied) == 1
    term.end()


def test_a_mirror_that_is_full_costs_a_copy_of_the_ledger_a_queue(
    config: RunFile, monkeypatch: pytest.MonkeyPatch, copied: list[Path], failures: list[float]
) -> None:
    """As many as one with room, though it lists what it holds; what came since the copy is queued, or it is made anew.
    A copy that somebody has removed, too; none lies there in the end."""
    write_base, every, full = restore.write_base, transactions(), [True]

    def write_unless_full(*given: Any) -> None:
        if full[0]:
            raise FailedMirror("no space left on device")
        write_base(*given)

    def fail_again() -> int:
        before = len(failures)
        until(lambda: len(failures) >= before + 3, "it has failed again and again")
        return len(copied)

    monkeypatch.setattr("dips.master.ledger_mirror.MOST_QUEUED", 3)
    monkeypatch.setattr(restore, "write_base", write_unless_full)
    term = Term(config, patience_s=0.01)
    assert fail_again() == 1
    for records in itertools.islice(every, 3):
        term.write(records)
    assert fail_again() == 1
    term.write(next(every))
    assert fail_again() == 2
    term.copy.unlink()
    assert fail_again() == 3
    term.write(next(every))
    full[0] = False
    until(lambda: not term.mirror.view().red, "it has caught up")
    knew = term.end()
    assert len(copied) == 3 and not term.copy.exists()
    lose(config)
    assert like(restored(config), knew)
    full[0] = True
    later = Term(config, patience_s=0.01)
    assert fail_again() == 4 and later.copy.exists()
    later.end()
    assert not later.copy.exists()


def test_a_base_replaces_what_it_holds_and_nothing_else(config: RunFile, tmp_path: Path) -> None:
    """Bases and transactions of earlier terms, and those of its own up to its number; leases of earlier terms; bases
    that a crash has left unfinished, but not what another master writes, or claims.
    """
    store = genesis.mirror_of(config)
    assert store is not None
    kinds = [(term, number, kind) for term in (4, 5, 6) for number in (1, 2, 3) for kind in ("base", "log", "term")]
    for term, number, kind in kinds:
        store.write_file(f"ledger/{term:010d}-{number:010d}.{kind}", b"x")
    for name in ("0000000004-0000000009.base", "0000000005-0000000001.base", "0000000006-0000000001.base", "claim"):
        store.write_file(f"ledger/{ASIDE}{name}", b"x")
    (tmp_path / "base").write_bytes(b"content")
    restore.write_base(store, "r", 5, 2, tmp_path / "base")
    assert store.list_names("ledger", unfinished=True) == [f"{ASIDE}0000000006-0000000001.base", f"{ASIDE}claim"]
    stays = [(5, 2, "base"), *(k for k in kinds if k[0] == 6 or k in ((5, 3, "base"), (5, 3, "log")))]
    stays += [k for k in kinds if k[0] == 5 and k[2] == "term"]
    assert store.list_names("ledger") == sorted(f"{t:010d}-{n:010d}.{kind}" for t, n, kind in stays)


def test_what_overflows_while_a_base_is_written_comes_with_the_next(
    config: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base was taken before: it does not have what left the queue since."""
    monkeypatch.setattr("dips.master.ledger_mirror.MOST_QUEUED", 3)
    writes, begins, honest = threading.Event(), threading.Event(), restore.write_base

    def write(*arguments: Any) -> None:
        begins.set()
        assert writes.wait(10.0)
        honest(*arguments)

    monkeypatch.setattr("dips.master.restore.write_base", write)
    term = Term(config, patience_s=0.05)
    assert begins.wait(10.0)
    for records in itertools.islice(transactions(), 7):
        term.write(records)
    writes.set()
    until(lambda: not term.mirror.view().red, "it has caught up")
    knew = term.end()
    lose(config)
    assert like(restored(config), knew)


def test_a_hung_mirror_is_waited_for_once(config: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """After MIRROR_S the transaction is told without it, and the next ones do not wait."""
    term = Term(config, patience_s=0.2)
    hangs, honest = [True], restore.write_transaction

    def write(*arguments: object) -> None:
        while hangs:
            time.sleep(0.01)
        honest(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("dips.master.restore.write_transaction", write)
    for records in itertools.islice(transactions(), 3):
        term.write(records)
        assert term.mirror.view().behind_s >= 0.2, "since the oldest transaction that waits"
    assert "longer than 0.2 s" in term.mirror.view().reason
    hangs.clear()
    until(lambda: not term.mirror.view().red, "it has caught up")
    term.end()


def test_what_was_cut_short_is_not_believed(config: RunFile, tmp_path: Path) -> None:
    """A half transaction at the end is as if it were not there; a half base is none."""
    term = Term(config)
    for records in itertools.islice(transactions(), 4):
        term.write(records)
    store = genesis.mirror_of(config)
    assert store is not None
    term.end()
    last = store.list_names("ledger")[-1]
    content = store.read_file(f"ledger/{last}", 1 << 20)
    assert content is not None
    store.write_file(f"ledger/{last}", content[:-5])
    found = restore.read_newest(store, "r", tmp_path / "base")
    assert found is not None and len(found.transactions) == 3
    base = next(name for name in store.list_names("ledger") if name.endswith(".base"))
    store.write_file(f"ledger/{base}", b"{}")
    lose(config)
    with pytest.raises(Corrupt, match="none of its 1 bases is whole: put one back, or move this folder away"):
        restored(config)


@pytest.mark.parametrize("gone", [False, True])
def test_a_transaction_that_is_damaged_before_others_ends_no_restore(config: RunFile, gone: bool) -> None:
    """What follows it was told: the run does not go on without it unless somebody moves it away."""
    term = Term(config)
    for records in itertools.islice(transactions(), 4):
        term.write(records)
    term.end()
    store = genesis.mirror_of(config)
    assert store is not None
    name = f"ledger/{1:010d}-{2:010d}.log"
    if gone:
        store.remove_path(name)
    else:
        store.write_file(name, b"{}")
    lose(config)
    with pytest.raises(
        Corrupt, match=rf"{name} is not whole or gone, and 2 transactions after it are there: put it back"
    ):
        restored(config)
    assert not genesis.ledger_path(config).exists()
    store.remove_files([f"ledger/{1:010d}-{number:010d}.log" for number in (2, 3, 4)])
    restored(config)


def test_a_mirror_of_another_run_is_refused(config: RunFile, tmp_path: Path) -> None:
    """Somebody copied another run's mirror there: the message names both."""
    Term(config).end()
    (tmp_path / "mirror" / "other").mkdir()
    (tmp_path / "mirror" / "r" / "master").rename(tmp_path / "mirror" / "other" / "master")
    with pytest.raises(Corrupt, match="expected the ledger of run 'other', got one of 'r'"):
        restore.read_newest(MirrorStore(str(tmp_path / "mirror"), "other", "master"), "other", tmp_path / "base")


def test_an_old_ledger_beside_a_newer_mirror_is_refused(config: RunFile) -> None:
    """A backup was put back: the mirror knows a later term, and the message says what to do."""
    path = genesis.ledger_path(config)
    Term(config).end()
    backup = path.read_bytes()
    Term(config).end()
    restore.restore_if_lost(config, LOG)  # the newest is fine
    for file in path.parent.glob("ledger.sqlite*"):
        file.unlink()
    path.write_bytes(backup)
    with pytest.raises(ConfigError, match=r"knows terms up to 1, its mirror .* has term 2: this file is an old copy"):
        restore.restore_if_lost(config, LOG)
    path.unlink()
    assert restored(config).term == 2 + SPARE + 1


def test_an_old_ledger_of_the_same_term_is_refused_too(config: RunFile) -> None:
    """A disk's snapshot was put back, or a WAL's end was lost: the mirror has what it lacks, and that was told."""
    path, term = genesis.ledger_path(config), Term(config)
    before, *after = itertools.islice(transactions(), 4)
    term.write(before)
    term.ledger.copy_to(backup := config.master.directory / "backup")
    for records in after:
        term.write(records)
    knew = term.end()
    restore.restore_if_lost(config, LOG)  # the newest is fine
    backup.replace(path)
    with pytest.raises(
        ConfigError, match=r"ends with transaction 1 of term 1, its mirror .* with 4: this file is an old"
    ):
        restore.restore_if_lost(config, LOG)
    path.unlink()
    assert like(restored(config), knew)


def test_a_mirror_whose_mount_hangs_holds_up_no_master(config: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A master with its ledger serves without a mirror: it did not start, and said nothing, until the mount's server
    was back.
    """
    Term(config).end()
    back = threading.Event()
    monkeypatch.setattr(MirrorStore, "list_names", lambda *_: [] if back.wait(5.0) else None)
    monkeypatch.setattr(restore, "LOOK_S", 0.05)
    with structlog.testing.capture_logs() as said:
        restore.restore_if_lost(config, structlog.get_logger())
    back.set()
    assert [line["event"] for line in said] == ["ledger_mirror_lags"] and "did not answer" in said[0]["reason"]


def test_a_damaged_ledger_beside_a_mirror_is_called_so(config: RunFile, tmp_path: Path) -> None:
    """Its term is asked for before it is verified: of bits flipped in its schema none meets the operator without the
    advice to move the file away, which is right where there is a mirror."""
    path = genesis.ledger_path(config)
    Term(config).end()
    content = path.read_bytes()
    at = [found.start() + 8 for found in re.finditer(rb"CREATE TABLE", content)]
    said = [_refusal(config, content[:each] + bytes([content[each] ^ 128]) + content[each + 1 :]) for each in at]
    assert all("Move it away" in each and str(path) in each for each in filter(None, said))
    assert sum(map(bool, said)) > len(at) / 2


def _refusal(config: RunFile, content: bytes) -> str:
    """What is said of a ledger with this content where a mirror is; empty if it is taken."""
    genesis.ledger_path(config).write_bytes(content)
    try:
        restore.restore_if_lost(config, LOG)
    except CorruptLedger as error:
        return str(error)
    return ""


def test_a_lost_ledger_whose_mirror_is_gone_says_so(config: RunFile, tmp_path: Path) -> None:
    """Nothing is begun anew for a mount that is missing."""
    Term(config).end()
    (tmp_path / "mirror").rename(tmp_path / "away")
    lose(config)
    with pytest.raises(FailedMirror, match="is not there: mount it"):
        restore.restore_if_lost(config, LOG)
    (tmp_path / "mirror").mkdir()
    restore.restore_if_lost(config, LOG)
    assert not genesis.ledger_path(config).exists(), "an empty mirror is one of a run that has not begun: it waits"


def test_a_run_is_not_made_over_another_ones_mirror(config: RunFile) -> None:
    """A slave with an empty directory would take the former run's snapshots for its own; --force throws them away."""
    Term(config).end()
    lose(config)
    with pytest.raises(ConfigError, match=r"a run of the name 'r' lies in .*mirror/r/master already"):
        genesis.make_run(config, TENSORS)
    genesis.make_run(config, TENSORS, force=True)
    store = genesis.mirror_of(config)
    assert store is not None and store.list_names() == ["initial"]


def test_a_restore_plays_no_wal_of_the_ledger_before(config: RunFile, tmp_path: Path) -> None:
    """After a crash the file alone was moved away, as the master asks for; its WAL is no part of the copy."""
    term, path = Term(config), genesis.ledger_path(config)
    for records in itertools.islice(transactions(), 9):
        term.write(records)
    crashed = {file: file.read_bytes() for file in path.parent.glob("ledger.sqlite-*")}
    assert {file.name for file in crashed} == {"ledger.sqlite-wal", "ledger.sqlite-shm"}
    knew = term.end()
    path.unlink()
    for file, content in crashed.items():
        file.write_bytes(content)
    state = restored(config)
    assert state.term == knew.term + SPARE + 1
    assert state.next_round == knew.next_round + SPARE + 1


def test_an_interrupted_restore_is_finished_by_the_next_start(config: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The initial model comes first: a ledger that is there says that nothing is left to restore."""
    Term(config).end()
    lose(config)

    def breaks(store: MirrorStore, name: str) -> IO[bytes]:
        raise FailedMirror(f"{store.url}/{name}: the link broke")

    monkeypatch.setattr(MirrorStore, "open_file", breaks)
    with pytest.raises(FailedMirror, match="the link broke"):
        restore.restore_if_lost(config, LOG)
    assert not genesis.ledger_path(config).exists()
    monkeypatch.undo()
    assert restored(config).term > SPARE
    assert all((config.master.directory / name).exists() for name in INITIAL)


def test_a_restore_that_is_killed_anywhere_is_whole_or_not_there(
    config: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind each fsync and rename: what has its name is on the disk, and the next start finishes the rest."""
    term = Term(config)
    term.write([RoundReserved(1, 0.0)])
    term.end()
    path = genesis.ledger_path(config)
    for at in range(1, 40):
        lose(config)
        with monkeypatch.context() as patch:
            cut = PowerCut(tmp_path, patch)
            fell = fell_behind(at, patch, lambda: restore.restore_if_lost(config, LOG))
            assert cut.early == []
            for file in (
                path,
                *(config.master.directory / name for name in INITIAL),
            ):
                if file.exists():
                    assert not [lost for lost in cut.find_lost(file) if lost.startswith("content")]
                    assert fell or cut.find_lost(file) == []
            cut.close()
        assert restored(config).next_round == 1 + SPARE + 2
        assert all((config.master.directory / name).exists() for name in INITIAL)
        if not fell:
            break
    else:
        pytest.fail("it never came to an end")
    assert at > 10


def test_a_second_restore_keeps_the_gap_of_the_first(config: RunFile) -> None:
    """Whoever holds a version of either gap is a witness, until an operator raises the counters."""
    term = Term(config)
    term.write([RoundReserved(1, 0.0)])
    term.end()
    gaps: list[tuple[int, int]] = []
    for _ in range(2):
        lose(config)
        state = restored(config)
        gaps.append((state.next_round - 1 - SPARE, state.next_round - 1))
        assert state.unknown_rounds == tuple(gaps)
        Term(config).end()
    lose(config)
    restore.restore_if_lost(config, LOG)
    with closing(Ledger.open(genesis.ledger_path(config))) as ledger:
        recover.make_plan(config, ledger).carry_out(ledger)
        assert ledger.read_state().unknown_rounds == ()


def test_only_one_master_restores(config: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one that starts meanwhile is refused, and writes nothing."""
    Term(config).end()
    lose(config)
    config.master.directory.mkdir()
    honest, seen = restore.read_newest, list[str]()

    def read(store: MirrorStore, run: str, base: Path) -> MirroredLedger | None:
        monkeypatch.undo()
        with pytest.raises(ConfigError, match="in use by another master"):
            restore.restore_if_lost(config, LOG)
        seen.append("refused")
        return honest(store, run, base)

    monkeypatch.setattr(restore, "read_newest", read)
    restore.restore_if_lost(config, LOG)
    assert seen == ["refused"]
    assert genesis.ledger_path(config).exists()


def test_a_copy_holds_the_wal(config: RunFile, tmp_path: Path) -> None:
    """What was committed a moment ago, and lies in the WAL only, is in the copy."""
    ledger = Ledger.open(genesis.ledger_path(config))
    ledger.write_records([RoundReserved(7, 0.0)])
    ledger.copy_to(tmp_path / "copy.sqlite")
    ledger.close()
    db = sqlite3.connect(tmp_path / "copy.sqlite")
    assert db.execute("SELECT max(round) FROM rounds").fetchone() == (7,)
    db.close()


MEASURED = """
import sys
from contextlib import closing
from pathlib import Path
from dips.master import restore
from dips.master.ledger import Ledger
from dips.store.mirror import MirrorStore

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10

directory = Path(sys.argv[2])
store = MirrorStore(str(directory / "mirror"), "r", "master")
with closing(Ledger.open(sys.argv[1], verified=False)) as ledger:
    before = peak()
    ledger.copy_to(directory / "copy")
    restore.write_base(store, "r", 1, 0, directory / "copy")
    assert restore.read_newest(store, "r", directory / "base") is not None
    print(peak() - before)
"""


def test_a_ledger_of_any_size_is_mirrored_and_restored_in_little_memory(config: RunFile, tmp_path: Path) -> None:
    """A month of twenty clusters has 150 MB; `dips plan memory` counts 400 MB for a master, however long its run."""
    with closing(Ledger.open(genesis.ledger_path(config))) as ledger:
        ledger._db.execute("CREATE TABLE much (content BLOB)")
        for _ in range(80):
            ledger._db.execute("INSERT INTO much VALUES (randomblob(1000000))")
    words = [sys.executable, "-c", MEASURED, str(genesis.ledger_path(config)), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 40, f"{done.stdout} MB for a ledger of 80"
    assert (tmp_path / "base").stat().st_size == (tmp_path / "copy").stat().st_size > 80_000_000


def test_a_master_with_a_successor_in_the_mirror_is_fenced(config: RunFile) -> None:
    """A machine that was cut off and taken for lost wakes: its next transaction is told to nobody."""
    every = transactions()
    old = Term(config)
    old.write(next(every))
    config.master.directory.rename(config.master.directory.with_name("lost"))
    restored(config)
    new = Term(config)
    assert new.kept_up and new.term > old.term
    with pytest.raises(StaleTerm, match=f"this is term {old.term}, its mirror .* has term {new.term}"):
        old.write(next(every))
    with pytest.raises(StaleTerm):
        old.write(next(every))
    old.end()
    new.end()
