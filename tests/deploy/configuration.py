"""The config maps as the daemons read them: they load, and say what the pods say."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dips.commands.plan import find_shares, make_plan
from dips.commands.planning import kubernetes_resources
from dips.config import ClusterFile, RunFile, host_port, load_cluster, load_run
from dips.errors import ConfigError
from dips.identity.names import PeerRole
from dips.identity.paths import TlsFiles
from tests.deploy.kubectl import Manifest
from tests.deploy.pods import Pod, expand_pods
from tests.deploy.rules import made_files, quantity

CONFIGS = Path(__file__).parents[2] / "configs" / "shared"
PARAMETERS, RANKS, ROUNDS = 1_000_000_000, 8, 10_000  # on each slave of the model that the manifests are for
LINK_S = 10.0
CSI_FILES = {"ca.crt", "tls.crt", "tls.key"}  # of cert-manager's csi-driver


def find_contradictions(objects: list[Manifest]) -> Iterator[str]:
    """What a config map and the pods that mount it do not agree on."""
    pods = expand_pods(objects)
    for manifest in (o for o in objects if o["kind"] == "ConfigMap" and "shared.yaml" in o["data"]):
        files = manifest["data"]
        if files["shared.yaml"] != (CONFIGS / "default.yaml").read_text():
            yield "shared.yaml is no copy of configs/shared/default.yaml"
        mounting = [p for p in pods if manifest["metadata"]["name"] in _config_maps(p)]
        try:
            with unpacked(files) as directory:
                if "dips.yaml" in files:
                    yield from _run(load_run(directory / "dips.yaml"), mounting)
                else:
                    yield from _cluster(load_cluster(directory / "cluster.yaml"), mounting)
        except ConfigError as error:
            yield f"ConfigMap {manifest['metadata']['name']}: {error}"


def _config_maps(pod: Pod) -> set[str]:
    return {v["configMap"]["name"] for v in pod.spec["volumes"] if "configMap" in v}


@contextmanager
def unpacked(files: dict[str, str]) -> Iterator[Path]:
    """A config map's files in a directory."""
    with tempfile.TemporaryDirectory() as directory:
        for name, text in files.items():
            (Path(directory) / name).write_text(text)
        yield Path(directory)


def _run(run: RunFile, pods: list[Pod]) -> Iterator[str]:
    slaves = [p for p in pods if p.app == "dips-slave"]
    if [p.name for p in slaves] != [s.name for s in run.slaves]:
        yield f"pods {[p.name for p in slaves]}, but slaves {[s.name for s in run.slaves]}"
    for pod in (p for p in pods if p.app == "dips-master"):
        yield from _ports(pod, {"control": run.master.listen, "http": run.master.http})
        yield from _paths(pod, run.master.directory, run.tls_files("master", PeerRole.MASTER))
        for section in run.slaves:
            if section.master not in {f"{pod.owner['spec']['serviceName']}:{pod.ports['control']}"}:
                yield f"{section.name} dials {section.master}, the master is {pod.owner['spec']['serviceName']}"
    for pod, section in zip(slaves, run.slaves, strict=False):
        lanes = {f"lane-{i}": lane for i, lane in enumerate(section.lanes)}
        yield from _ports(pod, {"control": section.listen, "http": section.http, **lanes})
        yield from _paths(pod, section.directory, run.tls_files(section.name, PeerRole.SLAVE))
        inside = isinstance(section.advertise, str) and section.advertise.endswith(".svc")
        if inside and section.advertise not in pod.host_names:
            yield f"{section.name} advertises {section.advertise}; its names are {pod.host_names}"
    yield from _resources(run, [p for p in pods if p.app in ("dips-master", "dips-slave")])


def _resources(run: RunFile, pods: list[Pod]) -> Iterator[str]:
    """What `dips plan memory --kubernetes` proposes; volumes may be larger."""
    for pod in pods:
        container, (claim,) = pod.containers[-1], pod.owner["spec"]["volumeClaimTemplates"]
        cpus = int(quantity(container["resources"]["requests"]["cpu"]))
        plan = make_plan(run, None, find_shares(run, PARAMETERS * len(run.slaves)), RANKS, ROUNDS)
        proposed = kubernetes_resources(plan, cpus)["master" if pod.app == "dips-master" else pod.name]
        if container["resources"] != proposed["resources"]:
            yield f"{pod.name}: resources {container['resources']}, planned: {proposed['resources']}"
        if quantity(claim["spec"]["resources"]["requests"]["storage"]) < quantity(proposed["storage"]):
            yield f"{pod.name}: its volume is smaller than planned: {proposed['storage']}"


