"""A daemon's file that changes while it runs: what is taken over, what is said, and what is left as it was."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import structlog
import yaml

from dips.config import RunFile, load_run, watching
from dips.config.watching import ConfigWatch, explain_key, find_changes, keep_watching
from dips.daemon import watch_file
from dips.protocol.tunable import TARGETS, TUNABLE
from dips.slave.app import list_foreign_keys
from dips.telemetry import logs
from tests.structure import config_keys
from tests.unit.slave.test_snapshots import as_nobody


class EditedRunFile:
    """A run file, and a master that looks at it."""

    def __init__(self, directory: Path) -> None:
        slave = {"master": "127.0.0.1:1", "initial_model": "m/model.safetensors"}
        self.content: dict[str, Any] = {
            "shared": "shared.yaml",
            "master": {"listen": "127.0.0.1:1", "directory": "m"},
            "slaves": [{"name": f"s{i}", "directory": f"s{i}", **slave} for i in range(2)],
            "tls": False,
        }
        self.path, self.shared, self.said = directory / "dips.yaml", {"run": "r"}, list[str]()
        self.write()
        config = load_run(self.path)
        self.watch = ConfigWatch(
            self.path,
            config,
            load_run,
            ("clusters", "log_level"),
            self.said.append,
            list_foreign_keys(config, config.slaves[0]),
        )

    def write(self, **keys: Any) -> None:
        self.content |= keys
        (self.path.parent / "shared.yaml").write_text(yaml.safe_dump(self.shared))
        new = self.path.with_suffix(".new")
        new.write_text(yaml.safe_dump(self.content))
        new.rename(self.path)

    def look(self) -> tuple[RunFile, list[str]] | None:
        return self.watch.look_again()


@pytest.fixture(name="story")
def made_story(tmp_path: Path) -> EditedRunFile:
    return EditedRunFile(tmp_path)


def test_what_may_change_is_taken_over(story: EditedRunFile) -> None:
    assert story.look() is None
    story.write(clusters=["west"], log_level="debug")
    found = story.look()
    assert found is not None
    config, keys = found
    assert (config.clusters, config.log_level, keys) == (("west",), "debug", ["clusters", "log_level"])
    assert story.look() is None and not story.said


def test_what_changed_before_the_first_look_is_taken_over(story: EditedRunFile) -> None:
    """Between the start, which reads the file, and the first look lies a restore, or a standby's wait of months."""
    config = load_run(story.path)
    story.write(clusters=["west"])
    story.watch = ConfigWatch(story.path, config, load_run, ("clusters",), story.said.append)
    found = story.look()
    assert found is not None and found[0].clusters == ("west",)
    assert story.look() is None and not story.said


def test_what_cannot_change_is_said_once_with_the_reason(story: EditedRunFile) -> None:
    story.content["slaves"][0]["slots"] = 4
    story.content["slaves"][1]["slots"] = 4  # the other slave's own affair
    story.shared["outer"] = {"lr": 0.5, "merge": "rda"}  # type: ignore[assignment]
    story.write(log_level="debug")
    found = story.look()
    assert found is not None and found[1] == ["log_level"]
    assert found[0].slaves[0].slots == 2, "the configuration in use is the one of the start"
    story.write(log_level="info")
    assert story.look() is not None
    keys = [line.partition(":")[0] for line in story.said]
    assert keys == ["shared.outer.lr", "shared.outer.merge", "slaves.s0.slots"]
    assert "0.7 → 0.5 is not used" in story.said[0] and "dips set" in story.said[0]
    assert "agreed on it when the run was made" in story.said[1], "a rule is no number"
    assert "memory is allocated at the start" in story.said[2]


def test_a_change_that_was_taken_back_is_said_again(story: EditedRunFile) -> None:
    """Each time that it comes, and not while it stays; a long value is cut."""
    for slots, said in ((4, 1), (4, 1), (2, 1), (4, 2), (5, 3)):
        story.content["slaves"][0]["slots"] = slots
        story.write(clusters=["west"])
        story.watch.look_again(now=True)
        assert len(story.said) == said, slots
    assert watching._spell("x" * watching.MOST_VALUE) == "x" * watching.MOST_VALUE
    assert watching._spell("x" * (watching.MOST_VALUE + 1)) == "x" * watching.MOST_VALUE + "…"


