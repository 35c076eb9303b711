"""`dips rebalance` on one host: its plan, what it refuses, and layers staged bit for bit, or nothing, wherever it is
interrupted. tests/integration/test_rebalance.py has whole runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
import yaml

from dips.commands import rebalancing
from dips.commands.rebalancing import rebalance_run
from dips.config import load_run
from dips.errors import Busy, ConfigError, CorruptSnapshot, DipsError, FailedDisk, UnavailableMaster
from dips.files import PidLock
from dips.ids import VersionId
from dips.master import genesis
from dips.master.ledger import Ledger
from dips.protocol.effects import Acknowledged, Pending, RebalancePlanned, Refused
from dips.protocol.events import RebalanceAsked
from dips.slave import staging
from dips.slave.snapshots import Snapshots
from dips.store import tensorfile
from dips.store.files import ASIDE, REBALANCE_LOCK, STAGING, read_layer, read_manifest, staged_path
from dips.store.version import digest_of
from dips.transport.endpoints import Endpoint, master_peer
from dips.transport.limits import MASTER_LIMITS
from tests.damage import flip_bit
from tests.guillotine import Guillotine, Killed
from tests.power_cut import PowerCut
from tests.typed import type_dips
from tests.unit.slave.test_snapshots import MANIFEST, arrays, opened, same
from tests.waiting import eventually

V1, V2, V3 = VersionId(1, 1), VersionId(2, 3), VersionId(3, 4)
BEFORE, AFTER, LAYERS = (0, 1), (1, 2, 3), (0, 1, 2, 3)  # of the slave: 1 stays, 2 and 3 come from another host
SHAPES = {f"block.{i}.w": (3 + i, 2) for i in range(6)} | {"head.b": (1,)}


@pytest.fixture(autouse=True)
def own_log() -> None:
    """A test before this one may have left a log that writes to its own, closed file."""
    structlog.reset_defaults()


# ---- the master's answers --------------------------------------------------------------------------------------------


def test_it_asks_until_the_placement_is_valid(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reason to wait is said once; what the master refuses is said as it says it. Nothing is copied meanwhile."""
    away, waits = UnavailableMaster("nobody answers"), Pending("a push is open")
    full = Busy("more calls come in than it takes")
    answers: list[Any] = []
    now, said, asked = 0.0, list[str](), list[Any]()

    async def ask_master(master: Endpoint, question: Any) -> Any:
        asked.append(question)
        answer = answers.pop(0) if answers else Acknowledged() if question.slave == "s1" else waits
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def sleep(seconds: float, others_run: Any = asyncio.sleep) -> None:
        nonlocal now
        now += seconds
        await others_run(0)

    monkeypatch.setattr(rebalancing, "ask_master", ask_master)
    monkeypatch.setattr(rebalancing, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(rebalancing.asyncio, "sleep", sleep)

    def rebalance(wait_s: float, *told: Any, slaves: tuple[str, ...] = ("s2",)) -> None:
        nonlocal now
        answers[:], now = told, 0.0
        said.clear()
        rebalance_run(load_run(run / "three.yaml"), slaves, master_peer("127.0.0.1:1", None), wait_s, said.append)

    rebalance(60.0, away, away, waits, waits, full, away, Acknowledged())
    assert said == ["nobody answers", "a push is open", str(full), "nobody answers"] and now == 6.0
    assert asked[0] == RebalanceAsked(0, "s2", ("s0", "s1", "s2"), None, "")
    with pytest.raises(ConfigError, match="it has other layers"):
        rebalance(60.0, waits, Refused(0.0, "it has other layers"))
    with pytest.raises(UnavailableMaster, match="given up after 2 s: a push is open; repeat the command"):
        rebalance(2.0, *[waits] * 9)
    assert now == 2.0
    with pytest.raises(UnavailableMaster, match="nobody answers"):
        rebalance(2.0, waits, *[away] * 9)
    assert now == 2.0
    rebalance(60.0, slaves=("s0", "s1", "s2"))
    assert now < 10.0, "the first that knows of the row ends the wait of all: the master has ended with it"


def test_a_host_of_many_slaves_asks_for_a_few_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that waits holds its connection, of which a master lets a certificate have 16: with 17 slaves on one
    host the command ended each time.
    """
    asked, now, most = list[str](), 0, 0

    async def ask_master(master: Endpoint, question: Any) -> Any:
        nonlocal now, most
        asked.append(question.slave)
        now += 1
        most = max(now, most)
        await asyncio.sleep(0.001)
        now -= 1
        return Acknowledged() if len(set(asked)) == 20 else Pending("a push is open")

    monkeypatch.setattr(rebalancing, "ask_master", ask_master)
    monkeypatch.setattr(rebalancing, "ASK_S", 0.0)
    config = load_run(write_file(tmp_path, "twenty.yaml", 20))
    rebalance_run(config, [s.name for s in config.slaves], master_peer("127.0.0.1:1", None), 60.0, lambda _: None)
    assert most == rebalancing.MOST_ASKED < MASTER_LIMITS.peer_connections


# ---- the command -----------------------------------------------------------------------------------------------------


def write_file(path: Path, name: str, slaves: int, **options: Any) -> Path:
    """A run file of `slaves` slaves with their directories; `options` are keys of each."""
    content = {
        "shared": {"run": "r"},
        "master": {"listen": "127.0.0.1:1", "directory": "m"},
        "slaves": [
            {"name": f"s{i}", "directory": f"s{i}", "master": "127.0.0.1:1", "initial_model": "m/initial", **options}
            for i in range(slaves)
        ],
        "tls": False,
    }
    file = path / name
    file.write_text(yaml.safe_dump(content))
    for i in range(slaves):
        (path / f"s{i}").mkdir(exist_ok=True)
    return file


@pytest.fixture(name="run")
def made_run(tmp_path: Path) -> Path:
    """A directory with the ledger of a run of two slaves, and its run file for three."""
    config = load_run(write_file(tmp_path, "two.yaml", 2))
    genesis.make_run(config, {name: np.full(shape, 0.5, np.float32) for name, shape in SHAPES.items()})
    write_file(tmp_path, "three.yaml", 3)
    return tmp_path


def test_a_dry_run_tells_moves_and_memory_and_changes_nothing(run: Path) -> None:
    """Also while the master runs, and where the slaves' directories are on other hosts."""
    for i in range(3):
        (run / f"s{i}").rmdir()
    with closing(Ledger.open(run / "m" / genesis.LEDGER)) as ledger:
        told = type_dips("rebalance", "--config", str(run / "three.yaml"), "--dry-run")
        assert dict(ledger.run_row().placement).keys() == {"s0", "s1"}
    assert "run r: the layers lie on s0, s1" in told and "→ s2" in told
    assert "moved: " in told and " of 7 layers" in told and told.count("layers, memory ") == 3


def spoil_shared(run: Path) -> None:
    raw = yaml.safe_load((run / "three.yaml").read_text())
    raw["shared"]["outer"] = {"lr": 0.1}
    (run / "three.yaml").write_text(yaml.safe_dump(raw))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (spoil_shared, r"shared\.outer\.lr: the run has 0\.7, this file 0\.1: put the options back"),
        (lambda run: write_file(run, "three.yaml", 9), r"expected at most 7, one for each layer of the model, got 9"),
        (lambda run: (run / "m/ledger.sqlite").unlink(), r"ledger\.sqlite"),
    ],
    ids=["other options", "too many slaves", "no ledger"],
)
def test_a_plan_that_cannot_be(run: Path, spoil: Any, told: str) -> None:
    spoil(run)
    with pytest.raises(ConfigError, match=told):
        type_dips("rebalance", "--config", str(run / "three.yaml"), "--dry-run")


