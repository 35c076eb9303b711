"""Machines of a guide: each a network namespace with its own address and directory, all on one bridge. Needs root.

    with Machines(tmp_path, {"master": "10.20.0.1", "authority": ""}) as machines:
        machines.type("master", "dips certs init ca/ --run r")         # to its end
        daemon = machines.start("master", "dips-master --config dips.yaml")

What is typed runs in bash on that machine. `scp` copies between the machines' directories, and `dips`, `dips-master`,
`torchrun` … are those of this checkout; nothing else differs from what a user types.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from tests.integration.cluster_harness import ROOT, Process

TYPED_S = 90.0  # for what ends by itself
NETWORK = 16  # bits
BRIDGES = ("hub", "hub2")  # all machines are on the first, until a test parts them
CONSOLE = {
    "dips": "dips.cli",
    "dips-master": "dips.master.app",
    "dips-slave": "dips.slave.app",
    "dips-client": "dips.client.app",
    "torchrun": "torch.distributed.run",
}
SCP = """#!/bin/sh
# SOURCE... MACHINE:PATH, as scp has it
for to; do :; done
recursive=; [ "$1" = -r ] && { recursive=-r; shift; }
while [ $# -gt 1 ]; do cp $recursive "$1" "$DIPS_MACHINES/${to%%:*}/${to#*:}" || exit; shift; done
"""
CAPTURE = """
import socket, sys
listening = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))  # all protocols, all interfaces
listening.setsockopt(socket.SOL_SOCKET, 33, 1 << 27)  # SO_RCVBUFFORCE: nothing is lost
print("listening", flush=True)
left = int(sys.argv[2])
with open(sys.argv[1], "wb", buffering=0) as file:
    while left > 0:
        packet, (_, _, kind, *_) = listening.recvfrom(1 << 18)
        if kind != 4:  # PACKET_OUTGOING: the same, as it leaves the bridge
            left -= file.write(packet)
"""
MOST_CAPTURED = 1 << 30  # bytes


def missing(tools: Sequence[str] = ("ip", "tc", "bash"), packages: str = "iproute2") -> str | None:
    """What this machine lacks for namespaces and these tools, or None."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    lacking = [tool for tool in tools if shutil.which(tool) is None]
    if lacking:
        return f"{' and '.join(lacking)} not found: install {packages}"
    probe = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False)
    return probe.stderr.strip() or None


class Machines:
    """Some machines and the bridge between them; leaving ends every process and removes all."""

    def __init__(self, directory: Path, addresses: Mapping[str, str]) -> None:
        """`addresses` by name; empty: a machine without a network."""
        self.directory, self.addresses = directory, dict(addresses)
        self.processes = list[Process]()
        self._tools, self._cleanup = directory / "tools", ExitStack()

    def __enter__(self) -> Machines:
        with ExitStack() as stack:
            self._write_tools()
            self._switch = stack.enter_context(_namespace(f"dips-{os.getpid()}-switch"))
            for bridge in BRIDGES:
                _run(f"ip -n {self._switch} link add {bridge} type bridge")
                _run(f"ip -n {self._switch} link set {bridge} up")
            for port, (name, address) in enumerate(self.addresses.items()):
                (self.directory / name).mkdir()
                namespace = stack.enter_context(_namespace(self._namespace_of(name)))
                _run(f"ip -n {namespace} link set lo up")
                if address:
                    self._plug_in(namespace, f"p{port}", address)
            stack.callback(self._end_processes)
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._cleanup.close()
        if error is not None:
            error.add_note("\n".join(process.tail() for process in self.processes))

    def of(self, name: str) -> Path:
        """A machine's directory."""
        return self.directory / name

    def type(self, name: str, line: str, code: int | None = 0) -> str:
        """Run a line on a machine to its end, and return what it printed; fail unless it ends with `code`."""
        done = subprocess.run(
            self._words(name, line), capture_output=True, text=True, timeout=TYPED_S, stdin=subprocess.DEVNULL,
            check=False,
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert code is None or done.returncode == code, f"{name}$ {line}\n{done.returncode}: {said}"
        return said

    def start(self, name: str, line: str) -> Process:
        """Run a line on a machine that goes on."""
        log = self.directory / f"{name}.{line.split()[0]}.log"
        process = Process(name, self._words(name, f"exec {line}"), log)
        self.processes.append(process)
        return process

    def plug(self, names: Iterable[str], bridge: str | None) -> None:
        """Plug machines into this one of BRIDGES: only those on one bridge reach each other. None: they fall silent."""
        for name in names:
            port = list(self.addresses).index(name)
            _run(f"ip -n {self._switch} link set p{port} {f'master {bridge}' if bridge else 'nomaster'}")

    def limit(self, name: str, mbit: float) -> None:
        """What a machine sends takes so long from now on."""
        _run(f"tc -n {self._namespace_of(name)} qdisc replace dev w0 root tbf rate {mbit}mbit burst 64kb latency 1s")

    @contextmanager
    def capture(self, to: Path) -> Iterator[None]:
        """Write every packet on the bridge to a file, one after the other."""
        words = ["ip", "netns", "exec", self._switch, sys.executable, "-c", CAPTURE, str(to), str(MOST_CAPTURED)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as listener:
            assert listener.stdout is not None and listener.stdout.readline().strip() == "listening"
            try:
                yield
            finally:
                listener.terminate()

    def words(self, name: str) -> list[str]:
        """The words before a command that have it run on a machine."""
        return ["ip", "netns", "exec", self._namespace_of(name)]

    def _words(self, name: str, line: str) -> list[str]:
        keys = {
            "PATH": f"{self._tools}:{os.environ['PATH']}",
            "DIPS_MACHINES": str(self.directory),
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.directory / name),
        }
        setting = [f"{key}={value}" for key, value in keys.items()]
        return [*self.words(name), "env", "-C", str(self.directory / name), *setting, "bash", "-c", line]

    def _namespace_of(self, name: str) -> str:
        return f"dips-{os.getpid()}-{name}"

    def _plug_in(self, namespace: str, port: str, address: str) -> None:
        _run(f"ip link add w0 netns {namespace} type veth peer name {port} netns {self._switch}")
        _run(f"ip -n {namespace} addr add {address}/{NETWORK} dev w0")
        _run(f"ip -n {namespace} link set w0 up")
        _run(f"ip -n {self._switch} link set {port} master {BRIDGES[0]} up")

    def _write_tools(self) -> None:
        self._tools.mkdir()
        for name, module in CONSOLE.items():
            self._write_tool(name, f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        self._write_tool("scp", SCP)

    def _write_tool(self, name: str, text: str) -> None:
        path = self._tools / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def _end_processes(self) -> None:
        for process in reversed(self.processes):
            process.terminate()


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    _run(f"ip netns add {name}")
    try:
        yield name
    finally:
        _run(f"ip netns del {name}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr.strip()}"