def test_a_key_that_is_removed_is_said(story: EditedRunFile) -> None:
    """Its value is null then, which is as little used as any other, and is said once."""
    story.write(master={**story.content["master"], "mirror": "s3://bucket/runs"})
    story.watch = ConfigWatch(story.path, load_run(story.path), load_run, (), story.said.append)
    del story.content["master"]["mirror"]
    for clusters in (["a"], None):
        story.write(clusters=clusters)
        assert story.look() is None
    assert [said.partition(" is not used")[0] for said in story.said] == [
        "master.mirror: s3://bucket/runs → null",
        "clusters: null → a",
    ]


def test_a_file_that_is_wrong_is_not_used(story: EditedRunFile) -> None:
    """Nor one that is gone; the next good one is."""
    story.write(log_level="loud")
    assert story.look() is None and "log_level" in story.said[0]
    story.path.unlink()
    assert story.look() is None and "cannot be read" in story.said[1]
    assert story.look() is None and len(story.said) == 2
    story.write(log_level="error")
    assert story.look() is not None


@pytest.mark.parametrize(
    ("added", "said"),
    [
        pytest.param(b"# caf\xe9\n", "expected UTF-8, got byte 0xe9", id="Latin-1"),
        pytest.param("# café".encode()[:-1], "expected UTF-8, got byte 0xc3", id="cut inside a letter"),
        pytest.param(b"clusters: 2026-13-45\n", "month must be in 1..12", id="a date that is none"),
        pytest.param(b"clusters: " + 1_000 * b"[" + b"\n", "levels deep", id="deep"),
        pytest.param(b"clusters: &a {names: *a}\n", "levels deep", id="holds itself"),
        pytest.param(b'log_level: "a\\0"\n', "log_level", id="a NUL"),
        pytest.param(b"clusters: !!bool maybe\n", "is not YAML", id="a tag that its value is not of"),
        pytest.param(b"clusters: !!int ''\n", "is not YAML", id="a tag of an empty value"),
        pytest.param(b"clusters: !!timestamp soon\n", "is not YAML", id="a tag of a time that is none"),
        pytest.param(b"? [1, 2]\n: 3\n", "is not YAML", id="a list as a key"),
        pytest.param(b"\x00", "is not YAML", id="a NUL byte"),
    ],
)
def test_no_bytes_of_a_file_end_who_looks_at_it(story: EditedRunFile, added: bytes, said: str) -> None:
    """In the file or in the one that it names; what was read before stays in use, and the next good file is used."""
    for path in (story.path, story.path.parent / "shared.yaml"):
        good = path.read_bytes()
        path.write_bytes(good + added)
        assert story.look() is None and said in story.said[-1] and str(story.path.parent) in story.said[-1]
        path.write_bytes(good)
        assert story.look() is None
    story.write(shared="a\0b")
    assert story.look() is None and "null byte" in story.said[-1]
    story.write(shared="shared.yaml", log_level="error")
    assert story.look() is not None


def test_a_port_that_is_none_ends_nobody_who_looks_at_it(story: EditedRunFile) -> None:
    """A key beside the 2 of many keyboards writes ², which Python takes for a digit and for no number."""
    story.write(master={**story.content["master"], "listen": "127.0.0.1:78²"})
    assert story.look() is None and "master.listen: expected an address" in story.said[-1]


def test_a_file_that_may_be_read_after_all_is_taken_over() -> None:
    """An editor that ran as root has saved it: who may read a file changes neither its size nor its time."""
    with TemporaryDirectory() as made:  # pytest's own are closed to others
        directory = Path(made)
        directory.chmod(0o777)
        story = EditedRunFile(directory)
        with as_nobody(*directory.iterdir()):
            story.look()
            story.write(log_level="debug")
            story.path.chmod(0)
            assert story.look() is None and "Permission denied" in story.said[-1]
            story.path.chmod(0o600)
            taken = story.look()
            assert taken is not None and taken[0].log_level == "debug"


def test_slaves_that_come_or_go_are_one_change(story: EditedRunFile) -> None:
    del story.content["slaves"][1]
    story.write()
    assert story.look() is None
    assert story.said[0].startswith("slaves: s0, s1 → s0") and "dips rebalance" in story.said[0]


