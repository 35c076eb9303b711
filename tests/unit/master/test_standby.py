"""The lease in the mirror and who claims a term: on a disk, in an object store, and in one that refuses every third
request."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import yaml
from fsspec.implementations.memory import MemoryFileSystem
from structlog.testing import capture_logs

from dips.commands import export
from dips.config import RunFile, load_run
from dips.errors import ConfigError, FailedMirror, StaleTerm
from dips.ids import GENESIS
from dips.master import genesis, restore, standby
from dips.master.app import serve
from dips.master.genesis import BOUND
from dips.master.ledger import SPARE_BYTES, Ledger, lack_room
from dips.master.runtime import BASE, MasterOutside, OperatorServicer
from dips.master.standby import LeaseKeeper, Standby
from dips.protocol.effects import Acknowledged
from dips.protocol.records import RoundReserved
from dips.protocol.releases import PROTOCOL
from dips.protocol.standby import CLAIM_S, SERVE_S, StandbyState, TermLease
from dips.protocol.view import LedgerMirrorView, RunView
from dips.store.mirror import SEEN, MirrorStore, read_sealed, seal
from dips.wire.generated import operator_pb2
from tests.busy_store import BusyFileSystem, persist
from tests.integration.cluster_harness import free_port
from tests.served import served
from tests.unit.master.test_ledger_mirror import TENSORS, Term
from tests.waiting import until

LOG = structlog.get_logger()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are renewed and looked at more often than they have to be; how long they last stays."""
    for name, value in (("RENEW_S", 0.05), ("IDLE_S", 0.05)):
        monkeypatch.setattr(f"dips.protocol.standby.{name}", value)
    monkeypatch.setattr("dips.master.standby.RENEW_S", 0.0)
    monkeypatch.setattr("dips.master.standby.AGAIN_S", 0.02)
    monkeypatch.setattr("dips.store.mirror.AGAIN_S", 0.001)


