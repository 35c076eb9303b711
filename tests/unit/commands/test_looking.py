"""Commands that look and start nothing: plan, check, completion; and what each says as JSON."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
import yaml
from cryptography.x509 import load_pem_x509_certificate
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from dips import cli
from dips.client.parallel import shard_buffer
from dips.client.rank.transfer import TransferRate
from dips.codecs import Codec
from dips.commands import completing, follow, logs, planning, trace, up
from dips.commands.config_checks import check_files, read_files
from dips.commands.init import load_tensors
from dips.commands.seed import SeedBar
from dips.commands.verify import INTACT, Known, _results_table, judge_results
from dips.config import load_run
from dips.errors import ConfigError, DipsError
from dips.identity.certificates import SOON, utc_now
from dips.identity.names import PeerRole
from dips.ids import GENESIS, VersionId
from dips.master.genesis import make_run
from dips.master.journal import SEGMENT_BYTES, SEGMENTS_KEPT
from dips.outer.pool import MemorySum
from dips.printable import FAIL, NOTE, OK, CheckFinding
from dips.protocol.manifest import Manifest
from dips.slave import machine
from dips.slave.machine import COPIES_BYTES, TRANSIT_BYTES
from dips.telemetry import timeline
from dips.transport.endpoints import master_peer
from dips.wire.chunks import encode_body
from tests.enrolled import Enrolled
from tests.typed import type_dips
from tests.unit.view.views import make_run as make_view
from tests.waiting import eventually, is_alive

RUN = "july"


class FilesToCheck:
    """A run file and a cluster file that agree, to be broken one key at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.run_file, self.cluster_file = directory, directory / "dips.yaml", directory / "west.yaml"
        slave = {"master": "127.0.0.1:7800", "initial_model": "m/model.safetensors"}
        self.run: dict[str, Any] = {
            "shared": {"run": RUN},
            "master": {"listen": "127.0.0.1:7800", "directory": "m"},
            "slaves": [{"name": f"s{i}", "directory": f"s{i}", **slave} for i in range(2)],
            "tls": False,
        }
        self.cluster: dict[str, Any] = {
            "shared": {"run": RUN}, "cluster": "west", "master": "127.0.0.1:7800", "tls": False,
        }  # fmt: skip

    def check(self, *labels: str, now: Any = None) -> list[CheckFinding]:
        self.run_file.write_text(yaml.safe_dump(self.run))
        self.cluster_file.write_text(yaml.safe_dump(self.cluster))
        return check_files(read_files([self.run_file, self.cluster_file]), labels, now)

    def secure(self) -> Enrolled:
        enrolled = Enrolled(self.directory, RUN)
        for file in (self.run, self.cluster):
            file["tls"] = "{name}.{role}.crt"
        return enrolled


@pytest.fixture(name="files")
def made_files(tmp_path: Path) -> FilesToCheck:
    return FilesToCheck(tmp_path)


def verdicts(rows: list[CheckFinding], verdict: str) -> list[str]:
    return [f"{row.what.rpartition('/')[2]}: {row.seen}" for row in rows if row.verdict == verdict]


def test_what_agrees_is_well(files: FilesToCheck) -> None:
    files.cluster["shared"]["heartbeat_s"] = 5.0  # half of a lease, and no more
    assert not verdicts(files.check(), FAIL)
    assert verdicts(files.check(), OK)[:2] == ["dips.yaml: run july", "west.yaml: cluster west of run july"]
    assert verdicts(files.check(), NOTE) == [
        f"dips.yaml: master.directory: no ledger at {files.directory}/m/ledger.sqlite"
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: f.run["master"].update(lisen="x"), "master.lisen: unknown key"),
        (lambda f: f.cluster.pop("tls"), "expected the path of a certificate"),
        (lambda f: f.run["slaves"][1].update(directory="s0"), "s0 is s0's, too"),
        (lambda f: f.run["slaves"][1].update(listen="127.0.0.1:7800"), "127.0.0.1:7800 is master.listen's, too"),
        (lambda f: f.run["slaves"][0].update(mirror="m"), "is a directory of the run itself"),
        (lambda f: f.cluster["shared"].update(run="june"), "run 'june' and run 'july'"),
        (lambda f: f.cluster["shared"].update(outer={"lr": 0.5}), "the run has 0.7, this file 0.5"),
        (lambda f: f.run.update(clusters=["east"]), "west is not in the run file's list"),
        (lambda f: f.cluster.update(tls="{name}.{role}.crt"), "one has certificates, the other speaks plain text"),
        (lambda f: f.cluster["shared"].update(heartbeat_s=9.0), "a heartbeat each 9 s, and a lease of 10 s"),
    ],
)
def test_what_would_be_refused_is_found(files: FilesToCheck, change: Any, said: str) -> None:
    change(files)
    assert any(said in line for line in verdicts(files.check(), FAIL)), files.check()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: f.run.update(clusters=["west"]), "the list keeps nobody out"),
        (lambda f: f.run["slaves"][0].update(master="127.0.0.1:7900"), "while the master listens on 127.0.0.1:7800"),
        (lambda f: f.cluster.update(master="127.0.0.1:7999"), "127.0.0.1:7999, while the master listens on 127"),
    ],
)
def test_what_looks_odd_has_a_note(files: FilesToCheck, change: Any, said: str) -> None:
    change(files)
    rows = files.check()
    assert not verdicts(rows, FAIL) and any(said in line for line in verdicts(rows, NOTE)), rows


