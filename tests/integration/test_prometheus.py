"""A real Prometheus scrapes a secured run by the example configuration: dashboard and alerts answer, and each alert
fires in an incident that is provoked, and clears when that is mended.
"""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from dips.identity.names import PeerRole
from tests.chaos import disks
from tests.enrolled import Enrolled
from tests.expressions import list_alerts, list_panels
from tests.integration import cluster_harness as harness
from tests.integration.prometheus import Prometheus, hurried_rules, scrape_config
from tests.integration.test_mistakes import CLI, type_words
from tests.integration.train_constant import tensors

HERE = Path(__file__).parent
TOKEN = "0123456789abcdef" * 2
FIRES_S, CLEARS_S = 60.0, 90.0
# Thresholds that a run of minutes reaches: alert → what its expression says, what it says here.
NEAR = {
    "DipsNoProgress": ("300, 43200", "12, 12"),
    "DipsClusterStale": ("> 20", "> 4"),
    "DipsMasterSilent": ("> 120", "> 2"),
    "DipsMasterRestarts": ("> 2", "> 0"),
    "DipsTrainerRestarts": ("> 3", "> 0.9"),
    "DipsRoundsSkipped": (">= 3", "> 0"),
}
# Nothing to see there while all is well: nobody is refused, nobody is asked to; and no cluster is a planned pipeline.
STAGES = {f"Stages of a planned pipeline: {what}" for what in ("idle, by cause", "most bytes of a device")}
EMPTY_WHEN_WELL = {"Refused per minute", "Alerts", *STAGES}
missing = [name for name in ("prometheus",) if shutil.which(name) is None]
# A master whose journal begins a segment every few seconds: those of a real one last for days.
SMALL_SEGMENTS = (
    "from dips.master.journal import Journal; Journal.__init__.__defaults__ = (4096,); "
    "from dips.master.app import main; main()"
)
OTHER_RELEASE = "import dips; dips.__version__ = '0.0.9'; from dips.master.app import main; main()"


class Incidents:
    """A run of two slaves and two clusters, and the Prometheus that watches it."""

    def __init__(self, directory: Path, run: harness.Run, enrolled: Enrolled, watch: Prometheus) -> None:
        self.directory, self.run, self.enrolled, self.watch = directory, run, enrolled, watch

    def until_fire(self, *alerts: str) -> None:
        self._wait(lambda firing: set(alerts) <= firing, FIRES_S, f"{', '.join(alerts)} fire")

    def until_clear(self, *alerts: str) -> None:
        """These alone, or all."""
        self._wait(
            lambda firing: not (firing & set(alerts) if alerts else firing), CLEARS_S, f"{alerts or 'all'} clear"
        )

    def _wait(self, holds: object, within_s: float, what: str) -> None:
        end = time.monotonic() + within_s
        while not holds(firing := self.watch.firing()):  # type: ignore[operator]
            assert time.monotonic() < end, f"not within {within_s:g} s: {what}; fire now: {sorted(firing)}"
            time.sleep(0.2)

    def tell(self, cluster: str, mode: str) -> None:
        (self.directory / f"{cluster}.out.mode").write_text(mode)

    def process(self, name: str) -> harness.Process:
        return next(p for p in self.run.processes if p.name == name and p.code is None)

    def start_cluster(self, name: str) -> None:
        command = [sys.executable, str(HERE / "train_incidents.py"), str(self.directory / f"{name}.out")]
        self.run.start_cluster(name, command, steps=6, http=f"127.0.0.1:{self.ports[name]}", max_restarts=20)

    ports: dict[str, int]


def write_keys(directory: Path, ports: dict[str, int]) -> None:
    """The keys of HTTP and of mirrors that the harness has no words for."""
    file = directory / "dips.yaml"
    content = yaml.safe_load(file.read_text())
    for section in (content["master"], *content["slaves"]):
        name = section.get("name", "master")
        section["http"] = f"0.0.0.0:{ports[name]}"
    content["http_token"] = "certs/http.token"
    content["master"].update(mirror="ledger-mirror", most_rollback=0)
    content["slaves"][0]["mirror"] = "ps0-mirror"
    file.write_text(yaml.safe_dump(content))