@pytest.fixture(params=["file", "memory", "busy"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the mirror is."""
    for store in (MemoryFileSystem, BusyFileSystem):
        store.store.clear()
    if request.param == "file":
        (tmp_path / "mirror").mkdir()
        return (tmp_path / "mirror").as_uri()
    return f"{request.param}://{tmp_path}/mirror"


def begun(tmp_path: Path, url: str, *machines: str, **master: Any) -> list[RunFile]:
    """A run that has begun on the first of these machines; the run file of each."""
    configs = list[RunFile]()
    for name in machines:
        slave = {"name": "s0", "master": "127.0.0.1:1", "directory": "s0", "initial_model": f"{name}/initial"}
        content = {
            "shared": {"run": "r"}, "master": {"directory": name, "mirror": url, **master}, "slaves": [slave],
            "tls": False,
        }  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
        configs.append(load_run(tmp_path / f"{name}.yaml"))
    BusyFileSystem.is_busy = False
    genesis.make_run(configs[0], TENSORS)
    BusyFileSystem.is_busy = True
    return configs


def mirror(config: RunFile) -> MirrorStore:
    store = genesis.mirror_of(config)
    assert store is not None
    return store


class Serving(Term):
    """A master that serves: its ledger, its mirror and its lease."""

    def __init__(self, config: RunFile, *, bound: bool = False) -> None:
        super().__init__(config)
        store, directory = mirror(config), config.master.directory
        self.lease = LeaseKeeper(
            store, "r", self.term, directory.name, directory, LOG, bound=bound, place=standby.name_place(config)
        )
        assert self.lease.start(5.0)
        self.lease.follow_mirror(self.mirror)

    def die(self) -> None:
        """As kill -9 leaves it."""
        self.lease.close()
        self.lease._thread.join(5.0)
        self.end()


class StandbyClock:
    """A standby's; time passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        return self.now


class Waiting:
    """A standby that looks when the test says so."""

    def __init__(self, config: RunFile) -> None:
        self.clock, self.config = StandbyClock(), config
        self.standby = Standby(config, mirror(config), LOG, self.clock)

    def look(self, after_s: float = 1.0) -> StandbyState:
        self.clock.now += after_s
        keeper = self.standby.look()
        assert keeper is None or self.standby.watch.state is StandbyState.CLAIMS
        return self.standby.watch.state

    def until(self, state: StandbyState) -> None:
        """Look until it is so, while no time passes for its clock."""
        until(lambda: self.look(0.0) is state, f"{state}: {self.standby.watch.reason}")

    def serves(self) -> bool:
        """Look once; return whether it is to serve the ledger that it has."""
        return standby._try_to_serve(self.standby, self.config, LOG, AsyncExitStack())

    def claim(self) -> LeaseKeeper | None:
        """Claim a term, as it does when it has seen no renewal for CLAIM_S; None if it could not."""
        for _ in range(100):
            keeper = self.standby.look()
            if keeper is not None:
                return keeper
            if self.standby.watch.state is StandbyState.READY:
                self.clock.now += CLAIM_S
        return None

    def take_over(self) -> LeaseKeeper | None:
        """Take over with the term that it claimed, if it did."""
        keeper = self.claim()
        assert keeper is None or standby._take_over(self.config, keeper, LOG)
        return keeper


def held(keeper: LeaseKeeper | None, ended: list[Any]) -> LeaseKeeper:
    """A term that must have been claimed; it ends with the test."""
    assert keeper is not None
    ended.append(keeper)
    return keeper


@pytest.fixture
def ended() -> Iterator[list[Any]]:
    """What is closed at the end of a test."""
    ended: list[Any] = []
    yield ended
    for each in ended:
        each.close()


# ---- claims ----------------------------------------------------------------------------------------------------------


def test_of_those_who_claim_a_term_at_once_one_has_it(tmp_path: Path, url: str) -> None:
    """Whoever is late is told so, and leaves what is there as it was."""
    (config,) = begun(tmp_path, url, "a")
    with ThreadPoolExecutor(8) as threads:
        for above in range(5):
            ready = threading.Barrier(8)

            def claim(n: int, above: int = above, ready: threading.Barrier = ready) -> TermLease | None:
                ready.wait()
                return persist(
                    lambda: restore.claim_term(mirror(config), "r", f"master {n}", claimable=True, above=above)
                )

            claims = [lease for lease in threads.map(claim, range(8)) if lease is not None]
            assert len(claims) == 1
            assert restore.look_at_lease(mirror(config), "r").lease == claims[0]


def test_a_claim_whose_answer_was_lost_is_its_writer_s(tmp_path: Path, url: str) -> None:
    """Tried again it is there already, byte for byte; what another wrote is another's."""
    (config,) = begun(tmp_path, url, "a")
    store, lease = mirror(config), TermLease(7, 0, "a", True, "once")
    for ours, theirs in ((lease, True), (lease, True), (replace(lease, nonce="twice"), False)):
        assert persist(lambda ours=ours: restore.write_lease(store, "r", ours)) is theirs
    assert restore.look_at_lease(store, "r").lease == lease


def test_a_term_is_claimed_as_long_as_its_lease_is_renewed(tmp_path: Path, url: str) -> None:
    """Leases that were written before go, but for the claim itself; those of other terms stay."""
    (config,) = begun(tmp_path, url, "a")
    store, written = mirror(config), [TermLease(term, n, "a", True) for term in (6, 7) for n in range(3)]
    for lease in written:
        assert persist(lambda lease=lease: restore.write_lease(store, "r", lease))
    persist(lambda: restore.remove_leases_before(store, written[-1]))
    left = sorted(name for name in persist(lambda: store.list_names("ledger")) if name.endswith(".term"))
    assert [tuple(map(int, name[:-5].split("-"))) for name in left] == [(6, 0), (6, 1), (6, 2), (7, 0), (7, 2)]
    assert restore.claim_term(store, "r", "b", claimable=True, above=6 - restore.SPARE) is None


def test_two_masters_that_restore_at_once_get_terms_of_their_own(tmp_path: Path, url: str) -> None:
    """And the earlier one is told so before anything of its leaves (the review's s05)."""
    first, a, b = begun(tmp_path, url, "first", "a", "b")
    persist(lambda: Serving(first).die())
    for config in (a, b):
        config.master.directory.mkdir()
        persist(lambda config=config: restore.restore_if_lost(config, LOG))
    one, other = Term(a), Term(b)
    try:
        assert one.term < other.term
        with pytest.raises(StaleTerm, match=f"this is term {one.term}, its mirror .* has term"):
            one.write([RoundReserved(9000, 0.0)])
        other.write([RoundReserved(9001, 0.0)])
    finally:
        one.end()
        other.end()
    found = restore.read_newest(mirror(first), "r", tmp_path / "base")
    assert found is not None and found.term == other.term


def test_a_standby_takes_over_without_the_initial_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy took as long as the model is large, and a disk without room for it ended each try; `dips export` of
    v0@r0 fetches it, where it is not there.
    """
    (tmp_path / "mirror").mkdir()
    a, b = begun(tmp_path, str(tmp_path / "mirror"), "a", "b")
    Serving(a).die()
    lease = restore.claim_term(mirror(b), "r", "b", claimable=True, above=restore.newest_term(mirror(b)))
    assert lease is not None
    b.master.directory.mkdir(exist_ok=True)
    restore.restore_if_lost(b, LOG, claimed=lease.term)
    assert genesis.ledger_path(b).exists() and (b.master.directory / genesis.INITIAL_SHARED).exists()
    assert not (b.master.directory / genesis.INITIAL_VERSION).exists()
    assert export._write_from_disks(tmp_path / "b.yaml", GENESIS, tmp_path / "model") == GENESIS
    with monkeypatch.context() as patch:
        patch.setattr(genesis, "bring_back", lambda *_: pytest.fail("it was brought again"))
        genesis.fetch_initial(mirror(b), "r", b.master.directory)  # which has it by now
    monkeypatch.setattr(genesis, "mirror_of", pytest.fail)  # needs a package that this host may not have
    assert export._write_from_disks(tmp_path / "b.yaml", GENESIS, tmp_path / "again") == GENESIS


@pytest.mark.parametrize("when", ["before the claim", "between claim and restore"])
def test_what_was_told_is_restored_and_what_was_not_is_refused(tmp_path: Path, when: str, ended: list[Any]) -> None:
    """A transaction that is written before a claim is the successor's; one that comes after it is told to nobody,
    though its master has not read a clock meanwhile."""
    (tmp_path / "mirror").mkdir()
    a, b = begun(tmp_path, str(tmp_path / "mirror"), "a", "b")
    master = Serving(a)
    master.lease.close()  # it is stopped: neither renews nor looks at its lease
    b.master.directory.mkdir()
    if when == "before the claim":
        master.write([RoundReserved(1, 0.0)])
    lease = restore.claim_term(mirror(b), "r", "b", claimable=True, above=master.term)
    assert lease is not None
    if when != "before the claim":
        with pytest.raises(StaleTerm):
            master.write([RoundReserved(1, 0.0)])
    restore.restore_if_lost(b, LOG, claimed=lease.term)
    ledger = Ledger.open(genesis.ledger_path(b))
    state = ledger.read_state()
    ledger.close()
    assert state.term == lease.term
    assert state.unknown_rounds == ((2, 2 + restore.SPARE),), "round 1 is in the ledger, whether it was told or not"
    master.end()


# ---- a standby -------------------------------------------------------------------------------------------------------


def test_a_standby_takes_over_with_everything_that_was_told(tmp_path: Path, url: str, ended: list[Any]) -> None:
    """The master lets it, is lost, and the standby has its ledger; a third one waits on the new lease."""
    a, b, c = begun(tmp_path, url, "a", "b", "c")
    master = persist(lambda: Serving(a))
    one, other = Waiting(b), Waiting(c)
    for waiting in (one, other):
        waiting.config.master.directory.mkdir()
        waiting.until(StandbyState.READY)
    assert until_view(master, lambda view: view.ready == 2)
    master.write([RoundReserved(1, 0.0)])
    knew = master.ledger.read_state()
    master.die()
    shutil.rmtree(a.master.directory)
    keeper = held(one.take_over(), ended)
    ledger = Ledger.open(genesis.ledger_path(b))
    state = ledger.read_state()
    ledger.close()
    assert state.versions == knew.versions and state.next_round > 1
    assert state.term == keeper.term > knew.term
    other.clock.now += CLAIM_S
    assert other.look() is StandbyState.READY, "it has seen a new lease, and waits anew"
    successor = Serving(b, bound=True)
    ended.append(successor.lease)
    assert successor.term == keeper.term + 1
    until(lambda: keeper.left_s() < 0, "the term of the restore is over")
    assert successor.lease.left_s() > 0
    successor.die()


def until_view(master: Serving, holds: Callable[[Any], Any]) -> bool:
    until(lambda: holds(master.lease.view()), master.lease.view)
    return True


def test_two_standbys_that_claim_at_once(tmp_path: Path, url: str, ended: list[Any]) -> None:
    """One has the term; the other waits again."""
    a, b, c = begun(tmp_path, url, "a", "b", "c")
    master = persist(lambda: Serving(a))
    both = [Waiting(b), Waiting(c)]
    for waiting in both:
        waiting.until(StandbyState.READY)
    master.die()
    for waiting in both:
        waiting.until(StandbyState.READY)
        waiting.clock.now += CLAIM_S
    with ThreadPoolExecutor(2) as threads:
        found = [keeper for keeper in threads.map(lambda w: w.standby.look(), both) if keeper is not None]
    ended += found
    assert len(found) <= 1  # a busy store may have refused both
    if found:
        for waiting in both:
            waiting.until(StandbyState.READY)


def test_a_master_that_cannot_renew_stops_before_a_standby_may_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: list[Any]
) -> None:
    """A store that is gone ends the lease after SERVE_S; without a standby it ends nothing. It is logged once."""
    (tmp_path / "mirror").mkdir()
    a, b = begun(tmp_path, str(tmp_path / "mirror"), "a", "b")
    gone, honest, failed = threading.Event(), restore.write_lease, count()

    def write(*arguments: Any) -> bool:
        if gone.is_set():
            next(failed)
            raise FailedMirror("the store is gone")
        return honest(*arguments)

    monkeypatch.setattr("dips.master.restore.write_lease", write)
    master = Serving(a)
    ended.append(master.lease)
    assert master.lease.left_s() > 1e9
    with capture_logs() as logged:
        gone.set()
        until(lambda: next(failed) > 3, "it is tried again and again")
        gone.clear()
    assert master.lease.left_s() > 1e9
    told = [(line["event"], line["reason"]) for line in logged]
    assert told == [("lease_not_renewed", "the store is gone")]
    Waiting(b).until(StandbyState.READY)
    until_view(master, lambda view: view.claimable)
    assert (a.master.directory / BOUND).exists()
    gone.set()
    until(lambda: master.lease.view().failing, "it cannot be renewed")
    left_s = master.lease.left_s()
    assert 0 < left_s <= SERVE_S
    time.sleep(0.2)
    assert master.lease.left_s() < left_s - 0.1
    master.end()


def test_a_mirror_that_lags_forbids_a_takeover_before_anything_leaves_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: list[Any]
) -> None:
    """While a standby may take over, a transaction waits longer than the patience; then the lease forbids it, and
    rounds go on as without a standby."""
    (tmp_path / "mirror").mkdir()
    a, b = begun(tmp_path, str(tmp_path / "mirror"), "a", "b")
    master = Serving(a)
    ended.append(master.lease)
    waiting = Waiting(b)
    waiting.until(StandbyState.READY)
    until_view(master, lambda view: view.claimable)
    allowed, told = list[bool](), threading.Event()

    def fail(*arguments: object) -> None:
        raise FailedMirror("quota exceeded")

    monkeypatch.setattr("dips.master.restore.write_transaction", fail)
    master.mirror._patience_s = 0.2

    def write() -> None:
        master.write([RoundReserved(1, 0.0)])
        allowed.append(restore.look_at_lease(mirror(b), "r").lease.claimable)  # type: ignore[union-attr]
        told.set()

    threading.Thread(target=write, daemon=True).start()
    assert told.wait(10.0)
    assert allowed == [False], "it left while a standby might have taken over without it"
    assert waiting.look() is StandbyState.FORBIDDEN
    assert not (a.master.directory / BOUND).exists()
    monkeypatch.undo()
    until(lambda: not master.mirror.view().red, "it has caught up")
    master.end()


def test_a_standby_says_that_it_is_there_at_its_pace_and_not_when_it_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: list[Any]
) -> None:
    """Each time is a write in the store, and one that claims the term is a standby no more."""
    monkeypatch.setattr("dips.master.standby.RENEW_S", 5.0)
    a, b = begun(tmp_path, f"memory://{tmp_path}/mirror", "a", "b")
    master = persist(lambda: Serving(a))
    waiting, told = Waiting(b), list[float]()
    waiting.standby._told = waiting.clock.now
    tell = waiting.standby._tell
    monkeypatch.setattr(waiting.standby, "_tell", lambda: (told.append(waiting.clock.now), tell()))
    begin = waiting.clock.now
    for _ in range(11):
        waiting.look(1.0)
    assert [at - begin for at in told] == [5.0, 10.0]
    until(lambda: master.lease.view().claimable, "it lets the standby take over")
    master.die()
    waiting.until(StandbyState.READY)
    told.clear()
    waiting.clock.now += CLAIM_S
    held(waiting.standby.look(), ended)
    assert not told


def test_a_standby_writes_nothing_before_a_master_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror without a term may not be this run's; it would lie there for ever."""
    _, b = begun(tmp_path, f"memory://{tmp_path}/mirror", "a", "b")
    waiting = Waiting(b)
    monkeypatch.setattr(waiting.standby, "_tell", lambda: pytest.fail("it was said"))
    for _ in range(2):
        waiting.look(1000.0)
    assert waiting.standby.counts.failed == 0


def test_a_standby_that_leaves_or_dies_binds_nobody_any_more(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, ended: list[Any]
) -> None:
    """One that leaves says so; one that died has not changed its file for PRESENT_S."""
    monkeypatch.setattr("dips.protocol.standby.PRESENT_S", 0.3)
    a, b = begun(tmp_path, url, "a", "b")
    master = persist(lambda: Serving(a))
    ended.append(master.lease)
    for leave in (True, False):
        waiting = Waiting(b)
        until(lambda w=waiting: w.look(0.0) and master.lease.view().claimable, "it lets the standby take over")
        if leave:
            waiting.standby.leave()
        until(lambda: not master.lease.view().claimable and master.lease.left_s() > 1e9, "it is free again")
    master.end()


def test_a_term_that_a_standby_has_claimed_counts_from_its_claim(tmp_path: Path) -> None:
    """Before it is renewed for the first time: a restore that fails is tried again as long as the term lasts."""
    (a,), clock = begun(tmp_path, f"memory://{tmp_path}/mirror", "a"), StandbyClock()
    claimed = LeaseKeeper(
        mirror(a), "r", 2, "a", a.master.directory, LOG, bound=True, claimed_at=clock.now - 3.0, clock=clock
    )
    assert claimed.left_s() == pytest.approx(SERVE_S - 3.0)


def test_a_master_that_was_bound_waits_for_its_store(tmp_path: Path, ended: list[Any]) -> None:
    """A standby may have taken over while it was away: it does not serve before it has a lease. One that was not bound
    serves."""
    (tmp_path / "mirror").mkdir()
    (a,) = begun(tmp_path, str(tmp_path / "mirror"), "a")
    (tmp_path / "mirror").rename(tmp_path / "away")
    free = LeaseKeeper(mirror(a), "r", 1, "a", a.master.directory, LOG)
    ended.append(free)
    assert free.start(0.1) and free.left_s() > 1e9
    (a.master.directory / BOUND).touch()
    bound = LeaseKeeper(mirror(a), "r", 2, "a", a.master.directory, LOG)
    ended.append(bound)
    started = threading.Event()
    threading.Thread(target=lambda: (bound.start(0.1), started.set()), daemon=True).start()
    assert not started.wait(0.5)
    free.close()
    (tmp_path / "away").rename(tmp_path / "mirror")
    assert started.wait(10.0) and bound.left_s() > 0


def test_a_run_that_is_made_anew_is_not_bound_by_the_one_before(tmp_path: Path, ended: list[Any]) -> None:
    """No standby was told anything of it: its master serves though the store is away."""
    (tmp_path / "mirror").mkdir()
    (a,) = begun(tmp_path, str(tmp_path / "mirror"), "a")
    (a.master.directory / BOUND).touch()
    genesis.make_run(a, TENSORS, force=True)
    (tmp_path / "mirror").rename(tmp_path / "away")
    keeper = LeaseKeeper(mirror(a), "r", 1, "a", a.master.directory, LOG)
    ended.append(keeper)
    assert keeper.left_s() > 1e9 and keeper.start(0.1)


def test_a_store_that_hangs_is_waited_for_as_long_as_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: list[Any]
) -> None:
    """A master that no standby can have followed serves after its patience."""
    (tmp_path / "mirror").mkdir()
    (a,) = begun(tmp_path, str(tmp_path / "mirror"), "a")
    hangs = threading.Event()
    monkeypatch.setattr("dips.master.restore.write_lease", lambda *_: hangs.wait(20.0))
    keeper = LeaseKeeper(mirror(a), "r", 1, "a", a.master.directory, LOG)
    ended.append(keeper)
    since = time.monotonic()
    assert keeper.start(0.2) and time.monotonic() - since < 10.0
    hangs.set()


def test_a_lease_is_renewed_at_its_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: list[Any]) -> None:
    """Once at the start and once more when the mirror is there; then not before its pause is over."""
    monkeypatch.setattr("dips.protocol.standby.IDLE_S", 1000.0)
    (tmp_path / "mirror").mkdir()
    (a,) = begun(tmp_path, str(tmp_path / "mirror"), "a")
    count, write_lease, second, third = iter(range(9)), restore.write_lease, threading.Event(), threading.Event()

    def write(*arguments: Any) -> bool:
        if (written := next(count)) > 0:
            (second if written == 1 else third).set()
        return write_lease(*arguments)

    monkeypatch.setattr(restore, "write_lease", write)
    master = Serving(a)
    assert second.wait(5.0) and not third.wait(0.1)
    master.die()