def test_certificates_are_looked_at_before_a_daemon_does(files: FilesToCheck) -> None:
    """Missing, another's, expired, soon to expire; and a Secret that is not mounted, with what to do."""
    enrolled = files.secure()
    assert "s1.slave.crt cannot be read" in str(verdicts(files.check("s1.slave"), FAIL))
    assert "of no process of this file is a certificate here" in str(verdicts(files.check(), FAIL))
    for name, role in (("master", PeerRole.MASTER), ("west", PeerRole.CLUSTER)):
        enrolled.enroll(name, role)
    assert not verdicts(files.check(), FAIL)
    later = utc_now() + timedelta(days=85)
    assert [line.partition(": ")[2][:6] for line in verdicts(files.check(now=later), NOTE)].count("west.c") == 1
    until = load_pem_x509_certificate((files.directory / "west.cluster.crt").read_bytes()).not_valid_after_utc
    for now, noted in ((until - SOON, False), (until - SOON + timedelta(seconds=1), True)):
        assert ("west.cluster.crt is valid until" in str(verdicts(files.check(now=now), NOTE))) is noted
    assert "expired at" in str(verdicts(files.check(now=later + timedelta(days=10)), FAIL))
    (files.directory / "west.cluster.key").write_bytes((files.directory / "master.master.key").read_bytes())
    assert "is not the key of" in str(verdicts(files.check(), FAIL))
    files.run["master"].update(on_version={"command": ["true"], "every": 1}, keep_every=1)
    (unknown,) = (row for row in files.check("nobody.slave") if "is in none of these files" in row.seen)
    labels = ("master.master", "on-version.puller", "operator.operator", "s0.slave", "s1.slave", "west.cluster")
    assert unknown.remedy == f"expected one of {', '.join(labels)}"


def test_all_interfaces_are_those_of_each_machine(files: FilesToCheck) -> None:
    """Slaves of two machines may listen alike; on an address that is one machine's they may not."""
    files.secure()
    for host, twice in (("0.0.0.0", False), ("[::]", False), ("10.0.0.1", True)):
        files.run["master"]["listen"] = f"{host}:7800"
        for slave in files.run["slaves"]:
            slave |= {"listen": f"{host}:7801", "directory": "m"}
        rows = files.check()
        assert ("7801 is slaves.s0.listen's, too" in str(verdicts(rows, FAIL))) is twice, host
        said = "s1.directory: " + str(files.directory / "m") + " is master's, too"
        assert said in str(verdicts(rows, FAIL if twice else NOTE)), "in pods all directories have one path"
    files.run["master"]["listen"] = "0.0.0.0:7800"
    assert said in str(verdicts(files.check(), FAIL)), "an address of one machine says that this is one"


def test_half_a_certificate_is_looked_at_and_a_list_of_revoked_ones_missed(files: FilesToCheck) -> None:
    """A key or a certificate alone is a mistake; without crl.pem nobody is revoked, which is a note."""
    enrolled, missed = files.secure(), "none of them is revoked before it expires"
    master = enrolled.enroll("master", PeerRole.MASTER)
    assert missed not in str(verdicts(files.check(), NOTE))
    master.crl.unlink()
    assert missed in str(verdicts(files.check(), NOTE))
    master.key.unlink()
    assert "master.master" in str(verdicts(files.check(), FAIL)), "not: no process of this file has one"