@contextmanager
def incidents(directory: Path) -> Iterator[Incidents]:
    if why := disks.missing():
        pytest.skip(f"NO SMALL DISK: {why}")
    certs = directory / "certs"
    enrolled = Enrolled(certs, run="test")
    roles = [("master", "master"), ("ps0", "slave"), ("ps1", "slave"), ("west", "cluster"), ("east", "cluster")]
    for name, role in [*roles, ("operator", "operator"), ("prometheus", "viewer")]:
        enrolled.enroll(name, PeerRole(role))
    (certs / "http.token").write_text(TOKEN)
    (certs / "http.token").chmod(0o600)
    for mirror in ("ledger-mirror", "ps0-mirror"):
        (directory / mirror).mkdir()
    ports = {name: harness.free_port() for name in ("master", "ps0", "ps1", "west", "east")}
    at = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    words = {
        "my-run": "test", "slave-0": "ps0", "slave-1": "ps1", "certs/": f"{certs}/",
        '"127.0.0.1:9431"': f'"{at["west"]}", "{at["east"]}"', "master.example:9400": at["master"],
        "ps0.example:9400": at["ps0"], "ps1.example:9400": at["ps1"],
    }  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(disks.small_disk(directory / "ps1", kib=4096))
        security = {"tls": "certs/{name}.{role}.crt"}
        shared = {"penalty": {"warmup_rounds": 3}}
        run = stack.enter_context(harness.Run(directory, tensors(), shared=shared, security=security))
        write_keys(directory, ports)
        watch = Prometheus(directory / "prometheus", scrape_config(words), hurried_rules(NEAR))
        it = Incidents(directory, run, enrolled, stack.enter_context(watch))
        it.ports = ports
        run.commands["master"] = [sys.executable, "-c", SMALL_SEGMENTS]
        run.start_servers()
        for cluster in ("west", "east"):
            it.start_cluster(cluster)
        yield it


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(missing), reason=f"not here (Debian: prometheus): {', '.join(missing)}")
def test_every_expression_answers_and_every_alert_fires_and_clears(tmp_path: Path) -> None:
    with incidents(tmp_path) as it:
        when_all_is_well(it)
        for incident in INCIDENTS:
            begun = time.monotonic()
            incident(it)
            it.until_clear()
            print(f"{incident.__name__}: {time.monotonic() - begun:.0f} s")
        names = {rule["alert"] for rule in list_alerts()}
        assert sorted(names - it.watch.fired) == [], "never fired"


def when_all_is_well(it: Incidents) -> None:
    """Every target is up; every expression answers, all of the dashboard with something; no alert fires."""
    it.run.until(lambda: set(it.watch.targets().values()) == {"up"}, 60, f"all are scraped: {it.watch.targets()}")
    it.run.until(lambda: it.watch.query("min(dips_cluster_accepted_total) >= 4"), 90, "both clusters' pushes count")
    it.until_clear()
    for rule in hurried_rules(NEAR)["groups"]:
        for alert in rule["rules"]:
            assert it.watch.query(alert["expr"]) == [], alert["alert"]
    empty = {title for title, expression in list_panels() if not it.watch.query(expression)}
    assert empty <= EMPTY_WHEN_WELL


# ---- incidents: each is provoked, seen, and mended -------------------------------------------------------------------


def strangers_knock(it: Incidents) -> None:
    """Wrong tokens at a port, a certificate that is nearly over, a host that pauses."""
    it.enrolled.enroll_ending("ps1", PeerRole.SLAVE, timedelta(hours=1))
    os.kill(it.process("west").pid, signal.SIGSTOP)
    time.sleep(1.6)
    os.kill(it.process("west").pid, signal.SIGCONT)
    wrong = urllib.request.Request(
        f"https://127.0.0.1:{it.ports['ps0']}/metrics", headers={"Authorization": "Bearer x"}
    )
    context = ssl._create_unverified_context()
    for _ in range(4):
        for _ in range(15):
            with suppress(urllib.error.HTTPError):
                urllib.request.urlopen(wrong, context=context, timeout=10)
        time.sleep(1.1)  # between two scrapes: a counter that is seen for the first time has not risen
    it.until_fire("DipsRefusals", "DipsCertificateExpires", "DipsCertificateExpired", "DipsLoopLag")
    it.enrolled.enroll("ps1", PeerRole.SLAVE)


def a_cluster_goes_wild(it: Incidents) -> None:
    """Its pushes are gated until it is quarantined; mended and readmitted it is as before."""
    it.tell("east", "wild")
    it.until_fire("DipsClusterGated", "DipsClusterQuarantined")
    code, said = type_words(
        *CLI, "cluster", "readmit", "east", "--config", str(it.directory / "dips.yaml"), cwd=it.directory
    )
    assert code == 0, said
    it.tell("east", "steady")


def a_trainer_stands_still_and_dies(it: Incidents) -> None:
    """Inner steps are over at once, so all else is standstill; it takes none while the other goes on; it is killed,
    twice, and stays away until that is seen."""
    it.tell("west", "eager")
    it.until_fire("DipsStandstill")
    it.tell("west", "steady")
    it.tell("east", "still")
    it.until_fire("DipsClusterStale")
    it.tell("east", "steady")
    for _ in range(2):
        it.run.until(lambda: it.watch.query("min(dips_agent_training) == 1"), 30, "the trainer is back")
        it.tell("east", "away")
        with suppress(ProcessLookupError):
            os.kill(int((it.directory / "east.out.pid").read_text()), signal.SIGKILL)
        it.until_fire("DipsTrainerDead")
        it.tell("east", "steady")
    it.until_fire("DipsTrainerRestarts")


