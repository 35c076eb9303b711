"""Walks a document's commands: what is kubectl's goes to a Node, everything else to bash, line by line as it stands."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import yaml

from tests.deploy.kubectl import render, run_kubectl
from tests.deploy.node import Node

BASH_S = 120.0
JOB_S, READY_S = 300.0, 120.0


def read_blocks(document: Path, section: str) -> list[str]:
    """The command blocks of a section."""
    text = document.read_text().split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```\n(.*?)```", text, re.DOTALL)


class Walker:
    """Somebody who types the commands of a document."""

    def __init__(self, node: Node, tree: Path, environment: dict[str, str], directory: Path) -> None:
        """`tree`: where deploy/ is; `directory`: where the commands are typed."""
        self._node, self._tree, self._environment, self._directory = node, tree, environment, directory
        self._words: dict[str, Callable[[list[str], str], None]] = {
            "apply": self._apply, "create": self._create, "wait": self._wait, "rollout": self._rollout,
            "port-forward": self._forward, "logs": self._logs,
        }  # fmt: skip
        self._forwarded: dict[str, str] = {}  # address here → address there
        self.said: list[str] = []  # by what was typed

    def walk(self, block: str) -> None:
        if not block.startswith("kubectl"):
            self._run_bash(block)
            return
        for line in block.splitlines():
            if not line.startswith("kubectl"):
                self._run_bash(line)
                continue
            words = shlex.split(line)[1:]
            namespace = "default"
            if words[0] == "-n":
                namespace, words = words[1], words[2:]
            self._words[words[0]](words[1:], namespace)

    def _run_bash(self, text: str) -> None:
        """Where the pods can be reached, as by a forwarded port."""
        for ours, theirs in self._forwarded.items():
            text = text.replace(ours, theirs)
        inside = ["ip", "netns", "exec", self._node.network.router] if self._forwarded else []
        done = subprocess.run(
            [*inside, "bash", "-euo", "pipefail", "-c", text], cwd=self._directory, env=self._environment,
            timeout=BASH_S, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        self.said.append(done.stdout)

    def _apply(self, words: list[str], namespace: str) -> None:
        for option, name in zip(words[::2], words[1::2], strict=True):
            path = self._tree / name
            found = render(path) if option == "-k" else [o for o in yaml.safe_load_all(path.read_text()) if o]
            self._node.apply(found)

    def _create(self, words: list[str], namespace: str) -> None:
        """The real kubectl makes the object; files are those of the directory."""
        absolute = [
            re.sub(r"^(--(?:from-file|cert|key)=(?:[\w.]+=)?)", rf"\1{self._directory}/", word) for word in words
        ]
        text = run_kubectl("create", *absolute, "-n", namespace, "--dry-run=client", "-o", "yaml")
        self._node.apply([yaml.safe_load(text)])

    def _wait(self, words: list[str], namespace: str) -> None:
        job = next(word for word in words if word.startswith("job/")).removeprefix("job/")
        pod = f"{job}-0"
        self._node.until(lambda: self._node.exit_code(pod) is not None, JOB_S, f"{job} has ended")
        assert self._node.exit_code(pod) == 0, self._node.logs(pod)

    def _rollout(self, words: list[str], namespace: str) -> None:
        assert words[0] == "status"
        sets = {word.removeprefix("statefulset/") for word in words[1:] if word.startswith("statefulset/")}
        for pod in [p for p in self._node.pods.values() if p.owner["metadata"]["name"] in sets]:
            self._node.until(
                lambda name=pod.name: self._node.probe(name, "/readyz")[0] == 200, READY_S, f"{pod.name} is ready"
            )

    def _forward(self, words: list[str], namespace: str) -> None:
        self._forwarded[f"127.0.0.1:{words[1]}"] = f"{self._node.network.parties[words[0]].ip}:{words[1]}"

    def _logs(self, words: list[str], namespace: str) -> None:
        self.said.append(self._node.logs(f"{words[-1].removeprefix('job/')}-0"))