def test_check_and_config_show_say_json(files: FilesToCheck) -> None:
    files.check()
    good, bad = ("--config", str(files.run_file)), ("--config", str(files.cluster_file))
    said = json.loads(type_dips("check", *good, "--json"))
    assert said["ok"] and {tuple(row) for row in said["rows"]} == {("what", "verdict", "seen", "remedy", "silent")}
    files.cluster_file.write_text("cluster: west\n")
    assert not json.loads(type_dips("check", *good, *bad, "--json", code=78))["ok"]
    assert "FAIL" in type_dips("check", *bad, code=78)
    assert json.loads(type_dips("config", "show", good[1]))["shared"]["heartbeat_s"] == 2.0


def test_peers_are_asked_for_a_cluster_file_by_itself(files: FilesToCheck) -> None:
    """With its run file it is compared with that: no master needs to run, and none can be compared with."""
    files.check()
    run, cluster = ("--config", str(files.run_file)), ("--config", str(files.cluster_file))
    assert "nothing is wrong; 1 note\n" in type_dips("check", *run, *cluster)
    with pytest.raises(ConfigError, match="give cluster files only"):
        CliRunner().invoke(cli.cli, ["check", *run, *cluster, "--model", "m"], catch_exceptions=False)
    files.cluster["master"] = NOBODY
    files.check()
    said = type_dips("check", *cluster, code=69)
    assert f"{files.cluster_file}: master: the master at {NOBODY} cannot be reached" in said
    files.cluster["before_start"] = ["no-such-program"]
    files.check()
    said = type_dips("check", *cluster, code=78)
    assert "no-such-program" in said and "cannot be reached" in said, "what is wrong here is not mended by waiting"


def test_the_ledger_is_compared_with_the_run_file(files: FilesToCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run and slaves; and whether each slave that is here has the memory for its layers, by the file's bound or
    what the machine has, the smaller one.
    """
    (files.directory / "s0").mkdir()
    files.check()
    make_run(load_run(files.run_file), {"a.w": np.zeros(3000, np.float32), "b.w": np.zeros(3000, np.float32)})
    rows = files.check()
    assert not verdicts(rows, FAIL)
    good = verdicts(rows, OK)
    assert "dips.yaml: master.directory: the ledger of run july" in good
    assert [line.partition(": ")[2][:9] for line in good if "slaves." in line] == ["slaves.s0"], "s1 is elsewhere"
    for bound, there, wrong in ((1000, 1 << 40, True), (1 << 40, 1000, True), (1 << 40, 1 << 40, False)):
        files.run["slaves"][0]["memory_bytes"] = bound
        monkeypatch.setattr(machine, "available_memory", lambda there=there: there)
        assert bool([line for line in verdicts(files.check(), FAIL) if "slaves.s0" in line]) is wrong, (bound, there)
    files.run["slaves"][0].update(memory_bytes=1000, directory="m")
    found = [line for line in verdicts(files.check(), FAIL) if "slaves.s0: " in line]
    assert not found, "the master's directory is here, and so s0 is on another machine"
    files.run["slaves"][0] |= {"directory": "s0"}
    files.run["slaves"][0].pop("memory_bytes")
    files.run["slaves"][1].update(name="s2", directory="s2")
    assert "master.directory" in str(verdicts(files.check(), FAIL))
    files.run["slaves"][1].update(name="s1", directory="s1")
    files.run["shared"]["run"] = files.cluster["shared"]["run"] = "june"
    assert "master.directory" in str(verdicts(files.check(), FAIL))


# ---- dips logs -------------------------------------------------------------------------------------------------------


def test_the_newest_lines_of_logs_are_printed(files: FilesToCheck) -> None:
    """Of all that are here, or of those that are named, each line with its process; none of them if 0 are wanted. A
    slave that the master starts logs in the master's directory.
    """
    files.check()
    for directory, name, count in (("logs", "master", 30), ("m/slaves", "s0", 3)):
        (path := files.directory / directory).mkdir(parents=True)
        (path / f"{name}.log").write_bytes(b"".join(b"line %d \xff\n" % i for i in range(count)))
    words = ("logs", "-c", str(files.run_file))
    lines = type_dips(*words).splitlines()
    assert len(lines) == 20 + 3 and lines[-1].startswith("master | line 29") and lines[0].startswith("s0     | line 0")
    assert [line[:12] for line in type_dips(*words, "s0", "-n", "2").splitlines()] == ["s0 | line 1 ", "s0 | line 2 "]
    assert type_dips(*words, "-n", "0") == ""
    with pytest.raises(ConfigError, match="no log of s9; there are those of s0, master"):
        CliRunner().invoke(cli.cli, [*words, "s9"], catch_exceptions=False)
    long = b"x" * (3 * logs.BLOCK)
    (files.directory / "m/slaves/s0.log").write_bytes(b"first\n" + long + b"\nlast\n")
    assert type_dips(*words, "s0", "-n", "2") == f"s0 | {long.decode()}\ns0 | last\n", "longer than a block"


def test_the_log_that_a_process_writes_now_is_printed(files: FilesToCheck) -> None:
    """A slave that the master starts since its run file says so has a log of before in the other place."""
    files.check()
    for age_s, directory in ((60, "logs"), (0, "m/slaves")):
        (path := files.directory / directory / "s0.log").parent.mkdir(parents=True)
        path.write_text(f"in {directory}\n")
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age_s))
    assert type_dips("logs", "-c", str(files.run_file)) == "s0 | in m/slaves\n"
    os.utime(files.directory / "logs" / "s0.log")
    assert type_dips("logs", "-c", str(files.run_file)) == "s0 | in logs\n"


def test_logs_are_followed_by_whole_lines(files: FilesToCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is still being written waits for its end, unless it is longer than a block; a file that was truncated begins
    again, and so does one that was moved away, which was a traceback; Ctrl-C ends it.
    """
    files.check()
    (files.directory / "logs").mkdir()
    (path := files.directory / "logs" / "west.log").write_bytes(b"one\n")
    block = b"y" * logs.BLOCK
    steps = [b"one\ntw", b"one\ntwo\nthree\n", b"one\ntwo\nthree\n", None, b"a new file\n", b"new\n", b"new\n" + block]

    def sleep(seconds: float) -> None:
        if not steps:
            raise KeyboardInterrupt
        if (content := steps.pop(0)) is None:
            path.unlink()
        else:
            path.write_bytes(content)

    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=sleep))
    said = type_dips("logs", "-c", str(files.run_file), "--follow")
    assert [line[:12] for line in said.splitlines()] == [
        "west | one", "west | two", "west | three", "west | a new", "west | new", "west | yyyyy"
    ]  # fmt: skip


