"""A run that trains while it is attacked: a master, two slaves, two clusters, with certificates or in plain text.

What the attackers hold is here, too: files of certificates, true and forged. Counters are read from the daemons' own
metrics, memory from the kernel.
"""

from __future__ import annotations

import json
import re
import ssl
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from dips.commands.planning import MASTER_BYTES
from dips.identity import certificates
from dips.identity.certificates import utc_now
from dips.identity.names import PeerIdentity, PeerRole, make_identity
from dips.identity.paths import TlsFiles
from tests.enrolled import Enrolled
from tests.integration import cluster_harness as harness
from tests.integration.test_mistakes import tiny
from tests.integration.train_constant import tensors

RUN = "test"  # the harness's
CLUSTERS = ("west", "east")
START_S = 150.0
COUNT_S = 30.0  # until what was refused is counted: handshakes are given up after 10 s
ROUNDS_S = 30.0  # for the run beside an attack to make two more versions
GROWTH = 0.10  # above the sum that a slave prints at its start, and `dips plan memory` for a master
AGENT_BYTES = 200_000_000  # of an agent, for which no sum is printed
TOKEN = "a-token-of-those-who-read-the-metrics"
JOB_TOKEN = "a-token-of-the-ranks-of-one-job"
_SUM = re.compile(r"= ([\d.]+) (MiB|GiB)$")
_COUNT = re.compile(r'^dips_refusals_total\{reason="(\w+)",run="[^"]*"\} (\S+)$', re.MULTILINE)


@dataclass
class Row:
    """A line of the table."""

    attack: str
    certificate: str
    refused_by: str
    counter: str


@dataclass
class RunProgress:
    """What must not have changed for the worse."""

    applied: int
    skipped: int
    accepted: dict[str, int]


