"""The checks of `make deploy-check` find what they are for: one thing is broken at a time, and is named."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.arrows import ARROWS, find_wrong_arrows
from tests.deploy.check import CHARTS, PARTS, render_all
from tests.deploy.configuration import find_contradictions
from tests.deploy.kubectl import KUBERNETES, Manifest, find_program, render_chart
from tests.deploy.names import answer_query
from tests.deploy.pods import expand_pods
from tests.deploy.rules import find_frozen, find_misfits
from tests.deploy.schemas import find_invalid
from tests.expressions import ALERTS, list_alerts

try:
    find_program("kubectl")
except RuntimeError as missing:
    pytestmark = pytest.mark.skip(f"NO KUBECTL: {missing}")

Break = Callable[[list[Manifest]], None]


@cache
def rendered() -> dict[str, list[Manifest]]:
    return render_all()


def together(*parts: str) -> list[Manifest]:
    return copy.deepcopy([o for part in parts for o in rendered()[part]])


def find(objects: list[Manifest], kind: str, name: str) -> Any:
    return next(o for o in objects if o["kind"] == kind and o["metadata"]["name"].startswith(name))


def find_all(objects: list[Manifest]) -> Iterator[str]:
    """The dear ones last: the search ends where the line is."""
    yield from find_misfits(objects)
    yield from find_contradictions(objects)
    yield from find_wrong_arrows(objects, expand_pods(objects), ARROWS)
    yield from find_invalid(objects)


def pod(objects: list[Manifest], kind: str = "StatefulSet", name: str = "dips-slave") -> Any:
    return find(objects, kind, name)["spec"]["template"]["spec"]


def container(objects: list[Manifest], kind: str = "StatefulSet", name: str = "dips-slave") -> Any:
    return pod(objects, kind, name)["containers"][0]


def policy(objects: list[Manifest], name: str) -> Any:
    return next(
        o for o in objects
        if o["kind"] == "NetworkPolicy" and o["metadata"]["name"] == name and o["metadata"]["namespace"] == "dips"
    )["spec"]  # fmt: skip


def change_file(objects: list[Manifest], name: str, old: str, new: str) -> None:
    for manifest in objects:
        if name in manifest.get("data", {}):
            assert old in manifest["data"][name]
            manifest["data"][name] = manifest["data"][name].replace(old, new)


BREAKS: dict[str, tuple[Break, str]] = {
    "misspelt": (
        lambda o: pod(o).update(terminationGracePeriodSecond=9),
        r"Kubernetes 1\.32: .*terminationGracePeriodSecond",
    ),
    "wrong type": (
        lambda o: find(o, "Service", "dips-slave")["spec"].update(clusterIP=5),
        r"Kubernetes 1\.37: spec\.clusterIP",
    ),
    "unknown kind": (lambda o: find(o, "Service", "dips-slave").update(kind="Servise"), "has no v1 Servise"),
    "selector": (
        lambda o: find(o, "Service", "dips-slave")["spec"].update(selector={"a": "b"}),
        "Service dips-slave selects no pod",
    ),
    "budget": (
        lambda o: find(o, "PodDisruptionBudget", "")["spec"].update(maxUnavailable=2),
        "no disruption budget of one",
    ),
    "port": (lambda o: container(o)["ports"].pop(1), r"port lane-0 is not one of dips-slave-0"),
    "probe": (
        lambda o: container(o)["readinessProbe"]["httpGet"].update(port="web"),
        "readinessProbe asks a port that does not exist: web",
    ),
    "not headless": (
        lambda o: find(o, "Service", "dips-master")["spec"].pop("clusterIP"),
        "dips-master is no headless service",
    ),
    "only ready": (
        lambda o: find(o, "Service", "dips-master")["spec"].pop("publishNotReadyAddresses"),
        "which are not ready",
    ),
    "root": (lambda o: pod(o)["securityContext"].update(runAsNonRoot=False), "dips-slave-0 may run as root"),
    "capability": (lambda o: container(o)["securityContext"].update(capabilities={"drop": []}), "slave has rights"),
    "writable": (lambda o: container(o)["volumeMounts"][0].pop("readOnly"), "slave may write to /etc/dips"),
    "secret": (
        lambda o: pod(o)["volumes"][1]["secret"].update(secretName="others"),
        "the Secret others, which deploy/README.md does not",
    ),
    "config map": (
        lambda o: pod(o)["volumes"][0]["configMap"].update(name="others"),
        r"mounts \[\('ConfigMap', 'others'\)\]",
    ),
    "no limit": (lambda o: container(o)["resources"].pop("limits"), "slave is not bounded"),
    "overcommitted": (lambda o: container(o)["resources"]["limits"].update(memory="64Gi"), "the request is the limit"),
    "not as planned": (
        lambda o: find(o, "StatefulSet", "dips-master")["spec"]["template"]["spec"]["containers"][0]["resources"][
            "limits"
        ].update(memory="1Gi"),
        r"dips-master-0: resources .*1Gi.*planned: .*420Mi",
    ),
    "small volume": (
        lambda o: find(o, "StatefulSet", "dips-slave")["spec"]["volumeClaimTemplates"][0]["spec"]["resources"][
            "requests"
        ].update(storage="20Gi"),
        "its volume is smaller than planned: 29374Mi",
    ),
    "one node": (lambda o: pod(o)["affinity"].clear(), "may share its node with another slave"),
    "shared claim": (
        lambda o: find(o, "StatefulSet", "dips-master")["spec"]["volumeClaimTemplates"][0]["spec"].update(
            accessModes=["ReadWriteMany"]
        ),
        "expected one claim, ReadWriteOncePod",
    ),
    "no drain": (lambda o: container(o).pop("lifecycle"), "dips-slave-0 is not drained"),
    "killed early": (
        lambda o: pod(o).update(terminationGracePeriodSeconds=60),
        "dips-slave-0 is not drained, or killed",
    ),
    "exit code 78": (
        lambda o: find(o, "Job", "berlin")["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"].update(values=[77]),
        r"Job berlin: expected FailJob on \[77, 78\]",
    ),
    "failures of all nodes": (
        lambda o: find(o, "Job", "berlin")["spec"].update(backoffLimitPerIndex=20),
        "Job berlin: one failure of its head counts once for each of its nodes",
    ),
    "restarted": (lambda o: pod(o, "Job", "berlin").update(restartPolicy="OnFailure"), "needs restartPolicy Never"),
    "evicted": (
        lambda o: find(o, "StatefulSet", "dips-slave")["spec"]["template"]["metadata"]["annotations"].clear(),
        "StatefulSet dips-slave: an autoscaler may evict its pods",
    ),
    "uninstalled": (
        lambda o: find(o, "PersistentVolumeClaim", "corpus")["metadata"].pop("annotations"),
        r"PersistentVolumeClaim corpus: `helm uninstall` deletes it",
    ),
    "digest": (
        lambda o: find(o, "ConfigMap", "dips-run")["metadata"].update(name="dips-run-7b9f2k4m5t"),
        "each edit would restart all pods",
    ),
    "compiled anew": (
        lambda o: container(o)["env"][1].update(value="/tmp/kernels"),
        "compiles its kernels anew in each pod",
    ),
    "latest": (
        lambda o: container(o).update(image="registry.example/dips:latest"),
        "names no registry, or not which image",
    ),
    "fewer slaves": (
        lambda o: find(o, "StatefulSet", "dips-slave")["spec"].update(replicas=1),
        r"pods \['dips-slave-0'\], but slaves",
    ),
    "renamed key": (lambda o: change_file(o, "dips.yaml", "advertise:", "advertize:"), r"advertize: unknown key"),
    "other lane": (lambda o: change_file(o, "dips.yaml", ":7812", ":7813"), "its configuration listens on"),
    "other directory": (
        lambda o: change_file(o, "dips.yaml", "directory: /var/lib/dips", "directory: /data"),
        "/data is on no volume",
    ),
    "other name": (
        lambda o: change_file(o, "dips.yaml", "dips-slave-1.dips-slave.dips.svc", "x.svc"),
        r"advertises x\.svc",
    ),
    "no certificate": (
        lambda o: change_file(o, "cluster.yaml", "cluster: berlin", "cluster: oslo"),
        r"oslo\.cluster\.crt is not among the files of its Secret",
    ),
    "preset": (lambda o: change_file(o, "shared.yaml", "lr: 0.7", "lr: 0.8"), "no copy of configs/shared/default.yaml"),
    "nodes": (lambda o: find(o, "Job", "berlin")["spec"].update(completions=3), "NODES is 2, of 3 pods"),
    "open to all": (
        lambda o: policy(o, "dips-slave")["ingress"][1].pop("from"),
        r"default/stranger → dips/dips-slave: open .*\[7811, 7812\]",
    ),
    "an arrow less": (
        lambda o: policy(o, "dips-slave")["ingress"].pop(0),
        r"dips/dips-master → dips/dips-slave: .*not open: \[7810\]",
    ),
    "no isolation": (
        lambda o: policy(o, "dips-master").update(policyTypes=["Ingress"], podSelector={"matchLabels": {"x": "y"}}),
        "dips-master",
    ),
    "other namespace": (
        lambda o: policy(o, "dips-master")["ingress"][0]["from"][2].pop("namespaceSelector"),
        r"training/dips-cluster → dips/dips-master: .*not open: \[7800\]",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_is_found(name: str) -> None:
    """A line that says what is wrong, among whatever else follows from it."""
    objects = together("base", "seed", "cluster")
    change, said = BREAKS[name]
    change(objects)
    found: list[str] = []
    for line in find_all(objects):
        found.append(line)
        if re.search(said, line):
            return
    pytest.fail(f"expected {said!r} in\n" + "\n".join(found))


@pytest.mark.parametrize(
    ("part", "kind", "change", "said"),
    [
        pytest.param(
            "chart in production",
            "PodMonitor",
            {"podMetricsEndpoint": []},
            "podMetricsEndpoint: Extra inputs",
            marks=pytest.mark.slow,  # its models alone take seconds to import
        ),
        ("chart in production", "ClusterIssuer", {"ca": {"secret": "x"}}, r"spec\.ca\.secretName: Field required"),
        ("chart as JobSet", "JobSet", {"replicatedJob": []}, "replicatedJob: Extra inputs"),
        (
            "chart as TrainJob",
            "TrainJob",
            {"runtimeRef": {"kind": "TrainingRuntime"}},
            "runtimeRef.name: Field required",
        ),
        ("chart as TrainJob", "TrainingRuntime", {"mlPolicy": {"numNodes": "two"}}, "mlPolicy.numNodes"),
    ],
)
def test_custom_resources_are_held_against_their_models(
    part: str, kind: str, change: dict[str, Any], said: str
) -> None:
    """Its model alone is imported: `make deploy-check` holds every object against its own."""
    manifest = find(together(part), kind, "")
    assert not [*find_invalid([manifest])]
    manifest["spec"].update(change)
    found = [*find_invalid([manifest])]
    assert any(re.search(said, line) for line in found), found


@pytest.mark.parametrize("part", [*PARTS, "cluster/common"])
def test_every_file_is_rendered(part: str) -> None:
    """A manifest that no kustomization names would be checked by nobody."""
    directory = KUBERNETES / part
    kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text())
    named = {*kustomization["resources"]}
    assert {p.name for p in directory.glob("*.yaml")} - {"kustomization.yaml"} == {
        n for n in named if n.endswith(".yaml")
    }
    for made in kustomization.get("configMapGenerator", ()):
        assert {Path(name).name for name in made["files"]} == {p.name for p in (directory / "config").iterdir()}


def plain(objects: list[Manifest]) -> dict[tuple[str, ...], Any]:
    """Objects by kind and name, without labels that say only whose they are; configuration as it is read."""
    found = {}
    for manifest in copy.deepcopy(objects):
        manifest["metadata"].pop("labels", None)
        for claim in manifest.get("spec", {}).get("volumeClaimTemplates", ()):
            claim["metadata"].pop("labels", None)
        if manifest["kind"] == "ConfigMap":
            manifest["data"] = {name: yaml.safe_load(text) for name, text in manifest["data"].items()}
        found[manifest["kind"], manifest["metadata"].get("namespace", ""), manifest["metadata"]["name"]] = manifest
    return found


def test_the_chart_is_the_plain_manifests() -> None:
    """With its own values: object by object what base and cluster are."""
    chart, ours = plain(together("chart", "chart of clusters")), plain(together("base", "cluster"))
    assert chart.keys() - ours.keys() == {("ClusterIssuer", "", "dips-ca")} and not ours.keys() - chart.keys()
    for key, manifest in ours.items():
        assert chart[key] == manifest, key


@pytest.mark.parametrize("count", [1, 3, 16])
def test_the_chart_makes_as_many_as_are_asked_for(count: int) -> None:
    """Slaves in the set and in the run file, their balancers, monitors, mirrors, names of certificates."""
    words = ("--values", CHARTS["chart in production"][1], "--set", f"slaves.count={count}")
    names = [f"dips-slave-{i}" for i in range(count)]
    objects = render_chart(*words)
    run = yaml.safe_load(find(objects, "ConfigMap", "dips-run")["data"]["dips.yaml"])
    assert (
        [s["name"] for s in run["slaves"]] == names == [p.name for p in expand_pods(objects) if p.app == "dips-slave"]
    )
    assert len({s["mirror"] for s in run["slaves"]} | {run["master"]["mirror"]}) == count + 1, (
        "each has a mirror of its own"
    )
    made = {(o["kind"], o["metadata"]["name"]) for o in objects}
    assert {("PodMonitor", n) for n in names} | {("Service", f"{n}-external") for n in names} < made
    allowed = find(objects, "CertificateRequestPolicy", "")["spec"]["allowed"]["dnsNames"]["values"]
    assert allowed == ["master.master.my-run.dips", *(f"{n}.slave.my-run.dips" for n in names)]


def test_the_chart_makes_several_clusters() -> None:
    """Two in one namespace: their files, policies and pods are their own."""
    berlin = yaml.safe_load((KUBERNETES / "chart" / "values.yaml").read_text())["clusters"]["list"][0]
    several = json.dumps([berlin, {**berlin, "name": "oslo", "nodes": 3, "capabilities": ["IPC_LOCK"]}])
    objects = render_chart("--set", "servers=false", "--set-json", f"clusters.list={several}")
    pods = expand_pods(objects)
    assert [p.name for p in pods] == ["berlin-0", "berlin-1", "oslo-0", "oslo-1", "oslo-2"]
    assert pods[2].containers[0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    for name in ("berlin", "oslo"):
        assert yaml.safe_load(find(objects, "ConfigMap", f"{name}-cluster")["data"]["cluster.yaml"])["cluster"] == name
        assert find(objects, "NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"]["dips/cluster"] == name


def test_a_mirror_that_nobody_could_reach_is_refused() -> None:
    """The policies let nothing out that is not named."""
    with pytest.raises(RuntimeError, match=r"mirror\.egress: expected rules"):
        render_chart("--set", "mirror.url=s3://bucket/my-run")


def test_who_is_revoked_in_production_is_refused() -> None:
    """The list lies beside the certificate, and may be changed while the pod runs."""
    objects = together("chart in production")
    assert not [*find_contradictions(objects)]
    pod(objects)["initContainers"][0]["command"][2] = "ln -sf /etc/dips-certificate/* /etc/dips-tls/"
    assert any("crl.pem" in line for line in find_contradictions(objects))


def test_the_operators_labels_are_those_of_the_alerts() -> None:
    """Without the relabeling a job would be called by the monitor's namespace and name, and no alert would fire."""
    objects = together("chart in production")
    assert not [*find_misfits(objects)]
    find(objects, "PodMonitor", "dips-slave-1")["spec"]["podMetricsEndpoints"][0]["relabelings"].pop(0)
    assert "dips-slave-1: scraped as ['dips/dips-slave-1'], the alerts expect ['dips-slave']" in [
        *find_misfits(objects)
    ]
    asked = set(re.findall(r'job="([\w-]+)"', ALERTS.read_text()))
    assert asked == {"dips-master", "dips-slave", "dips-agent"}