def _cluster(cluster: ClusterFile, pods: list[Pod]) -> Iterator[str]:
    for pod in pods:
        yield from _ports(pod, {"http": cluster.http})
        yield from _paths(pod, cluster.directory, cluster.tls_files(cluster.cluster, PeerRole.CLUSTER))
        if pod.labels.get("dips/cluster") != cluster.cluster:
            yield f"{pod.name} is labelled as {pod.labels.get('dips/cluster')}, its file says {cluster.cluster}"
        if cluster.token is None or not _is_mounted(pod, cluster.token, "secret"):
            yield f"{pod.name}: the token is no mounted Secret: {cluster.token}"
        variables = {e["name"]: e.get("value") for e in pod.containers[-1]["env"]}
        nodes = len([p for p in pods if p.owner is pod.owner])
        if variables["NODES"] != str(nodes):
            yield f"{pod.name}: NODES is {variables['NODES']}, of {nodes} pods"


def _ports(pod: Pod, listening: dict[str, str | None]) -> Iterator[str]:
    numbers = {name: host_port(address)[1] for name, address in listening.items() if address}
    if numbers != pod.ports:
        yield f"{pod.name} has ports {pod.ports}, its configuration listens on {numbers}"


def _paths(pod: Pod, directory: Path | None, tls: TlsFiles | None) -> Iterator[str]:
    if directory is not None and not _is_mounted(pod, directory):
        yield f"{pod.name}: {directory} is on no volume"
    if tls is None:
        yield f"{pod.name} has no certificate"
        return
    for path in (tls.ca, tls.cert, tls.key, tls.crl):
        if path.name in _linked(pod, path.parent):
            continue
        if not _is_mounted(pod, path, "secret", "csi"):
            yield f"{pod.name}: {path} is in no Secret and no volume of csi-driver"
        elif not _is_made(pod, path):
            yield f"{pod.name}: {path.name} is not among the files of its Secret in deploy/README.md"


def _linked(pod: Pod, directory: Path) -> set[str]:
    """The names that an init container links into a directory: its command is run, with the pod's mounts elsewhere."""
    with tempfile.TemporaryDirectory() as root:
        for mount in (m for c in pod.containers for m in c["volumeMounts"]):
            Path(root + mount["mountPath"]).mkdir(parents=True, exist_ok=True)
        for container in pod.spec.get("initContainers", ()):
            command = [re.sub(r"(?<=\s)/etc/", f"{root}/etc/", word) for word in container["command"]]
            subprocess.run(command, check=True, timeout=LINK_S)
        links = [path for path in Path(root + str(directory)).iterdir() if path.is_symlink()]
        targets = {path.name: Path("/") / path.readlink().relative_to(root) for path in links}
    return {name for name, target in targets.items() if _is_made(pod, target)}


def _is_made(pod: Pod, path: Path) -> bool:
    """Its Secret has a file of this name; csi-driver's are always the same."""
    volumes = {v["name"]: v for v in pod.spec["volumes"]}
    for mount in pod.containers[-1]["volumeMounts"]:
        if path.parent == Path(mount["mountPath"]):
            volume = volumes[mount["name"]]
            if "configMap" in volume:
                made = made_files().get(volume["configMap"]["name"], set())
            else:
                made = made_files().get(volume["secret"]["secretName"], set()) if "secret" in volume else CSI_FILES
            return path.name in made
    return False


def _is_mounted(pod: Pod, path: Path, *kinds: str) -> bool:
    """Some volume of these kinds, or any, is at this path or above it."""
    volumes: dict[str, dict[str, Any]] = {v["name"]: v for v in pod.spec["volumes"]}
    for mount in (m for c in pod.containers for m in c["volumeMounts"]):
        fits = not kinds or any(kind in volumes.get(mount["name"], {}) for kind in kinds)
        if fits and path.is_relative_to(mount["mountPath"]):
            return True
    return False
