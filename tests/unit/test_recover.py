"""`dips recover`: a saved model makes up for a lost directory or ledger; nothing is written while anybody serves."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import yaml
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from dips.cli import cli
from dips.config import RunFile, load_run
from dips.errors import ConfigError
from dips.ids import GENESIS, VersionId
from dips.master import genesis
from dips.master.ledger import Ledger
from dips.master.ledger_rebuild import SPARE
from dips.outer_step import nesterov_step
from dips.protocol.manifest import Manifest
from dips.protocol.records import RoundReserved, ScoreHistory, VersionCommitted
from dips.slave.snapshots import Snapshots

V1 = VersionId(1, 1)
SHAPES = {"a.w": (3,), "b.w": (2, 2)}


def tensors(value: float) -> dict[str, np.ndarray]:
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def config(tmp_path: Path) -> RunFile:
    """A run of two slaves at v1@r1: θ is 1 and m is 5 everywhere, both lie on both disks."""
    slaves = [
        {"name": n, "master": "127.0.0.1:1", "directory": n, "initial_model": "m/initial/model.safetensors"}
        for n in ("s0", "s1")
    ]
    content = {"shared": {"run": "r"}, "master": {"directory": "m"}, "slaves": slaves, "insecure": True}
    (tmp_path / "dips.yaml").write_text(yaml.safe_dump(content))
    config = load_run(tmp_path / "dips.yaml")
    row = genesis.make_run(config, tensors(0.0))
    manifest = Manifest.from_json(row.manifest)
    for name, layers in row.placement:
        disk = opened(config, name)
        disk.bind_layers(manifest, layers, [row.genesis[i] for i in layers], 1)
        flat = {i: np.ones(manifest.layers[i].numel, np.float32) for i in layers}
        disk.write_snapshot(V1, flat, {i: 5 * array for i, array in flat.items()})
        disk.close()
    with closing(Ledger.open(genesis.ledger_path(config), wall=time.time)) as ledger:
        ledger.start_term()
        made = VersionCommitted(
            V1, GENESIS, True, (), (), nesterov_step(1.0, 0.7, 0.8), 1.0, False, (), (), ScoreHistory((), (1.0,)), 0.0
        )
        ledger.write_records([RoundReserved(1, 0.0), made])
    save_file(tensors(2.0), tmp_path / "saved.safetensors")
    return config


def opened(config: RunFile, name: str) -> Snapshots:
    section = config.slave_section(name)
    return Snapshots(section.directory, "r", name, section.initial_model, structlog.get_logger())


def recover(tmp_path: Path, *words: str) -> Any:
    file, model = str(tmp_path / "dips.yaml"), str(tmp_path / "saved.safetensors")
    return CliRunner().invoke(cli, ["recover", "--config", file, "--model", model, *(words or ("--yes",))])


def content(config: RunFile, version: VersionId) -> Mapping[str, np.ndarray]:
    """All parameters and momentum of a version, by the names of the slaves' files."""
    files = [load_file(s.directory / str(version) / "model.safetensors") for s in config.slaves]
    return {name: array for file in files for name, array in file.items()}