def test_a_run_misses_its_own_master(tmp_path: Path) -> None:
    """Its PrometheusRule fires when its master's pod is gone, though another run's in the same Prometheus is well."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not here (Debian: prometheus): the story was not told")
    rule = find(together("chart in production"), "PrometheusRule", "dips-my-run")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    series = {"my-run": "1x9 stale", "other": "1x60"}
    fires = {
        "exp_labels": {"severity": "page", "job": "dips-master", "run": "my-run"},
        "exp_annotations": next(
            r["annotations"] | {"summary": "The master  is not scraped, or is not there."} for r in list_alerts()
        ),
    }  # fmt: skip
    story = {
        "interval": "1m",
        "input_series": [
            {"series": f'up{{job="dips-master", run="{run}", namespace="dips"}}', "values": values}
            for run, values in series.items()
        ],
        "alert_rule_test": [
            {"eval_time": "8m", "alertname": "DipsMasterDown"},
            {"eval_time": "50m", "alertname": "DipsMasterDown", "exp_alerts": [fires]},
        ],
    }
    (tmp_path / "story.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [story]}))
    done = subprocess.run(
        ["promtool", "test", "rules", "story.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_image_can_be_applied() -> None:
    """With a Job among the servers it could not: the Job's template is immutable. By itself it may be applied again."""
    assert not [*find_frozen(together("base"))] and not [*find_frozen(together("seed"))]
    assert "Job dips-seed is applied with the servers" in next(find_frozen(together("base", "seed")))