def test_a_term_that_another_claimed_is_not_served(tmp_path: Path, url: str, ended: list[Any]) -> None:
    """A second master on a copy of the ledger has the same number, and is refused."""
    (a,) = begun(tmp_path, url, "a")
    for name, ours in (("a", True), ("copy", False)):
        keeper = LeaseKeeper(mirror(a), "r", 7, name, tmp_path / name, LOG)
        ended.append(keeper)
        keeper.start(5.0)  # a store that is busy may have refused it as yet
        until(lambda k=keeper, o=ours: k._written if o else k.left_s() < 0, f"{name} has it: {ours}")
    (tmp_path / "bound").mkdir()
    (tmp_path / "bound" / BOUND).touch()
    bound, served = LeaseKeeper(mirror(a), "r", 7, "bound", tmp_path / "bound", LOG), SimpleQueue[bool]()
    ended.append(bound)
    threading.Thread(target=lambda: served.put(bound.start(0.1)), daemon=True).start()
    assert served.get(timeout=20.0) is False, "it ends, and waits for no lease that it will never have"


def test_a_term_is_claimed_by_the_first_write_that_comes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: list[Any]
) -> None:
    """The store was away when a second master on a copy of the ledger began, and is back: it is refused as ever, and
    not served beside the first one in the same term."""
    (tmp_path / "mirror").mkdir()
    (a,) = begun(tmp_path, str(tmp_path / "mirror"), "a")
    write_lease, away = restore.write_lease, {"copy"}

    def write(store: MirrorStore, run: str, lease: TermLease, claimed: bool) -> bool:
        if lease.holder in away:
            away.clear()
            raise FailedMirror("503 Slow Down")
        return write_lease(store, run, lease, claimed)

    monkeypatch.setattr(restore, "write_lease", write)
    first, second = (LeaseKeeper(mirror(a), "r", 7, name, tmp_path / name, LOG) for name in ("a", "copy"))
    ended += [first, second]
    assert first.start(5.0) and first._written
    second.start(5.0)
    until(lambda: second._written or second.left_s() < 0, "it has an answer")
    assert second.left_s() < 0 and first.left_s() > 0