# ---- dips follow -----------------------------------------------------------------------------------------------------


def test_a_follower_writes_where_it_is_told_or_beside_its_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a command alone into a directory of its own, which is gone at the end."""
    asked = list[tuple[Path, list[str], bool]]()

    async def follow_run(master: object, name: str, output: Path, words: list[str]) -> None:
        asked.append((output, words, output.parent.is_dir()))

    monkeypatch.setattr(follow, "_follow", follow_run)
    words = ("follow", "--master", NOBODY)
    type_dips(*words, "--output", str(tmp_path / "m.safetensors"))
    type_dips(*words, "--output", str(tmp_path / "m.safetensors"), "--command", "evaluate 'a b'")
    type_dips(*words, "--command", "evaluate")
    assert asked[:2] == [(tmp_path / "m.safetensors", command, True) for command in ([], ["evaluate", "a b"])]
    aside, command, was_there = asked[2]
    assert command == ["evaluate"] and was_there and not aside.parent.exists()
    for wrong, told in (([], "what to do with each version"), (["--command", "'"], "--command")):
        with pytest.raises(ConfigError, match=told):
            CliRunner().invoke(cli.cli, [*words, *wrong], catch_exceptions=False)


def test_a_command_gets_a_version_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that comes again, since a pull that failed had overwritten it, would have been evaluated twice."""
    first, second = VersionId(1, 1), VersionId(2, 2)

    async def follow_versions(_: object, __: str, make_room: Any, take: Any, ___: object) -> VersionId:
        for version in (first, first, second):
            make_room("r", version, Manifest.from_shapes([("w", (2,))]))
            await take(version)
        return second

    monkeypatch.setattr(follow, "follow_versions", follow_versions)
    output = tmp_path / "m.safetensors"
    told = type_dips("follow", "--master", NOBODY, "--output", str(output))
    assert told == f"{first}: {output}\n{second}: {output}\nthe run has ended with {second}\n"


