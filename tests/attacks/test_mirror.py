"""Attacks by who may write the master's mirror, and standbys that find what they left: real masters, one that serves.

The run beside it makes two more versions with both clusters and loses no round. What a standby cannot use it says,
counts, and does not claim a term from. Who may write there may claim a term, which ends the master: that is not refused
(docs/guides/threats.md).
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import yaml

from dips.config import load_run
from dips.master import genesis
from dips.protocol.standby import CLAIM_S
from dips.store.mirror import MirrorStore, seal
from tests.attacks.deployment import RUN, START_S, AttackedRun
from tests.integration import cluster_harness as harness

pytestmark = [pytest.mark.attacks, pytest.mark.real_commands, pytest.mark.timeout(240)]
REFUSED = re.compile(r"^dips_standby_refused_total\{.*\} ([\d.]+)$", re.MULTILINE)
NEVER = 9_999_999_999  # the number of a lease that the master will not write


def store_of(run: AttackedRun) -> MirrorStore:
    store = genesis.mirror_of(load_run(run.run.file))
    assert store is not None
    return store


@pytest.fixture(autouse=True)
def run_goes_on(mirrored: AttackedRun) -> Iterator[None]:
    yield from mirrored.going_on()


@contextmanager
def standing_by(run: AttackedRun, name: str) -> Iterator[tuple[harness.Process, Callable[[str], str]]]:
    """A second master on this machine, and its HTTP port."""
    file, port = yaml.safe_load(run.run.file.read_text()), harness.free_port()
    directory = run.directory / name
    file["master"] |= {"directory": str(directory), "http": f"127.0.0.1:{port}"}
    path = run.directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(file))
    process = run.run._start(name, [*run.run.commands["master"], "--config", str(path), "--standby"])

    def get(what: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{what}", timeout=10) as reply:
                return str(reply.read().decode())
        except urllib.error.HTTPError as error:
            return error.read().decode()
        except OSError:
            return ""

    try:
        yield process, get
    finally:
        process.terminate()


@pytest.mark.parametrize(
    ("attack", "spoil", "says"),
    [
        ("a lease that is torn", lambda whole: whole[: len(whole) // 2], "not whole"),
        ("a lease of another run", lambda whole: seal("other", b"{}"), f"expected the ledger of run {RUN!r}"),
        ("a lease of a later release", lambda whole: whole.replace(b'"format": 1', b'"format": 9'), "got 9"),
        ("a lease from the future", lambda whole: whole, f"-{NEVER}, got "),
    ],
)
def test_a_lease_that_cannot_be_used(
    mirrored: AttackedRun, attack: str, spoil: Callable[[bytes], bytes], says: str
) -> None:
    """It lies above the master's own, so no renewal replaces it: the standby claims nothing for longer than it would
    wait, and goes on when it is gone.
    """
    store = store_of(mirrored)
    with ExitStack() as closing, standing_by(mirrored, "second") as (process, get):
        mirrored.run.until(lambda: "stands by" in get("readyz"), START_S, "it stands by")
        newest = max(name for name in store.list_names("ledger") if name.endswith(".term"))
        whole = store.read_file(f"ledger/{newest}", 1 << 16)
        assert whole is not None
        spoilt = f"ledger/{newest.partition('-')[0]}-{NEVER}.term"
        store.write_file(spoilt, spoil(whole))
        closing.callback(store.remove_path, spoilt)
        mirrored.run.until(lambda: says in get("readyz"), 30, f"it says {says!r}")
        until = time.monotonic() + 1.25 * CLAIM_S
        while time.monotonic() < until:
            assert process.code is None and says in get("readyz")
            time.sleep(0.5)
        counted = REFUSED.search(get("metrics"))
        assert counted and float(counted[1]) == 1.0, get("metrics")
        store.remove_path(spoilt)
        mirrored.run.until(lambda: says not in get("readyz"), 30, "it watches the true lease again")
        assert "term_claimed" not in process.log.read_text()
    mirrored.note_attack(attack, "none, but the mirror's", "the lease", "", "", 0, why="dips_standby_refused_total 1")


def test_files_of_standbys_that_are_none(mirrored: AttackedRun) -> None:
    """Torn, of another run, without a number, and ten that died: each is told once, and goes."""
    store, log = store_of(mirrored), mirrored.directory / "master.log"
    store.write_file("standby/000", b"torn")
    store.write_file("standby/001", seal("other", b"{}"))
    store.write_file("standby/002", seal(RUN, json.dumps({"name": "x", "ready": True, "number": "?"}).encode()))
    for number in range(10):
        died = {"name": "x", "number": number, "ready": True, "reason": "\x1b[2J"}
        store.write_file(f"standby/01{number}", seal(RUN, json.dumps(died).encode()))
    mirrored.run.until(lambda: not store.list_names("standby"), 150, "all are removed")
    text = log.read_text()
    for name in ("000", "001", "002"):
        assert sum(f"standby/{name}" in line for line in text.splitlines()) == 1, name
    assert "\x1b" not in text
    mirrored.note_attack(
        "files of standbys that are none",
        "none, but the mirror's",
        "the lease's holder",
        "",
        "",
        0,
        why="not: told once",
    )


def test_two_standbys(mirrored: AttackedRun) -> None:
    """Neither claims a term while the master serves, however long."""
    with standing_by(mirrored, "second") as (second, get_second), standing_by(mirrored, "third") as (third, get_third):
        for get in (get_second, get_third):
            mirrored.run.until(lambda get=get: "stands by" in get("readyz"), START_S, "both stand by")
        until = time.monotonic() + 2 * CLAIM_S
        while time.monotonic() < until:
            assert all(process.code is None for process in (second, third, mirrored.daemons["master"]))
            time.sleep(0.5)
        for process in (second, third):
            assert "term_claimed" not in process.log.read_text()
    mirrored.note_attack("two standbys", "none, but the mirror's", "the lease", "", "", 0, why="not: they may wait")
