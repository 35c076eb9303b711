"""`make deploy-run`: an operator's steps of deploy/README.md, verbatim, on one machine with podman.

The images are built without a network; pods run without rights on read-only roots, each in a network of its own; every
arrow of the design passes and everything else is refused; two nodes of a cluster train the demo's model; a slave drains
in its own name and comes back.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.arrows import ARROWS, NAMES, Party, strangers
from tests.deploy.images import ROOT, build_images
from tests.deploy.node import Node
from tests.deploy.podman import find_missing
from tests.deploy.walk import Walker, read_blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
VERSIONS = 60  # about a second each: enough to look at the pods meanwhile
TRAINED_S = 600.0
STATUS = "dips status --master 127.0.0.1:7800 --credentials certs/operator.operator.crt --json"
CERTIFICATES, SECRETS, SERVERS, CLUSTER = range(4)  # blocks of the section; production's comes after them


@pytest.fixture(name="images", scope="module")
def built_images() -> dict[str, str]:
    if why := find_missing():
        pytest.skip(f"NO CONTAINERS: {why}")
    return build_images("test")


@pytest.fixture(name="tree")
def edited_tree(tmp_path: Path, images: dict[str, str]) -> Path:
    """deploy/ as an operator has edited it: images, a short run, the demo's model and script."""
    kubernetes = tmp_path / "tree" / "deploy" / "kubernetes"
    shutil.copytree(ROOT / "deploy" / "kubernetes", kubernetes)
    for directory in (kubernetes / "base", kubernetes / "seed", kubernetes / "cluster"):
        edit(directory / "kustomization.yaml", images=[
            {"name": name, "newName": image.partition(":")[0], "newTag": image.partition(":")[2]}
            for name, image in images.items()
        ])  # fmt: skip
    for directory in (kubernetes / "base", kubernetes / "cluster" / "common"):
        edit(
            directory / "config" / "shared.yaml",
            outer={"lr": 0.7, "momentum": 0.5, "clip": {"relative": 2.0}}, penalty={"gates": []},
            stop={"versions": VERSIONS}, data={"ranges": 200},
        )  # fmt: skip
    edit(kubernetes / "cluster" / "common" / "config" / "cluster.yaml", pace={"steps": 2})
    replace(kubernetes / "seed" / "seed.yaml", "mymodel:build", "dips.demo.model:build")
    job = kubernetes / "cluster" / "job.yaml"
    replace(job, "[train.py, --data, /corpus]", "[-m, dips.demo.train]")
    replace(job, 'name: GPUS, value: "8"', 'name: GPUS, value: "1"')
    replace(job, "mymodel:build", "dips.demo.model:build")
    replace(job, "limits: {memory: 512Gi", "limits: {memory: 4Gi")
    return tmp_path / "tree"


def edit(file: Path, **changes: object) -> None:
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **changes}))


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text, f"{file} has no {old!r}"
    file.write_text(text.replace(old, new))


@pytest.fixture(name="node")
def made_node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "node")
    try:
        yield node
    finally:
        node.close()


@pytest.fixture(name="environment")
def environment_of_the_operator(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "dips"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dips.cli "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def read_status(operator: Walker) -> dict[str, Any]:
    operator.walk(STATUS)
    found: dict[str, Any] = json.loads(operator.said[-1])
    return found


def test_the_steps_of_the_document(node: Node, tree: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """From no certificate to a trained model; every line is typed as it stands."""
    (tmp_path / "operator").mkdir()
    operator = Walker(node, tree, environment, tmp_path / "operator")
    blocks = read_blocks(ROOT / "deploy" / "README.md", "Kubernetes")
    for number in (CERTIFICATES, SECRETS, SERVERS):
        operator.walk(blocks[number])
    assert node.probe("dips-master-0", "/metrics")[0] in (401, 403), "metrics are for those with a certificate"
    operator.walk(blocks[CLUSTER])
    node.until(lambda: "berlin" in read_status(operator).get("clusters", {}), 120, "the cluster has joined")

    for pod in ("dips-master-0", "dips-slave-0", "berlin-0"):
        done = node.run_in(pod, "cat", "/proc/self/status")
        inside = done.stdout + done.stderr
        assert (
            "CapEff:\t0000000000000000" in inside
            and "CapBnd:\t0000000000000000" in inside
            and "NoNewPrivs:\t1" in inside
        ), inside
        assert re.search(r"^Uid:\t10001", inside, re.MULTILINE) and "Seccomp:\t2" in inside
        assert node.run_in(pod, "sh", "-c", "touch /etc/x").returncode != 0, "the root is read-only"

    ours = set(node.pods)
    for number, party in enumerate(p for p in strangers() if p.namespace and p.role != NAMES):
        node.network.add_pod(f"other-{number}", party)
    node.network.add_pod("outside", Party("outside"))
    node.apply([])
    assert not (wrong := node.network.find_wrong_ways(ARROWS, dict.fromkeys(ours))), "\n".join(wrong)

    assert node.stop_pod("dips-slave-1") == 0, "it drained in its own name"
    assert read_status(operator)["finished"] is None, "it drained while they trained"
    node.start_again("dips-slave-1")
    node.until(lambda: node.probe("dips-slave-1", "/readyz")[0] == 200, 120, "the slave is ready again")

    last = f"v{VERSIONS}@r{VERSIONS}"  # no round was skipped, for the drained slave neither
    node.until(lambda: read_status(operator)["finished"] == last, TRAINED_S, f"the run has ended at {last}")
    node.until(lambda: node.exit_code("berlin-0") is not None, 120, "the head has ended")
    assert [node.exit_code(f"berlin-{i}") for i in range(2)] == [0, 0], node.logs("berlin-0")
    assert read_status(operator)["rounds"] == {"applied": VERSIONS, "unchanged": 0, "skipped": 0}
