"""A run of real processes that can be hurt in any place, and looked at until it is certain that nothing was lost.

    with House(tmp_path, loop) as deployment:
        deployment.start()
        deployment.progress(2)                              # two more versions
        deployment.slaves["ps0"].process.kill()
        deployment.start_slave("ps0")
        deployment.progress(2)
        deployment.check()                                  # every element is the reference's number; tokens add up

Whoever dials does so through a line of wires.py: clusters to the master, slaves to the master, the master to slaves,
ranks to the slaves' lanes. The tests themselves ask the master directly. Steps are placed by what timelines, ledger and
calls on the lines tell, never by sleeping.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from dips.commands.operator import ask_master
from dips.commands.status import ask_status
from dips.errors import Unavailable
from dips.identity.names import MASTER_NAME, PeerRole
from dips.ids import VersionId
from dips.master import genesis
from dips.master.ledger import Ledger
from dips.protocol.events import TuningAsked
from dips.protocol.options import TunedOption
from dips.slave.export import export_snapshot
from dips.telemetry import timeline
from dips.wire.generated.slave_pb2 import SlaveRegistered
from tests.chaos import predict
from tests.chaos.certificates import OPERATOR, LineEnds, RunCertificates, is_secured
from tests.chaos.train_chaos import CHUNK_BYTES, SHAPES, START, H
from tests.chaos.wires import CutLine, Loop, Wire
from tests.forkserver.process import descendants
from tests.integration.cluster_harness import EVER, Process, Run, free_port

RUN, SLAVES = "test", ("ps0", "ps1")  # the harness's
SCRIPT = str(Path(__file__).with_name("train_chaos.py"))
TOKENS = {"east": 64, "west": 24, "north": 40}
TIMING, HEARTBEAT_S = {"window_s": 0.15}, 0.8
DEADLINES = {"compute_s": 10.0, "transfer_s": 20.0}  # set as an operator does, since no key has them
LEASE_S = 5 * HEARTBEAT_S
UNTOLD_S = 3.0  # an agent leaves behind what it knew before its last heartbeat; one that nobody answers takes a second
SHARED = {
    "outer": {"lr": predict.LR, "momentum": predict.MOMENTUM, "step": "nesterov", "clip": {"norm": predict.CLIP}},
    "penalty": {"gates": []}, "heartbeat_s": HEARTBEAT_S, "data": {"ranges": 1_000_000},
}  # fmt: skip
ROLLS_BACK = {"most_rollback": 20}  # by itself: a round here takes 0.15 s, a mirror lags by some, and nobody is asked
OUR_BUGS = ("Traceback (most recent call last)", "LocalProtocolError", "the coordinator failed")
# Printed by grpcio and asyncio after a daemon's last line, of calls that came while it ended: it is nobody's bug.
AFTER_END = re.compile(r'(?<="event": "stopped")([^\n]*\n)(?:(?!\{)[^\n]*\n)+')
AGENT_BUGS = ("LocalProtocolError", "a task of the agent failed")
PARTS = ("accepted", "gated", "carried", "lost", "undone")
FIRST_GROUP = 43_000
STEADY_S = 90.0  # for two more versions, restarts included: a trainer has taken 35 s to start where eight things ran
SEEN_S = 60.0  # for what takes a second on idle cores


def address() -> str:
    return f"127.0.0.1:{free_port()}"


class Deployment(Run):
    """One run: a master, two slaves, some clusters, and all lines between them."""

    def __init__(
        self,
        directory: Path,
        loop: Loop,
        *,
        clusters: Sequence[str] = ("east", "west"),
        shared: Mapping[str, Any] | None = None,
        timing: Mapping[str, Any] | None = None,
        master: Mapping[str, Any] | None = None,
        step_s: float = 0.02,
        ranges: bool = True,
        groups: bool = False,
        mirrors: bool = False,
        secure: bool = False,
        slaves: int = len(SLAVES),
    ) -> None:
        """
        master  more keys of the run file's section `master`
        step_s  what an inner step takes at least
        groups  every process belongs to a Unix group of its own, by which a packet filter knows its packets
        secure  with certificates; DIPS_CHAOS_SECURE says it for all deployments
        mirrors  master and slaves have mirrors in `mirror/`, which stands for another disk
        ranges  each inner step takes a data range of its own, without which a cluster that is cut off cannot train on
        """
        self.ranges, self.groups = ranges, dict[str, int]() if groups else None
        self.loop, self.clusters, self.step_s, self._more = (
            loop,
            tuple(clusters),
            step_s,
            {**ROLLS_BACK, **(master or {})},
        )
        self._mirrors = {"mirror": "mirror"} if mirrors else {}
        if mirrors:
            (directory / "mirror").mkdir()
        self._own: dict[str, dict[str, str]] = {}  # of each slave: what it listens on
        self.to_master: dict[str, CutLine] = {}  # by who dials
        self.orders: dict[str, CutLine] = {}  # by slave
        self.lanes: dict[str, Wire] = {}
        self.master_directory = directory / "master"
        self._untold: dict[str, int] = {}  # tokens at most that died with an agent before he could tell
        self._killed: dict[str, int] = {}  # trainers killed: what they did since they last asked may be untold
        self._places: dict[str, dict[str, None]] = {}  # of each cluster: where it ever ran
        tensors = {name: np.full(shape, START, np.float32) for name, shape in SHAPES.items()}
        names = [f"ps{number}" for number in range(slaves)]
        self.certificates = RunCertificates(directory, RUN, names, clusters) if is_secured(secure) else None
        super().__init__(
            directory, tensors, shared={**SHARED, **(shared or {})}, timing={**TIMING, **(timing or {})},
            slaves=slaves, security=self.certificates.security if self.certificates else None,
        )  # fmt: skip
        *python, code = self.commands["slave"]  # small chunks, so that each piece of this small model is several
        small = f"from dips.slave import app; app.CHUNK_BYTES = {CHUNK_BYTES}"
        self.commands["slave"] = [*python, f"{small}; {code}"]
        self._weave()

    # ---- lines -------------------------------------------------------------------------------------------------------

    def _run_file(self, timing: Mapping[str, Any]) -> dict[str, Any]:
        file = super()._run_file(timing)
        self.address = file["master"]["listen"] = address()
        file["master"] |= {**self._more, **self._mirrors}
        for section in file["slaves"]:
            own = self._own[section["name"]] = {key: address() for key in ("listen", "lane", "master")}
            section |= {
                **self._mirrors,
                "listen": own["listen"],
                "lanes": [own["lane"]],
                "master": own["master"],
            }
        return file

    def _ends(self, caller: str, role: PeerRole, server: str = "") -> LineEnds:
        return self.certificates.ends(caller, role, server) if self.certificates else LineEnds()

    def _weave(self) -> None:
        names: dict[str, str] = {}

        def rename(said: SlaveRegistered) -> None:
            said.address = names[said.address]
            said.lanes[:] = [names[lane] for lane in said.lanes]

        for name, own in self._own.items():
            orders = self._ends(MASTER_NAME, PeerRole.MASTER, name)
            self.orders[name] = CutLine(self.loop, address(), own["listen"], orders)
            self.lanes[name] = Wire(self.loop, address(), own["lane"])
            names |= {own["listen"]: self.orders[name].wire.listen, own["lane"]: self.lanes[name].listen}
            self.to_master[name] = CutLine(
                self.loop, own["master"], self.address, self._ends(name, PeerRole.SLAVE), rename
            )
        for name in self.clusters:
            self.to_master[name] = CutLine(self.loop, address(), self.address, self._ends(name, PeerRole.CLUSTER))

    def wires(self, name: str) -> list[Wire]:
        """Every wire of one slave, or of one cluster's control; what a partition of that machine holds."""
        if name in self.orders:
            return [self.to_master[name].wire, self.orders[name].wire, self.lanes[name]]
        return [self.to_master[name].wire]

    # ---- processes ---------------------------------------------------------------------------------------------------

    def start_all(self) -> None:
        """Start master, slaves and clusters, and return at once."""
        self.start_servers()
        for name in self.clusters:
            self.cluster(name)

    def start(self) -> None:
        """Begin the run, and return when all clusters have taken part in the first versions."""
        self.start_all()
        for name in self.clusters:
            self.seen_after(self.timeline(name), "pull_end", within_s=90)
        self._set_deadlines()

    def _set_deadlines(self) -> None:
        """Shorten the deadlines, so that a dead slave or rank costs seconds; they are in the ledger from here on."""
        changes = tuple(TunedOption(f"timing.{key}", value) for key, value in DEADLINES.items())
        master = self._ends(OPERATOR, PeerRole.OPERATOR).dial(self.address)
        self.loop.run(ask_master(master, TuningAsked(0, changes)))

    def _start(self, name: str, command: Sequence[str]) -> Process:
        """As ever, but it ends with this process, however this one ends."""
        words = [sys.executable, "-m", "dips.client.agent.launch", str(os.getpid()), "--", *command]
        if self.groups is not None:
            group = self.groups.setdefault(name, FIRST_GROUP + len(self.groups))
            words = ["setpriv", "--regid", str(group), "--clear-groups", *words]
        return super()._start(name, words)

    def process(self, name: str) -> Process:
        """The newest process of that name; of a cluster, wherever it runs."""
        names = self._places.get(name, {name: None})
        return next(p for p in reversed(self.processes) if p.name in names)

    def cluster(self, name: str, *, place: str = "", words: Sequence[str] = (), **options: Any) -> Process:
        """Start an agent with its trainer; `place`: another machine, so another directory, for the same cluster."""
        where, tokens = place or name, str(TOKENS[name])
        self._places.setdefault(name, {})[where] = None
        out = str(self.directory / f"{where}.out")
        command = [sys.executable, SCRIPT, name, out, tokens, str(self.step_s), *words]
        command += ["--ranges"] if self.ranges else []
        keys = {
            "cluster": name, "master": self.to_master[name].wire.listen,
            "max_restarts": 1000, **options,
        }  # fmt: skip
        return self.start_cluster(where, command, steps=H, **keys)

    def kill_agent(self, name: str) -> None:
        """SIGKILL of an agent; its trainer ends with it. The next one in its directory tells what this one knew."""
        since, below = time.time() - UNTOLD_S, descendants(self.process(name).pid)
        self.process(name).kill()
        self.until(
            lambda: not any(_incarnations(pid) for pid in below), 30, f"the trainer of {name} ends with its agent"
        )
        self.count_untold(name, since)  # now: it may have taken a step while it was killed

    def end_agent(self, name: str) -> None:
        """SIGTERM of an agent: it ends its trainer, and leaves."""
        self.count_kill(name)
        self.process(name).terminate()

    def kill_trainer(self, name: str) -> None:
        """SIGKILL of everything below an agent, which starts it anew."""
        self.count_kill(name)
        for pid in descendants(self.process(name).pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_rank(self, name: str) -> None:
        """SIGKILL of the rank alone; what started it starts it anew."""
        self.count_kill(name)
        os.kill(self.ranks(name)[-1], signal.SIGKILL)

    def wait_for_end(self, process: Process, code: int) -> None:
        """Wait until a process has ended by itself, with this code; others may do what they like."""
        self.until(lambda: process.code is not None, SEEN_S, f"{process.name} ends")
        assert process.code == code, f"{process.name} ended with {process.code}, expected {code}\n{process.tail()}"

    def count_kill(self, name: str, times: int = 1) -> None:
        """What its trainer did since its last question, H steps at most, may not have been told (agent_client.py)."""
        self._killed[name] = self._killed.get(name, 0) + times

    def count_untold(self, name: str, since: float) -> None:
        """An agent died, or was fenced: of what its cluster did since then (Unix seconds) there may be no report."""
        lines = self._written(name, "steps")
        self._untold[name] = self._untold.get(name, 0) + sum(t for at, t in lines if at > since)

    def ranks(self, name: str) -> list[int]:
        """The processes of a cluster's training job: its launcher, and the rank if there is one now."""
        return descendants(self.process(name).pid)

    # ---- logical time ------------------------------------------------------------------------------------------------

    @property
    def master_timeline(self) -> Path:
        return self.master_directory / "timeline.jsonl"

    def marks(self, path: Path, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """Lines of a timeline, by kind and fields."""
        if not path.exists():
            return []
        lines = timeline.read_marks(path)
        return [line for line in lines if line["kind"] == kind and all(line.get(k) == v for k, v in fields.items())]

    def seen_after(
        self, path: Path, kind: str, count: int = 1, since: float = 0.0, within_s: float = SEEN_S, **fields: Any
    ) -> dict[str, Any]:
        """Wait for the `count`-th such line of a timeline written after `since` (Unix seconds); return it."""
        found: list[dict[str, Any]] = []

        def holds() -> bool:
            found[:] = [line for line in self.marks(path, kind, **fields) if line["at"] > since]
            return len(found) >= count

        self.until(holds, within_s, f"{kind} {fields or ''} in {path}")
        return found[count - 1]

    def ledger(self) -> closing[Ledger]:
        """The ledger of whichever master serves."""
        return closing(Ledger.open(self.master_directory / genesis.LEDGER, readonly=True))

    def progress(self, versions: int = 2, by: Sequence[str] = (), within_s: float = STEADY_S) -> VersionId:
        """Wait until so many more rounds made a version, and each of `by` is in one of them; return the head."""
        with self.ledger() as ledger:
            last = max((r.round for r in ledger.read_history(1)), default=0)

        def holds() -> bool:
            with self.ledger() as ledger:
                new = [r for r in ledger.read_history(12) if r.round > last and r.version is not None]
            return len(new) >= versions and set(by) <= {f.push.cluster for r in new for f in r.folds}

        self.until(holds, within_s, f"{versions} more versions{' by ' + ', '.join(by) if by else ''}")
        return self.head()

    def hold_push(self, name: str, lanes: Sequence[str], *ways: str, place: str = "") -> str:
        """Hold lanes when a cluster asks for its next push, so that no pull meets the cut first; return that push."""
        ask = self.to_master[name].calls.trap("RequestPush")
        ask.caught()
        since = time.time()
        for lane in lanes:
            self.lanes[lane].hold(*ways)
        ask.release()
        self.seen_after(self.timeline(place or name), "push_begin", since=since)
        granted = [str(mark["push"]) for mark in self.marks(self.master_timeline, "push_granted")]
        return next(push for push in reversed(granted) if push.startswith(f"{name}/"))

    def retired(self, within_s: float = STEADY_S) -> None:
        """Wait until a version has been retired: from then on nobody offers v0@r0 any more."""

        def holds() -> bool:
            with self.ledger() as ledger:
                return any(row.retired for row in ledger.read_state().versions)

        self.until(holds, within_s, "a version is retired")

    def status(self) -> dict[str, Any] | None:
        try:
            return self.loop.run(ask_status(self._ends(OPERATOR, PeerRole.OPERATOR).dial(self.address), deadline_s=5.0))
        except Unavailable:
            return None

    def wait_for_status(self, holds: Callable[[dict[str, Any]], Any], within_s: float, what: str) -> dict[str, Any]:
        """Wait until the master's status is so; return it."""
        found: dict[str, Any] = {}

        def look() -> bool:
            found.clear()
            found.update(self.status() or {})
            return bool(found) and bool(holds(found))

        self.until(look, within_s, what)
        return found

    # ---- the truth ---------------------------------------------------------------------------------------------------

    def check(self, excess: Mapping[str, int] | None = None) -> None:
        """Stand still and hold everything against the ledger; then go on.

        excess  tokens that a cluster may report beyond what it consumed here (0 but for failures that lose words)
        """
        holds = [self.directory / f"{where}.hold" for name in self.clusters for where in self._places.get(name, {})]
        for hold in holds:
            hold.touch()
        try:
            self._settled(excess or {})
            self.check_history()
            self._check_export()
        finally:
            for hold in holds:
                hold.unlink()

    def check_history(self) -> None:
        """What ledger, ranks and logs tell, without standing still."""
        seen = {name: self._written(name, "seen") for name in self.clusters}  # first: then every row is there
        with self.ledger() as ledger:
            state = ledger.read_state()
            rounds = ledger.read_history(EVER)
        lineage = [row.version for row in state.versions]
        predict.check_lineage(rounds, lineage)
        predict.check_once(rounds, lineage)
        predicted = predict.predict(rounds)
        for name in self.clusters:
            predict.check_numbers(seen[name], predicted, name)
        torn = {path.name: path.read_text() for path in self.directory.glob("*.torn")}
        assert not torn, f"torn: {torn}"
        for log in self.directory.glob("*.log"):
            text = self._read_log(log)
            daemon = log.stem in ("master", *self.slaves)  # a trainer whose agent died may say so by a traceback
            bugs = [bug for bug in (OUR_BUGS if daemon else AGENT_BUGS) if bug in text]
            assert not bugs, f"{log} says {bugs}\n{text[-3000:]}"

    def _read_log(self, path: Path) -> str:
        """Return what is said in a log, but for what is nobody's bug."""
        return AFTER_END.sub(r"\1", path.read_text(errors="replace"))

    def _settled(self, excess: Mapping[str, int]) -> dict[str, Any]:
        """Wait until every cluster's tokens add up: consumed = accepted + gated + carried + lost."""
        problems: list[str] = []

        def holds(status: dict[str, Any]) -> bool:
            problems[:] = [p for name in self.clusters for p in self._owed(name, status, excess.get(name, 0))]
            return not problems

        try:
            return self.wait_for_status(holds, SEEN_S, "tokens add up")
        except AssertionError as error:
            raise AssertionError(f"tokens do not add up: {problems}") from error

    def _owed(self, name: str, status: Mapping[str, Any], excess: int) -> list[str]:
        c, begun = status["clusters"].get(name), sum(t for _, t in self._written(name, "steps"))
        if c is None:
            return [] if begun == 0 else [f"{name} is unknown to the master"]
        told = {**(c["heartbeat"] or {}), **c}  # the view counts what earlier incarnations lost, too
        parts = {k: told.get(f"tokens_{k}", 0) for k in PARTS}
        if c["state"] == "gone":
            parts["carried"] = 0  # of its last heartbeat: lost by now
        least = begun - H * TOKENS[name] * self._killed.get(name, 0) - self._untold.get(name, 0)
        ok = least <= sum(parts.values()) <= begun + excess
        return (
            [] if ok else [f"{name} consumed {least} to {begun}, reported {sum(parts.values())}: {parts}, {c['state']}"]
        )

    def _check_export(self) -> None:
        """Every element of the exported model is the reference's number; the head, if that is durable."""
        with self.ledger() as ledger:
            rows, rounds = ledger.read_state().versions, ledger.read_history(EVER)  # rows first: each one has its round
        head = next(row.version for row in reversed(rows) if row.durable)
        out = self.directory / "export.safetensors"
        export_snapshot([self.directory / name for name in self.slaves], head, out)
        expected = predict.predict(rounds)[str(head)]
        tensors = load_file(out)
        assert {name: t.shape for name, t in tensors.items()} == SHAPES
        elements = np.concatenate([t.reshape(-1) for t in tensors.values()])
        assert (elements == elements[0]).all(), f"torn export of {head}: {elements.min()} to {elements.max()}"
        assert abs(float(elements[0]) - expected) < predict.TOLERANCE, f"{head}: {elements[0]}, reference {expected}"

    def _written(self, name: str, what: str) -> list[Any]:
        """Lines that the trainers of a cluster wrote, wherever it ran."""
        return [line for where in self._places.get(name, {}) for line in _lines(self.directory / f"{where}.{what}")]

    # ---- the end -----------------------------------------------------------------------------------------------------

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
        try:
            super().__exit__(kind, error, at)
        finally:
            left = left_running(self.directory)
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for line in (*self.to_master.values(), *self.orders.values(), *self.lanes.values()):
                line.close()
        assert not left or kind, f"left running: {left}"


def left_running(directory: Path) -> dict[int, str]:
    """Processes whose command line or environment names this directory, with what they are."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # it ended while we looked, or it is a thread of the kernel
                words = (entry / "cmdline").read_bytes()
                if str(directory).encode() + b"/" in words + (entry / "environ").read_bytes():
                    found[int(entry.name)] = words.replace(b"\0", b" ").decode(errors="replace")
    return found


def _incarnations(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _lines(path: Path) -> list[Any]:
    """JSON lines of a trainer; the last may be torn by its death."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found