def test_a_lost_directory_loses_momentum_and_nothing_else(config: RunFile, tmp_path: Path) -> None:
    """The new version has the file's θ everywhere, the living slave's momentum, and 0 for the lost layers."""
    shutil.rmtree(config.slave_section("s1").directory)
    done = recover(tmp_path)
    assert done.exit_code == 0, done.output
    assert "s1: 1 layers, no snapshot is left: momentum 0" in done.output
    head = VersionId(2, 2)
    found = content(config, head)
    (lost,) = [name for name, shape in SHAPES.items() if not found[f"momentum.{name}"].any()]
    (kept,) = SHAPES.keys() - {lost}
    assert all((found[f"theta.{name}"] == 2.0).all() for name in SHAPES)
    assert (found[f"momentum.{kept}"] == 5.0).all()
    with closing(Ledger.open(genesis.ledger_path(config), readonly=True)) as ledger:
        state, (*_, newest) = ledger.read_state(), ledger.read_history()
        assert set(ledger.read_digests()) == {(2, "s0"), (2, "s1")}
    assert [v.version for v in state.versions] == [GENESIS, V1, head]
    assert state.versions[-1].durable
    assert state.history == ScoreHistory((), (1.0,)), "what the penalty knows stays"
    assert newest.recovered == f"from {tmp_path / 'saved.safetensors'}: layers {lost[0]} lost their momentum"
    told = CliRunner().invoke(cli, ["history", "--config", str(tmp_path / "dips.yaml")], env={"COLUMNS": "200"})
    assert "recovered: from" in told.output and "lost their momentum" in told.output
    verified = CliRunner().invoke(cli, ["verify", "--config", str(tmp_path / "dips.yaml")])
    assert verified.exit_code == 0, verified.output


def test_a_lost_ledger_begins_anew_above_every_name(config: RunFile, tmp_path: Path) -> None:
    """History is gone, momentum is not; rounds and incarnations are above all that were used."""
    shutil.rmtree(config.master.directory)
    done = recover(tmp_path)
    assert done.exit_code == 0, done.output
    with closing(Ledger.open(genesis.ledger_path(config), readonly=True)) as ledger:
        state = ledger.read_state()
    head = state.versions[-1].version
    assert head.version == 1 and head.round > 1 + SPARE and state.incarnations_above >= SPARE
    found = content(config, head)
    assert all((found[f"theta.{name}"] == 2.0).all() and (found[f"momentum.{name}"] == 5.0).all() for name in SHAPES)


def test_it_is_refused_while_anybody_serves(config: RunFile, tmp_path: Path) -> None:
    """The sentence names who serves, by pid, and what to stop; nothing was written."""
    before = genesis.ledger_path(config).read_bytes()
    with closing(opened(config, "s1")), closing(Ledger.open(genesis.ledger_path(config))):
        done = recover(tmp_path)
    assert isinstance(done.exception, ConfigError)
    assert "the master (pid " in str(done.exception) and "slave s1 (pid " in str(done.exception)
    assert str(done.exception).endswith("still serve this run: stop the master and all slaves first")
    assert genesis.ledger_path(config).read_bytes() == before


@pytest.mark.parametrize(
    ("saved", "problem"),
    [
        ({"a.w": np.ones(3, np.float32)}, "expected a tensor 'b.w', it is missing"),
        ({**tensors(1.0), "b.w": np.ones((2, 3), np.float32)}, "tensor 'b.w': expected"),
        ({**tensors(1.0), "b.w": np.ones((2, 2), np.float16)}, "tensor 'b.w': expected"),
        ({**tensors(1.0), "b.w": np.full((2, 2), np.nan, np.float32)}, "layer b is not finite"),
    ],
)
def test_a_file_that_is_not_the_model_is_refused(
    config: RunFile, tmp_path: Path, saved: dict[str, np.ndarray], problem: str
) -> None:
    """What is missing, of another shape or type, or not finite is named; nothing was written."""
    save_file(saved, tmp_path / "saved.safetensors")
    done = recover(tmp_path)
    assert isinstance(done.exception, ConfigError) and problem in str(done.exception)
    assert not list(tmp_path.glob("s*/v2@*"))


def test_no_is_an_answer(config: RunFile, tmp_path: Path) -> None:
    """Asked, and told no: the plan was shown, nothing was written."""
    file, model = str(tmp_path / "dips.yaml"), str(tmp_path / "saved.safetensors")
    done = CliRunner().invoke(cli, ["recover", "--config", file, "--model", model], input="n\n")
    assert done.exit_code == 1 and "momentum of v1@r1" in done.output
    assert not list(tmp_path.glob("s*/v2@*"))
