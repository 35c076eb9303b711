"""The containers of deploy/kubernetes/loopback, run as processes: their commands, scripts, probes and run file work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from tests.integration import cluster_harness as harness

HERE = Path(__file__).parent
POD = HERE.parents[1] / "deploy" / "kubernetes" / "loopback"


def here(text: str, directory: Path, ports: dict[str, str]) -> str:
    """The same words with this test's directories and ports in place of a container's."""
    for path in ("/etc/dips", "/var/lib/dips"):
        text = text.replace(path, str(directory / path.strip("/").replace("/", "-")))
    return re.sub(r"\b78\d\d\b", lambda found: ports.setdefault(found[0], str(harness.free_port())), text)


@pytest.mark.timeout(240)
def test_the_pod_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Init makes the run once, master and slaves serve, every probe is content, and a cluster's preflight is well."""
    ports: dict[str, str] = {}
    (tmp_path / "etc-dips").mkdir()
    (tmp_path / "var-lib-dips").mkdir()
    (tmp_path / "bin").mkdir()
    for name, module in (("dips", "dips.cli"), ("dips-master", "dips.master.app"), ("dips-slave", "dips.slave.app")):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(harness.ROOT))
    for file in (POD / "config").iterdir():
        (tmp_path / "etc-dips" / file.name).write_text(here(file.read_text(), tmp_path, ports))
    text = here((POD / "pod.yaml").read_text(), tmp_path, ports)
    spec: dict[str, Any] = next(o for o in yaml.safe_load_all(text) if o["kind"] == "StatefulSet")["spec"]["template"][
        "spec"
    ]

    save_file(
        {n: np.zeros((8, 8), np.float32) for n in ("a.weight", "b.weight")},
        tmp_path / "var-lib-dips" / "start.safetensors",
    )
    init = spec["initContainers"][0]
    for _ in range(2):  # a pod that is started again does not make the run anew
        done = subprocess.run(
            [*init["command"], *init["args"]], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr

    processes = [harness.Process(c["name"], c["command"], tmp_path / f"{c['name']}.log") for c in spec["containers"]]
    try:
        for process in processes[1:]:
            for _ in range(1200):
                if '"ready"' in process.log.read_text():
                    break
                assert process.code is None, process.tail()
                subprocess.run(["sleep", "0.1"], check=True)
        for container in spec["containers"]:
            probe = container["livenessProbe"]["exec"]["command"]
            done = subprocess.run([sys.executable, *probe[1:]], capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{container['name']}: {done.stderr}"
        cluster = {
            "shared": "paper.yaml", "cluster": "berlin", "master": f"127.0.0.1:{ports['7800']}",
            "directory": str(tmp_path / "berlin"), "insecure": True,
        }  # fmt: skip
        (tmp_path / "etc-dips" / "cluster.yaml").write_text(yaml.safe_dump(cluster))
        check = [
            *harness.daemon("client"),
            "check",
            "--config",
            str(tmp_path / "etc-dips" / "cluster.yaml"),
            "--most-mib",
            "4",
        ]
        done = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        codes = [process.terminate() for process in reversed(processes)]
    assert codes == [0, 0, 0]
