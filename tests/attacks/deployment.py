"""A run that trains while it is attacked: a master, two slaves, two clusters, with certificates or in plain text.

What the attackers hold is here, too: files of certificates, true and forged. Counters are read from the daemons' own
metrics, memory from the kernel.
"""

from __future__ import annotations

import re
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from dips.identity import certificates, pem_files
from dips.identity.certificates import utc_now
from dips.identity.names import PeerIdentity, PeerRole, make_identity
from dips.identity.paths import TlsFiles
from tests.enrolled import Enrolled
from tests.integration import cluster_harness as harness
from tests.integration.test_client_agent import tensors
from tests.integration.test_mistakes import tiny

RUN = "test"  # the harness's
CLUSTERS = ("west", "east")
COUNT_S = 30.0  # until what was refused is counted: handshakes are given up after 10 s
ROUNDS_S = 30.0  # for the run beside an attack to make two more versions
GROWTH = 0.10  # of a daemon's memory
GROWTH_BYTES = 48 << 20  # and so much besides: sockets of a flood, and what an allocator keeps of them
_COUNT = re.compile(r'^dips_refusals_total\{reason="(\w+)"\} (\S+)$', re.MULTILINE)


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
    expected: dict[str, Counter[str]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)  # of a daemon's memory, in bytes, as seen after each attack

    def __enter__(self) -> AttackedRun:
        self.directory.mkdir()
        security: dict[str, Any] = {"insecure": True}
        if self.secured:
            self.enrolled = Enrolled(self.directory / "certs", RUN)
            names = [("master", PeerRole.MASTER), ("ps0", PeerRole.SLAVE), ("ps1", PeerRole.SLAVE)]
            for name, role in [*names, *((cluster, PeerRole.CLUSTER) for cluster in CLUSTERS)]:
                self.enrolled.enroll(name, role)
            security = {
                "tls": {
                    "ca": "certs/ca/ca.crt",
                    "cert": "certs/{name}.{role}.crt",
                    "key": "certs/{name}.{role}.key",
                    "crl": "certs/ca/crl.pem",
                }
            }
        self.metrics = {name: f"127.0.0.1:{harness.free_port()}" for name in ("master", "ps0", "ps1")}
        shared = {"penalty": {"rule": "none"}, "stop": {"versions": 1_000_000}}
        self.run = harness.Run(self.directory, tensors(), shared=shared, slaves=2, security=security)
        try:
            self._start()
        except BaseException as error:
            self.run.__exit__(type(error), error, None)
            raise
        return self

    def _start(self) -> None:
        self._serve_metrics()
        self.daemons = {"master": self.run.start_master()}
        self.daemons |= {name: self.run.start_slave(name) for name in self.run.slaves}
        for cluster in CLUSTERS:
            self.run.start_cluster(cluster, tiny(self.directory), steps=10)
        self.run.until(lambda: self._has_begun(), 90.0, "both clusters train")
        self._rss = {name: self.read_rss(name) for name in self.daemons}

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
        lines = (self.directory / f"{daemon}.log").read_text().splitlines()
        return next(said for said in map(yaml.safe_load, lines) if said.get("event") == "serving")

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
        )
        pem_files.write_public(files.cert, pem_files.to_pem(signed))
        pem_files.write_private(files.key, certificates.key_to_pem(key))
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

    def note_attack(self, attack: str, certificate: str, refused_by: str, daemon: str, reason: str, times: int) -> None:
        """It was refused, which the daemon must have counted by `reason`."""
        self.rows.append(Row(attack, certificate, refused_by, f"{daemon}: {reason} ≥ {times}" if reason else "-"))
        if reason:
            self.expected.setdefault(daemon, Counter())[reason] += times

    def read_refusals(self, daemon: str) -> dict[str, float]:
        return {reason: float(value) for reason, value in _COUNT.findall(self._scrape(daemon))}

    def read_standing(self) -> RunProgress:
        text = self._scrape("master")
        accepted = {cluster: _read(text, f'dips_cluster_accepted_total{{cluster="{cluster}"}}') for cluster in CLUSTERS}
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

    def require_memory(self) -> None:
        for name, before in self._rss.items():
            now, most = self.read_rss(name), int(before * (1 + GROWTH)) + GROWTH_BYTES
            self.peaks[name] = max(now, self.peaks.get(name, 0))
            assert now <= most, f"{name}: {now >> 20} MiB, {before >> 20} before the attacks, at most {most >> 20}"

    def describe_memory(self) -> str:
        grown = (f"{name} {self._rss[name] >> 20} → {peak >> 20} MiB" for name, peak in self.peaks.items())
        return f"memory of the {'secured' if self.secured else 'plain'} run: {', '.join(grown)}"

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

    def _scrape(self, daemon: str) -> str:
        with urllib.request.urlopen(f"http://{self.metrics[daemon]}/metrics", timeout=10) as reply:
            return str(reply.read().decode())

    def _serve_metrics(self) -> None:
        content: Mapping[str, Any] = yaml.safe_load(self.run.file.read_text())
        content["master"]["metrics"] = self.metrics["master"]
        for slave in content["slaves"]:
            slave["metrics"] = self.metrics[slave["name"]]
        self.run.file.write_text(yaml.safe_dump(content))


def _read(text: str, name: str) -> int:
    line = next((line for line in text.splitlines() if line.startswith(name + " ")), None)
    if line is None:
        raise ValueError(f"no {name}")
    return int(float(line.rpartition(" ")[2]))
