"""One agent for a job of several hosts: its ranks find it from everywhere, wherever rank 0 is, and end when it ends."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import namespaces
from dips.client.rank import joining
from dips.identity.names import PeerRole
from tests.enrolled import enroll_all
from tests.forkserver.process import is_server
from tests.integration import cluster_harness as harness
from tests.integration import test_constant_model as constant
from tests.integration import train_constant as script

HERE = Path(__file__).parent
TOKEN = "a token of this job, never on a command line"
VERSIONS = 12


TENSORS = script.tensors()
SHARED = {
    "stop": {"versions": VERSIONS},
    "outer": {"lr": constant.LR, "momentum": constant.MOMENTUM, "step": "nesterov", "clip": {"norm": constant.CLIP}},
    "penalty": {"gates": []},
}
pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(300)]


class Nodes(harness.Run):  # type: ignore[misc, name-defined]
    """A run whose processes can be put into network namespaces."""

    def __init__(self, directory: Path, *, security: Any = None) -> None:
        self.inside: dict[str, list[str]] = {}  # words in front of a process's command, by its name
        self.elsewhere: list[str] = []  # those of the others
        super().__init__(directory, TENSORS, shared=SHARED, security=security)

    def _start(self, name: str, command: Sequence[str]) -> Any:
        return super()._start(name, [*self.inside.get(name, self.elsewhere), *command])

    def torchrun(self, rank: int, *words: str) -> Any:
        """Start one node's torchrun as its own launcher would: it is nobody's child here."""
        return self._start(f"node{rank}", [*node(*words), *self.training()])

    def training(self) -> list[str]:
        return [str(HERE / "train_constant.py"), "fast", "64", "1", str(self.directory / "fast.out")]

    def check(self) -> None:
        """Both ranks end with the number that the ledger's folds predict, and installed the same versions."""
        rounds = [(r.version, r.folds) for r in self.versions()]
        assert len(rounds) == VERSIONS
        expected = constant.reference(rounds, sum(t.size for t in TENSORS.values()))
        seen = [dict(json.loads((self.directory / f"fast.out.{rank}").read_text())) for rank in range(2)]
        assert list(seen[0]) == list(seen[1]) and f"v{VERSIONS}@r{rounds[-1][0].round}" in seen[0]
        for numbers in seen:
            for version, number in numbers.items():
                assert number == pytest.approx(expected[version], abs=1e-6), version


def node(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *words]


@pytest.fixture(name="hosts")
def made_hosts() -> Iterator[dict[str, namespaces.End]]:
    if why := namespaces.missing():
        pytest.skip(f"NO NAMESPACES: {why}")
    with namespaces.network({"head": None, "a": None, "b": None}, "10.232.0") as hosts:
        yield hosts


@pytest.mark.slow
def test_an_agent_on_a_host_of_its_own(
    hosts: dict[str, namespaces.End], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks on two hosts without a way out, the agent on a third with the tunnels: a rank dies, torchrun restarts all.

    Master and slaves are on the agent host's loopback, where no rank can reach them: data goes through the relay, by
    frames that are sealed, since the run has certificates. Rank 0 is on either host, as torchrun's c10d store decides.
    """
    head = hosts["head"]
    monkeypatch.setenv("DIPS_AGENT", f"tcp://{head.ip}:29410")
    monkeypatch.setenv("DIPS_AGENT_TOKEN", TOKEN)
    monkeypatch.setenv("DIPS_CLUSTER_FILE", str(tmp_path / "fast.yaml"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "w0")
    # as deploy/README.md says: whoever starts torchrun sets it
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    peers = [("master", PeerRole.MASTER), *((f"ps{i}", PeerRole.SLAVE) for i in range(2)), ("fast", PeerRole.CLUSTER)]
    with Nodes(tmp_path, security=enroll_all(tmp_path / "certs", "test", peers)) as run:
        run.inside = {"node0": hosts["a"].command(), "node1": hosts["b"].command()}
        run.elsewhere = head.command()
        run.start_servers()
        agent = run.start_cluster("fast", [], relay=head.ip)
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts['a'].ip}:29500", "--rdzv-id", "job"]
        nodes = [
            run.torchrun(
                rank,
                *rendezvous,
                "--rdzv-conf",
                f"is_host={1 - rank}",
                "--max-restarts",
                "3",
                "--local-addr",
                hosts[name].ip,
            )
            for rank, name in enumerate("ab")
        ]
        run.until(lambda: len(run.versions()) >= 3, 120, "three versions")
        for child in psutil.Process(nodes[1].pid).children():
            if not is_server(child.pid):
                child.kill()
        for process in (*nodes, agent):
            run.wait(process, 150)
        run.check()
        attached = [line for line in agent.log.read_text().splitlines() if "trainer_attached" in line]
        assert len(attached) == 2
        assert "relay_port" in agent.log.read_text()


def test_an_agent_that_dies_ends_the_ranks_of_other_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs beside rank 1, rank 0 is elsewhere, started by others; killed, it takes both along, and both come back.

    Both nodes are this machine, so that the test needs no root; what torchrun of node 0 starts knows nothing of the
    agent's process, as on another machine.
    """
    monkeypatch.setenv("DIPS_AGENT_TOKEN", TOKEN)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("DIPS_CLUSTER_FILE", str(tmp_path / "fast.yaml"))
    with Nodes(tmp_path) as run:
        run.start_servers()
        line = f"$MASTER_ADDR:{harness.free_port()}"  # the same in both incarnations: it stands in the cluster file

        def start() -> tuple[Any, Any]:
            port = ["--master-addr", "127.0.0.1", "--master-port", str(harness.free_port())]
            agent = run.start_cluster("fast", [*node("--node-rank", "1", *port), *run.training()], agent=line)
            return agent, run.torchrun(0, "--node-rank", "0", *port)

        agent, other = start()
        run.until(lambda: len(run.versions()) >= 3, 120, "three versions")
        agent.kill()
        run.until(lambda: other.code is not None, joining.GRACE_S + 40, "the other host's ranks ended")
        assert other.code != 0
        # the third: rank 1 had ended first, while both were in a collective
        said = (
            r"is gone: this rank ends|the agent at tcp://\S+ (closed|is gone: |does not answer: )"
            r"|gloo.*(by peer|Broken pipe)"
        )
        assert re.search(said, other.log.read_text())
        for process in start():
            run.wait(process, 150)
        run.check()