def test_a_set_that_is_held_back_stays_so() -> None:
    """The API server refuses OnDelete beside the `rollingUpdate` that it has filled in; a strategy in the file took it
    back, so the apply of another image rolled slaves one by one that were to be started all together.
    """
    held, given_back = map(json.loads, re.findall(r"-p '(.+?)'", (KUBERNETES.parent / "README.md").read_text()))
    assert held["spec"]["updateStrategy"] == {"type": "OnDelete", "rollingUpdate": None}
    assert given_back["spec"]["updateStrategy"] == {"type": "RollingUpdate"}
    sets = [o for o in together("base", "chart") if o["kind"] == "StatefulSet"]
    assert len(sets) == 4 and not [o["metadata"]["name"] for o in sets if "updateStrategy" in o["spec"]]


def test_an_indexed_jobs_pods_have_names() -> None:
    """The head's address in the job is the name of its first pod."""
    pods = expand_pods(together("cluster"))
    variables = {e["name"]: e.get("value") for e in pods[0].containers[0]["env"]}
    assert variables["MASTER_ADDR"] in pods[0].host_names
    assert [p.name for p in pods] == ["berlin-0", "berlin-1"]


def test_the_nodes_names_are_answered() -> None:
    """An address for A, nothing for AAAA, and that there is no such name."""

    def query(name: str, kind: int) -> bytes:
        labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
        return b"\x12\x34\x01\x00\x00\x01" + bytes(6) + labels + b"\0" + kind.to_bytes(2, "big") + b"\0\1"

    names = {"dips-master.dips.svc": "10.233.0.1"}
    assert answer_query(query("dips-master.dips.svc", 1), names)[-4:] == bytes([10, 233, 0, 1])
    for name, kind, code in (("dips-master.dips.svc", 28, 0), ("nobody.dips.svc", 1, 3)):
        answer = answer_query(query(name, kind), names)
        assert (answer[3] & 15, answer[6:8]) == (code, b"\0\0")
