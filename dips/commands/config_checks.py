"""Findings of `dips check` in the files themselves, and on this machine. Asks nobody, changes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from dips.commands.options import open_ledger
from dips.config import ClusterFile, RunFile, host_port, load_cluster, load_run
from dips.config.reading import is_cluster_file
from dips.config.section import TlsKey
from dips.differences import differing_options
from dips.errors import ConfigError, DipsError
from dips.identity.certificates import ends_soon, utc_now
from dips.identity.names import MASTER_NAME, PeerRole
from dips.identity.paths import REVOCATIONS
from dips.identity.tls_files import load_tls, require_identity
from dips.printable import FAIL, NOTE, OK, CheckFinding

OPERATOR = "operator"


@dataclass
class CheckedFiles:
    """The files of a check, each read once."""

    rows: list[CheckFinding] = field(default_factory=list)  # one of each file: it was read, or why not
    runs: list[tuple[Path, RunFile]] = field(default_factory=list)
    clusters: list[tuple[Path, ClusterFile]] = field(default_factory=list)
    only_clusters: bool = True  # no run file was given, not even one with wrong keys


def read_files(files: Sequence[Path]) -> CheckedFiles:
    """Read all files; those that cannot be read have only a row."""
    found = CheckedFiles()
    for path in files:
        try:
            if is_cluster_file(path):
                found.clusters.append((path, cluster := load_cluster(path)))
                found.rows.append(CheckFinding(str(path), OK, f"cluster {cluster.cluster} of run {cluster.shared.run}"))
            else:
                found.only_clusters = False
                found.runs.append((path, run := load_run(path)))
                found.rows.append(CheckFinding(str(path), OK, f"run {run.shared.run}"))
        except ConfigError as error:
            found.rows.append(CheckFinding(str(path), FAIL, str(error).removeprefix(f"{path}: ")))
    return found


def check_files(files: CheckedFiles, labels: tuple[str, ...] = (), now: datetime | None = None) -> list[CheckFinding]:
    """Return the rows of all files."""
    rows, known = list(files.rows), set[str]()
    for path, run in files.runs:
        processes = [(MASTER_NAME, PeerRole.MASTER), *((s.name, PeerRole.SLAVE) for s in run.slaves)]
        if run.master.on_version is not None:
            from dips.commands.version_process import PULLED_AS

            processes.append((PULLED_AS, PeerRole.PULLER))
        processes.append((OPERATOR, PeerRole.OPERATOR))
        known |= {f"{name}.{role}" for name, role in processes}
        rows += _check_run(path, run)
        rows += _check_tls(path, run, run.shared.run, processes, labels, now)
    for path, cluster in files.clusters:
        process = [(cluster.cluster, PeerRole.CLUSTER)]
        known.add(f"{cluster.cluster}.{PeerRole.CLUSTER}")
        rows += _check_tls(path, cluster, cluster.shared.run, process, labels, now)
        for run_path, run in files.runs:
            rows += _check_agreement(path, cluster, run_path, run)
    rows += [
        CheckFinding("--for", FAIL, f"{label} is in none of these files", f"expected one of {', '.join(sorted(known))}")
        for label in labels
        if label not in known
    ]
    return rows


# ---- the run file --------------------------------------------------------------------------------------------------


def _check_run(path: Path, run: RunFile) -> Iterator[CheckFinding]:
    yield from _check_addresses(path, run)
    yield from _check_directories(path, run)
    if not run.tls and run.clusters is not None:
        yield CheckFinding(
            f"{path}: clusters", NOTE, "with `tls: off` nobody proves its name, so the list keeps nobody out"
        )
    yield from _check_ledger(path, run)


def _check_addresses(path: Path, run: RunFile) -> Iterator[CheckFinding]:
    """Check that no port is used twice on one host; port 0 means any free port."""
    users = defaultdict[tuple[str, int], list[str]](list)
    listening = [("master.listen", run.master.listen), ("master.http", run.master.http)]
    for s in run.slaves:
        listening += [(f"slaves.{s.name}.{key}", getattr(s, key)) for key in ("listen", "http")]
        listening += [(f"slaves.{s.name}.lanes", lane) for lane in (s.lanes if isinstance(s.lanes, tuple) else ())]
    for key, address in listening:
        if address is not None and host_port(address)[1]:
            users[host_port(address)].append(key)
    for (host, port), keys in users.items():
        if len(keys) > 1 and not _on_own_machines(host):
            yield CheckFinding(
                f"{path}: {keys[1]}", FAIL, f"{host}:{port} is {keys[0]}'s, too", "give each a port of its own"
            )
    for s in run.slaves:
        if host_port(s.master)[1] != host_port(run.master.listen)[1]:
            yield CheckFinding(
                f"{path}: slaves.{s.name}.master", NOTE, f"{s.master}, while the master listens on {run.master.listen}",
                "right if something between them translates ports",
            )  # fmt: skip


def _on_own_machines(host: str) -> bool:
    """Return whether a host is `0.0.0.0` or `::`, which mean each machine itself."""
    return host in ("0.0.0.0", "::")


def _check_directories(path: Path, run: RunFile) -> Iterator[CheckFinding]:
    used = {run.master.directory.resolve(): ("master", run.master.listen)}
    for s in run.slaves:
        directory = s.directory.resolve()
        other, listen = used.setdefault(directory, (s.name, s.listen))
        if other == s.name:
            continue
        key, seen = f"{path}: slaves.{s.name}.directory", f"{directory} is {other}'s, too"
        if all(_on_own_machines(host_port(address)[0]) for address in (listen, s.listen)):
            yield CheckFinding(key, NOTE, seen, "right if each has a machine, or a pod, of its own")
        else:
            yield CheckFinding(key, FAIL, seen, "one directory for each")
    mirrors = [("master", run.master.mirror), *((f"slaves.{s.name}", s.mirror) for s in run.slaves)]
    for owner, mirror in mirrors:
        if mirror is not None and "://" not in mirror and Path(mirror).resolve() in used:
            yield CheckFinding(
                f"{path}: {owner}.mirror", FAIL, f"{mirror} is a directory of the run itself", "take another disk's"
            )


def _check_ledger(path: Path, run: RunFile) -> Iterator[CheckFinding]:
    from dips.master import genesis
    from dips.protocol.manifest import Manifest
    from dips.slave.machine import available_bytes, memory_of

    ledger_file = genesis.ledger_path(run)
    if not ledger_file.exists():
        yield CheckFinding(f"{path}: master.directory", NOTE, f"no ledger at {ledger_file}", "`dips init` makes one")
        return
    try:
        with open_ledger(run) as ledger:
            row = ledger.run_row()
        genesis.check_is_of_run(run, row)
        genesis.check_placement(run, row)
    except DipsError as error:
        yield CheckFinding(f"{path}: master.directory", FAIL, str(error))
        return
    yield CheckFinding(f"{path}: master.directory", OK, f"the ledger of run {row.run}")
    model = Manifest.from_json(row.manifest)
    for name, layers in row.placement:
        section = run.slave_section(name)
        if not section.directory.is_dir() or section.directory == run.master.directory:
            continue  # on another machine, where the path may be the same
        memory = memory_of(section, sum(model.layers[i].numel for i in layers), run.shared.pull_codec)
        try:
            memory.require_memory(available_bytes(section))
            yield CheckFinding(f"{path}: slaves.{name}", OK, memory.describe_sum())
        except ConfigError as error:
            yield CheckFinding(f"{path}: slaves.{name}", FAIL, str(error))


# ---- certificates --------------------------------------------------------------------------------------------------


def _check_tls(
    path: Path,
    config: TlsKey,
    run: str,
    processes: Sequence[tuple[str, PeerRole]],
    labels: tuple[str, ...],
    now: datetime | None,
) -> Iterator[CheckFinding]:
    """Check the certificates whose files are here or whose labels are requested; a single process is always checked."""
    here, listed = 0, False
    for name, role in processes:
        files, label = config.tls_files(name, role), f"{name}.{role}"
        if files is None:
            return
        wanted = label in labels or (len(processes) == 1 and not labels)
        if not wanted and not (files.cert.exists() or files.key.exists()):
            continue
        here, listed = here + 1, listed or files.crl.exists()
        try:
            loaded = require_identity(load_tls(files, now), name, role, run)
        except ConfigError as error:
            yield CheckFinding(f"{path}: {label}", FAIL, str(error))
            continue
        said = f"{files.cert} is valid until {loaded.until:%Y-%m-%d %H:%M} UTC"
        soon = ends_soon(loaded.since, loaded.until, now or utc_now())
        yield CheckFinding(
            f"{path}: {label}", NOTE if soon else OK, said, f"dips certs renew {files.cert}" if soon else ""
        )
    if not here:
        assert files is not None
        yield CheckFinding(
            f"{path}: tls", FAIL, f"of no process of this file is a certificate here, {files.cert} say",
            "`dips certs request` and `issue` make them; in Kubernetes look whether the Secret is mounted",
        )  # fmt: skip
    elif not listed:
        seen = f"no {REVOCATIONS} beside the certificates: none of them is revoked before it expires"
        yield CheckFinding(f"{path}: tls", NOTE, seen)


# ---- both ----------------------------------------------------------------------------------------------------------


def _check_agreement(path: Path, cluster: ClusterFile, run_path: Path, run: RunFile) -> Iterator[CheckFinding]:
    """Check what the master would compare when the cluster joins, and all that both files state."""
    beside = f"{path} and {run_path}"
    if cluster.shared.run != run.shared.run:
        seen = f"run {cluster.shared.run!r} and run {run.shared.run!r}"
        yield CheckFinding(f"{beside}: shared.run", FAIL, seen, "a cluster belongs to one run")
    elif cluster.shared.digest != run.shared.digest:
        differing = "; ".join(differing_options(cluster.shared.agreed, run.shared.agreed))
        yield CheckFinding(f"{beside}: shared", FAIL, differing, "copy the section `shared` of the run file")
    else:
        yield CheckFinding(f"{beside}: shared", OK, f"digest {run.shared.digest[:12]}")
    if bool(cluster.tls) != bool(run.tls):
        seen = "one has certificates, the other speaks plain text"
        yield CheckFinding(f"{beside}: tls", FAIL, seen, "give both a certificate, or both `tls: off`")
    if host_port(cluster.master)[1] != host_port(run.master.listen)[1]:
        yield CheckFinding(
            f"{beside}: master", NOTE, f"{cluster.master}, while the master listens on {run.master.listen}",
            "right if something between them translates ports",
        )  # fmt: skip
    if run.clusters is not None and cluster.cluster not in run.clusters:
        seen = f"{cluster.cluster} is not in the run file's list"
        yield CheckFinding(f"{beside}: clusters", FAIL, seen, "add it; the master takes that over without a restart")
    lease_s = run.timing_options().lease_s
    if cluster.shared.heartbeat_s > lease_s / 2:
        seen = f"a heartbeat each {cluster.shared.heartbeat_s:g} s, and a lease of {lease_s:g} s"
        yield CheckFinding(f"{beside}: shared.heartbeat_s", FAIL, seen, "take the run file's")
