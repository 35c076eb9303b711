"""A run of two releases: it is upgraded and taken back in random orders while it trains (docs/protocol.md#releases).

Every process goes to the other release, one after another, and with the next order back: DIPS_UPGRADES orders of them
(3). The release before comes from its wheel, in a virtual environment of its own, and has made the run. At the end the
run is finalised, and the release before refused.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from dips import __version__
from dips.cli import cli
from dips.master import journal
from dips.master.ledger import Ledger
from dips.protocol.releases import OLDEST_PROTOCOL, PROTOCOL
from tests.chaos.deployment import SEEN_S, Deployment
from tests.chaos.wires import Loop
from tests.forkserver import client
from tests.integration.cluster_harness import END_S, ROOT, Process, daemon
from tests.releases import make_venv

ORDERS = int(os.environ.get("DIPS_UPGRADES", "3"))
# A slave of 0.1.0 calls a pull that a new master grants again, with a newer version, a bug of its own.
KNOWN_OF_FORMER = re.compile(r"[^\n]*LocalProtocolError[^\n]*pull \S+ already reads [^\n]*\n")
SEED = int(os.environ.get("DIPS_UPGRADES_SEED", str(random.SystemRandom().randrange(1 << 32))))
REFUSED = 78  # exit code of a process that must not start


class Release(NamedTuple):
    """An interpreter that has a release of Di-PS; `root` has these tests, and is in front of its packages."""

    python: str
    root: Path


PRESENT = Release(sys.executable, ROOT)


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory, forked_commands: None) -> Iterator[Release]:
    """The release before; its commands are forked, too."""
    directory = tmp_path_factory.mktemp("former")
    root = directory / "root"
    root.mkdir()
    (root / "tests").symlink_to(ROOT / "tests")
    release = Release(str(make_venv(directory / "venv")), root)
    server, process = client.start(*release)
    with client.forking(server):
        yield release
    server.close()
    process.wait()


class MixedDeployment(Deployment):
    """A run whose processes are of two releases: each of that in `releases`, or of the former one."""

    def __init__(self, directory: Path, loop: Loop, former: Release) -> None:
        self.former, self.releases = former, dict[str, Release]()
        super().__init__(directory, loop, clusters=("east", "west", "north"), slaves=4, step_s=0.05)
        self.commands["slave"] = daemon("slave")
        self.names = ["master", *self.slaves, *self.clusters]

    def _make_run(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """By `dips init` of the release before."""
        model = self.directory / "model.safetensors"
        save_file(dict(tensors), model)
        words = ["init", "--config", str(self.file), "--model", str(model)]
        made = self._make_process("init", [sys.executable, "-m", "dips.cli", *words], self.directory / "init.log")
        made.wait_for_end(SEEN_S)
        assert made.code == 0, made.tail()

    def _make_process(self, name: str, command: Sequence[str], log: Path) -> Process:
        release = self.releases.get(name, self.former)
        return Process(
            name, [release.python if word == sys.executable else word for word in command], log, release.root
        )

    def _read_log(self, path: Path) -> str:
        return KNOWN_OF_FORMER.sub("", super()._read_log(path))

    def restart(self, name: str, release: Release, *, kill: bool) -> None:
        """End a process, by SIGTERM or SIGKILL, and start it as this release."""
        self.all_live()
        if name in self.clusters and kill:
            self.kill_agent(name)
        elif name in self.clusters:
            self.end_agent(name)
        elif kill:
            self.process(name).kill()
        else:
            self.process(name).terminate()
        self.releases[name] = release
        self.start_one(name)

    def start_one(self, name: str) -> Process:
        if name == "master":
            return self.start_master()
        return self.cluster(name) if name in self.clusters else self.start_slave(name)

    def all_live(self) -> None:
        """Nothing ends by itself."""
        ended = {name: self.process(name).code for name in self.names if self.process(name).code is not None}
        assert not ended, f"{ended}\n" + "\n".join(self.process(name).tail() for name in ended)

    def check_releases(self) -> None:
        """What processes say of themselves is what they were started as: a path too many would make all of one."""
        formers = {name for name in self.names if self.releases.get(name, self.former) == self.former}
        if "master" in formers:
            self.wait_for_status(lambda told: "protocol" not in told, SEEN_S, "the master is of the release before")
        else:
            away = {f"{'cluster' if name in self.clusters else 'slave'} {name}" for name in formers}
            self.wait_for_status(lambda told: set(told.get("holdouts", ())) == away, SEEN_S, f"formers are {formers}")
        for name in self.clusters:
            expected = "0.1.0" if name in formers else __version__
            told = self.directory / f"{name}.release"
            self.until(lambda told=told, at=expected: told.read_text() == at, SEEN_S, f"{name} trains with {expected}")


@pytest.mark.timeout(300 + 150 * ORDERS)
def test_orders_of_upgrade_and_downgrade(tmp_path: Path, loop: Loop, former: Release) -> None:
    """θ of every version is the reference's, tokens and ranges add up, no version is lost, and nothing ends by itself.
    Of the processes that were changed some go back at once, as when an operator thinks again. What masters of this
    release decided it decides again from their journals; it reads those of the release before, some of whose rules
    are mended.
    """
    print(f"\nDIPS_UPGRADES_SEED={SEED} DIPS_UPGRADES={ORDERS}")
    with MixedDeployment(tmp_path, loop, former) as run:
        run.start()
        head, restarts = run.progress(2, by=run.clusters), 0
        for number in range(ORDERS):
            rng = random.Random(f"{SEED}/{number}")
            to, back = (PRESENT, former) if number % 2 == 0 else (former, PRESENT)
            order = rng.sample(run.names, len(run.names))
            for at, name in enumerate(order):
                run.restart(name, to, kill=rng.random() < 0.3)
                restarts += 1
                if rng.random() < 0.2:
                    again = rng.choice(order[: at + 1])
                    run.restart(again, back, kill=rng.random() < 0.3)
                    run.progress(1)
                    run.restart(again, to, kill=rng.random() < 0.3)
                    restarts += 2
                if rng.random() < 0.5:
                    run.progress(1)
                    run.check_releases()
            run.progress(2, by=run.clusters)
            run.check_releases()
            run.all_live()
            run.check_history()
            print(
                f"order {number}: {'up' if to is PRESENT else 'down'} by {' '.join(order)}; head {run.head()}",
                flush=True,
            )
        assert head in run.lineage(), "a committed version is no longer in the lineage"
        run.check()
        print(f"{ORDERS} orders, {restarts} restarts")
        begun = filter(journal._is_begun, journal.list_segments(run.master_directory))
        replayed = [one for segment in begun for one in journal.replay_journal(segment)]
        own = [one.differs for one in replayed if not one.other_code]
        assert own and not any(own), own


def test_a_run_is_finalised_and_the_release_before_refused(tmp_path: Path, loop: Loop, former: Release) -> None:
    """Not before all are upgraded. Then a process of the release before ends with 78 and a sentence that says what to
    do, while the run goes on. With the ledger's former file, which was kept, that release has the run back.
    """
    with MixedDeployment(tmp_path, loop, former) as run:
        run.start()
        for name in run.names[:-1]:
            run.restart(name, PRESENT, kill=False)
        run.progress(2, by=run.clusters)
        *_, last = run.names
        done = CliRunner().invoke(cli, ["finalise", "--config", str(run.file)])
        assert done.exit_code == 1, done.output
        assert f"not known to speak {PROTOCOL}: cluster {last};" in done.output
        run.restart(last, PRESENT, kill=False)
        run.progress(1, by=run.clusters)
        shown = CliRunner().invoke(cli, ["status", "--config", str(run.file)]).output
        assert f"protocol: speaks {OLDEST_PROTOCOL}, can speak {PROTOCOL}: dips finalise" in shown
        done = CliRunner().invoke(cli, ["finalise", "--config", str(run.file)])
        assert done.exit_code == 0 and f"the run speaks {PROTOCOL};" in done.output, done.output
        run.progress(2, by=run.clusters)
        for name in ("ps2", "east", "master"):
            refuse_former(run, name, former)
        run.check()
        kept = run.master_directory / f"ledger.format{OLDEST_PROTOCOL}.sqlite"
        with closing(Ledger.open(kept, readonly=True)) as ledger:
            assert ledger.run_row().protocol == OLDEST_PROTOCOL
        go_back(run, kept, former)


def go_back(run: MixedDeployment, kept: Path, former: Release) -> None:
    """Put the former file in place, as docs/guides/operations.md#upgrade says: the release before goes on.

    What was pushed since that file was kept is in θ, and no longer in the ledger: nothing can be added up.
    """
    for name in reversed(run.names):
        run.process(name).terminate()
    head, ledger = run.head(), run.master_directory / "ledger.sqlite"
    for beside in ("-wal", "-shm"):
        Path(f"{ledger}{beside}").unlink(missing_ok=True)
    kept.replace(ledger)
    run.releases = dict.fromkeys(run.names, former)
    words = [*run.commands["master"], "recover", "--config", str(run.file), "--yes", "--adopt", str(head)]
    recovered = run._make_process("recover", words, run.directory / "recover.log")
    recovered.wait_for_end(SEEN_S)
    assert recovered.code == 0, recovered.tail()
    run.start_all()
    run.progress(2, by=run.clusters)
    run.check_releases()
    run.all_live()
    assert head in run.lineage() and run.head().version >= head.version + 2


def refuse_former(run: MixedDeployment, name: str, former: Release) -> None:
    """Start a process of the release before in the place of one: it ends by itself, and says why."""
    if name in run.clusters:
        run.end_agent(name)
    else:
        run.process(name).terminate()
    run.releases[name] = former
    refused = run.start_one(name)
    run.until(lambda: refused.code is not None, END_S, f"{name} of the release before ends")
    assert refused.code == REFUSED, refused.tail()
    expected = (
        f"expected ledger format {OLDEST_PROTOCOL}, got {PROTOCOL}" if name == "master" else "install a release there"
    )
    assert expected in refused.tail(), refused.tail()
    run.releases[name] = PRESENT
    run.start_one(name)
    run.progress(1, by=run.clusters)
