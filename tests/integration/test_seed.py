"""`dips seed`: a master and slaves that start with empty directories, and share no disk (docs/guides/seed.md)."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dips.errors import ConfigError, Denied, DipsError
from dips.identity.names import PeerRole
from dips.store.files import read_parameters
from tests.enrolled import enroll_all
from tests.integration import cluster_harness as harness
from tests.integration import train_constant as script
from tests.typed import type_dips

TINY = str(Path(__file__).parent / "train_tiny.py")
VERSIONS = 2


def model_of(number: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(number)
    parameters = script.ConstantModel().named_parameters()
    return {name: random.standard_normal(tuple(p.shape)).astype(np.float32) for name, p in parameters}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[harness.Run]:
    """A run that `dips init` has not made, and two models beside it."""
    save_file(model_of(1), tmp_path / "one.safetensors")
    save_file(model_of(2), tmp_path / "two.safetensors")
    shared = {"penalty": {"gates": []}, "stop": {"versions": VERSIONS}}
    with harness.Run(tmp_path, model_of(1), shared=shared, slave={"initial_model": None}) as made:
        shutil.rmtree(tmp_path / "master")
        yield made


def states_of(run: harness.Run) -> dict[str, str]:
    """What `dips status` says of each slave, or of the run that waits."""
    picture = json.loads(type_dips("status", "--master", run.address, "--json"))
    return {"run": picture.get("waiting", ""), **{name: s["state"] for name, s in picture["slaves"].items()}}


@pytest.mark.timeout(120)
def test_a_run_begins_without_a_shared_disk(run: harness.Run, tmp_path: Path) -> None:
    """The master waits, the slaves wait; one command brings all of it, and each restart on the way loses nothing."""
    seed = ("seed", "--master", run.address, "--model", str(tmp_path / "one.safetensors"), "--wait-s", "60")
    other = ("seed", "--master", run.address, "--model", str(tmp_path / "two.safetensors"), "--wait-s", "60")
    master = run.start_master()
    run.until(lambda: "no_ledger" in (tmp_path / "master.log").read_text(), 30, "the master waits")
    assert "waits for the first model" in states_of(run)["run"]
    assert "waits for the first model" in type_dips("status", "--master", run.address)
    slaves = run.start_slaves()
    west = run.start_cluster("west", [sys.executable, TINY, "steps", str(tmp_path / "out")])

    assert "every slave has the first model" in type_dips(*seed)
    run.until(lambda: states_of(run)["ps0"] == states_of(run)["ps1"] == "ready", 30, "the slaves serve it")
    with pytest.raises(ConfigError, match="expected the first model of this run, got another: they differ in"):
        type_dips(*other)
    run.wait(west, 60)
    with pytest.raises(ConfigError, match="this run has begun, and takes no first model any more"):
        type_dips(*seed)

    for process in (*slaves, master):
        process.terminate()
    assert run.head().version == VERSIONS
    brought = {k: t for s in run.slaves for k, t in read_parameters(tmp_path / s / "v0@r0").items()}
    assert brought.keys() == model_of(1).keys()
    assert all(np.array_equal(brought[name], tensor) for name, tensor in model_of(1).items())


@pytest.mark.timeout(120)
def test_what_crashes_on_the_way_is_nothing_or_whole(run: harness.Run, tmp_path: Path) -> None:
    """The master dies with a ledger and no slave, a slave loses its disk: said again, only what lacks is brought."""
    seed = ("seed", "--master", run.address, "--model", str(tmp_path / "one.safetensors"), "--wait-s", "60")
    master = run.start_master()
    run.until(lambda: "no_ledger" in (tmp_path / "master.log").read_text(), 30, "the master waits")
    with pytest.raises(DipsError, match=r"not here: ps0, ps1|cannot be reached"):
        type_dips(*seed[:-1], "0")
    master.kill()
    run.start_master()
    slaves = run.start_slaves()
    assert "every slave has the first model" in type_dips(*seed)
    run.until(lambda: states_of(run)["ps0"] == states_of(run)["ps1"] == "ready", 30, "the slaves serve it")

    slaves[0].kill()
    kept = (tmp_path / "ps1" / "v0@r0").stat().st_mtime_ns
    shutil.rmtree(tmp_path / "ps0")
    run.start_slave("ps0")
    run.until(lambda: states_of(run)["ps0"] == "restoring", 30, "it waits for the model again")
    assert "every slave has the first model" in type_dips(*seed)
    run.until(lambda: states_of(run)["ps0"] == states_of(run)["ps1"] == "ready", 30, "the slaves serve it")
    assert (tmp_path / "ps1" / "v0@r0").stat().st_mtime_ns == kept, "what is there is not brought again"


PEERS = (
    ("master", PeerRole.MASTER), ("ps0", PeerRole.SLAVE), ("ps1", PeerRole.SLAVE), ("alice", PeerRole.OPERATOR),
    ("eve", PeerRole.VIEWER),
)  # fmt: skip


@pytest.mark.timeout(120)
def test_a_secured_run_is_seeded_and_a_slave_drains_itself(tmp_path: Path) -> None:
    """Over encrypted lanes, by an operator's certificate and no other's; a slave drains in its own name alone."""
    save_file(model_of(1), tmp_path / "one.safetensors")
    certs, shared = enroll_all(tmp_path / "certs", "test", PEERS), {"stop": {"versions": VERSIONS}}
    options = {"shared": shared, "slave": {"initial_model": None}, "security": certs}
    with harness.Run(tmp_path, model_of(1), **options) as run:
        shutil.rmtree(tmp_path / "master")
        run.start_servers()
        run.until(lambda: "no_ledger" in (tmp_path / "master.log").read_text(), 30, "the master waits")

        def word(*words: str, who: str = "alice.operator") -> str:
            return type_dips(*words, "--master", run.address, "--credentials", str(tmp_path / "certs" / f"{who}.crt"))

        seed = ("seed", "--model", str(tmp_path / "one.safetensors"), "--wait-s", "60")
        with pytest.raises(Denied, match="a certificate of operator, got that of viewer 'eve'"):
            word(*seed, who="eve.viewer")
        assert "every slave has the first model" in word(*seed)

        def ready() -> bool:
            slaves = json.loads(word("status", "--json"))["slaves"].values()
            return all(s["state"] == "ready" for s in slaves)

        run.until(ready, 30, "the slaves serve it")
        drain = ("drain", "ps0", "--self", "--config", str(run.file), "--wait-s", "30")
        assert "ps0 may be stopped: drained" in type_dips(*drain)
        assert json.loads(word("status", "--json"))["slaves"]["ps0"]["state"] == "draining"
        assert "ps0 may be stopped: drained" in type_dips(*drain), "said again, it is drained still"