async def test_a_second_ctrl_c_ends_a_command_that_is_deaf_to_the_first(tmp_path: Path) -> None:
    """It went on, with the file of a version that `dips follow` has removed."""
    deaf = f"trap '' TERM; echo $$ > {tmp_path}/pid; exec sleep 600"
    running = asyncio.create_task(follow._run_command(["sh", "-c", deaf], {"DIPS_VERSION": "v1@r1"}))
    await eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    for _ in range(2):
        assert is_alive(pid)
        running.cancel()
        for _ in range(5):  # it hears of each
            await asyncio.sleep(0)
    await asyncio.gather(running, return_exceptions=True)
    try:
        await eventually(lambda: not is_alive(pid), 5.0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# ---- dips seed -------------------------------------------------------------------------------------------------------


def test_a_timeline_is_read_once_however_it_is_named(tmp_path: Path) -> None:
    """`timeline.jsonl*` names the older file, too, which is read with the newer one: its pushes were drawn twice."""
    paths = [tmp_path / timeline.FILE, tmp_path / f"{timeline.FILE}.1"]
    for at, path in enumerate(paths):
        path.write_text(json.dumps({"at": at, "run": "r"}) + "\n")
    for named in (paths, paths[::-1], [tmp_path, *paths], paths[:1]):
        assert [mark["at"] for mark in trace.read_timelines(named)] == [1, 0]
    assert [mark["at"] for mark in trace.read_timelines(paths[1:])] == [1], "by itself"


def test_steps_of_a_timeline_are_read_and_not_kept(tmp_path: Path) -> None:
    """A trace draws none of them, and those of a week took a GB for each cluster; the last says how long it went on."""
    kinds = ["trainer_attached", "inner", "inner", "push_begin", "pipeline", "inner"]
    lines = [json.dumps({"at": at, "run": "r", "role": "cluster", "who": "a", "kind": k}) for at, k in enumerate(kinds)]
    (tmp_path / timeline.FILE).write_text("\n".join(lines))
    assert [(mark["at"], mark["kind"]) for mark in trace.read_timelines([tmp_path])] == [
        (0, "trainer_attached"), (3, "push_begin"), (5, "inner"),
    ]  # fmt: skip


def test_a_model_that_nobody_names_is_that_of_dips_init(files: FilesToCheck) -> None:
    """Of the run file, where no other is given; what is missing is said before a master is asked."""
    files.check()
    words, initial = ("seed", "--config", str(files.run_file), "--wait-s", "0"), files.directory / "m/initial/v0@r0"

    def refused(*more: str) -> str:
        done = CliRunner().invoke(cli.cli, [*words, *more])
        assert isinstance(done.exception, DipsError), done.output
        return str(done.exception)

    assert f"nothing to bring: give --model FILE or --factory MODULE:FUNCTION; {initial} is not here" in refused()
    assert "no.such" in refused("--factory", "no.such:model")
    assert "no.such: expected a safetensors file" in refused("--model", "no.such")
    initial.mkdir(parents=True)
    assert "the master at 127.0.0.1:7800" in refused()


def test_each_reason_to_wait_is_told_once() -> None:
    progress = Progress(console=Console(file=io.StringIO(), width=80))
    bar = SeedBar(progress)
    for reason in ("no slave", "no slave", "no room", "no slave"):
        bar.show_wait(reason)
    bar.show_rate(TransferRate(5, 10, 1.0))
    assert progress.console.file.getvalue().split("\n")[:-1] == ["no slave", "no room", "no slave"]  # type: ignore[attr-defined]
    assert [(task.description, task.completed, task.total) for task in progress.tasks] == [("moving", 5, 10)]


# ---- dips up ---------------------------------------------------------------------------------------------------------


def test_a_run_is_watched_until_its_agent_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status is told from time to time, if the master answers; a daemon that ends before ends the command."""
    now, views = 0.0, [None, make_view(head="v1@r1"), make_view(head="v2@r2")]

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def process(name: str, code: int | None, ends_s: float) -> Any:
        ended = lambda: code if now >= ends_s else None  # noqa: E731
        return SimpleNamespace(name=name, exit_code=ended, log_tail=lambda: "the end of its log")

    monkeypatch.setattr(up, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(up.local, "read_status", lambda master: views.pop(0))
    agent, master = process("west", 3, 3.5 * up.TELL_EVERY_S), process("master", None, 0.0)
    running: Any = SimpleNamespace(processes={"master": master, "west": agent})
    up._watch_agent(running, agent, master_peer(NOBODY, None))
    assert not views and [line[:21] for line in capsys.readouterr().out.splitlines()] == [
        "status: head v1@r1, 0", "status: head v2@r2, 0"
    ]  # fmt: skip
    for code, exits in ((0, 1), (69, 69)):
        now, running.processes["s0"] = 0.0, process("s0", code, 0.5)
        with pytest.raises(typer.Exit) as ended:
            up._watch_agent(running, agent, master_peer(NOBODY, None))
        assert ended.value.exit_code == exits
        assert f"error: s0 ended with exit code {code}; the end of its log" in capsys.readouterr().err


def test_a_status_that_nobody_reads_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `dips up … | tee log` without tee what the training shows is dropped; the next status stopped everything."""

    def fail(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(up.local, "read_status", lambda master: make_view())
    monkeypatch.setattr("builtins.print", fail)
    up._tell_status(master_peer(NOBODY, None))


# ---- dips verify -----------------------------------------------------------------------------------------------------


def test_the_run_goes_back_to_what_every_slave_has_intact() -> None:
    """The newest of its versions; without a ledger, of those on the disks."""
    v1, v2, v3 = (VersionId(n, n) for n in (1, 2, 3))
    results = {"s0": {v1: INTACT, v2: INTACT, v3: INTACT}, "s1": {v1: INTACT, v2: "torn", v3: "bit rot"}}
    for known in (Known((v1, v2, v3), v3, {}), Known((), None, {})):
        verdict, code = judge_results(results, known, all_here=True)
        assert code and "v3@r3 is not intact (s1: bit rot); the run would be rolled back to v1@r1" in verdict
    verdict, code = judge_results({"s0": {}}, Known((), None, {}), all_here=False)
    assert code and "no snapshot is on s0, and without the ledger nothing says which" in verdict
    assert judge_results({"s0": {}}, Known((), GENESIS, {}), all_here=False)[1] == 0
    verdict, code = judge_results(results, Known((v1, v2, v3), v1, {}), all_here=False)
    assert not code and verdict == "the newest durable version v1@r1 is intact on s0, s1"


def test_a_directory_of_two_slaves_is_of_one_of_them_here(files: FilesToCheck) -> None:
    """In pods all have one path: the other's snapshots are not looked for in this one's volume."""
    files.run["slaves"][1].update(directory="s0")
    files.check()
    (files.directory / "s0").mkdir()
    with pytest.raises(ConfigError, match=r"the directory of s0 and of s1, .* by --slave"):
        CliRunner().invoke(cli.cli, ["verify", "--config", str(files.run_file)], catch_exceptions=False)


def test_what_is_not_intact_is_red() -> None:
    """A version of the ledger in red if it lacks anything on a slave, what the ledger does not know faint."""
    v1, v2, v9 = VersionId(1, 1), VersionId(2, 2), VersionId(9, 9)
    results = {"s0": {v1: INTACT, v2: INTACT, v9: "torn"}, "s1": {v1: INTACT, v2: "bit rot", v9: INTACT}}
    table = _results_table(results, Known((v1, v2), v1, {}))
    assert [row.style for row in table.rows] == ["", "red", "dim"]
    assert list(table.columns[1].cells) == ["committed", "committed", "no version, or retired"]
    assert list(table.columns[3].cells) == [INTACT, "bit rot", INTACT]
    alone = _results_table({"s0": {v9: INTACT}}, Known((), None, {}))
    assert list(alone.columns[1].cells) == ["–"] and [row.style for row in alone.rows] == [""]


# ---- dips plan memory ----------------------------------------------------------------------------------------------


def test_a_slave_is_planned_as_it_counts_itself(files: FilesToCheck) -> None:
    files.run["slaves"][0].update(slots=3, pinned=2)
    files.check()
    words = ("plan", "memory", "--config", str(files.run_file), "--parameters", "2001", "--json")
    plan = json.loads(type_dips(*words))
    assert [s["parameters"] for s in plan["slaves"]] == [1000, 1001] and plan["model"] == 2001
    assert plan["slaves"][0]["memory_bytes"] == MemorySum(1000, 3, 2, TRANSIT_BYTES + COPIES_BYTES).total_bytes
    assert plan["slaves"][0]["disk_bytes"] == 1000 * 8 * 3  # two that stay and the one that is written
    assert (plan["cluster"]["push_bytes"], plan["cluster"]["pull_bytes"]) == (8004, 8004)
    assert plan["round"]["persist_s"] == pytest.approx(8 * 1001 / plan["round"]["disk_rate"]), "the heaviest slave's"


def test_a_disk_has_room_for_the_first_model_that_stays(files: FilesToCheck) -> None:
    """`dips seed` brings it to the slave's own disk: a volume of the planned size was full at the third version."""
    del files.run["slaves"][0]["initial_model"]
    files.check()
    words = ("plan", "memory", "--config", str(files.run_file), "--parameters", "2000", "--json")
    assert [s["disk_bytes"] for s in json.loads(type_dips(*words))["slaves"]] == [1000 * (4 + 8 * 3), 1000 * 8 * 3]


def test_a_disk_has_room_for_what_stays_while_a_mirror_lags(files: FilesToCheck) -> None:
    """The newest two, the one that is written, the newest that all mirrors hold, and the one that is copied; archives
    beside them, if their number is bounded.
    """
    words = ("plan", "memory", "--config", str(files.run_file), "--parameters", "2000", "--json")
    for slave in files.run["slaves"]:
        slave["mirror"] = f"{slave['name']}-mirror"
    files.check()
    assert json.loads(type_dips(*words))["slaves"][0]["disk_bytes"] == 1000 * 8 * 5
    files.run["master"].update(keep_every=10, keep_most=24)
    files.check()
    assert json.loads(type_dips(*words))["slaves"][0]["disk_bytes"] == 1000 * 8 * (5 + 24)


def test_a_masters_disk_has_room_for_its_journal_and_for_versions_that_are_exported(files: FilesToCheck) -> None:
    """A volume of the planned size was full when the journal had its length, or at the first version of `on_version`:
    the ledger had no room, and the master ended with 74.
    """
    words = (
        "plan",
        "memory",
        "--config",
        str(files.run_file),
        "--parameters",
        "200000000",
        "--rounds",
        "1000",
        "--json",
    )
    files.check()
    logs = SEGMENTS_KEPT * SEGMENT_BYTES + 2 * timeline.MOST_BYTES
    assert json.loads(type_dips(*words))["master_disk_bytes"] == 800_000_000 + 2 * 2_000_000 + logs
    files.run["master"].update(keep_every=10, on_version={"every": 10, "command": ["true"]})
    files.check()
    assert json.loads(type_dips(*words))["master_disk_bytes"] == 3 * 800_000_000 + 2 * 2_000_000 + logs


def test_a_round_costs_what_disk_and_link_take() -> None:
    """The heaviest slave's snapshot over its disk's rate, the cluster's push and pull over its link's."""
    words = ("plan", "memory", "--parameters", "2000000000", "--slaves", "4", "--disk-mb", "125", "--link-gbit", "8")
    cost = json.loads(type_dips(*words, "--json"))["round"]
    assert (cost["push_s"], cost["persist_s"], cost["pull_s"], cost["start_s"]) == (8.0, 32.0, 8.0, 64.0)
    said = type_dips(*words)
    assert "links of 1,000 MB/s and disks of 125 MB/s: 48.0 s beside the inner steps" in said
    assert "4.00 GB on the heaviest slave's disk, before the version counts: 32.0 s" in said
    assert "room for 3 snapshots of 4.00 GB" in said
    assert ["layers", "parameters", "memory", "disk"] in [line.replace("┃", " ").split() for line in said.splitlines()]
    rows = [line.replace("│", " ").split() for line in said.splitlines()]
    assert [row[:3] for row in rows if row and row[0].startswith("slave-")] == [
        [f"slave-{i}", "–", "500,000,000"] for i in range(4)
    ]
    assert [row[-2:] for row in rows if row and row[0] == "slave-0"] == [["14.00", "GB"]]
    assert [len(row) for row in rows if row and row[0] == "master"] == [5], "memory and disk, each with its unit"


def test_ranks_and_links_follow_the_codecs(files: FilesToCheck) -> None:
    files.run["shared"].update(codec="int8", pull_codec="bf16")
    files.cluster["shared"].update(codec="int8", pull_codec="bf16")
    files.cluster["overlap"] = "full"
    files.check()
    plan = json.loads(
        type_dips(
            *("plan", "memory", "--config", str(files.run_file), "--cluster", str(files.cluster_file)),
            *("--parameters", "65536", "--ranks", "4", "--json"),
        )
    )
    assert plan["cluster"]["rank_bytes"] == 16384 * (4 + 4 + 8) + planning.RANK_PROCESS_BYTES
    assert plan["cluster"]["pull_bytes"] == 2 * 65536


@pytest.mark.parametrize("codec", Codec)
def test_codecs_are_as_wide_as_planned(codec: Codec) -> None:
    """Of pushes; the link of a cluster of as many elements carries them."""
    sent = len(bytes(encode_body(codec, np.ones(65536, np.float32))))
    planned = planning.plan_cluster(65536, 2, codec, Codec.FP32)
    assert planned.push_bytes == sent
    owed = 8 if codec.lossy else 0  # a parameter: what rounding has left is kept
    assert planned.rank_bytes == 32768 * (4 + owed) + planning.RANK_PROCESS_BYTES


def test_ranks_are_planned_as_they_count_themselves() -> None:
    assert planning.RANK_PROCESS_BYTES == shard_buffer.PROCESS_BYTES


def test_a_plan_of_a_real_model_and_for_kubernetes() -> None:
    words = ("plan", "memory", "--factory", "dips.demo.model:build")
    assert "1,070,464 parameters" in type_dips(*words)
    proposed = yaml.safe_load(type_dips(*words, "--kubernetes", "--cpus", "6"))
    assert proposed.keys() == {"master", "slave-0", "slave-1"}
    resources = proposed["slave-0"]["resources"]
    assert resources["requests"]["cpu"] == "6" and "cpu" not in resources["limits"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert proposed["slave-0"]["storage"] == "1024Mi", "no claim is smaller"
    assert "name the model" in type_dips("plan", "memory", code=2)
    assert "name the model" in type_dips("plan", "memory", "--parameters", "3", "--factory", "a:b", code=2)


# ---- completion ----------------------------------------------------------------------------------------------------


def test_a_shell_completes_names_of_the_run_file(files: FilesToCheck) -> None:
    files.run["clusters"] = ["west", "east"]
    files.check()
    words = {
        "COMP_WORDS": f"dips drain --config {files.run_file} s",
        "COMP_CWORD": "4",
        "_DIPS_COMPLETE": "complete_bash",
    }
    done = CliRunner().invoke(cli.cli, prog_name="dips", env=words)
    assert done.stdout.split() == ["s0", "s1"], done.output
    context = typer.Context(typer.main.get_command(cli.cli))
    context.params["config"] = str(files.run_file)
    assert completing.complete_cluster(context, "w") == ["west"]
    assert completing.complete_version(context, "") == []
    assert "outer.lr=" in completing.complete_change("outer")
    context.params["config"] = "nowhere.yaml"
    assert completing.complete_slave(context, "") == []


def test_a_clusters_check_looks_at_the_agents_certificate(files: FilesToCheck) -> None:
    """Missing, and then there; plain text is a note."""
    files.cluster["master"] = NOBODY
    assert "certificates: none: plain text on loopback" in check_cluster(files, 69)
    enrolled = files.secure()
    missing = check_cluster(files, 78)
    assert (
        "west.cluster.crt cannot be read" in missing
        and "none was asked" in missing
        and "cannot be reached" not in missing
    )
    enrolled.enroll("west", PeerRole.CLUSTER)
    there = check_cluster(files, 69)
    assert "west.cluster.crt is valid until " in there and f"the master at {NOBODY} cannot be reached" in there


def check_cluster(files: FilesToCheck, code: int) -> str:
    files.check()
    return type_dips("check", "--config", str(files.cluster_file), code=code)


def test_certificates_are_shown_as_json(tmp_path: Path) -> None:
    files = Enrolled(tmp_path, RUN).enroll("west", PeerRole.CLUSTER)
    said = json.loads(type_dips("certs", "show", str(files.cert), "--json"))
    assert said.keys() == {"file", "who", "state", "serial", "until"} and said["state"] == "valid"
    assert said["who"] == "cluster 'west' of run 'july'"


def test_a_factory_without_torch_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters and slaves are installed without torch: who makes a model there is told what is missing."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"--factory mymodel:build needs torch here: .*or give --model FILE"):
        load_tensors(None, "mymodel:build", 0, (), ())


NOBODY = "127.0.0.1:9"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--factory", "mymodle:build"], "--factory mymodle:build: No module named 'mymodle'"),
        (["--model", "no-such.safetensors"], "no-such.safetensors: expected a safetensors file with fp32 parameters"),
        ([], "nothing to begin from: give --model FILE"),
    ],
)
def test_seed_looks_for_its_model_before_it_waits_for_a_master(words: list[str], told: str) -> None:
    """A mistyped name is told at once, not after ten minutes in which nobody answered."""
    with pytest.raises(ConfigError, match=told):
        CliRunner().invoke(cli.cli, ["seed", "--master", NOBODY, *words, "--wait-s", "0"], catch_exceptions=False)


def test_seed_without_torch_is_told_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `dips init`, though no master is there yet."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match="--factory mymodel:build needs torch here"):
        CliRunner().invoke(
            cli.cli, ["seed", "--master", NOBODY, "--factory", "mymodel:build", "--wait-s", "0"], catch_exceptions=False
        )


def test_a_check_keeps_paths_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cluster's check saw can be copied from a terminal of 80 columns; a table would cut or fold it."""
    monkeypatch.setenv("COLUMNS", "80")
    directory = tmp_path / "a-directory-whose-name-is-longer-than-a-column-of-a-table"
    content: dict[str, Any] = {"shared": {"run": RUN}, "cluster": "west", "master": NOBODY, "directory": str(directory)}
    content["tls"] = False
    (file := tmp_path / "west.yaml").write_text(yaml.safe_dump(content))
    said = type_dips("check", "--config", str(file), code=69)
    assert str(directory) in said
    assert f"FAIL  {file}: master: the master at {NOBODY} cannot be reached" in said
    assert "\n      start the master, or correct the key `master`" in said
