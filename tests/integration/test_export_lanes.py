"""`dips export --master`: versions from any host that reaches master and slaves, without their disks."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors import safe_open
from safetensors.numpy import load_file

from dips.errors import ConfigError, DipsError
from tests.integration import cluster_harness as harness
from tests.integration import train_constant as script
from tests.typed import type_dips

TINY = str(Path(__file__).parent / "train_tiny.py")
VERSIONS, EVERY = 5, 2


SUM = """
import json, os
from safetensors.numpy import load_file
print(json.dumps({"sum": sum(float(t.sum()) for t in load_file(os.environ["DIPS_MODEL"]).values())}))
"""


def file_of_a_master_elsewhere(run: harness.Run) -> Path:
    """The run file as it stands on a machine that has no slave's disk; each second version is looked at."""
    content = yaml.safe_load(run.file.read_text())
    for slave in content["slaves"]:
        slave["directory"] = f"elsewhere-{slave['name']}"
    command = [sys.executable, "-c", SUM]
    content["master"] |= {"keep_every": EVERY, "on_version": {"every": EVERY, "command": command}}
    path = run.file.with_name("master.yaml")
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.timeout(120)
def test_versions_come_over_the_lanes(tmp_path: Path) -> None:
    """Before a run and after it, which takes no notice: bit for bit what the disks hold, and the file says of what.

    Each second version is looked at over the lanes, though newer ones are made meanwhile.
    """
    random = np.random.default_rng(3)
    tensors = {
        name: random.standard_normal(tuple(p.shape)).astype(np.float32)
        for name, p in script.ConstantModel().named_parameters()
    }
    shared = {"penalty": {"gates": []}, "stop": {"versions": VERSIONS}}
    elsewhere = tmp_path / "elsewhere"
    with harness.Run(tmp_path, tensors, shared=shared) as run:
        run.file, of_slaves = file_of_a_master_elsewhere(run), run.file
        run.start_master()
        run.file = of_slaves
        run.start_slaves()
        told = tmp_path / "master.log"
        run.until(lambda: told.read_text().count('"slave_ready"') == len(run.slaves), 60, "all slaves have registered")
        assert "v0@r0" in type_dips("export", "--master", run.address, "--output", str(elsewhere / "first.safetensors"))
        first = load_file(elsewhere / "first.safetensors")
        assert first.keys() == tensors.keys() and all(np.array_equal(first[name], t) for name, t in tensors.items())

        run.wait(run.start_cluster("west", [sys.executable, TINY, "steps", str(tmp_path / "out")]), 60)
        lanes, disks = elsewhere / "lanes.safetensors", tmp_path / "disks.safetensors"
        type_dips("export", "--master", run.address, "--output", str(lanes))
        type_dips("export", "--config", str(run.file), "--output", str(disks))
        assert lanes.read_bytes() == disks.read_bytes()
        with safe_open(lanes, "np") as file:
            head = file.metadata()["version"]
        with run.ledger() as ledger:
            run.until(lambda: ledger.read_history()[3].result is not None, 60, "the last of them is looked at")
            rounds, state = ledger.read_history(), ledger.read_state()
        assert str(rounds[-1].version) == head and head.startswith(f"v{VERSIONS}@")
        assert [r.version.version for r in rounds if r.version and r.result] == [2, 4]
        assert {o.push.cluster for r in rounds for o in r.outcomes} == {"west"}
        passed = {c.name: (c.inc, c.ended) for c in state.clusters if c.name != "west"}
        assert passed == {"export.puller": (2, True), "on-version.puller": (2, True)}

        older, of_disks = elsewhere / "older.safetensors", tmp_path / "older.safetensors"
        type_dips("export", "--master", run.address, "--output", str(older), "--version", "v2@r2")
        type_dips("export", "--config", str(run.file), "--output", str(of_disks), "--version", "v2@r2")
        assert older.read_bytes() == of_disks.read_bytes() != lanes.read_bytes()
        result, expected = rounds[1].result, sum(float(t.sum()) for t in load_file(older).values())
        assert result is not None and result.ok and result.numbers == {"sum": expected}, result
        with pytest.raises(ConfigError, match=f"no longer on its disks; the slaves keep {head}, v4@r4, v2@r2"):
            type_dips(
                "export", "--master", run.address, "--output", str(elsewhere / "old.safetensors"), "--version", "v1@r1"
            )
        assert not (elsewhere / "old.safetensors").exists() and len(list(elsewhere.iterdir())) == 3


def test_a_master_that_does_not_answer(tmp_path: Path) -> None:
    """Said with its address; nothing is left."""
    with pytest.raises(DipsError, match=r"127\.0\.0\.1:1"):
        type_dips("export", "--master", "127.0.0.1:1", "--output", str(tmp_path / "x.safetensors"))
    assert not list(tmp_path.iterdir())
