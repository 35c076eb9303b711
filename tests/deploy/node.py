"""A node that runs what `kubectl apply` was given: pods as containers of podman, with the rights of their manifests.

It stands for the controllers and the kubelet: sets and jobs become pods, config maps, Secrets and claims directories,
services names of a DNS (names.py), NetworkPolicies nft rules (network.py). It schedules nothing and restarts nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from tests.deploy.arrows import NAMES, Party, Policies
from tests.deploy.kubectl import Manifest
from tests.deploy.network import PodNetwork
from tests.deploy.podman import remove_containers, run_podman
from tests.deploy.pods import Pod, expand_pods
from tests.waiting import until

USER = 10001
SECRET_MODE, CLAIM_MODE = 0o440, 0o2770
LOOK_S = 0.5
KUBE_DNS = "kube-dns-0"
PIDS = 512
CLONE_NEWNET = 0x40000000


class Node:
    """Pods of one machine; `close` ends them and removes what they had."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.network = directory, PodNetwork()
        self._names, self._addresses = directory / "names.json", dict[str, str]()
        self._begin_dns()
        self.objects: list[Manifest] = []
        self.pods: dict[str, Pod] = {}

    def apply(self, objects: list[Manifest]) -> None:
        """Take these objects, and start the pods that are new."""
        names = {(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects}
        self.objects = [
            o for o in self.objects if (o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) not in names
        ] + objects
        new = [pod for pod in expand_pods(objects) if pod.name not in self.pods]
        for pod in new:
            self.pods[pod.name] = pod
            self.network.add_pod(pod.name, Party.of(pod))
        self._tell_names()
        self.network.enforce(Policies(self.objects))
        for pod in new:
            self._start(pod)

    def find(self, kind: str, namespace: str, name: str) -> Manifest:
        for manifest in self.objects:
            found = manifest["kind"], manifest["metadata"].get("namespace"), manifest["metadata"]["name"]
            if found == (kind, namespace, name):
                return manifest
        raise AssertionError(f"no {kind} {name} in the namespace {namespace} was applied")

    def container_of(self, pod: str) -> str:
        return f"dips-run-{os.getpid()}-{pod}"

    def exit_code(self, pod: str) -> int | None:
        """None while it runs."""
        said = run_podman("inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", self.container_of(pod)).stdout
        status, code = said.split()
        return int(code) if status in ("exited", "stopped") else None

    def logs(self, pod: str, lines: int = 40) -> str:
        said = run_podman("logs", "--tail", str(lines), self.container_of(pod), check=False)
        return f"--- {pod}\n{said.stdout}{said.stderr}"

    def run_in(self, pod: str, *command: str, within_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """`kubectl exec`."""
        return run_podman("exec", self.container_of(pod), *command, within_s=within_s, check=False)

    def probe(self, pod: str, path: str) -> tuple[int, str]:
        """What the kubelet's probe is told; (0, reason) if nobody answers."""
        ports = self.pods[pod].ports
        context = ssl._create_unverified_context()  # the kubelet does not verify either
        url = f"https://{self.network.parties[pod].ip}:{ports['http']}{path}"
        try:
            with _inside(self.network.router), urllib.request.urlopen(url, context=context, timeout=5) as answer:
                return answer.status, answer.read(4096).decode()
        except HTTPError as error:
            return error.code, error.read(4096).decode()
        except (URLError, OSError) as error:
            return 0, str(error)

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        until(condition, lambda: "\n".join([what, *map(self.logs, self.pods)]), seconds, LOOK_S)

    def stop_pod(self, pod: str) -> int:
        """As the kubelet ends a pod: preStop, then SIGTERM; return preStop's exit code."""
        code = 0
        for container in self.pods[pod].containers:
            hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
            if hook:
                code = self.run_in(pod, *hook, within_s=self.pods[pod].spec["terminationGracePeriodSeconds"]).returncode
        run_podman("stop", "--time", "60", self.container_of(pod))
        return code

    def start_again(self, pod: str) -> None:
        run_podman("start", self.container_of(pod))

    def close(self) -> None:
        remove_containers(self.container_of(pod) for pod in self.pods)
        self._server.terminate()
        self._server.wait()
        self.network.close()

    def _start(self, pod: Pod) -> None:
        (container,) = pod.spec["containers"]
        context = pod.spec["securityContext"]
        assert container["securityContext"]["readOnlyRootFilesystem"] and container["securityContext"]["capabilities"]
        environment = {e["name"]: self._value(pod, e) for e in container.get("env", ())}
        command = [_expand(word, environment) for word in [*container["command"], *container.get("args", ())]]
        memory = re.sub(r"i$", "", container["resources"]["limits"]["memory"]).lower()
        run_podman(
            "run", "--detach", "--name", self.container_of(pod.name), "--hostname", pod.name,
            "--network", f"ns:/run/netns/{self.network.namespace_of(pod.name)}",
            "--read-only", "--read-only-tmpfs=false", "--cap-drop", "all", "--security-opt", "no-new-privileges",
            "--user", f"{context['runAsUser']}:{context['runAsGroup']}", "--memory", memory, "--pids-limit", str(PIDS),
            "--env", "OMP_NUM_THREADS=1", "--entrypoint", "", "--stop-timeout", "60", "--image-volume", "ignore",
            *(word for name, value in environment.items() for word in ("--env", f"{name}={value}")),
            "--no-hosts", "--volume", f"{self._resolver(pod)}:/etc/resolv.conf:ro",
            "--volume", f"{self._hosts(pod)}:/etc/hosts:ro",
            *(word for mount in container["volumeMounts"] for word in ("--volume", self._mount(pod, mount))),
            container["image"], *command,
        )  # fmt: skip

    def _value(self, pod: Pod, variable: dict[str, Any]) -> str:
        if "value" in variable:
            return str(variable["value"])
        path = variable["valueFrom"]["fieldRef"]["fieldPath"]
        return pod.name if path == "metadata.name" else str(pod.index)  # the job-completion-index

    def _begin_dns(self) -> None:
        """A pod of the cluster's DNS, as policies know it."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._names.write_text("{}")
        self._dns = self.network.add_pod(KUBE_DNS, Party(NAMES, "kube-system", {"k8s-app": "kube-dns"})).ip
        command = [sys.executable, str(Path(__file__).with_name("names.py")), self._dns, str(self._names)]
        self._server = subprocess.Popen(["ip", "netns", "exec", self.network.namespace_of(KUBE_DNS), *command])

    def _tell_names(self) -> None:
        """Pods by their own names, services by the pod that each selects first."""
        for pod in self.pods.values():
            ip = self.network.parties[pod.name].ip
            self._addresses |= dict.fromkeys(pod.host_names[1:], ip)
            service = pod.owner["spec"].get("serviceName")
            if service and pod.index == 0:
                self._addresses[f"{service}.{pod.namespace}.svc"] = ip
        aside = self._names.with_suffix(".new")
        aside.write_text(json.dumps(self._addresses))
        aside.replace(self._names)

    def _resolver(self, pod: Pod) -> Path:
        path = self._directory / f"{pod.namespace}.resolv.conf"
        path.write_text(f"search {pod.namespace}.svc svc\nnameserver {self._dns}\noptions ndots:5\n")
        return path

    def _hosts(self, pod: Pod) -> Path:
        """A pod knows itself, as the kubelet writes it."""
        path = self._directory / f"{pod.name}.hosts"
        names = " ".join([*reversed(pod.host_names), pod.name])
        path.write_text(f"127.0.0.1 localhost\n{self.network.parties[pod.name].ip} {names}\n")
        return path

    def _mount(self, pod: Pod, mount: dict[str, Any]) -> str:
        name = mount["name"]
        claims = {c["metadata"]["name"] for c in pod.owner["spec"].get("volumeClaimTemplates", ())}
        volume = next((v for v in pod.spec["volumes"] if v["name"] == name), {"name": name})
        directory = self._directory / pod.name / name
        if "configMap" in volume:
            content = self.find("ConfigMap", pod.namespace, volume["configMap"]["name"])["data"]
            _fill(directory, {k: v.encode() for k, v in content.items()}, 0o444)
        elif "secret" in volume:
            _fill(directory, _secret(self.find("Secret", pod.namespace, volume["secret"]["secretName"])), SECRET_MODE)
        else:  # a claim or an emptyDir: of the pod's group, as fsGroup makes it
            assert name in claims or {"emptyDir", "persistentVolumeClaim"} & volume.keys(), volume
            directory.mkdir(parents=True, exist_ok=True)
            os.chown(directory, 0, USER)
            directory.chmod(CLAIM_MODE)
        return f"{directory}:{mount['mountPath']}:{'ro' if mount.get('readOnly') else 'rw'}"


def _fill(directory: Path, files: dict[str, bytes], mode: int) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    for name, content in files.items():
        path = directory / name
        path.write_bytes(content)
        os.chown(path, 0, USER)
        path.chmod(mode)


def _secret(manifest: Manifest) -> dict[str, bytes]:
    from base64 import b64decode

    plain = {k: v.encode() for k, v in manifest.get("stringData", {}).items()}
    return plain | {k: b64decode(v) for k, v in manifest.get("data", {}).items()}


def _expand(word: str, environment: dict[str, str]) -> str:
    """`$(NAME)` in a command."""
    return re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), word)


@contextmanager
def _inside(namespace: str) -> Iterator[None]:
    """This thread in another network namespace."""
    home, there = os.open("/proc/thread-self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        _enter_network(there)
        try:
            yield
        finally:
            _enter_network(home)
    finally:
        os.close(home)
        os.close(there)


def _enter_network(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
