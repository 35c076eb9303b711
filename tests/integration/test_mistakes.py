"""Mistakes of a first week: each ends with a message that says what to do, its exit code, and nothing else harmed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration import cluster_harness as harness
from tests.integration.test_client_agent import TINY, tensors

CLI = [sys.executable, "-m", "dips.cli"]


@pytest.fixture(name="run")
def made_run(tmp_path: Path) -> Iterator[Any]:
    shared = {"penalty": {"rule": "none"}, "stop": {"versions": 3}}
    with harness.Run(tmp_path, tensors(), shared=shared, slaves=1) as run:
        yield run


def type_words(*words: str, cwd: Path = harness.ROOT) -> tuple[int, str]:
    """Run a command as a person does; return its exit code and what it said on standard error."""
    done = subprocess.run(
        list(words),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(harness.ROOT)},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr + done.stdout


def tiny(tmp_path: Path, mode: str = "steps") -> list[str]:
    return [sys.executable, TINY, mode, str(tmp_path / "out")]


@pytest.mark.parametrize("role", ["master", "slave", "client"])
def test_every_command_explains_itself(role: str) -> None:
    """-h is --help everywhere, and -c is --config."""
    code, text = type_words(*harness.daemon(role), "-h")
    assert code == 0 and "-c" in text and "--config" in text
    code, text = type_words(
        *harness.daemon(role),
        "-c",
        "no-such.yaml",
        *(["-n", "x"] if role == "slave" else ["--", "x"] if role == "client" else []),
    )
    assert code == 78 and text == "error: no-such.yaml: cannot be read: No such file or directory\n"


def test_the_masters_example_works(tmp_path: Path) -> None:
    """What `dips-master --help` shows makes a run, word for word."""
    _, text = type_words(*harness.daemon("master"), "--help")
    line = next(line.strip() for line in text.splitlines() if line.strip().startswith("dips init"))
    shutil.copy(harness.ROOT / "configs" / "dips.yaml", tmp_path / "dips.yaml")
    content = yaml.safe_load((tmp_path / "dips.yaml").read_text())
    content["shared"] = {"run": "r"}
    (tmp_path / "dips.yaml").write_text(yaml.safe_dump(content))
    code, text = type_words(*CLI, *line.split()[1:], cwd=tmp_path)
    assert code == 0, text


@pytest.mark.timeout(120)
def test_another_model_and_other_options_are_refused(run: Any, tmp_path: Path) -> None:
    """A model that differs, and shared options that differ: 78, with the parameters or keys; the next cluster joins."""
    run.start_master()
    wrong = run.start_cluster("wrong", tiny(tmp_path, "wrong"))
    other = dict(run.shared)
    run.shared = {**other, "outer": {"lr": 0.5}}
    odd = run.start_cluster("odd", tiny(tmp_path))
    run.shared = other
    run.wait(wrong, 60, code=78)
    run.wait(odd, 60, code=78)
    assert "head.bias: expected shape (1,), got (2,)" in wrong.log.read_text()
    assert (
        "shared.outer.lr: the run has 0.7, this file 0.5: copy the run file's section `shared`" in odd.log.read_text()
    )
    run.start_slaves()
    run.wait(run.start_cluster("right", tiny(tmp_path)), 60)


def test_a_run_file_that_was_changed(run: Any) -> None:
    """The master names the key that differs from those that the run was made with."""
    run.shared = {**run.shared, "outer": {"lr": 0.5}}
    run.write_run_file()
    master = run.start_master()
    run.wait(master, 60, code=78)
    assert "shared.outer.lr: the run has 0.7, this file 0.5: put the options back" in master.log.read_text()


@pytest.mark.timeout(120)
def test_a_slave_without_the_initial_model(run: Any, tmp_path: Path) -> None:
    """It says to copy the file, naming the key, and asks again."""
    model = tmp_path / "master" / "initial" / "model.safetensors"
    model.rename(tmp_path / "elsewhere")
    run.start_master()
    slave = run.start_slave(run.slaves[0])
    run.until(lambda: "copy it from <master.directory>/initial/" in slave.log.read_text(), 60, "it says so")
    assert "under the key initial_model" in slave.log.read_text()