async def test_nothing_is_mirrored_before_its_term_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store was away when a master on a copy of the ledger began, and its base came before its claim: it replaced
    that of the master whose term it is, and a restore lacked what was told."""
    monkeypatch.setattr("dips.master.runtime.MIRROR_S", 0.1)
    monkeypatch.setattr("dips.master.ledger_mirror.BACKOFF_S", (0.01, 0.02))
    (tmp_path / "mirror").mkdir()
    (a,) = begun(tmp_path, str(tmp_path / "mirror"), "a")
    write_lease, away = restore.write_lease, [True]

    def write(*arguments: Any) -> bool:
        if away:
            raise FailedMirror("503 Slow Down")
        return write_lease(*arguments)

    monkeypatch.setattr(restore, "write_lease", write)
    with closing(Ledger.open(genesis.ledger_path(a))) as ledger:
        outside = MasterOutside(ledger)
        outside.begin_mirror(a, ledger.start_term(), LOG)
        mirrored, view = mirror(a).list_names("ledger"), outside.complete_view(RunView())
        away.clear()
        until(lambda: not outside.complete_view(RunView()).ledger_mirror.red, "it is claimed, and keeps up")  # type: ignore[union-attr]
        await outside.close()
    assert mirrored == [] and "term 1 is not claimed" in view.ledger_mirror.reason  # type: ignore[union-attr]


async def test_dips_finalise_is_refused_on_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The former ledger, which is kept beside, filled it in the middle of the transaction: the master ended with 74."""
    (tmp_path / "ledger.sqlite").write_bytes(bytes(1000))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=SPARE_BYTES + 1000 - full))

    async def ask_core(make: Callable[[int], Any]) -> Acknowledged:
        return Acknowledged()

    for full, speaks, answer in ((1, 1, "refused"), (1, 2, "acknowledged"), (0, 1, "acknowledged")):
        runtime: Any = SimpleNamespace(build_view=partial(RunView, protocol=speaks), ask_core=ask_core)
        lacks = partial(lack_room, tmp_path / "ledger.sqlite")
        operator = OperatorServicer(runtime, begin=ask_core, lack_room=lacks)
        said = await operator.Finalise(operator_pb2.FinaliseAsked(protocol=2), None)
        assert said.HasField(answer) and (full == 0 or "free bytes, for a copy of the ledger" in lacks())


