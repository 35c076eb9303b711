"""Mistakes of a first week: each ends with a message that says what to do, its exit code, and nothing else harmed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dips.commands.status import ask_status
from dips.errors import UnavailableMaster
from dips.transport.endpoints import master_peer
from tests.integration import cluster_harness as harness
from tests.integration.test_client_agent import TINY
from tests.integration.train_constant import tensors

CLI = [sys.executable, "-m", "dips.cli"]


@pytest.fixture(name="run")
def made_run(tmp_path: Path) -> Iterator[Any]:
    shared = {"penalty": {"gates": []}, "stop": {"versions": 3}}
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
    assert type_words(*CLI, "new", ".", "--bare", cwd=tmp_path)[0] == 0
    content = yaml.safe_load((tmp_path / "dips.yaml").read_text())
    content["shared"] = {"run": "r"}
    (tmp_path / "dips.yaml").write_text(yaml.safe_dump(content))
    code, text = type_words(*CLI, *line.split()[1:], cwd=tmp_path)
    assert code == 0, text


@pytest.mark.timeout(120)
def test_another_model_and_other_options_are_refused(run: Any, tmp_path: Path) -> None:
    """A model that differs, and shared options that differ: 78, with the parameters or keys; the next cluster trains.

    What it trains is a line of each log for an outer step, and its last loss is shown at the end.
    """
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
    told = asyncio.run(ask_status(master_peer(run.address, None)))
    assert (told["finished"] is not None, told["newest"]["loss"]) == (True, 1.5)
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in ("master", "ps0", "right")}
    one_each = [("master", '"version_committed"'), ("ps0", '"event": "order"'), ("right", '"event": "outcome"')]
    assert [logs[name].count(event) for name, event in one_each] == [3, 3, 3], "a line for each outer step"
    assert not any(event in text for event in ("push_granted", "push_begin", "OpenPush") for text in logs.values())


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
    model = tmp_path / "master" / "initial"
    model.rename(tmp_path / "elsewhere")
    run.start_master()
    slave = run.start_slave(run.slaves[0])
    run.until(lambda: "copy it from <master.directory>/initial/" in slave.log.read_text(), 60, "it says so")
    assert "under the key initial_model" in slave.log.read_text()


# ---- the training command ------------------------------------------------------------------------------------------


def seen(run: Any, cluster: str) -> dict[str, Any]:
    """A cluster, as the master tells; nothing until that listens."""
    try:
        told = asyncio.run(ask_status(master_peer(run.address, None)))
    except UnavailableMaster:
        return {}
    return dict(told["clusters"].get(cluster, {}))


@pytest.mark.timeout(120)
def test_a_command_that_is_not_there(run: Any) -> None:
    """Its name is said before anything is started, and it is not tried again."""
    typo = run.start_cluster("typo", ["pyhton", "train.py"], max_restarts=10)
    run.wait(typo, 30, code=78)
    assert typo.log.read_text().startswith("error: the training command 'pyhton' is not found")
    assert not run.timeline("typo").exists()


@pytest.mark.timeout(120)
def test_a_script_that_always_crashes(run: Any, tmp_path: Path) -> None:
    """Before its first step: three times the same, with the last line in the log; status says why it is gone."""
    run.start_servers()
    script = tmp_path / "train.py"
    script.write_text(CRASHES)
    west = run.start_cluster("west", [sys.executable, str(script)], max_restarts=10)
    told = "crashing, 1 of 10, exit 1, last line: ValueError: no data"
    run.until(lambda: told in str((seen(run, "west").get("heartbeat") or {}).get("remarks")), 60, "it is shown")
    run.wait(west, 60, code=1)
    assert seen(run, "west")["reason"].startswith("crashed 3 times in the same way before its first step: exit 1")
    assert west.log.read_text().count("trainer_start") == 3


CRASHES = f"""
import sys
sys.path.insert(0, {str(Path(TINY).parent)!r})
from train_constant import ConstantModel
from dips.client import OuterLoop
OuterLoop(ConstantModel())
raise ValueError("no data")
"""


@pytest.mark.timeout(120)
def test_a_model_that_does_not_move(run: Any, tmp_path: Path) -> None:
    """Norm 0 after inner steps is refused, and told in log and status; so is an end without one accepted push."""
    run.start_servers()
    still = run.start_cluster("still", tiny(tmp_path, "still"))
    run.wait(still, 60)
    log, left = still.log.read_text(), seen(run, "still")
    assert "its push was gated: norm 0 after 1 inner step: the optimizer trains other tensors" in log
    assert (left["accepted"], left["gated"]) == (0, 3)
    assert left["reason"].startswith("left without one accepted push: it took 3 inner steps: train longer")
    assert '"level": "warning"' in next(line for line in log.splitlines() if "ended without one accepted push" in line)


@pytest.mark.timeout(120)
def test_a_name_that_is_taken(run: Any, tmp_path: Path) -> None:
    """A second agent of one name is refused while the first lives, which goes on unharmed."""
    run.start_master()
    slave = run.start_slave(run.slaves[0])
    run.until(lambda: '"ready"' in slave.log.read_text(), 60, "it is ready")
    first = run.start_cluster("west", tiny(tmp_path), steps=1000)
    run.until(lambda: seen(run, "west"), 60, "it joined")
    file = tmp_path / "again.yaml"
    file.write_text((tmp_path / "west.yaml").read_text().replace("directory: west", "directory: again"))
    second = run._start("again", [*harness.daemon("client"), "-c", str(file), "--", *tiny(tmp_path)])
    run.wait(second, 60, code=77)
    assert "expected a name that is free, got west, which a live agent has as west/1" in second.log.read_text()
    assert first.code is None and seen(run, "west")["inc"] == 1, "it was not fenced"


@pytest.mark.timeout(120)
def test_what_an_agent_waits_for_is_in_its_log(run: Any, tmp_path: Path) -> None:
    """A slave that is not there; SIGTERM while it waits for it, or for a master, ends it without a traceback."""
    alone = run.start_cluster("alone", tiny(tmp_path))
    run.until(lambda: "asks the master again" in alone.log.read_text(), 60, "it waits for a master")
    alone.terminate()
    run.start_master()
    west = run.start_cluster("west", tiny(tmp_path))
    run.until(lambda: '"waits"' in west.log.read_text(), 60, "it waits for a slave")
    assert "not yet registered: ps0" in west.log.read_text()
    assert "does not answer" not in west.log.read_text(), "the master did"
    west.terminate()
    for agent in (alone, west):
        assert "Traceback" not in agent.log.read_text(), agent.tail()
