"""Carries packets between a TUN in one network namespace and a TUN in another, late and at a rate.

python -m benchmarks.tunlink NAMESPACE IP NAMESPACE IP MBIT DELAY_MS     (prints "up", ends by SIGTERM)
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000  # few packets, since this is Python; with 32000 TCP was seen to ramp up for 2 s, without a loss
QUEUE_S = 0.25  # of packets that wait for the wire; later ones are dropped
BATCH = 64  # packets read before any is delivered


class Half:
    """One direction: packets read here leave there."""

    def __init__(self, source: int, sink: int, bytes_per_s: float, delay_s: float) -> None:
        self.source, self.sink = source, sink
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s
        self._free_at = 0.0  # when the wire has sent what was given to it
        self._under_way: deque[tuple[float, bytes]] = deque()

    @property
    def next_at(self) -> float:
        return self._under_way[0][0] if self._under_way else float("inf")

    def read(self) -> None:
        for _ in range(BATCH):
            try:
                packet = os.read(self.source, 65_536)
            except BlockingIOError:
                return
            now = time.monotonic()
            begin = max(now, self._free_at)
            if begin - now <= QUEUE_S:
                self._free_at = begin + len(packet) / self._bytes_per_s
                self._under_way.append((self._free_at + self._delay_s, packet))

    def deliver(self) -> None:
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            try:
                os.write(self.sink, self._under_way[0][1])
            except BlockingIOError:
                return
            self._under_way.popleft()


def tun(name: str, namespace: str, ip: str, peer: str) -> int:
    """Make a TUN device, move it into the namespace, and keep the end that carries its packets."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    for command in (
        f"ip link set {name} netns {namespace}",
        f"ip -n {namespace} addr add {ip} peer {peer} dev {name}",
        f"ip -n {namespace} link set {name} mtu {MTU} txqueuelen 4000 up",
    ):
        subprocess.run(command.split(), check=True)
    return fd


def main(words: list[str]) -> None:
    """Carry until the end."""
    near_ns, near_ip, far_ns, far_ip, mbit, delay_ms = words
    near = tun(f"tn{os.getpid()}", near_ns, near_ip, far_ip)
    far = tun(f"tf{os.getpid()}", far_ns, far_ip, near_ip)
    rate, delay = float(mbit) * 1e6 / 8, float(delay_ms) / 1e3
    halves = Half(near, far, rate, delay), Half(far, near, rate, delay)
    print("up", flush=True)
    while True:
        wait = min(half.next_at for half in halves) - time.monotonic()
        readable, _, _ = select.select([near, far], [], [], max(0.0, min(wait, 0.05)))
        for half in halves:
            if half.source in readable:
                half.read()
            half.deliver()


if __name__ == "__main__":
    main(sys.argv[1:])