async def test_dips_finalise_waits_for_a_standby_of_the_release_before(tmp_path: Path, url: str) -> None:
    """It could not serve such a run: `dips status` names it, and the request is refused until it has gone."""
    a, b = begun(tmp_path, url, "a", "b")
    ledger = Ledger.open(genesis.ledger_path(a))
    outside = MasterOutside(ledger)
    persist(lambda: outside.begin_mirror(a, 1, LOG))
    numbers, runs = iter(range(10**6)), threading.Event()
    runs.set()
    waiting = Waiting(b)
    waiting.until(StandbyState.READY)
    asked = list[Any]()

    async def ask_core(make: Callable[[int], Any]) -> Acknowledged:
        asked.append(make(1))
        return Acknowledged()

    def view() -> RunView:
        return outside.complete_view(RunView(protocol=PROTOCOL - 1, protocol_newest=PROTOCOL, holdouts=("cluster x",)))

    def tell_as_before() -> None:
        content = {"name": "old", "number": next(numbers), "ready": True, "reason": ""}
        mirror(a).write_file("standby/old", seal("r", json.dumps(content).encode()))

    def count() -> int:
        waiting.look(0.0)
        if runs.is_set():
            persist(tell_as_before)
        lease = view().lease
        return 0 if lease is None else lease.present

    runtime: Any = SimpleNamespace(build_view=view, ask_core=ask_core)
    operator = OperatorServicer(runtime, begin=ask_core)
    ask = operator_pb2.FinaliseAsked(protocol=PROTOCOL)
    try:
        until(lambda: count() == 2, "both standbys are seen")
        until(lambda: count() and view().lease.claimable, "the mirror keeps up")  # type: ignore[union-attr]
        assert not view().ledger_mirror.red  # type: ignore[union-attr]
        assert view().holdouts == ("cluster x", "standby old")
        assert "standby old; upgrade" in (await operator.Finalise(ask, None)).refused.reason and not asked
        runs.clear()
        persist(lambda: mirror(a).remove_path("standby/old"))
        until(lambda: count() == 1, "the old one is gone")
        assert view().holdouts == ("cluster x",)
        assert (await operator.Finalise(ask, None)).HasField("acknowledged") and asked[0].request.protocol == PROTOCOL
    finally:
        await outside.close()
        ledger.close()
    threads = {"lease", "ledger-mirror", "ledger_0"}
    until(lambda: not threads & {thread.name for thread in threading.enumerate()}, "all is closed")


def stood_by(a: RunFile, b: RunFile) -> tuple[Serving, Waiting]:
    """A master on one machine, and a standby on another that may claim its term."""
    master = persist(lambda: Serving(a))
    waiting = Waiting(b)
    waiting.until(StandbyState.READY)
    until_view(master, lambda view: view.claimable)
    return master, waiting


def test_a_term_that_is_over_is_not_taken_over_with(tmp_path: Path, url: str, ended: list[Any]) -> None:
    """Another claimed a later one meanwhile: nothing is restored, and the standby waits on."""
    a, b = begun(tmp_path, url, "a", "b")
    master, waiting = stood_by(a, b)
    master.die()
    keeper = held(waiting.claim(), ended)
    persist(lambda: restore.claim_term(mirror(a), "r", "c", claimable=True, above=keeper.term))
    assert not standby._take_over(b, keeper, LOG)
    assert not genesis.ledger_path(b).exists()


