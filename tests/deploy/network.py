"""The network of a node in namespaces: each pod has its own, a router joins them, and nft in it is the policies.

As in a cluster whose network is routed: a pod has an address of /32 and sends everything to the node. What no policy
allows is refused with an answer ("administratively prohibited"), so that a test need not wait for silence.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.deploy.arrows import DNS, EVERY, Party, Policies

SUBNET, GATEWAY = "10.233.0", "169.254.1.1"
MOST_PODS = 250
COMMAND_S = 60.0
OPEN, ARRIVED, REFUSED = "open", "arrived", "refused"  # connected; nobody listens there; the policy says no

_DIAL = """
import errno, json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def dial(target):
    with socket.socket() as s:
        s.settimeout(5)
        code = s.connect_ex(tuple(target))
    return {0: "open", errno.ECONNREFUSED: "arrived", errno.EHOSTUNREACH: "refused", errno.EACCES: "refused"}.get(
        code, errno.errorcode.get(code, str(code)))
targets = json.load(sys.stdin)
with ThreadPoolExecutor(32) as pool:
    print(json.dumps(list(pool.map(dial, targets))))
"""


class PodNetwork:
    """Namespaces by pod name, all behind one router; `close` removes everything."""

    def __init__(self) -> None:
        self._prefix = f"dips-{os.getpid()}"
        self.router = f"{self._prefix}-node"
        self.parties: dict[str, Party] = {}  # by pod name, with their addresses
        _ip("netns", "add", self.router)
        _ip("-n", self.router, "link", "set", "lo", "up")
        for setting in ("ip_forward=1", "icmp_ratelimit=0", "icmp_msgs_per_sec=100000"):  # every refusal is told
            self._sysctl(self.router, f"net.ipv4.{setting}")

    def add_pod(self, name: str, party: Party) -> Party:
        """Plug a pod in; return it with its address."""
        number = len(self.parties) + 1
        assert number <= MOST_PODS
        address, device, namespace = f"{SUBNET}.{number}", f"p{number}", self.namespace_of(name)
        _ip("netns", "add", namespace)
        _ip("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", device, "netns", self.router)
        for words in (
            ("addr", "add", f"{address}/32", "dev", "eth0"), ("link", "set", "lo", "up"), ("link", "set", "eth0", "up"),
            ("route", "add", GATEWAY, "dev", "eth0", "scope", "link"), ("route", "add", "default", "via", GATEWAY),
        ):  # fmt: skip
            _ip("-n", namespace, *words)
        _ip("-n", self.router, "link", "set", device, "up")
        self._sysctl(self.router, f"net.ipv4.conf.{device}.proxy_arp=1")
        _ip("-n", self.router, "addr", "add", f"{GATEWAY}/32", "dev", device)
        _ip("-n", self.router, "route", "add", f"{address}/32", "dev", device)
        self.parties[name] = Party(party.role, party.namespace, party.labels, party.ports, address)
        return self.parties[name]

    def namespace_of(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def enforce(self, policies: Policies) -> None:
        """Replace the rules: what the policies allow between each two pods, and the answers to it."""
        rules = [
            f"ip saddr {a.ip} ip daddr {b.ip} {ports} accept"
            for a in self.parties.values()
            for b in self.parties.values()
            if a is not b
            for ports in _matches(policies.allowed_ports(a, b))
        ]
        lines = "\n".join(["ct state established,related accept", *rules, "counter reject with icmpx admin-prohibited"])
        chain = f"chain pods {{\ntype filter hook forward priority 0;\n{lines}\n}}"
        rules_of_all = f"flush ruleset\ntable inet policies {{\n{chain}\n}}\n"
        _run(["ip", "netns", "exec", self.router, "nft", "-f", "-"], rules_of_all)

    def dial(self, source: str, targets: Iterable[tuple[str, int]]) -> list[str]:
        """What happens when a process of pod `source` connects to each (pod, port)."""
        addresses = [(self.parties[name].ip, port) for name, port in targets]
        command = ["ip", "netns", "exec", self.namespace_of(source), sys.executable, "-c", _DIAL]
        found: list[str] = json.loads(_run(command, json.dumps(addresses)))
        return found

    def find_wrong_ways(self, arrows: frozenset[tuple[str, str, int]], ours: Mapping[str, object]) -> list[str]:
        """Every pair of pods of which one is ours, every port: an arrow passes, everything else is refused."""
        wrong = []
        for source, a in self.parties.items():
            targets = [
                (name, port) for name in self.parties for port in sorted(EVERY)
                if name != source and (source in ours or name in ours)
            ]  # fmt: skip
            for (name, port), found in zip(targets, self.dial(source, targets), strict=True):
                is_arrow = (a.role, self.parties[name].role, port) in arrows
                if found != REFUSED if not is_arrow else found not in (OPEN, ARRIVED):
                    wrong.append(f"{source} → {name}:{port}: {found}, and it is {'an' if is_arrow else 'no'} arrow")
        return wrong

    def close(self) -> None:
        for name in [*map(self.namespace_of, self.parties), self.router]:
            if Path("/run/netns", name).exists():
                _ip("netns", "del", name)

    @staticmethod
    def _sysctl(namespace: str, setting: str) -> None:
        _run(["ip", "netns", "exec", namespace, "sysctl", "-qw", setting])


def _matches(ports: frozenset[int]) -> list[str]:
    """All ports are not only those that are tried: a job's ranks take any. Names are asked for by UDP."""
    if ports == EVERY:
        return [""]
    tcp = [f"tcp dport {{ {', '.join(map(str, sorted(ports)))} }}"] if ports else []
    return tcp + ([f"udp dport {DNS}"] if DNS in ports else [])


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(command: list[str], text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)[:200]}: {done.stderr.strip()}")
    return done.stdout
