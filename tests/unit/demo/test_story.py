"""The small decisions of the demo: its files, its schedule, what it shows."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from dips.config import host_port, load_cluster, load_run
from dips.config.reading import load_file
from dips.config.shared import Shared
from dips.demo import layout, train
from dips.demo.run import Watch
from dips.errors import ConfigError
from dips.identity.names import PeerRole
from tests.unit.view.views import make_cluster, make_run


def test_the_files_are_right(tmp_path: Path) -> None:
    """What the demo writes loads as what an operator writes, and all parties agree."""
    files = layout.make_layout(tmp_path / "out")
    address = layout.write_configs(files, ranges=10, tokens=1000, wall_s=60)
    run = load_run(files.run_file)
    assert [s.name for s in run.slaves] == list(layout.SLAVES)
    assert run.master.listen == address
    assert host_port(address)[1] > 0
    assert (run.shared.stop.tokens, run.shared.data.ranges) == (1000, 10)
    for name in layout.CLUSTERS:
        cluster = load_cluster(files.cluster_file(name))
        assert cluster.shared.digest == run.shared.digest
        assert (cluster.cluster, cluster.master, cluster.directory) == (name, address, files.directory / name)


@pytest.mark.parametrize("name", ["default", "paper"])
def test_a_preset_gives_the_rules_and_nothing_else(tmp_path: Path, name: str) -> None:
    """Name, end and data stay the demo's."""
    preset = Path(__file__).parents[3] / "configs" / "shared" / f"{name}.yaml"
    files = layout.make_layout(tmp_path / "out")
    layout.write_configs(files, ranges=10, tokens=1000, wall_s=60, preset=preset)
    shared, wanted = load_run(files.run_file).shared, load_file(preset, Shared)
    assert (shared.outer, shared.penalty) == (wanted.outer, wanted.penalty)
    assert (shared.run, shared.stop.tokens, shared.data.ranges) == (layout.RUN, 1000, 10)


def test_a_preset_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    """Before a directory is made."""
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("run: x\nouter: {merge: median}\n")
    with pytest.raises(ConfigError, match=r"wrong\.yaml: outer\.merge"):
        layout.read_preset(wrong)
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        layout.read_preset(tmp_path / "none.yaml")


def test_a_used_directory_is_refused(tmp_path: Path) -> None:
    """A run never writes into another's directory, nor in the place of a file."""
    (tmp_path / "x").touch()
    with pytest.raises(ConfigError, match=r"--out .*x: cannot be written: Not a directory"):
        layout.make_layout(tmp_path / "x")
    with pytest.raises(ConfigError, match="is not empty"):
        layout.make_layout(tmp_path)


def test_the_schedule() -> None:
    """The rate warms up by steps of this incarnation, falls by the run's progress, and never reaches zero."""
    warm = [train.learning_rate(step, 0.0) for step in range(train.WARMUP_STEPS)]
    assert warm == sorted(warm)
    assert warm[-1] == pytest.approx(train.LR)
    falling = [train.learning_rate(1000, progress / 10) for progress in range(13)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == pytest.approx(train.LEAST_LR)


STATUS = make_run({"fast": make_cluster()}, {}, head="v7@r9")


def test_without_a_terminal_lines_are_plain() -> None:
    """News come at once, the status now and then, neither with an escape sequence."""
    out = io.StringIO()
    with Watch(60, Console(file=out, width=80)) as watch:
        watch.print_event("killed slave-1")
        watch.show_status(STATUS)
        watch.show_status(STATUS)
        watch.show_status(None)
    text = out.getvalue()
    assert "killed slave-1" in text
    assert text.count("v7@r9") == 1
    assert "\x1b" not in text


def test_on_a_terminal_all_is_drawn() -> None:
    """The picture has the status and the news; a master that does not answer leaves the last one standing."""
    out = io.StringIO()
    with Watch(60, Console(file=out, force_terminal=True, width=120, height=50)) as watch:
        watch.print_event("killed slave-1")
        watch.show_status(STATUS)
        watch.show_status(None)
    last = out.getvalue().rpartition("▱")[2]
    assert "v7@r9" in last
    assert "killed slave-1" in last


def test_the_files_of_a_secure_demo(tmp_path: Path) -> None:
    """They name certificates in place of plain text, as the guide has it."""
    files = layout.make_layout(tmp_path / "out")
    layout.write_configs(files, ranges=10, tokens=1000, wall_s=60, secure=True)
    run, fast = load_run(files.run_file), load_cluster(files.cluster_file("fast"))
    ours = run.tls_files("slave-0", PeerRole.SLAVE)
    assert ours is not None and ours.cert == files.directory / "certs" / "slave-0.slave.crt"
    theirs = fast.tls_files("fast", PeerRole.CLUSTER)
    assert theirs is not None and theirs.crl == files.directory / "certs" / "crl.pem"