def test_a_restore_that_fails_is_tried_again_at_leisure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: list[Any]
) -> None:
    """As long as the lease lasts; a store that is busy is not asked again at once."""
    (tmp_path / "mirror").mkdir()
    a, b = begun(tmp_path, str(tmp_path / "mirror"), "a", "b")
    master, waiting = stood_by(a, b)
    master.die()
    keeper = held(waiting.claim(), ended)
    pauses, restore_if_lost = list[float](), restore.restore_if_lost

    def restore_at_last(*arguments: Any, **more: Any) -> None:
        if len(pauses) < 2:
            raise FailedMirror("quota exceeded")
        restore_if_lost(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(restore, "restore_if_lost", restore_at_last)
        patch.setattr(standby.time, "sleep", pauses.append)
        assert standby._take_over(b, keeper, LOG)
    assert pauses == [standby.AGAIN_S] * 2 and genesis.ledger_path(b).exists()


async def test_what_the_daemon_writes_is_in_its_mirror(tmp_path: Path) -> None:
    """Before anybody is told of it."""
    (tmp_path / "mirror").mkdir()
    (a,) = begun(tmp_path, str(tmp_path / "mirror"), "a")
    with closing(Ledger.open(genesis.ledger_path(a))) as ledger:
        outside = MasterOutside(ledger)
        outside.begin_mirror(a, ledger.start_term(), LOG)
        await outside.write_records([RoundReserved(1, 0.0)])
        found = restore.read_newest(mirror(a), "r", tmp_path / "base")
        assert found is not None and found.transactions[-1].records == (RoundReserved(1, 0.0),)
        await outside.close()


@pytest.mark.parametrize("again", [False, True])
async def test_a_master_that_begins_bound_tells_nothing_that_its_mirror_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """It has taken over, or starts again beside its own lease, and its store takes neither a base nor a lease that
    forbids a takeover: nothing leaves. As soon as the store takes that lease all does, as without a standby.
    Guards docs/protocol.md#a-second-master."""
    monkeypatch.setattr("dips.master.runtime.MIRROR_S", 0.2)
    (tmp_path / "mirror").mkdir()
    (a,) = begun(tmp_path, str(tmp_path / "mirror"), "a")
    if again:
        (a.master.directory / BOUND).touch()
    write_lease, takes_leases = restore.write_lease, threading.Event()

    def fail(*arguments: object) -> None:
        raise FailedMirror("quota exceeded")

    def write_first(store: MirrorStore, run: str, lease: TermLease, claimed: bool) -> bool:
        if lease.number and not takes_leases.is_set():
            fail()
        return write_lease(store, run, lease, claimed)

    monkeypatch.setattr(restore, "write_base", fail)
    monkeypatch.setattr(restore, "write_lease", write_first)
    with closing(Ledger.open(genesis.ledger_path(a))) as ledger:
        outside = MasterOutside(ledger)
        await asyncio.to_thread(outside.begin_mirror, a, ledger.start_term(), LOG, bound=not again)
        told = asyncio.create_task(outside.write_records([RoundReserved(1, 0.0)]))
        await asyncio.wait([told], timeout=1.0)
        left = told.done()
        takes_leases.set()
        await asyncio.wait_for(told, 10.0)
        await outside.close()
        assert not left, "it left while a standby might have taken over without it"
        assert not restore.look_at_lease(mirror(a), "r").lease.claimable  # type: ignore[union-attr]


@pytest.mark.parametrize("stopped", ["never", "while it waits", "while it takes leave"])
def test_a_standby_waits_until_it_is_to_serve_or_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: str
) -> None:
    """The term of the restore is kept as long as the caller wants; whichever way it ends, it takes leave. Whoever is
    stopped in the moment of a takeover does not serve."""
    monkeypatch.setattr("dips.protocol.standby.SERVE_S", 2.0)
    monkeypatch.setattr("dips.protocol.standby.CLAIM_S", 3.0)
    monkeypatch.setattr("dips.master.standby.LOOK_S", 0.5)
    monkeypatch.setattr("dips.master.standby.RENEW_S", 0.1)
    (tmp_path / "mirror").mkdir()
    a, b = begun(tmp_path, str(tmp_path / "mirror"), "a", "b")
    master, leave = Serving(a), Standby.leave

    def leave_stopped(waiting: Standby) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        leave(waiting)

    if stopped == "while it takes leave":
        monkeypatch.setattr(Standby, "leave", leave_stopped)

    def lose_master() -> None:
        until_view(master, lambda view: view.claimable)
        master.die()

    async def stand_by() -> bool:
        async with AsyncExitStack() as stack:
            waiting = asyncio.create_task(standby.stand_by(b, None, LOG, stack))
            await asyncio.to_thread(lose_master)
            if stopped == "while it waits":
                signal.raise_signal(signal.SIGTERM)
            serves = await asyncio.wait_for(waiting, 20)
            assert ("lease" in {thread.name for thread in threading.enumerate()}) is (stopped != "while it waits")
        return serves

    assert asyncio.run(stand_by()) is (stopped == "never")
    assert genesis.ledger_path(b).exists() is (stopped != "while it waits")
    until(lambda: mirror(b).list_names("standby") == [], "it has taken leave")
    until(lambda: "lease" not in {thread.name for thread in threading.enumerate()}, "the term of the restore is kept")


def test_the_ledger_of_a_former_master_is_set_aside(tmp_path: Path, url: str, ended: list[Any]) -> None:
    """It comes back as a standby: what it has is old, is kept beside, and is not served."""
    a, b = begun(tmp_path, url, "a", "b")
    master, waiting = stood_by(a, b)
    knew = master.ledger.read_state()
    master.die()
    keeper = held(waiting.take_over(), ended)
    assert not restore.own_ledger_is_newest(a, keeper.term, 0)
    assert restore.own_ledger_is_newest(b, keeper.term, 0)
    restore.set_aside_old(a, keeper.term, LOG)
    assert sorted(p.name for p in a.master.directory.glob("ledger*sqlite*")) == [
        "ledger.old.sqlite",
        "ledger.sqlite.lock",
    ]
    with closing(Ledger.open(a.master.directory / restore.OLD, readonly=True)) as old:
        assert old.read_state() == knew, "with what was in its WAL"


def test_the_ledger_of_a_run_that_was_thrown_away_is_set_aside(tmp_path: Path, ended: list[Any]) -> None:
    """Its terms may be later than those of the new run, which was lost with its master: the standby served the run that
    was thrown away."""
    (tmp_path / "mirror").mkdir()
    a, b = begun(tmp_path, str(tmp_path / "mirror"), "a", "b")
    master, waiting = stood_by(a, b)
    master.die()
    former = waiting.take_over()
    assert former is not None
    former.close()
    former._thread.join(5.0)
    genesis.make_run(a, {name: tensor + 1 for name, tensor in TENSORS.items()}, force=True)
    (b.master.directory / SEEN).unlink()  # as it is told to, since its mirror is another
    master, waiting = stood_by(a, b)
    knew = master.ledger.read_state()
    master.die()
    held(waiting.take_over(), ended)
    with closing(Ledger.open(genesis.ledger_path(b))) as ledger:
        assert ledger.read_state().row == knew.row