def test_a_signal_hurries_the_look(story: EditedRunFile) -> None:
    """SIGHUP: at once, and also a file whose dates have not changed."""

    async def play() -> list[str]:
        taken, hurry, done = list[str](), asyncio.Event(), asyncio.Event()

        def apply(_: RunFile, keys: list[str]) -> None:
            taken.extend(keys)
            done.set()

        task = asyncio.create_task(keep_watching(story.watch, apply, hurry))
        await asyncio.sleep(0)
        story.write(log_level="debug")
        hurry.set()
        await asyncio.wait_for(done.wait(), 0.9)
        task.cancel()
        return taken

    assert asyncio.run(play()) == ["log_level"]


@pytest.mark.parametrize(("fixed", "level"), [(False, logging.DEBUG), (True, logging.INFO)])
def test_the_level_of_a_command_line_stays(story: EditedRunFile, fixed: bool, level: int) -> None:
    """Whatever the file says; its other keys are taken over all the same."""

    async def play() -> list[str]:
        loop = asyncio.get_running_loop()
        applied: asyncio.Future[list[str]] = loop.create_future()
        task = watch_file(
            "run file", story.path, load_run(story.path), load_run, structlog.get_logger(), applied.set_exception,
            fixed_level=fixed, changeable=("clusters",), apply=lambda new, keys, told: applied.set_result(keys),
        )  # fmt: skip
        await asyncio.sleep(0)
        story.write(clusters=["west"], log_level="debug")
        os.kill(os.getpid(), signal.SIGHUP)
        try:
            return await asyncio.wait_for(applied, 10)
        finally:
            task.cancel()

    assert asyncio.run(play()) == ["clusters", "log_level"]
    assert logs._LevelledLogger.level == level


@pytest.mark.parametrize("turns", range(6))
def test_whoever_is_hurried_and_cancelled_at_once_ends(story: EditedRunFile, turns: int) -> None:
    """asyncio.wait_for of Python 3.11 loses a cancellation that comes with what it waits for: an agent did not end."""

    async def cancel_soon() -> None:
        hurry = asyncio.Event()
        watching = asyncio.create_task(keep_watching(story.watch, lambda *_: None, hurry))
        await asyncio.sleep(0.01)
        hurry.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        watching.cancel()
        await asyncio.wait({watching}, timeout=1.0)
        assert watching.cancelled()

    asyncio.run(cancel_soon())


def test_a_silent_disk_under_the_file_holds_nothing_up(story: EditedRunFile) -> None:
    """The daemon's loop runs on, its end waits for nothing, and the change is taken over when the disk answers.

    A read of a FIFO waits for its writer, as one of a network's disk for its server.
    """
    content = story.path.read_text()
    story.path.unlink()
    os.mkfifo(story.path)

    async def play() -> list[str]:
        taken: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        apply = lambda _, keys: taken.set_result(keys)  # noqa: E731
        task = asyncio.create_task(keep_watching(story.watch, apply))
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert not task.done()
        replaced = story.path.with_suffix(".written")
        replaced.write_text(content.replace("tls: false", "tls: false\nlog_level: debug"))
        with story.path.open("w") as disk:  # whoever reads it reads the new file next
            replaced.rename(story.path)
            disk.write(content)
        keys = await asyncio.wait_for(taken, 10.0)
        task.cancel()
        return keys

    assert asyncio.run(play()) == ["log_level"]


def test_every_key_has_a_reason() -> None:
    assert "restart this process" in explain_key("master.most_rollback")
    assert "dips set" in explain_key("shared.stop.tokens")
    assert "agreed" in explain_key("shared.codec")
    assert "next start of the training command" in explain_key("overlap")
    assert "restart the master" in explain_key("slaves.s0.supervisor"), "the slave says it, and does not read it"
    assert list(find_changes({"a": {"b": 1}}, {"a": {"b": 2}, "c": 3})) == [("a.b", 1, 2), ("c", None, 3)]


def test_dips_set_takes_each_key_for_which_it_is_named() -> None:
    """Who edited `timing.window` was sent to `dips set`, which has no such key; the master reads it at its start."""
    named = {key for key in config_keys(RunFile) if "dips set" in explain_key(key)}
    assert {key.removeprefix("shared.").removeprefix("master.") for key in named} <= {*TUNABLE, *TARGETS}
    assert "restart this process" in explain_key("master.timing.window")
