"""What no schema can see: that objects fit each other. Each rule yields a line for what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dips.errors import TREATMENTS, ConfigError, Denied
from tests.deploy.kubectl import Manifest
from tests.deploy.pods import INDEX, NAME, Pod, expand_pods, pod_specs, selects

README = Path(__file__).parents[2] / "deploy" / "README.md"
CLAIM = "/var/lib/dips"  # the volume of a daemon
WRITABLE = ("/tmp", CLAIM, "/dev/shm")  # of a read-only root
KEPT = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
UNITS = {"": 1, "m": 0.001, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
HOPELESS = {next(t.exit_code for c, t in TREATMENTS if issubclass(e, c)) for e in (ConfigError, Denied)}
FAILURES = 60  # of a node in a run of a month that a job must outlive: two a day

JOBS = {"dips-master": "dips-master", "dips-slave": "dips-slave", "dips-cluster": "dips-agent"}  # of deploy/prometheus

Rule = Callable[[list[Manifest], list[Pod]], Iterator[str]]


def find_misfits(objects: list[Manifest]) -> Iterator[str]:
    """All that is wrong with these objects together."""
    pods = expand_pods(objects)
    for rule in RULES:
        yield from rule(objects, pods)


def find_frozen(objects: list[Manifest]) -> Iterator[str]:
    """Jobs that are applied with servers: their templates cannot be changed, so another image would be refused."""
    if any(o["kind"] == "StatefulSet" for o in objects):
        for job in _of_kind(objects, "Job"):
            yield f"{_named(job)} is applied with the servers: a second apply with another image is refused"


def made_files() -> dict[str, set[str]]:
    """The files of each Secret and config map that deploy/README.md makes."""
    made = re.findall(r"create (?:secret \w+|configmap) ([\w-]+) (.+)$", README.read_text(), re.MULTILINE)
    found: dict[str, set[str]] = {}
    for name, words in made:
        files = re.findall(r"--from-file=(?:([\w.]+)=)?(\S+)", words)
        found[name] = {key or Path(path).name for key, path in files}
    return found


def quantity(text: object) -> float:
    found = re.fullmatch(r"([\d.]+)(m|[KMGT]i)?", str(text))
    assert found, text
    return float(found[1]) * UNITS[found[2] or ""]


def _of_kind(objects: list[Manifest], *kinds: str) -> list[Manifest]:
    return [o for o in objects if o["kind"] in kinds]


def _named(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def selectors_find_pods(objects: list[Manifest], pods: list[Pod]) -> Iterator[str]:
    """Services, budgets, monitors and policies select pods of their namespace; sets select their own."""
    for manifest in _of_kind(objects, "Service", "PodDisruptionBudget", "PodMonitor", "NetworkPolicy"):
        spec, namespace = manifest["spec"], manifest["metadata"].get("namespace", "default")
        selector = spec.get("selector", spec.get("podSelector"))
        if manifest["kind"] == "Service":
            selector = {"matchLabels": selector}
        if not any(p.namespace == namespace and selects(selector, p.labels) for p in pods):
            yield f"{_named(manifest)} selects no pod"
    for pod in pods:
        selector = pod.owner["spec"].get("selector")
        if selector is not None and not selects(selector, pod.labels):
            yield f"{_named(pod.owner)} does not select its own pods"


def ports_exist(objects: list[Manifest], pods: list[Pod]) -> Iterator[str]:
    """A service leads to a port that its pods have, under the same number; so do monitors and probes."""
    for service in _of_kind(objects, "Service"):
        for pod in (p for p in pods if selects({"matchLabels": service["spec"]["selector"]}, p.labels)):
            for port in service["spec"].get("ports", ()):
                if pod.ports.get(port["targetPort"]) != port["port"]:
                    yield f"{_named(service)}: port {port['name']} is not one of {pod.name}: {pod.ports}"
    for monitor in _of_kind(objects, "PodMonitor"):
        for pod in (p for p in pods if selects(monitor["spec"]["selector"], p.labels)):
            wanted = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
            if not wanted <= pod.ports.keys():
                yield f"{_named(monitor)}: {pod.name} has no port {sorted(wanted - pod.ports.keys())}"
    for pod in pods:
        for container in pod.containers:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                asked = container.get(probe, {}).get("httpGet")
                if asked and asked["port"] not in pod.ports:
                    yield f"{pod.name}: {probe} asks a port that does not exist: {asked['port']}"


def sets_have_names(objects: list[Manifest], pods: list[Pod]) -> Iterator[str]:
    """A set's pods are found by name, before they are ready too: their service is headless and says so."""
    services = {o["metadata"]["name"]: o["spec"] for o in _of_kind(objects, "Service")}
    for pod in pods:
        name = pod.owner["spec"].get("serviceName") or (pod.owner["kind"] == "Job" and pod.spec.get("subdomain"))
        if not name:
            continue
        service = services.get(name, {})
        if service.get("clusterIP") != "None" or service.get("publishNotReadyAddresses") is not True:
            yield f"{_named(pod.owner)}: {name} is no headless service that names pods which are not ready"