def test_a_mirror_that_is_emptied_lets_no_former_master_serve(tmp_path: Path, url: str, ended: list[Any]) -> None:
    """The run is thrown away beside a standby that has an old ledger: with nothing newer in an object store, it served
    that one. Guards docs/architecture.md#invariant-5."""
    a, b = begun(tmp_path, url, "a", "b")
    master, waiting = stood_by(a, b)
    master.die()
    keeper = held(waiting.take_over(), ended)
    former = Waiting(a)
    former.until(StandbyState.READY)
    keeper.close()
    keeper._thread.join(5.0)
    persist(lambda: mirror(a).remove_path(""))
    assert not any(former.serves() for _ in range(6))
    assert former.look(CLAIM_S) is StandbyState.LOOKING


@pytest.mark.parametrize("left", [0.0, 0.5, 0.98])
def test_a_damaged_ledger_of_a_former_master_stops_no_takeover(tmp_path: Path, ended: list[Any], left: float) -> None:
    """Its machine crashed, and comes back as a standby: nobody reads what is set aside, and it is kept as it is."""
    (tmp_path / "mirror").mkdir()
    a, b = begun(tmp_path, str(tmp_path / "mirror"), "a", "b")
    master, waiting = stood_by(a, b)
    path = genesis.ledger_path(b)
    master.ledger.copy_to(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(left * len(whole))])
    knew = master.ledger.read_state()
    master.die()
    held(waiting.take_over(), ended)
    with closing(Ledger.open(path)) as ledger:
        assert ledger.read_state().versions == knew.versions
    assert path.with_name(restore.OLD).stat().st_size == int(left * len(whole))


def cloned(a: RunFile, b: RunFile, master: Serving) -> RunFile:
    """The run file of another machine, with a copy of this master's ledger."""
    b.master.directory.mkdir()
    master.ledger.copy_to(genesis.ledger_path(b))
    return b.model_copy(update={"master": b.master.model_copy(update={"listen": "127.0.0.1:2"})})


@pytest.mark.parametrize("differs", ["address", "boot"])
def test_a_copy_of_a_living_master_s_directory_is_not_served(
    tmp_path: Path, url: str, ended: list[Any], monkeypatch: pytest.MonkeyPatch, differs: str
) -> None:
    """A standby's machine is a clone of the master's: it waits, also if it has the same name and address. The master
    itself starts again at once.
    """
    a, b = begun(tmp_path, url, "a", "b")
    master = persist(lambda: Serving(a))
    ended.append(master.lease)
    elsewhere, itself = cloned(a, b, master), Waiting(a)
    with monkeypatch.context() as patch:
        if differs == "boot":
            patch.setattr(standby, "read_boot_id", lambda: "of the clone")
        clone = Waiting(b if differs == "boot" else elsewhere)
        clone.until(StandbyState.READY)
        assert not any(clone.serves() for _ in range(6))
    master.die()
    until(itself.serves, "it starts again")


@pytest.mark.parametrize("more", [0, 1])
def test_a_copy_of_a_lost_master_s_directory_is_served_if_it_has_all(tmp_path: Path, url: str, more: int) -> None:
    """The lease allows no claim, and nobody has renewed it for long enough."""
    a, b = begun(tmp_path, url, "a", "b")
    master = persist(lambda: Serving(a))
    clone = Waiting(cloned(a, b, master))
    if more:
        master.write([RoundReserved(1, 0.0)])
        until(lambda: master.mirror.view() == LedgerMirrorView(), "it has caught up")
    master.die()
    clone.until(StandbyState.FORBIDDEN)
    assert not any(clone.serves() for _ in range(6))
    clone.clock.now += CLAIM_S
    assert any(clone.serves() for _ in range(6)) is not bool(more)


def test_a_standby_answers_scrapes(tmp_path: Path) -> None:
    """Its HTTP port has its own metrics and those of every daemon."""
    (tmp_path / "mirror").mkdir()
    port = free_port()
    begun(tmp_path, str(tmp_path / "mirror"), "a", http=f"127.0.0.1:{port}")
    (tmp_path / "a" / "ledger.sqlite").rename(tmp_path / "ledger.sqlite")

    def scrape() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            return str(reply.read().decode())

    async def stand_by() -> str:
        ready = asyncio.Event()
        async with AsyncExitStack() as stack:
            config = load_run(tmp_path / "a.yaml")
            waiting = asyncio.create_task(standby.stand_by(config, None, LOG, stack, ready.set))
            await ready.wait()
            text = await asyncio.to_thread(scrape)
            waiting.cancel()
            await asyncio.wait([waiting])
            return text

    text = asyncio.run(stand_by())
    for name in ("dips_standby_ready", "dips_standby_term", "dips_standby_refused_total", "dips_ready"):
        assert re.search(rf'^{name}\{{run="r"\}} ', text, re.MULTILINE), text


def test_a_standby_whose_store_is_away_says_so_and_looks_on(tmp_path: Path) -> None:
    """It takes nothing over meanwhile, however long that lasts, and is ready again when the store is back."""
    (tmp_path / "mirror").mkdir()
    a, b = begun(tmp_path, str(tmp_path / "mirror"), "a", "b")
    master, waiting = stood_by(a, b)
    counts = waiting.standby.counts
    master.die()
    waiting.until(StandbyState.READY)
    assert counts.ready and counts.failed == 0
    (tmp_path / "mirror").rename(tmp_path / "away")
    with capture_logs() as logs:
        waiting.standby._log = structlog.get_logger()
        for failed in (1, 2):
            assert waiting.look(CLAIM_S) is StandbyState.LOOKING
            assert not counts.ready and counts.failed == failed
        assert "is not there: mount it" in waiting.standby.watch.reason
        (tmp_path / "away").rename(tmp_path / "mirror")
        assert waiting.look(0.0) is StandbyState.CLAIMS
    said = [(line["state"], line["log_level"]) for line in logs if line["event"] == "stands_by"]
    assert said == [("looking", "warning"), ("claims", "info")], "once for each change"


