"""docs/guides/several-machines.md as it stands, on five hosts with addresses of their own: certificates, no tunnel.

Then, while both clusters train: every certificate and the authority are replaced, and one cluster is revoked in the
middle of a push and enrolled again, by the same guide. All packets are captured on the bridge between the hosts.
"""

from __future__ import annotations

import mmap
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from dips.master.genesis import LEDGER
from dips.master.ledger import Ledger
from dips.telemetry import timeline
from dips.view.points import RoundHistory
from tests.damage import load_parameters
from tests.integration.cluster_harness import ROOT, Process
from tests.integration.machines import MOST_CAPTURED, Machines, missing

GUIDE = ROOT / "docs/guides/several-machines.md"
TRAINING = ("mymodel.py", "train.py")  # what a user brings
MYMODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))  # 2 MB
"""
TRAIN = """
import time
import torch
from dips.client import OuterLoop
from mymodel import build

torch.set_num_threads(1)
model = build()
with OuterLoop(model) as outer:
    while not outer.finished:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-4)
        time.sleep(0.01)
        outer.step(tokens=8, loss=torch.tensor(1.5))
"""
DAEMONS = ("dips-master --config", "dips-slave --config", "dips-client --config")
CLUSTERS = ("berlin", "oslo")
ROUNDS = 3  # between two changes
STEADY_S = 120.0
ENDED_S = 30.0  # a revoked cluster's agent: two heartbeats, then its rank hears why, and has 10 s to end
SLOW_MBIT = 2.0  # 2 MB take eight seconds
LABELS = {
    "master": ("master.master", "operator.operator"),
    "slave-0": ("slave-0.slave",),
    "slave-1": ("slave-1.slave",),
    "berlin": ("berlin.cluster",),
    "oslo": ("oslo.cluster",),
}
DENIED = 77
MOST_NEEDLES = 24  # of later versions
NEEDLE = 32  # bytes of a parameter: as many do not come by chance


# ---- the guide -------------------------------------------------------------------------------------------------------


def guide_addresses() -> dict[str, str]:
    """The guide's table: machine → address."""
    found = dict[str, str]()
    for names, addresses in re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", GUIDE.read_text(), re.MULTILINE):
        given = re.findall(r"\d+\.\d+\.\d+\.\d+", addresses)
        machines = re.findall(r"`([^`]+)`", names)
        found.update(zip(machines, given or [""] * len(machines), strict=True))
    return found