def a_slave_dies_in_a_round(it: Incidents) -> None:
    """The round breaks, and nothing goes on without it; it comes back by itself on the same disk."""
    it.tell("east", "still")  # so that the window stays open for it
    time.sleep(3)
    marks = it.directory / "master" / "timeline.jsonl"
    opened = marks.read_text().count("round_opened")
    it.run.until(lambda: marks.read_text().count("round_opened") > opened, 30, "a round is open")
    it.process("ps1").kill()
    it.tell("east", "steady")
    it.until_fire("DipsSlaveDown", "DipsSlaveLost", "DipsNotReady", "DipsNoProgress", "DipsRoundsSkipped")
    it.run.start_slave("ps1")


def a_disk_goes_back(it: Incidents) -> None:
    """Both slaves die, and one has lost the run's newest version: an operator says that the run goes back."""
    for name in ("ps0", "ps1"):
        it.process(name).kill()
    head = it.run.lineage()[-1]  # a disk may have a later one, of a round that was not over
    kept = disks.versions(it.directory / "ps1")
    common = max(version for version in kept if version < head)
    for lost in kept[kept.index(common) + 1 :]:
        shutil.rmtree(it.directory / "ps1" / str(lost))
    it.run.start_slaves()
    it.until_fire("DipsRollbackWaits")
    words = ("rollback", str(common), "--config", str(it.directory / "dips.yaml"))
    code, said = type_words(*CLI, *words, cwd=it.directory)
    assert code == 0, said
    it.until_fire("DipsVersionsUndone")


def a_disk_is_full(it: Incidents) -> None:
    """Versions are made that are not durable, and said to be so, until there is room."""
    with disks.full(it.directory / "ps1"):
        it.until_fire("DipsDiskAlmostFull", "DipsNotDurable")


def mirrors_and_journal_fail(it: Incidents) -> None:
    """The mirrors' directories are gone, the journal's next files are taken; all recover by themselves."""
    master = it.directory / "master"
    for mirror in ("ledger-mirror", "ps0-mirror"):
        (it.directory / mirror).rename(it.directory / f"{mirror}.away")
    newest = max(master.glob("journal-*.jsonl"), key=lambda path: path.stat().st_mtime)
    _, term, number = newest.stem.split("-")
    taken = [master / f"journal-{term}-{int(number) + more}.jsonl" for more in range(1, 400)]
    made = []
    for path in taken:
        with suppress(FileExistsError):  # the journal goes on meanwhile
            path.mkdir()
            made.append(path)
    it.until_fire("DipsSlaveMirrorBehind", "DipsLedgerMirrorBehind", "DipsJournalNotWritten")
    for mirror in ("ledger-mirror", "ps0-mirror"):
        (it.directory / f"{mirror}.away").rename(it.directory / mirror)
    for path in made:
        with suppress(FileNotFoundError):
            path.rmdir()


def the_master_dies(it: Incidents) -> None:
    """Agents cannot reach it; it comes back as another release, and then as this one."""
    it.process("master").kill()
    it.until_fire("DipsMasterDown", "DipsMasterSilent")
    ours, it.run.commands["master"] = it.run.commands["master"], [sys.executable, "-c", OTHER_RELEASE]
    it.run.start_master()
    it.until_fire("DipsReleasesDiffer", "DipsMasterRestarts")
    it.process("master").terminate()
    it.run.commands["master"] = ours
    it.run.start_master()


def all_clusters_leave(it: Incidents) -> None:
    """First one, then the other; then both come back."""
    it.process("east").terminate()
    it.until_fire("DipsAgentDown", "DipsClusterLost")
    it.process("west").terminate()
    it.until_fire("DipsNobodyTrains")
    for cluster in ("west", "east"):
        it.start_cluster(cluster)


def the_standby_dies(it: Incidents) -> None:
    """A second master waits at the same mirror until it is killed, and comes back. (The last: it would take over.)"""
    file = yaml.safe_load((it.directory / "dips.yaml").read_text())
    listen, http = (f"127.0.0.1:{harness.free_port()}" for _ in range(2))
    file["master"] |= {"listen": listen, "http": http, "directory": "standby"}
    (path := it.directory / "standby.yaml").write_text(yaml.safe_dump(file))
    words = [*it.run.commands["master"], "--config", str(path), "--standby"]
    it.run._start("standby", words)
    it.run.until(lambda: it.watch.query("max(dips_standbys_ready) > 0"), 60, "a standby is ready")
    it.process("standby").kill()
    it.until_fire("DipsNoStandby")
    it.run._start("standby", words)


INCIDENTS = (
    strangers_knock,
    a_cluster_goes_wild,
    a_trainer_stands_still_and_dies,
    a_slave_dies_in_a_round,
    a_disk_goes_back,
    a_disk_is_full,
    mirrors_and_journal_fail,
    the_master_dies,
    all_clusters_leave,
    the_standby_dies,
)