def test_a_host_dials_the_master_as_its_slave_does(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`master.listen` may be 0.0.0.0, which on a slave's own host is that host: the call waited an hour for nobody."""
    dialled = list[str]()
    monkeypatch.setattr(rebalancing, "rebalance_run", lambda _, slaves, peer, *__: dialled.append(peer.address))
    file = write_file(run, "four.yaml", 4, master="localhost:2")
    type_dips("rebalance", "--config", str(file), "--slave", "s3")
    assert dialled == ["localhost:2"]


def test_directories_that_cannot_be(run: Path) -> None:
    """Named before anybody is asked: one that is not here, one of two slaves, one that another call copies into."""
    call = partial(rebalance_run, master=master_peer("127.0.0.1:1", None), wait_s=0.0, say=print)
    (run / "s2").rmdir()
    with pytest.raises(ConfigError, match=r"slaves\.s2\.directory: .*s2 is not here: call this command on the host of"):
        call(load_run(run / "three.yaml"), ["s1", "s2"])
    with pytest.raises(ConfigError, match="s9"):
        call(load_run(run / "three.yaml"), ["s9"])
    text = (run / "three.yaml").read_text().replace("directory: s2", "directory: s1")
    (run / "three.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"s1 is said to be of s1 and of s2: .* by --slave"):
        call(load_run(run / "three.yaml"), ["s1", "s2"])
    busy = pytest.raises(ConfigError, match=r"another `dips rebalance` copies into .*s1")
    with closing(PidLock(run / "s1" / ".rebalance.lock", busy="", advice="")), busy:
        call(load_run(run / "three.yaml"), ["s0", "s1"])
    with closing(PidLock(run / "s0" / ".rebalance.lock", busy="", advice="")):
        pass  # what was locked before the refusal is free


def test_another_run_and_too_small_a_machine_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a byte moves: what the master would not start with, or this machine not hold, is staged for nothing."""
    config = load_run(run / "three.yaml")
    master, asking = master_peer("127.0.0.1:1", None), asyncio.Semaphore()
    copied = rebalancing._HostCopy(config, config.slave_section("s2"), master, 1.0, print, asking)
    agreed = config.shared.agreed
    copied._require_same_run(SimpleNamespace(run="r", shared=agreed))
    with pytest.raises(ConfigError, match=r"shared\.run: the master serves run 'august', the run file's is 'r'"):
        copied._require_same_run(SimpleNamespace(run="august", shared=agreed))
    with pytest.raises(ConfigError, match="put the options back as they are in the run"):
        copied._require_same_run(SimpleNamespace(run="r", shared={**agreed, "codec": "int8"}))
    copied._require_memory(MANIFEST, AFTER)
    monkeypatch.setattr(rebalancing, "available_bytes", lambda section: 1)
    with pytest.raises(ConfigError, match=r"^slaves\.s2: .*memory"):
        copied._require_memory(MANIFEST, AFTER)


# ---- layers of another host ------------------------------------------------------------------------------------------


class Host:
    """The host of slave s, which holds the layers BEFORE at V1 and V2; `fetch` answers as the other slaves would, and
    `calls` are the layers of each request.
    """

    def __init__(self, path: Path) -> None:
        self.root, self.calls, self.damages = path / "s", list[list[int]](), False
        self.said, self.closed = list[str](), False
        self.fetching: Callable[[], Awaitable[None]] | None = None
        self.parts = arrays(LAYERS, 21), arrays(LAYERS, 22)
        with closing(opened(self.root, layers=BEFORE)) as snapshots:
            snapshots.write_snapshot(V1, arrays(BEFORE, 11), arrays(BEFORE, 12))
            snapshots.write_snapshot(V2, *({i: flat[i] for i in BEFORE} for flat in self.parts))

    def fetch(self, layers: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> dict[int, tuple[str, str]]:
        self.calls.append(list(layers))
        for index, flats in layers.items():
            for flat, held in zip(flats, self.parts, strict=True):
                flat[:] = held[index]
            if self.damages and flats[1].size:
                flats[1].view(np.uint8)[0] ^= 1
        return {i: (digest_of(self.parts[0][i]), digest_of(self.parts[1][i])) for i in layers}

    def stage(self, layers: tuple[int, ...] = AFTER, sinc: int = 9, version: VersionId = V2) -> str:
        planned = staging.plan_fetch(("r", "s", sinc), version, self.root, MANIFEST, layers, self.fetch)
        return staging.stage_parts([planned])["s"]

    def entries(self) -> list[str]:
        return sorted(p.name for p in self.root.iterdir() if p.name != ".lock")

    def assert_served(self, layers: tuple[int, ...]) -> None:
        """A slave that starts with these layers offers V2, and its bytes are the version's."""
        with closing(opened(self.root, layers=layers)) as snapshots:
            assert V2 in snapshots.complete_versions()
            found = arrays(layers, 98), arrays(layers, 99)
            snapshots.read_snapshot(V2, *found)
            assert all(same(mine, {i: own[i] for i in layers}) for mine, own in zip(found, self.parts, strict=True))


@pytest.fixture(name="host")
def made_host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_layers_come_from_here_and_from_another_host(host: Host) -> None:
    """What the directory has is copied, the rest fetched; the versions beside it stay until the master names the new
    layers; a second try copies nothing.
    """
    digest = host.stage()
    assert host.calls == [[2, 3]]
    staged = read_manifest(staged_path(host.root, V2))
    assert staged.digest == digest and tuple(record.index for record in staged.layers) == AFTER
    for record in staged.layers:
        theta, momentum = (np.empty(record.layer.numel, np.float32) for _ in range(2))
        read_layer(staged_path(host.root, V2), staged, record, theta, momentum)
        assert theta.tobytes() == host.parts[0][record.index].tobytes()
        assert momentum.tobytes() == host.parts[1][record.index].tobytes()
    assert host.stage(sinc=10) == digest and len(host.calls) == 1, "staged by the first try"
    assert host.entries() == [f".rebalanced-{V2}", str(V1), str(V2)]
    host.assert_served(BEFORE)
    host.assert_served(AFTER)
    assert host.entries() == [str(V1), str(V2)]


def test_what_an_interrupted_try_was_writing_goes_with_the_next(host: Host) -> None:
    """Of another version, which nobody would name again: its slave leaves it alone as long as a rebalance runs."""
    left = host.root / f"{STAGING}{V1}"
    left.mkdir()
    (left / "00000.safetensors").write_bytes(bytes(100))
    host.stage()
    assert host.entries() == [f".rebalanced-{V2}", str(V1), str(V2)]


def test_a_slave_that_restarts_takes_nothing_from_its_rebalance(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes what its former process had not finished, and of a rebalance what nobody is writing any more."""
    fetch = host.fetch

    def fetch_meanwhile(layers: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> dict[int, tuple[str, str]]:
        (host.root / f"{ASIDE}{V3}").mkdir()
        host.assert_served(BEFORE)
        return fetch(layers)

    monkeypatch.setattr(host, "fetch", fetch_meanwhile)
    with closing(PidLock(host.root / REBALANCE_LOCK, busy="", advice="")):
        host.stage()
    (host.root / f"{STAGING}{V3}").mkdir()
    host.assert_served(AFTER)
    assert host.entries() == [REBALANCE_LOCK, str(V1), str(V2)]


def test_what_was_staged_for_another_plan_is_copied_anew(host: Host) -> None:
    """Other layers of the same version, and an older version, which the run has left meanwhile."""
    host.stage((1, 2))
    host.stage()
    assert host.calls == [[2], [2, 3]]
    host.stage(version=V3)
    assert host.entries() == [f".rebalanced-{V3}", str(V1), str(V2)]
    with closing(Snapshots(host.root, "r", "s", None, structlog.get_logger())) as unbound:
        assert unbound.complete_versions() == (V2, V3), "a slave offers it before it knows its layers"
    assert host.calls[2:] == [[1, 2, 3]], "V2 is not V3"


def test_killed_anywhere_the_former_layers_serve(tmp_path: Path) -> None:
    """And the repeated call stages the rest."""
    for at in range(1, 50):
        (tmp_path / str(at)).mkdir()
        host = Host(tmp_path / str(at))
        with pytest.MonkeyPatch.context() as patch:
            guillotine = Guillotine(patch, at)
            try:
                host.stage()
            except Killed:
                pass
            if not guillotine.fell:
                break
        if at % 2:
            host.assert_served(BEFORE)  # its slave restarts meanwhile
        host.stage()
        host.assert_served(AFTER)
        assert host.entries() == [str(V1), str(V2)]
    else:
        pytest.fail("it never came to an end")
    assert at > 1


def test_what_is_staged_outlives_a_power_cut(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the digest is told; and its name, when the slave has promoted it."""
    cut = PowerCut(tmp_path, monkeypatch)
    host.stage()
    assert cut.find_lost(staged_path(host.root, V2)) == [] and cut.early == []
    host.assert_served(AFTER)
    assert cut.find_lost(host.root / str(V2)) == [] and not cut.would_return(staged_path(host.root, V2))
    cut.close()


def rot(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk keeps something else than was written."""
    real = staging.stage_version

    def rots(aside: Path, version: VersionId) -> None:
        real(aside, version)
        flip_bit(staged_path(aside.parent, version), "theta.")

    monkeypatch.setattr(staging, "stage_version", rots)


def damage_own(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (host.root / str(V2)).glob("*1.safetensors"):
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)


def damage_fetched(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.damages = True


def fill_disk(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorfile, "_reserve_space", full)


@pytest.mark.parametrize(
    ("spoil", "error", "told", "calls"),
    [
        (rot, CorruptSnapshot, r"\.rebalanced-v2@r3/\d+\.safetensors: theta\.", 1),
        (damage_own, CorruptSnapshot, r"s/v2@r3/00001\.safetensors: .*expected xxh3-128", 0),
        (damage_fetched, CorruptSnapshot, r"layer .* of v2@r3: expected θ and m of xxh3-128", 1),
        (fill_disk, FailedDisk, r"the run is as it was: .*No space left", 0),
    ],
)
def test_what_fails_leaves_nothing(
    host: Host, monkeypatch: pytest.MonkeyPatch, spoil: Any, error: type[DipsError], told: str, calls: int
) -> None:
    """Room for all is reserved before anything travels, and what is staged is read back before its digest is told."""
    spoil(host, monkeypatch)
    with pytest.raises(error, match=told):
        host.stage()
    assert len(host.calls) == calls and host.entries() == [str(V1), str(V2)]


def test_what_stays_where_it_is_is_read(host: Host, pulled: rebalancing._HostCopy) -> None:
    """A damaged version is found before the older ones, its only substitutes, are given up."""
    path, planned = host.root / str(V2), RebalancePlanned(V2, BEFORE, 9)
    assert asyncio.run(pulled._stage_layers(planned)) == read_manifest(path).digest
    flip_bit(path, "momentum.")
    with pytest.raises(CorruptSnapshot, match=r"s/v2@r3/\d+\.safetensors: momentum\."):
        asyncio.run(pulled._stage_layers(planned))


@pytest.fixture(name="pulled")
def pulled_by_host(host: Host, run: Path, monkeypatch: pytest.MonkeyPatch) -> rebalancing._HostCopy:
    """The copy of slave s, whose layers a puller brings from `host.fetch`; `host.said` is what it says."""
    config = load_run(run / "three.yaml")

    class HostPuller:
        run, manifest, shared = "r", MANIFEST, config.shared.agreed

        def __init__(self, master: Endpoint, name: str) -> None:
            assert name == "rebalance-s.puller"

        async def __aenter__(self) -> HostPuller:
            return self

        async def __aexit__(self, *_: object) -> None:
            host.closed = True

        async def pull_layers(self, version: VersionId, layers: Any) -> Any:
            assert version == V2
            assert host.fetching is not None
            await host.fetching()
            return host.fetch(layers)

    monkeypatch.setattr(rebalancing, "VersionPuller", HostPuller)
    monkeypatch.setattr(rebalancing, "ASK_S", 0.001)
    section = config.slave_section("s2").model_copy(update={"name": "s", "directory": host.root})
    master, asking = master_peer("127.0.0.1:1", None), asyncio.Semaphore()
    return rebalancing._HostCopy(config, section, master, 1.0, host.said.append, asking)


async def test_the_master_is_asked_while_layers_move(
    host: Host, pulled: rebalancing._HostCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the lease of the head would end after ten seconds, the run go on, and terabytes be copied in vain; a
    question that nobody answers ends nothing. Once the layers are staged, only their digest is told.
    """
    asked, copying = list[tuple[VersionId | None, str]](), asyncio.Lock()

    async def ask_master(_: Endpoint, question: RebalanceAsked) -> Any:
        asked.append((question.version, question.digest))
        if question.version is None:
            assert copying.locked() is (len(asked) > 1)
            if len(asked) == 2:
                raise UnavailableMaster("nobody answers")
            return RebalancePlanned(V2, AFTER, 9)
        await asyncio.sleep(0.01)  # in which a question that is still asked would come
        return Acknowledged()

    async def fetching() -> None:
        await eventually(lambda: len(asked) >= 4)

    monkeypatch.setattr(rebalancing, "ask_master", ask_master)
    host.fetching = fetching
    await pulled.move_layers(copying)
    assert asked[-1] == (V2, read_manifest(staged_path(host.root, V2)).digest)
    assert [version for version, _ in asked[:-1]] == [None] * (len(asked) - 1)
    assert host.calls == [[2, 3]] and host.closed
    assert host.said.count("nobody answers") == 1 and host.said[-1] == f"{V2} is staged for s"
    assert asyncio.all_tasks() == {asyncio.current_task()}
    host.assert_served(AFTER)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("run", "the master serves run 'august'"),
        ("shared", "put the options back"),
        ("memory", r"^slaves\.s: .*memory"),
    ],
    ids=["another run", "other options", "too little memory"],
)
async def test_layers_that_would_be_of_no_use_are_not_pulled(
    host: Host, pulled: rebalancing._HostCopy, monkeypatch: pytest.MonkeyPatch, what: str, told: str
) -> None:
    """Those of another run, of one with other options, or more than this machine holds: its puller leaves the run."""
    match what:
        case "run":
            monkeypatch.setattr(rebalancing.VersionPuller, "run", "august", raising=False)
        case "shared":
            monkeypatch.setattr(rebalancing.VersionPuller, "shared", {"codec": "none such"}, raising=False)
        case "memory":
            monkeypatch.setattr(rebalancing, "available_bytes", lambda section: 1)
    with pytest.raises(ConfigError, match=told):
        await pulled._stage_layers(RebalancePlanned(V2, AFTER, 9))
    assert host.calls == [] and host.closed


def test_many_layers_are_fetched_some_at_a_time(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a mapped file while it is fetched."""
    monkeypatch.setattr(staging, "FETCHED", 2)
    host.stage(LAYERS[1:], version=V3)
    assert host.calls == [[1, 2], [3]]
