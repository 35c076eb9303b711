"""The manifests fit each other and the programs: what no schema can see; `make check` holds them against schemas."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dips.config import RunFile, host_port, load_cluster, load_run
from dips.errors import ConfigError

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
DIRECTORIES = ("base", "loopback", "cluster")
WRITABLE = ("/tmp", "/var/lib/dips", "/var/cache/dips", "/initial", "/dev/shm")  # of a read-only root


def objects(directory: str) -> list[dict[str, Any]]:
    """All resources that a kustomization names."""
    wanted = yaml.safe_load((KUBERNETES / directory / "kustomization.yaml").read_text())["resources"]
    return [o for name in wanted for o in yaml.safe_load_all((KUBERNETES / directory / name).read_text()) if o]


def workloads(directory: str) -> list[dict[str, Any]]:
    return [o for o in objects(directory) if "template" in o.get("spec", {})]


def containers(workload: dict[str, Any]) -> list[dict[str, Any]]:
    spec = workload["spec"]["template"]["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


ALL = [(d, w) for d in DIRECTORIES for w in workloads(d)]
NAMES = [f"{d}-{w['metadata']['name']}" for d, w in ALL]
everywhere = pytest.mark.parametrize(("directory", "workload"), ALL, ids=NAMES)


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_every_file_is_rendered(directory: str) -> None:
    """A manifest that no kustomization names would be checked by nobody."""
    kustomization = yaml.safe_load((KUBERNETES / directory / "kustomization.yaml").read_text())
    files = {p.name for p in (KUBERNETES / directory).glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(kustomization["resources"])
    for made in kustomization["configMapGenerator"]:
        assert all((KUBERNETES / directory / f).is_file() for f in made["files"])


@everywhere
def test_selectors_find_their_pods(directory: str, workload: dict[str, Any]) -> None:
    """A workload selects its own pods, and its service too; ports are named alike on both sides."""
    labels = workload["metadata"]["name"], workload["spec"]["template"]["metadata"]["labels"]
    if workload["kind"] != "StatefulSet":
        return
    selector = workload["spec"]["selector"]["matchLabels"]
    assert selector.items() <= labels[1].items()
    services = {o["metadata"]["name"]: o["spec"] for o in objects(directory) if o["kind"] == "Service"}
    service = services[workload["spec"]["serviceName"]]
    assert service["selector"].items() <= labels[1].items()
    offered = {p["name"]: p["containerPort"] for c in containers(workload) for p in c.get("ports", [])}
    for port in service.get("ports", []):
        assert offered[port["targetPort"]] == port["port"]


@everywhere
def test_nobody_has_rights(directory: str, workload: dict[str, Any]) -> None:
    """Non-root, read-only root, no capabilities, no token; memory is limited; what is written has a volume."""
    spec = workload["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    volumes = {v["name"] for v in spec["volumes"]}
    volumes |= {v["metadata"]["name"] for v in workload["spec"].get("volumeClaimTemplates", [])}
    for container in containers(workload):
        locked = container["securityContext"]
        assert (locked["readOnlyRootFilesystem"], locked["allowPrivilegeEscalation"]) == (True, False)
        assert locked["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]
        mounts = {m["mountPath"]: m for m in container["volumeMounts"]}
        assert {m["name"] for m in mounts.values()} <= volumes
        assert "/tmp" in mounts
        for path, mount in mounts.items():
            assert mount.get("readOnly") or path in WRITABLE, f"{container['name']} may write to {path}"


@everywhere
def test_slaves_can_write_their_kernels(directory: str, workload: dict[str, Any]) -> None:
    """Numba caches what it compiles; under a read-only root it needs a place (docs/rationale.md#44)."""
    for container in containers(workload):
        if container.get("command", [""])[0] == "dips-slave":
            cache = {e["name"]: e.get("value") for e in container["env"]}["NUMBA_CACHE_DIR"]
            mount = next(m for m in container["volumeMounts"] if m["mountPath"] == cache)
            assert not mount.get("readOnly")


@everywhere
def test_mounted_claims_and_config_maps_exist(directory: str, workload: dict[str, Any]) -> None:
    """What a pod mounts is made by the same kustomization."""
    kustomization = yaml.safe_load((KUBERNETES / directory / "kustomization.yaml").read_text())
    maps = {m["name"] for m in kustomization["configMapGenerator"]}
    claims = {o["metadata"]["name"] for o in objects(directory) if o["kind"] == "PersistentVolumeClaim"}
    for volume in workload["spec"]["template"]["spec"]["volumes"]:
        assert volume.get("configMap", {}).get("name") in {None, *maps}
        assert volume.get("persistentVolumeClaim", {}).get("claimName") in {None, *claims}


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_the_presets_are_those_of_configs(directory: str) -> None:
    """Kustomize reads nothing outside its directory, so there is a copy: it must be one."""
    ours = (KUBERNETES / directory / "config" / "paper.yaml").read_text()
    assert ours == (ROOT / "configs" / "paper.yaml").read_text()


def test_the_base_needs_certificates_and_says_so() -> None:
    """Pods speak over the network: the daemons refuse that without certificates, and the kustomization warns of it."""
    with pytest.raises(ConfigError, match="expected a section `tls`"):
        load_run(KUBERNETES / "base" / "config" / "dips.yaml")
    assert "NOT YET TO BE APPLIED" in (KUBERNETES / "base" / "kustomization.yaml").read_text()


def base_on_loopback(tmp_path: Path) -> RunFile:
    """The base's run file with every host on loopback: everything else in it is parsed as the daemons will."""
    content = yaml.safe_load((KUBERNETES / "base" / "config" / "dips.yaml").read_text())
    for section in (content["master"], *content["slaves"]):
        for key in ("listen", "master"):
            if key in section:
                section[key] = f"127.0.0.1:{host_port(section[key])[1]}"
        section["lanes"] = [f"127.0.0.1:{host_port(lane)[1]}" for lane in section.get("lanes", [])]
        if "advertise" in section:
            section["advertise"] = "localhost"
    del content["master"]["lanes"]
    content["insecure"] = True
    (tmp_path / "paper.yaml").write_text((KUBERNETES / "base" / "config" / "paper.yaml").read_text())
    (tmp_path / "dips.yaml").write_text(yaml.safe_dump(content))
    return load_run(tmp_path / "dips.yaml")


def test_the_base_fits_its_run_file(tmp_path: Path) -> None:
    """As many pods as slaves, by their names; ports, service names and paths are those of the configuration."""
    run = base_on_loopback(tmp_path)
    raw = yaml.safe_load((KUBERNETES / "base" / "config" / "dips.yaml").read_text())
    by_name = {w["metadata"]["name"]: w for w in workloads("base")}
    slaves, master = by_name["dips-slave"], by_name["dips-master"]
    assert [s.name for s in run.slaves] == [f"dips-slave-{i}" for i in range(slaves["spec"]["replicas"])]
    ports = {p["name"]: p["containerPort"] for c in containers(slaves) for p in c.get("ports", [])}
    for section, declared in zip(run.slaves, raw["slaves"], strict=True):
        used = [host_port(section.listen)[1], *(host_port(lane)[1] for lane in section.lanes)]
        assert sorted(ports.values()) == used
        assert declared["advertise"] == f"{section.name}.{slaves['spec']['serviceName']}"
        assert declared["master"] == f"dips-master:{host_port(run.master.listen)[1]}"
        assert mounted(slaves, section.directory) and mounted(slaves, section.initial_model)
    assert [p["containerPort"] for c in containers(master) for p in c.get("ports", [])] == [7800]
    assert mounted(master, run.master.directory)
    init = next(c for c in containers(master) if c["name"] == "init")["args"][0]
    assert f"{run.master.directory}/ledger.sqlite" in init
    assert f"{run.slaves[0].initial_model}" in init


def test_the_pod_on_loopback_fits_its_run_file() -> None:
    """It loads as it stands; a container for the master and one for each slave; its probes ask the right ports."""
    run = load_run(KUBERNETES / "loopback" / "config" / "dips.yaml")
    (pod,) = workloads("loopback")
    by_name = {c["name"]: c for c in containers(pod)}
    assert set(by_name) == {"init", "master", *(s.name for s in run.slaves)}
    for name, listen in [("master", run.master.listen), *((s.name, s.listen) for s in run.slaves)]:
        probe = by_name[name]["livenessProbe"]["exec"]["command"][-1]
        assert str(host_port(listen)) in probe
    for section in run.slaves:
        assert by_name[section.name]["command"][-2:] == ["--name", section.name]
        assert mounted(pod, section.directory)
    used = [run.master.listen, *(a for s in run.slaves for a in (s.listen, *s.lanes))]
    assert len(set(used)) == len(used), "two daemons of one pod on one port"
    forwarded = (KUBERNETES / "loopback" / "kustomization.yaml").read_text().split("port-forward dips-0 ")[1].split()
    lanes = [str(host_port(lane)[1]) for s in run.slaves for lane in s.lanes]
    assert forwarded[: 1 + len(lanes)] == [str(host_port(run.master.listen)[1]), *lanes]


def test_the_job_fits_its_cluster_file() -> None:
    """The example's file loads, and its directory is a volume that can be written."""
    config = load_cluster(KUBERNETES / "cluster" / "config" / "cluster.yaml")
    (job,) = workloads("cluster")
    assert mounted(job, config.directory)
    training = next(c for c in containers(job) if c["name"] == "training")
    assert training["command"] == ["dips-client", "--config", "/etc/dips/cluster.yaml", "--"]


def mounted(workload: dict[str, Any], path: Path) -> bool:
    """Some container has a volume at this path or above it."""
    mounts = (Path(m["mountPath"]) for c in containers(workload) for m in c["volumeMounts"])
    return any(path.is_relative_to(mount) for mount in mounts)


@everywhere
def test_commands_are_those_of_the_package(directory: str, workload: dict[str, Any]) -> None:
    """Every program that a container starts is one that the wheel installs, with options that it has."""
    for container in containers(workload):
        for words in commands(container):
            if words[0].startswith("dips"):
                assert options(words) <= KNOWN[words[0], words[1] if words[1] in ("init", "check") else ""], words


KNOWN = {
    ("dips", "init"): {"--config", "--model"},
    ("dips-master", ""): {"--config"},
    ("dips-slave", ""): {"--config", "--name"},
    ("dips-client", ""): {"--config"},
    ("dips-client", "check"): {"--config", "--factory"},
}


def commands(container: dict[str, Any]) -> Iterator[list[str]]:
    if container["command"][0] != "sh":
        yield [*container["command"]]
        return
    for line in container["args"][0].replace("||", "\n").splitlines():
        if line.strip():
            yield shlex.split(line)


def options(words: list[str]) -> set[str]:
    return {w for w in words if w.startswith("--") and w != "--"}