def nobody_has_rights(objects: list[Manifest], pods: list[Pod]) -> Iterator[str]:
    """Non-root by number, read-only root, no capabilities, no token; what is written has a volume."""
    for pod in pods:
        context = pod.spec.get("securityContext", {})
        if not (context.get("runAsNonRoot") and context.get("runAsUser", 0) > 0):
            yield f"{pod.name} may run as root"
        if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{pod.name} has no seccomp profile"
        if context.get("fsGroupChangePolicy") != "OnRootMismatch":
            yield f"{pod.name} changes the owner of all its files at each start"
        if pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.name} has a token of the API server"
        for container in pod.containers:
            locked = {
                "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip
            if container.get("securityContext") != locked:
                yield f"{pod.name}: {container['name']} has rights: {container.get('securityContext')}"
            yield from (f"{pod.name}: {line}" for line in _mounts(pod, container))


def _mounts(pod: Pod, container: dict[str, Any]) -> Iterator[str]:
    volumes = {v["name"] for v in pod.spec["volumes"]}
    volumes |= {v["metadata"]["name"] for v in pod.owner["spec"].get("volumeClaimTemplates", ())}
    mounts = container["volumeMounts"]
    if missing := {m["name"] for m in mounts} - volumes:
        yield f"{container['name']} mounts {sorted(missing)}, which are no volumes"
    if "/tmp" not in {m["mountPath"] for m in mounts}:
        yield f"{container['name']} has no /tmp"
    for mount in mounts:
        linked = container in pod.spec.get("initContainers", ()) and mount["name"] == "tls"
        if not mount.get("readOnly") and mount["mountPath"] not in WRITABLE and not linked:
            yield f"{container['name']} may write to {mount['mountPath']}"
    for variable in container.get("env", ()):
        if variable["name"] == "NUMBA_CACHE_DIR" and not Path(variable["value"]).is_relative_to(CLAIM):
            yield f"{container['name']} compiles its kernels anew in each pod: {variable['value']} is not below {CLAIM}"


def what_is_mounted_exists(objects: list[Manifest], pods: list[Pod]) -> Iterator[str]:
    """Config maps and claims are made here, priorities too; Secrets by a command that deploy/README.md shows."""
    made = {(o["kind"], o["metadata"]["name"]) for o in objects}
    by_hand = made_files().keys()
    for pod in pods:
        for volume in pod.spec["volumes"]:
            wanted = {
                ("ConfigMap", volume.get("configMap", {}).get("name")),
                ("PersistentVolumeClaim", volume.get("persistentVolumeClaim", {}).get("claimName")),
            }
            if missing := {w for w in wanted if w[1] and w[1] not in by_hand} - made:
                yield f"{pod.name} mounts {sorted(missing)}, which nobody makes"
            secret = volume.get("secret", {}).get("secretName")
            if secret and secret not in by_hand:
                yield f"{pod.name} mounts the Secret {secret}, which deploy/README.md does not make"
        priority = pod.spec.get("priorityClassName")
        if priority and ("PriorityClass", priority) not in made:
            yield f"{pod.name} has a priority that nobody makes: {priority}"


def memory_is_bounded(objects: list[Manifest], pods: list[Pod]) -> Iterator[str]:
    """Every container asks for CPU and memory and has a limit; a slave's pool is its request."""
    for pod in pods:
        for container in pod.containers:
            resources = container.get("resources", {})
            requests, limits = resources.get("requests", {}), resources.get("limits", {})
            if not {"cpu", "memory"} <= requests.keys() or "memory" not in limits:
                yield f"{pod.name}: {container['name']} is not bounded: {resources}"
            elif quantity(requests["memory"]) > quantity(limits["memory"]):
                yield f"{pod.name}: {container['name']} asks for more memory than its limit"
            elif pod.app == "dips-slave" and requests["memory"] != limits["memory"]:
                yield f"{pod.name}: its pool is taken at start: the request is the limit, or the node overcommits it"


def servers_are_spread(objects: list[Manifest], pods: list[Pod]) -> Iterator[str]:
    """No two slaves on a node, a claim for one pod alone, a budget, a priority, a drain before the end."""
    budgets = _of_kind(objects, "PodDisruptionBudget")
    for pod in (p for p in pods if p.owner["kind"] == "StatefulSet"):
        if not pod.spec.get("priorityClassName"):
            yield f"{pod.name} has no priority"
        modes = [c["spec"]["accessModes"] for c in pod.owner["spec"]["volumeClaimTemplates"]]
        if modes != [["ReadWriteOncePod"]]:
            yield f"{pod.name}: expected one claim, ReadWriteOncePod, got {modes}"
        if pod.app != "dips-slave":
            continue
        apart = pod.spec.get("affinity", {}).get("podAntiAffinity", {})
        required = apart.get("requiredDuringSchedulingIgnoredDuringExecution", [])
        if not any(
            t["topologyKey"] == "kubernetes.io/hostname" and selects(t["labelSelector"], pod.labels) for t in required
        ):
            yield f"{pod.name} may share its node with another slave"
        if not any(selects(c["labelSelector"], pod.labels) for c in pod.spec.get("topologySpreadConstraints", ())):
            yield f"{pod.name} is not spread over zones"
        if not any(selects(b["spec"]["selector"], pod.labels) and b["spec"]["maxUnavailable"] == 1 for b in budgets):
            yield f"{pod.name} has no disruption budget of one"
        drain = pod.containers[-1].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        waits = re.search(r"dips drain .*--wait-s (\d+)", " ".join(drain))
        if waits is None or int(waits[1]) + 30 > pod.spec["terminationGracePeriodSeconds"]:
            yield f"{pod.name} is not drained, or killed while it is: {drain}"


def jobs_know_exit_codes(objects: list[Manifest], pods: list[Pod]) -> Iterator[str]:
    """What cannot get better fails the job; drained nodes do not count; each rule names a container that is there; and
    a job of several nodes outlives as many failures as a month brings.
    """
    for manifest in objects:
        for job, template in pod_specs(manifest):
            if manifest["kind"] == "StatefulSet":
                continue
            if template["spec"]["restartPolicy"] != "Never":
                yield f"{_named(manifest)}: podFailurePolicy needs restartPolicy Never"
            rules = job.get("podFailurePolicy", {}).get("rules", [])
            codes = {code: r["action"] for r in rules for code in r.get("onExitCodes", {}).get("values", ())}
            if any(codes.get(code) != "FailJob" for code in HOPELESS):
                yield f"{_named(manifest)}: expected FailJob on {sorted(HOPELESS)}, got {codes}"
            if codes.get(75, "Count") not in ("Count", "Ignore"):
                yield f"{_named(manifest)}: 75 (a newer incarnation took over) is no reason to fail the job"
            if not any(r["action"] == "Ignore" and r.get("onPodConditions") for r in rules):
                yield f"{_named(manifest)}: a drained node counts as a failure"
            nodes_fail = job.get("backoffLimitPerIndex", 0), job.get("maxFailedIndexes")
            if job.get("completionMode") == "Indexed" and (nodes_fail[0] < FAILURES or nodes_fail[1] != 0):
                yield f"{_named(manifest)}: one failure of its head counts once for each of its nodes: {nodes_fail}"
            names = {r["onExitCodes"]["containerName"] for r in rules if "onExitCodes" in r}
            if names - {c["name"] for c in template["spec"]["containers"]}:
                yield f"{_named(manifest)}: exit codes of {sorted(names)}, which are no containers"


def autoscalers_stay_away(objects: list[Manifest], pods: list[Pod]) -> Iterator[str]:
    """A daemon or a training pod is not moved to save a node: it costs all rounds a drain and a reload, or the job."""
    for manifest in objects:
        for _, template in pod_specs(manifest):
            if template["metadata"]["labels"][NAME] == "dips-seed":
                continue
            if not KEPT.items() <= template["metadata"].get("annotations", {}).items():
                yield f"{_named(manifest)}: an autoscaler may evict its pods: expected the annotations {KEPT}"


def data_outlive_a_release(objects: list[Manifest], pods: list[Pod]) -> Iterator[str]:
    """To change a cluster is to uninstall and install its release: the claim of its data set must not go with it."""
    for manifest in _of_kind(objects, "PersistentVolumeClaim"):
        if manifest["metadata"].get("annotations", {}).get("helm.sh/resource-policy") != "keep":
            yield f"{_named(manifest)}: `helm uninstall` deletes it: expected helm.sh/resource-policy: keep"


def monitors_are_complete(objects: list[Manifest], pods: list[Pod]) -> Iterator[str]:
    """Each daemon is scraped once if any is, under a job that the alerts know and its run; nobody else is."""
    monitors = _of_kind(objects, "PodMonitor")
    if not monitors:
        return
    for pod in (p for p in pods if p.app in JOBS):
        wanted = {JOBS[pod.app]} if pod.labels.get(INDEX, "0") == "0" else set()  # the agent is on node 0
        found = {
            label_of(monitor, endpoint, "job")
            for monitor in monitors
            if monitor["metadata"]["namespace"] == pod.namespace and selects(monitor["spec"]["selector"], pod.labels)
            for endpoint in monitor["spec"]["podMetricsEndpoints"]
            if label_of(monitor, endpoint, "run")
        }
        if found != wanted:
            yield f"{pod.name}: scraped as {sorted(found)}, the alerts expect {sorted(wanted)}"


def label_of(monitor: Manifest, endpoint: dict[str, Any], name: str) -> str:
    """A label of what is scraped, as the operator writes it: its own `job`, then the endpoint's relabelings."""
    value = f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}" if name == "job" else ""
    for step in endpoint.get("relabelings", ()):
        if step.get("targetLabel") == name and not step.get("sourceLabels"):
            value = step["replacement"]
    return value


