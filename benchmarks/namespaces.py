"""Network namespaces with shaped links between them: what a wide area is, on one machine. Needs root and ip, tc.

    with wire(mbit=1000) as (near, far): ...                 # a veth pair, each end behind `tc tbf`
    with wire(mbit=100, delay_ms=20) as (near, far): ...     # a TUN on each side and a program that carries the packets
    with network({"site": None, "oslo": 8}) as hosts: ...   # hosts on one switch, each behind a link of its own
    with cut(hosts["oslo"]): ...                            # or `slowed`: to a share of its rate

The kernels that we meet have no netem: delay is made in user space, hence 480 Mbit/s at most.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

BURST = "256kb"  # of the bucket: several of the largest segments that the kernel hands over at once
QUEUE = "50ms"
LINK = "w0"  # the device of a host's own link
NAMES = Path("/run/netns")  # where ip keeps them


@dataclass(frozen=True, slots=True)
class End:
    """One end of the wire; without a name it is where we are."""

    namespace: str
    ip: str
    port: tuple[str, str] | None = None  # of a host of `network`: the switch's namespace, and its device there
    mbit: float | None = None  # of its link, each way

    def command(self, *words: str) -> list[str]:
        """What runs a program in this namespace."""
        return ["ip", "netns", "exec", self.namespace, *words] if self.namespace else list(words)


def missing() -> str | None:
    """What this machine lacks, or None."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    tools = [tool for tool in ("ip", "tc", "sysctl") if shutil.which(tool) is None]
    if tools:
        return f"{' and '.join(tools)} not found: install iproute2 and procps"
    return None if Path("/dev/net/tun").exists() else "/dev/net/tun does not exist"


@contextmanager
def wire(mbit: float, delay_ms: float = 0.0) -> Iterator[tuple[End, End]]:
    """Make the link; on return namespaces, devices and the carrying program are gone."""
    near, far = (End(f"dips-{os.getpid()}-{side}", f"10.231.0.{k}") for k, side in ((1, "near"), (2, "far")))
    with ExitStack() as stack:
        for end in (near, far):
            stack.enter_context(_namespace(end.namespace))
            _run(f"ip -n {end.namespace} link set lo up")
        if delay_ms:
            stack.enter_context(_carried(near, far, mbit, delay_ms))
        else:
            _veth(near, far, mbit)
        yield near, far


@contextmanager
def _namespace(name: str) -> Iterator[None]:
    try:
        _run(f"ip netns add {name}")
        yield
    finally:
        if (NAMES / name).exists():  # also one that was being added when we were told to end
            _run(f"ip netns del {name}")


def _veth(near: End, far: End, mbit: float) -> None:
    _run(f"ip link add {LINK} netns {near.namespace} type veth peer name {LINK} netns {far.namespace}")
    for end in (near, far):
        _run(f"ip -n {end.namespace} addr add {end.ip}/24 dev {LINK}")
        _run(f"ip -n {end.namespace} link set {LINK} up")
        _run(f"tc -n {end.namespace} qdisc add dev {LINK} root tbf rate {mbit}mbit burst {BURST} latency {QUEUE}")


@contextmanager
def _carried(near: End, far: End, mbit: float, delay_ms: float) -> Iterator[None]:
    words = ["-m", "benchmarks.tunlink", near.namespace, near.ip, far.namespace, far.ip, str(mbit), str(delay_ms)]
    carrier = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert carrier.stdout is not None
        if carrier.stdout.readline().strip() != "up":
            raise RuntimeError(f"the link did not come up: exit code {carrier.wait(10)}")
        yield
    finally:
        carrier.terminate()
        carrier.communicate(timeout=10)


@contextmanager
def network(links: Mapping[str, float | None], subnet: str = "127.9.0") -> Iterator[dict[str, End]]:
    """Hosts by name, all on one switch; a host's link takes so many Mbit/s each way, None: as many as come.

    Their addresses are by default those of a loopback network that spans the namespaces, since daemons that speak plain
    text take no others.
    """
    switch = f"dips-{os.getpid()}-switch"
    hosts = {
        name: End(f"dips-{os.getpid()}-{name}", f"{subnet}.{k}", (switch, f"p{k}"), mbit)
        for k, (name, mbit) in enumerate(links.items(), 1)
    }
    with ExitStack() as stack:
        for namespace in (switch, *(host.namespace for host in hosts.values())):
            stack.enter_context(_namespace(namespace))
        _run(f"ip -n {switch} link add hub type bridge")
        _run(f"ip -n {switch} link set hub up")
        for host in hosts.values():
            _plug_in(host)
        yield hosts


@contextmanager
def cut(host: End) -> Iterator[None]:
    """Pull the plug of a host of `network`: what it sends is lost, what is sent to it too, and nobody is told."""
    switch, port = _plugged(host)
    _run(f"ip -n {switch} link set {port} down")
    try:
        yield
    finally:
        _run(f"ip -n {switch} link set {port} up")


@contextmanager
def slowed(host: End, share: float) -> Iterator[None]:
    """Give the link of a host of `network` only a share of its rate."""
    assert host.mbit is not None
    _shape(host, "change", host.mbit * share)
    try:
        yield
    finally:
        _shape(host, "change", host.mbit)


def _plugged(host: End) -> tuple[str, str]:
    assert host.port is not None, "only a host of `network` has a port"
    return host.port


def _shape(host: End, verb: str, mbit: float) -> None:
    for namespace, device in ((host.namespace, LINK), _plugged(host)):
        _run(f"tc -n {namespace} qdisc {verb} dev {device} root tbf rate {mbit}mbit burst {BURST} latency {QUEUE}")


def _plug_in(host: End) -> None:
    there, (switch, port) = host.namespace, _plugged(host)
    _run(f"ip link add {LINK} netns {there} type veth peer name {port} netns {switch}")
    _run(f"ip -n {there} link set lo up")
    _run(f"ip -n {there} addr del 127.0.0.1/8 dev lo")  # else all of 127.0.0.0/8 is this host
    _run(f"ip -n {there} addr add 127.0.0.1/32 dev lo")
    for device in ("all", LINK):
        _run(f"ip netns exec {there} sysctl -qw net.ipv4.conf.{device}.route_localnet=1")
    _run(f"ip -n {there} addr add {host.ip}/24 dev {LINK}")
    _run(f"ip -n {there} link set {LINK} up")
    _run(f"ip -n {switch} link set {port} master hub up")
    if host.mbit is not None:
        _shape(host, "add", host.mbit)


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
