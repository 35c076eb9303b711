"""The pods that manifests make: replicas and indexes expanded, with the labels that Kubernetes adds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.deploy.kubectl import Manifest

NAME = "app.kubernetes.io/name"
POD_NAME = "statefulset.kubernetes.io/pod-name"
INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass(frozen=True)
class Pod:
    """One pod, as a controller would make it."""

    name: str
    namespace: str
    labels: dict[str, str]
    spec: dict[str, Any]
    owner: Manifest
    index: int = 0

    @property
    def app(self) -> str:
        return self.labels.get(NAME, "")

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        return {p["name"]: p["containerPort"] for c in self.containers for p in c.get("ports", ())}

    @property
    def host_names(self) -> list[str]:
        """The names under which others find it, if a headless service has its subdomain."""
        service = self.owner["spec"].get("serviceName") or self.spec.get("subdomain")
        if not service:
            return []
        base = f"{self.name}.{service}"
        return [base, f"{base}.{self.namespace}.svc"]


def expand_pods(objects: list[Manifest]) -> list[Pod]:
    """Every pod of every workload."""
    return [pod for manifest in objects for pod in _expand(manifest)]


def pod_specs(manifest: Manifest) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(job or set, pod template) of each workload in it, whatever it is wrapped in."""
    spec = manifest.get("spec", {})
    if manifest["kind"] in ("StatefulSet", "Job", "Deployment"):
        yield spec, spec["template"]
    jobs = spec.get("replicatedJobs") or spec.get("template", {}).get("spec", {}).get("replicatedJobs") or ()
    for job in jobs:
        yield job["template"]["spec"], job["template"]["spec"]["template"]


def _expand(manifest: Manifest) -> Iterator[Pod]:
    name, namespace = manifest["metadata"]["name"], manifest["metadata"].get("namespace", "default")
    for spec, template in pod_specs(manifest):
        count = spec["replicas"] if manifest["kind"] == "StatefulSet" else spec.get("completions", 1)
        for index in range(count):
            labels = dict(template["metadata"]["labels"])
            if manifest["kind"] == "StatefulSet":
                labels[POD_NAME] = f"{name}-{index}"
            elif spec.get("completionMode") == "Indexed":
                labels[INDEX] = str(index)
            yield Pod(f"{name}-{index}", namespace, labels, template["spec"], manifest, index)


def selects(selector: dict[str, Any] | None, labels: dict[str, str]) -> bool:
    """A label selector; {} selects everything."""
    selector = selector or {}
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    return all(_matches(e, labels) for e in selector.get("matchExpressions", ()))


def _matches(expression: dict[str, Any], labels: dict[str, str]) -> bool:
    found, values = labels.get(expression["key"]), expression.get("values", [])
    operator = expression["operator"]
    if operator == "In":
        return found in values
    if operator == "NotIn":
        return found not in values
    assert operator in ("Exists", "DoesNotExist"), operator
    return (found is not None) == (operator == "Exists")