def test_a_file_of_a_standby_that_cannot_be_used_is_said_once(tmp_path: Path) -> None:
    """At each look it would fill the log; once it could be used again, the next one that cannot is said anew."""
    (tmp_path / "mirror").mkdir()
    (a,) = begun(tmp_path, str(tmp_path / "mirror"), "a")
    store, keeper = mirror(a), LeaseKeeper(mirror(a), "r", 1, "a", tmp_path, LOG)
    whole = seal("r", json.dumps({"name": "b", "number": 1, "ready": True, "reason": ""}).encode())
    said = list[int]()
    with capture_logs() as logs:
        keeper._log = structlog.get_logger()
        for content in (b"torn", b"torn", b"torn", whole, b"torn"):
            store.write_file("standby/b", content)
            keeper._look_for_standbys()
            said.append(len(logs))
    assert said == [1, 1, 1, 1, 2] and {line["event"] for line in logs} == {"standby_refused"}


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda whole, lease: whole[: len(whole) // 2], "not whole"),
        (lambda whole, lease: b"", "not whole"),
        (lambda whole, lease: seal("other", lease), "expected the ledger of run 'r', got one of 'other'"),
        (lambda whole, lease: whole.replace(b'"format": 1', b'"format": 9'), "expected a mirror of format 1, got 9"),
        (lambda whole, lease: seal("r", b"[]"), "no lease of this version"),
        (lambda whole, lease: seal("r", lease.replace(b'"term":', b'"later":')), "no lease of this version"),
        (lambda whole, lease: seal("r", lease.replace(b'"number": ', b'"number": 7')), "expected the lease"),
    ],
)
def test_a_lease_that_cannot_be_used_is_refused_in_a_sentence(
    tmp_path: Path, spoil: Callable[[bytes, bytes], bytes], says: str, ended: list[Any]
) -> None:
    """It is counted, it is never claimed from, and the next renewal mends it; the master does not notice."""
    (tmp_path / "mirror").mkdir()
    a, b = begun(tmp_path, str(tmp_path / "mirror"), "a", "b")
    master, waiting = Serving(a), Waiting(b)
    waiting.until(StandbyState.READY)
    until_view(master, lambda view: view.claimable)
    master.lease.close()
    master.lease._thread.join(5.0)
    store = mirror(a)
    name = sorted(n for n in store.list_names("ledger") if n.endswith(".term"))[-1]
    whole = store.read_file(f"ledger/{name}", 1 << 16)
    content = read_sealed(store, "r", f"ledger/{name}", 1 << 16)
    assert whole is not None and content is not None
    store.write_file(f"ledger/{name}", spoil(whole, content))
    for _ in range(3):
        assert waiting.look(CLAIM_S) is StandbyState.REFUSED
    assert says in waiting.standby.watch.reason and waiting.standby.counts.refused == 1
    master.write([RoundReserved(1, 0.0)])
    number = int(name[11:21]) + 1
    assert restore.write_lease(store, "r", TermLease(master.term, number, "a", True), claimed=True)
    assert waiting.look() is StandbyState.READY
    master.end()


def test_files_of_standbys_that_cannot_be_used_harm_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: list[Any]
) -> None:
    """Torn, of another run, or of very many that died: the master renews its lease, sees the standby that is there, and
    removes the others."""
    monkeypatch.setattr("dips.protocol.standby.PRESENT_S", 0.3)
    (tmp_path / "mirror").mkdir()
    a, b = begun(tmp_path, str(tmp_path / "mirror"), "a", "b")
    master = Serving(a)
    ended.append(master.lease)
    store = mirror(a)
    store.write_file("standby/0", b"torn")
    store.write_file("standby/1", seal("other", b"{}"))
    store.write_file("standby/2", seal("r", json.dumps({"name": "x", "number": "?"}).encode()))
    for n in range(3 * standby.MOST_STANDBYS):
        died = {"name": "x", "number": n, "ready": True, "reason": ""}
        store.write_file(f"standby/{n:03}", seal("r", json.dumps(died).encode()))
    waiting = Waiting(b)
    until(lambda: waiting.look(0.0) and store.list_names("standby") == [waiting.standby._file[8:]], "one is left")
    until(lambda: waiting.look(0.0) and master.lease.view().claimable, "it lets this one take over")
    assert len(master.lease.view().standbys) == 1
    master.end()


@pytest.mark.parametrize("keys", [{"mirror": None}, {"slaves": "exec"}])
def test_a_standby_that_could_not_serve_is_refused_at_once(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Without a mirror there is nothing to watch; slaves that a master starts are on its own machine."""
    (tmp_path / "mirror").mkdir()
    begun(tmp_path, str(tmp_path / "mirror"), "a")
    file = yaml.safe_load((tmp_path / "a.yaml").read_text())
    if "mirror" in keys:
        del file["master"]["mirror"]
    else:
        file["slaves"].append({**file["slaves"][0], "name": "s1", "directory": "s1", "supervisor": "exec"})
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(file))

    async def stand_by() -> None:
        async with AsyncExitStack() as stack:
            await standby.stand_by(load_run(tmp_path / "a.yaml"), None, LOG, stack)

    with pytest.raises(ConfigError, match="master.mirror" if "mirror" in keys else "slaves.supervisor"):
        asyncio.run(stand_by())


async def test_a_standby_serves_the_slaves_that_its_run_file_names_by_then(tmp_path: Path) -> None:
    """It began to wait before a `dips rebalance`: the file is the new one, and what it read at its start is not."""
    (tmp_path / "mirror").mkdir()
    (config,) = begun(tmp_path, str(tmp_path / "mirror"), "a", listen=f"127.0.0.1:{free_port()}")
    former = config.slaves[0].model_copy(update={"name": "s9"})
    old = config.model_copy(update={"slaves": (former,)})
    async with served(lambda ready: serve(old, tmp_path / "a.yaml", LOG, ready, stands_by=True)):
        pass


async def test_what_a_killed_master_left_of_a_copy_is_gone_when_it_serves(tmp_path: Path) -> None:
    """It may have filled the disk: with it there no term could begin. Without a mirror nothing else removes it."""
    (tmp_path / "mirror").mkdir()
    (config,) = begun(tmp_path, str(tmp_path / "mirror"), "a", listen=f"127.0.0.1:{free_port()}")
    alone = config.model_copy(update={"master": config.master.model_copy(update={"mirror": None})})
    (tmp_path / "a" / BASE).write_bytes(b"a half")
    async with served(lambda ready: serve(alone, tmp_path / "a.yaml", LOG, ready)):
        assert not (tmp_path / "a" / BASE).exists()