def guide_blocks(title: str) -> list[str]:
    """The code blocks of a section, in order."""
    (section,) = re.findall(rf"^## \d*\.? ?{re.escape(title)}.*?\n(.*?)(?=^## |\Z)", GUIDE.read_text(), re.M | re.S)
    return re.findall(r"^```[a-z]*\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def typed_lines(block: str) -> list[tuple[str, str]]:
    """`machine$ command` → (machine, command)."""
    lines = [line for line in block.splitlines() if line]
    found = [re.fullmatch(r"([a-z0-9-]+)\$ (.+)", line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if match is None]
    return [(match[1], match[2]) for match in found if match]


class GuidedRun:
    """Types the guide's lines; remembers what goes on."""

    def __init__(self, machines: Machines) -> None:
        self.machines, self.daemons = machines, dict[str, Process]()

    def type_block(self, block: str, change: Callable[[str], str] = lambda line: line) -> None:
        for machine, line in typed_lines(block):
            own = change(line).replace("--nproc-per-node 8", "--nproc-per-node 1")  # accelerators of this machine
            if own.startswith(DAEMONS):
                self.daemons[machine] = self.machines.start(machine, own)
            else:
                self.machines.type(machine, own)

    def write_files(self, blocks: Sequence[str]) -> None:
        """Blocks that begin with a file's name: on the master, or on each cluster under its own name."""
        for block in blocks:
            if name := re.match(r"# (\S+\.yaml)\n", block):
                for machine in CLUSTERS if name[1] == "cluster.yaml" else ("master",):
                    text = block.replace("cluster: berlin", f"cluster: {machine}")
                    (self.machines.of(machine) / name[1]).write_text(text)

    def renew(self, authority: str, labels: Sequence[tuple[str, str]]) -> None:
        """The guide's lines for berlin, for each certificate."""
        block = guide_blocks("While it runs")[0]
        for machine, label in labels:
            lines = [
                f"{machine if who == 'berlin' else who}$ "
                + line.replace("berlin:", f"{machine}:").replace("berlin.cluster", label).replace("ca/", authority)
                for who, line in typed_lines(block)
            ]
            self.type_block("\n".join(lines))

    def wait_for_slaves(self) -> None:
        logs = [self.daemons[name].log for name in ("slave-0", "slave-1")]
        self.until(lambda: all('"ready"' in log.read_text() for log in logs), "both slaves are ready")

    # ---- what became of it -------------------------------------------------------------------------------------------

    def history(self) -> list[RoundHistory]:
        with closing(Ledger.open(self.machines.of("master") / "master" / LEDGER, readonly=True)) as ledger:
            return ledger.read_history(1_000_000)

    def go_on(self, by: Sequence[str] = CLUSTERS, rounds: int = ROUNDS) -> None:
        """Wait for so many more versions with contributions of each of `by`."""
        last = max((r.round for r in self.history()), default=0)

        def holds() -> bool:
            new = [r for r in self.history() if r.round > last and r.version is not None]
            return all(sum(name in {f.push.cluster for f in r.folds} for r in new) >= rounds for name in by)

        self.until(holds, f"{rounds} rounds with {', '.join(by)}")

    def until(self, holds: Callable[[], Any], what: str, within_s: float = STEADY_S) -> None:
        end = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
            dead = [p.tail() for p in self.daemons.values() if p.code not in (None, DENIED)]
            assert not dead, "\n".join(dead)
            time.sleep(0.1)

    def marks(self, cluster: str, kind: str) -> list[dict[str, Any]]:
        path = self.machines.of(cluster) / "run" / "timeline.jsonl"
        return [line for line in timeline.read_marks(path) if line["kind"] == kind] if path.exists() else []


# ---- the test --------------------------------------------------------------------------------------------------------


@pytest.fixture(name="run")
def guided_run(tmp_path: Path) -> Iterator[GuidedRun]:
    if why := missing():
        pytest.skip(f"NO NAMESPACES: {why}; two machines are not tried")
    with Machines(tmp_path, guide_addresses()) as machines:
        for machine in ("master", *CLUSTERS):
            for name, text in zip(TRAINING, (MYMODEL, TRAIN), strict=True):
                (machines.of(machine) / name).write_text(text)
        yield GuidedRun(machines)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_several_machines_by_the_guide(run: GuidedRun, tmp_path: Path) -> None:
    """It trains; nothing restarts while all certificates change; the wire shows no parameter and no cluster's name."""
    train_by_the_guide(run, tmp_path / "packets")

    started = {name: process.pid for name, process in run.daemons.items()}
    replace_all(run)
    assert {name: process.pid for name, process in run.daemons.items() if process.code is None} == started
    revoke_and_enroll(run)
    assert {name: process.pid for name, process in run.daemons.items() if name != "oslo"} == {
        name: pid for name, pid in started.items() if name != "oslo"
    }
    check_rounds(run)


def train_by_the_guide(run: GuidedRun, captured: Path) -> None:
    """Sections 1 to 3. The jobs are captured from their start, without the checks, which move hundreds of megabytes."""
    (certificates,) = guide_blocks("Certificates")
    run.type_block(certificates)
    files = guide_blocks("Files")
    run.write_files(files)
    run.type_block(files[-1])
    daemons, seed, jobs, looks, takes = guide_blocks("Start")
    run.type_block(daemons)
    run.type_block(seed)
    run.wait_for_slaves()
    checks = [line for line in jobs.splitlines() if "dips check" in line]
    run.type_block("\n".join(checks))
    with run.machines.capture(captured):
        run.type_block("\n".join(line for line in jobs.splitlines() if line not in checks))
        run.go_on()
        needles = parameter_bytes(run)
    assert "berlin" in run.machines.type("master", typed_lines(looks)[0][1])
    run.type_block(looks)
    run.type_block(takes)
    check_wire(captured, needles)


def replace_all(run: GuidedRun) -> None:
    """Each certificate, then the authority, then each certificate by the new one."""
    blocks = guide_blocks("While it runs")
    labels = [(machine, label) for machine, own in LABELS.items() for label in own]
    run.type_block(blocks[0])
    run.renew("ca/", [pair for pair in labels if pair[0] != "berlin"])
    run.go_on()
    run.type_block(blocks[1])  # both authorities
    run.go_on(rounds=1)
    run.renew("ca2/", labels)
    run.go_on(rounds=1)
    run.type_block(blocks[2])  # the old one goes
    run.go_on()


def revoke_and_enroll(run: GuidedRun) -> None:
    """oslo, in the middle of a push; berlin goes on; oslo comes back."""
    _, _, _, revoke, enroll = guide_blocks("While it runs")
    signed, *copies = revoke.splitlines()  # nobody knows of it before it is copied
    run.type_block(signed)
    run.machines.limit("oslo", SLOW_MBIT)
    begun = len(run.marks("oslo", "push_begin"))
    run.until(lambda: len(run.marks("oslo", "push_begin")) > begun, "oslo pushes")
    ended = len(run.marks("oslo", "push_end"))
    run.type_block("\n".join(copies))
    assert len(run.marks("oslo", "push_end")) == ended, "it was revoked in the middle of a push"
    oslo = run.daemons["oslo"]
    run.until(lambda: oslo.code is not None, "oslo's agent ends", ENDED_S)
    assert oslo.code == DENIED and "is revoked" in oslo.log.read_text(), oslo.tail()
    run.go_on(by=("berlin",))
    run.machines.limit("oslo", 1000.0)
    run.type_block(enroll)
    run.go_on()


def check_rounds(run: GuidedRun) -> None:
    """By the ledger: no round was skipped, and every push of berlin is in a version."""
    rounds = run.history()
    assert not [r.reason for r in rounds if r.kind == "skipped"]
    outcomes = {str(o.push): o.kind for r in rounds for o in r.outcomes if o.push.cluster == "berlin"}
    assert set(outcomes.values()) == {"accepted"}, outcomes
    granted = len(run.marks("berlin", "push_begin"))
    assert granted - 1 <= len(outcomes) <= granted, f"{granted} pushes were begun, {len(outcomes)} had an outcome"


def parameter_bytes(run: GuidedRun) -> list[bytes]:
    """Pieces of what the slaves hold: of each tensor of each snapshot its first, middle and last bytes."""
    found = []
    for slave in ("slave-0", "slave-1"):
        for file in run.machines.of(slave).glob("*/v*@r*/*.safetensors"):
            for name, tensor in load_file(file).items():
                raw = tensor.tobytes()
                assert name.startswith(("theta.", "momentum."))
                if name.startswith("theta."):
                    found += [raw[at : at + NEEDLE] for at in (0, len(raw) // 8 * 4, len(raw) - NEEDLE)]
    assert len(found) >= 3 * 16, "snapshots of both slaves are there"
    seeded = [run.machines.of(slave) / slave / "v0@r0" for slave in ("slave-0", "slave-1")]
    first = [tensor for version in seeded for tensor in load_parameters(version).values()]
    return [tensor.tobytes()[:NEEDLE] for tensor in first] + found[:: len(found) // MOST_NEEDLES + 1]


def check_wire(captured: Path, needles: Sequence[bytes]) -> None:
    """What was captured holds no parameter and no name but those of the servers that are dialled."""
    with captured.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as wire:
        assert 2 * ROUNDS * 2 * 2_000_000 < len(wire) < MOST_CAPTURED, "pushes and pulls of both, from begin to end"
        assert wire.find(b"master.master.two-hosts.dips") >= 0, "TLS names the server that is dialled: it captures"
        plain = {b"berlin", b"oslo", b"0.weight", b"theta", b"torchrun", b"RequestPush", *needles}
        assert not [word for word in plain if wire.find(word) >= 0]
    captured.unlink()