@dataclass
class AttackedRun:
    """Started by `with`; `expected` is what the attacks so far must have made the daemons count."""

    directory: Path
    secured: bool
    mode: str = "steps"  # of its clusters' script
    options: Mapping[str, Any] = field(default_factory=dict)  # of the section `shared`, besides
    master: Mapping[str, Any] = field(default_factory=dict)  # keys of the master's section
    expected: dict[str, Counter[str]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)  # of a daemon's memory, in bytes, as seen after each attack

    def __enter__(self) -> AttackedRun:
        self.directory.mkdir()
        if mirror := self.master.get("mirror"):
            (self.directory / mirror).mkdir()
        security: dict[str, Any] = {"tls": False}
        if self.secured:
            self.enrolled = Enrolled(self.directory / "certs", RUN)
            names = [("master", PeerRole.MASTER), ("ps0", PeerRole.SLAVE), ("ps1", PeerRole.SLAVE)]
            for name, role in [*names, *((cluster, PeerRole.CLUSTER) for cluster in CLUSTERS)]:
                self.enrolled.enroll(name, role)
            security = {"tls": "certs/{name}.{role}.crt"}
        self.http = {name: harness.free_port() for name in ("master", "ps0", "ps1", *CLUSTERS)}
        self.agent_line = harness.free_port()  # west's, for ranks of other hosts
        self.viewer: ssl.SSLContext | None = None
        if self.secured:
            self.viewer = self.client_context(self.certificate_of("scraper", PeerRole.VIEWER))
        shared = {"penalty": {"gates": []}, "stop": {"versions": 1_000_000}, **self.options}
        self.run = harness.Run(
            self.directory, tensors(), shared=shared, slaves=2, security=security, master=self.master
        )
        try:
            self._start()
        except BaseException as error:
            self.run.__exit__(type(error), error, None)
            raise
        return self

    def _start(self) -> None:
        self._write_ports()
        self.daemons = {"master": self.run.start_master()}
        self.daemons |= {name: self.run.start_slave(name) for name in self.run.slaves}
        for cluster in CLUSTERS:
            line = {"agent": f"127.0.0.1:{self.agent_line}", "token": "job.token"} if cluster == CLUSTERS[0] else {}
            agent = self.run.start_cluster(
                cluster, tiny(self.directory, self.mode), steps=10, http=self._http_address(cluster), **line
            )
            self.daemons[cluster] = agent
        self.run.until(lambda: self._has_begun(), START_S, "both clusters train")
        self._most = {name: self.most_bytes(name) for name in self.daemons}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.run.__exit__(kind, error, at)

    # ---- whom to attack --------------------------------------------------------------------------------------------

    def address_of(self, daemon: str) -> str:
        """Its gRPC port."""
        if daemon == "master":
            return self.run.address
        return str(self._serving_of(daemon)["address"])

    def lane_of(self, slave: str) -> tuple[str, int]:
        host, _, port = self._serving_of(slave)["lanes"][0].rpartition(":")
        return host, int(port)

    def _serving_of(self, daemon: str) -> dict[str, Any]:
        return self._said_of(daemon, "serving")

    def _said_of(self, daemon: str, event: str) -> dict[str, Any]:
        """The first line of its log with this event."""
        lines = (self.directory / f"{daemon}.log").read_text().splitlines()
        return next(said for said in map(json.loads, lines) if said.get("event") == event)

    # ---- certificates ----------------------------------------------------------------------------------------------

    def certificate_of(self, name: str, role: PeerRole) -> TlsFiles:
        """That of an enrolled process."""
        return self.enrolled.enroll(name, role)

    def forge(self, stem: str, sans: list[str], *, begin_s: float = -60.0, end_s: float = 3600.0) -> TlsFiles:
        """One that our authority has signed, and never would."""
        authority, key = self.enrolled.authority, certificates.new_key()
        begin, end = (utc_now() + timedelta(seconds=s) for s in (begin_s, end_s))
        builder = x509.CertificateBuilder().subject_name(certificates._common_name(stem))
        builder = builder.issuer_name(authority.root.subject).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)
        names = x509.SubjectAlternativeName([x509.DNSName(san) for san in sans])
        signed = builder.add_extension(names, critical=False).sign(authority._key, hashes.SHA256())
        files = TlsFiles(
            self.directory / "certs" / "ca" / "ca.crt",
            self.directory / f"{stem}.crt",
            self.directory / f"{stem}.key",
            self.directory / "certs" / "ca" / "crl.pem",
        )
        certificates.write_public(files.cert, certificates.to_pem(signed))
        certificates.write_private(files.key, certificates.key_to_pem(key))
        return files

    def forge_elsewhere(self, run: str = RUN) -> TlsFiles:
        """West's name, signed by an authority that calls itself as ours does."""
        directory = self.directory / f"elsewhere-{len(self.rows)}"
        directory.mkdir()
        files = Enrolled(directory, run).enroll("west", PeerRole.CLUSTER)
        files.ca.write_bytes((self.directory / "certs" / "ca" / "ca.crt").read_bytes())
        return files

    @staticmethod
    def identity(name: str, role: PeerRole) -> PeerIdentity:
        return make_identity(name, role, RUN)

    # ---- what came of it -------------------------------------------------------------------------------------------

    def note_attack(
        self, attack: str, certificate: str, refused_by: str, daemon: str, reason: str, times: int, why: str = ""
    ) -> None:
        """It was refused, which the daemon must have counted by `reason`; `why` no count can be."""
        assert bool(reason) != bool(why), "counted, or it is said why not"
        self.rows.append(Row(attack, certificate, refused_by, f"{daemon}: {reason} ≥ {times}" if reason else why))
        if reason:
            self.expected.setdefault(daemon, Counter())[reason] += times

    def read_refusals(self, daemon: str) -> dict[str, float]:
        return {reason: float(value) for reason, value in _COUNT.findall(self._scrape(daemon))}

    def going_on(self) -> Iterator[None]:
        """Around a test: the run beside it goes on, and no daemon has taken more memory than it may."""
        before = self.read_standing()
        yield
        self.require_rounds(before)
        self.require_memory()

    def read_standing(self) -> RunProgress:
        text = self._scrape("master")
        accepted = {
            cluster: _read(text, "dips_cluster_accepted_total", f'cluster="{cluster}",') for cluster in CLUSTERS
        }
        return RunProgress(_read(text, "dips_rounds_applied_total"), _read(text, "dips_rounds_skipped_total"), accepted)

    def read_rss(self, daemon: str) -> int:
        return int(psutil.Process(self.daemons[daemon].pid).memory_info().rss)

    def require_rounds(self, before: RunProgress) -> None:
        """The run beside it goes on, with both clusters, and has lost no round."""

        def goes_on() -> bool:
            now = self.read_standing()
            each = all(now.accepted[name] > before.accepted[name] for name in CLUSTERS)
            return each and now.applied >= before.applied + 2

        self.run.until(goes_on, ROUNDS_S, "the run beside the attack makes two more versions")
        assert self.read_standing().skipped == before.skipped, "a round was lost"

    def most_bytes(self, daemon: str) -> int:
        """What it may have: its printed sum and a tenth."""
        if daemon in CLUSTERS:
            return AGENT_BYTES
        if daemon == "master":
            return int(MASTER_BYTES * (1 + GROWTH))
        found = _SUM.search(self._said_of(daemon, "memory")["sum"])
        assert found, "a slave prints its sum"
        return int(float(found[1]) * (1 << {"MiB": 20, "GiB": 30}[found[2]]) * (1 + GROWTH))

    def require_memory(self) -> None:
        for name, most in self._most.items():
            now = self.read_rss(name)
            self.peaks[name] = max(now, self.peaks.get(name, 0))
            assert now <= most, f"{name}: {now >> 20} MiB of physical memory, at most {most >> 20}"

    def describe_memory(self) -> str:
        """For the table: what a daemon had at most, of what it might."""
        grown = (f"{name} {peak >> 20} of {self._most[name] >> 20} MiB" for name, peak in self.peaks.items())
        run = "secured" if self.secured else "plain"
        return f"memory of the {run} run, of the printed sum + 10 % (agents print none): {', '.join(grown)}"

    def require_counted(self) -> None:
        until = time.monotonic() + COUNT_S
        while missing := self._find_missing():
            assert time.monotonic() < until, f"refused and not counted: {'; '.join(missing)}"
            time.sleep(0.5)

    def _find_missing(self) -> list[str]:
        found = []
        for daemon, reasons in self.expected.items():
            counted = self.read_refusals(daemon)
            found += [
                f"{daemon} {reason}: {counted.get(reason, 0):g} of {times}"
                for reason, times in reasons.items()
                if counted.get(reason, 0) < times
            ]
        return found

    def _has_begun(self) -> bool:
        try:
            return min(self.read_standing().accepted.values()) >= 2
        except (OSError, ValueError):
            return False

    # ---- HTTP ports ------------------------------------------------------------------------------------------------

    @property
    def base_url(self) -> str:
        return "https://127.0.0.1" if self.secured else "http://127.0.0.1"

    def client_context(self, files: TlsFiles | None) -> ssl.SSLContext:
        """Of a reader who trusts the run's authority, and shows a certificate if he has one."""
        context = ssl.create_default_context(cafile=str(self.directory / "certs" / "ca" / "ca.crt"))
        context.check_hostname = False  # it has the daemon's name, no address
        if files is not None:
            context.load_cert_chain(files.cert, files.key)
        return context

    def _scrape(self, daemon: str) -> str:
        url = f"{self.base_url}:{self.http[daemon]}/metrics"
        with urllib.request.urlopen(url, timeout=10, context=self.viewer) as reply:
            return str(reply.read().decode())

    def _http_address(self, daemon: str) -> str:
        """Not of loopback, where there are certificates: it speaks TLS then."""
        return f"{'0.0.0.0' if self.secured else '127.0.0.1'}:{self.http[daemon]}"

    def _write_ports(self) -> None:
        """Every daemon has an HTTP port; the secured master's takes a token, too."""
        content: Mapping[str, Any] = yaml.safe_load(self.run.file.read_text())
        content["master"]["http"] = self._http_address("master")
        for slave in content["slaves"]:
            slave["http"] = self._http_address(slave["name"])
        for name, token in (("http.token", TOKEN), ("job.token", JOB_TOKEN)):
            certificates.write_private(self.directory / name, token.encode())
        if self.secured:
            content["http_token"] = "http.token"
        self.run.file.write_text(yaml.safe_dump(content))


def _read(text: str, name: str, labels: str = "") -> int:
    """Return a metric's value; `labels`: those before `run`, each with its comma."""
    found = re.search(rf'^{name}\{{{re.escape(labels)}run="[^"]*"\}} (\S+)$', text, re.MULTILINE)
    if found is None:
        raise ValueError(f"no {name}")
    return int(float(found[1]))