def edits_restart_nobody(objects: list[Manifest], pods: list[Pod]) -> Iterator[str]:
    """A config map keeps its name when its content changes, and no pod carries a digest of it."""
    for manifest in _of_kind(objects, "ConfigMap"):
        if re.search(r"-[a-z0-9]{10}$", manifest["metadata"]["name"]):
            yield f"{_named(manifest)}: its name has a digest: each edit would restart all pods that mount it"
    for manifest in objects:
        for _, template in pod_specs(manifest):
            if digests := [key for key in template["metadata"].get("annotations", {}) if "checksum" in key]:
                yield f"{_named(manifest)}: {', '.join(digests)}: each edit would restart all its pods"


def images_are_named(objects: list[Manifest], pods: list[Pod]) -> Iterator[str]:
    """The kustomization has given every image its registry and a tag or digest that says which."""
    for pod in pods:
        for container in pod.containers:
            if not re.fullmatch(
                r"[\w.-]+(:\d+)?/[\w./-]+(:(?!latest)[\w.-]+|@sha256:[0-9a-f]{64})", container["image"]
            ):
                yield f"{pod.name}: {container['image']} names no registry, or not which image"


RULES: tuple[Rule, ...] = (
    selectors_find_pods,
    ports_exist,
    sets_have_names,
    nobody_has_rights,
    what_is_mounted_exists,
    memory_is_bounded,
    servers_are_spread,
    jobs_know_exit_codes,
    autoscalers_stay_away,
    data_outlive_a_release,
    monitors_are_complete,
    edits_restart_nobody,
    images_are_named,
)
