"""Followers: each new version arrives whole within seconds of its row, with its name; and nobody notices them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from dips.ids import GENESIS, VersionId
from dips.slave.export import export_snapshot
from tests.integration import cluster_harness as harness
from tests.integration import train_constant as script

TINY = str(Path(__file__).parent / "train_tiny.py")
NOTE = """
import json, os, shutil, sys
from safetensors import safe_open
with safe_open(os.environ["DIPS_MODEL"], "np") as file:
    version, mode = file.metadata()["version"], os.stat(os.environ["DIPS_MODEL"]).st_mode & 0o777
shutil.copy(os.environ["DIPS_MODEL"], f"{sys.argv[1]}/{version}.safetensors")
with open(f"{sys.argv[1]}/seen", "a") as seen:
    print(json.dumps([os.environ["DIPS_VERSION"], version, mode]), file=seen)
"""


def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    named = script.ConstantModel().named_parameters()
    return {name: random.standard_normal(tuple(p.shape)).astype(np.float32) for name, p in named}


@pytest.mark.timeout(180)
def test_a_command_sees_each_version_whole(tmp_path: Path) -> None:
    """`dips follow`: by updates, the file is bit for bit what the disks keep; the run's end ends it."""
    shared = {"penalty": {"gates": []}, "stop": {"versions": 6}, "pull_codec": "int8"}
    (tmp_path / "seen-files").mkdir()
    (tmp_path / "note.py").write_text(NOTE)
    with harness.Run(tmp_path, tensors(), shared=shared, master={"keep_every": 1}) as run:
        run.start_master()
        run.start_slaves()
        command = f"{sys.executable} {tmp_path / 'note.py'} {tmp_path / 'seen-files'}"
        words = [sys.executable, "-m", "dips.cli", "follow", "--master", run.address, "--command", command]
        follower = run._start("follower", words)
        run.until(lambda: (tmp_path / "seen-files" / "seen").exists(), 60, "the first version is seen")
        west = run.start_cluster("west", [sys.executable, TINY, "steps", str(tmp_path / "out")], steps=50)
        run.wait(west, 90)
        run.wait(follower, 30)
        said = (tmp_path / "follower.log").read_text()
        seen = [json.loads(line) for line in (tmp_path / "seen-files" / "seen").read_text().splitlines()]
        names = [VersionId.parse(version) for version, *_ in seen]
        assert names[0] == GENESIS and names[-1].version == 6 and names == sorted(set(names)) and len(names) > 3
        assert all(named == held and mode == 0o600 for named, held, mode in seen), seen
        assert f"the run has ended with {names[-1]}" in said
        for version in names[1:]:  # the slaves keep no snapshot of v0@r0
            export_snapshot([tmp_path / name for name in run.slaves], version, tmp_path / "disks.safetensors")
            of_disks, followed = (
                load_file(tmp_path / "disks.safetensors"),
                load_file(tmp_path / f"seen-files/{version}.safetensors"),
            )
            assert all(np.array_equal(of_disks[name], followed[name]) for name in of_disks), version
        with run.ledger() as ledger:
            rounds, state, acts = ledger.read_history(), ledger.read_state(), ledger.read_audit()
        assert {o.push.cluster for r in rounds for o in r.outcomes} == {"west"}
        assert {c.name: c.ended for c in state.clusters}["follow.puller"]
        assert [(a.caller, a.action, a.arguments) for a in acts] == [("follow.puller", "pull", "v0@r0")]
