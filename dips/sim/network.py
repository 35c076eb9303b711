"""The simulated network of control, where a question and its answer can be late, lost or twice; data is in streams.py.

A call ends exactly once: with the first answer before its deadline, or with None. A message is delivered to the process
that runs on the host at that moment, so it may outlive its sender and reach a successor: the fences
(docs/architecture.md#invariants) must handle this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any, Protocol

from cryptography import x509

from dips.errors import UnavailableMaster
from dips.identity import certificates
from dips.identity.certificates import utc_now
from dips.identity.names import PeerIdentity, PeerRole
from dips.identity.paths import TlsFiles
from dips.identity.tls_files import LoadedTls
from dips.protocol.effects import Failed
from dips.sim.heap import Chance, Heap, Timer
from dips.sim.loop import SimLoop
from dips.tasks import T
from dips.transport.tls import LOOK_S, TlsSource

Answer = Callable[[Any], None]


# ---- certificates ----------------------------------------------------------------------------------------------------
# Certificates are real, their files are not: each process sees the newest when it next looks (transport/tls.py).


LIFE = timedelta(days=90)  # of a certificate


@cache
def _make_root(run: str) -> tuple[x509.Certificate, certificates.Key]:
    key = certificates.new_key()
    return certificates.make_authority(run, key, utc_now(), LIFE.days), key


@cache
def _issue(identity: PeerIdentity, number: int) -> x509.Certificate:
    root, key = _make_root(identity.run)
    return certificates.sign_request(
        certificates.make_request(identity, certificates.new_key()), root, key, utc_now(), LIFE
    )


class SimAuthority:
    """Issues the certificates of a run; the master has its list of revoked ones at once, nobody else has."""

    def __init__(self, run: str, heap: Heap) -> None:
        self.run, self._heap = run, heap
        self._numbers: dict[str, int] = {}  # cluster → the number of its newest certificate
        self._revoked: frozenset[int] = frozenset()
        self._expelled: dict[str, list[list[float]]] = {}  # cluster → when it was revoked and when enrolled again

    def revoke(self, cluster: str) -> None:
        """Revoke the newest certificate of a cluster."""
        identity = PeerIdentity(cluster, PeerRole.CLUSTER, self.run)
        self._revoked |= {_issue(identity, self._numbers.get(cluster, 0)).serial_number}
        self._expelled.setdefault(cluster, []).append([self._heap.now, inf])

    def enroll(self, cluster: str) -> None:
        """Issue another certificate for a cluster."""
        self._numbers[cluster] = self._numbers.get(cluster, 0) + 1
        for times in self._expelled.get(cluster, ()):
            times[1] = min(times[1], self._heap.now)

    def revoked_s(self, cluster: str, answered_at: float) -> float:
        """Return for how many seconds a cluster may have been refused whose last heartbeat was answered at
        `answered_at`: enrolments since then, or just before, need not have been seen, as while the master is down.
        """
        times = self._expelled[cluster]
        first = next((revoked for revoked, enrolled in times if enrolled + LOOK_S > answered_at), times[-1][0])
        return min(times[-1][1], self._heap.now) - first

    def load_files(self, identity: PeerIdentity) -> LoadedTls:
        """Return what the files of a process hold."""
        root, _ = _make_root(self.run)
        certificate = _issue(identity, self._numbers.get(identity.name, 0))
        revoked = self._revoked if identity.role is PeerRole.MASTER else frozenset[int]()
        pems = certificates.to_pem(root), certificates.to_pem(certificate)
        since, until = certificates.signed_at(certificate), certificate.not_valid_after_utc
        return LoadedTls(identity, *pems, b"", since, until, revoked, (root,))

    def take_stamp(self, identity: PeerIdentity) -> tuple[int, ...]:
        """Return a value that changes with the files of a process."""
        return self._numbers.get(identity.name, 0), len(self._revoked)


class SimTlsSource(TlsSource):
    """A process's certificate, without files."""

    def __init__(self, authority: SimAuthority, name: str, role: PeerRole, clock: Callable[[], float]) -> None:
        self._authority, self._identity = authority, PeerIdentity(name, role, authority.run)
        super().__init__(TlsFiles.beside(Path(f"{name}.{role}.crt")), name, role, authority.run, clock=clock)

    @staticmethod
    def _call_look(work: Callable[[], T], name: str) -> Future[T]:
        """Call it at once: no disk is silent."""
        done = Future[T]()
        done.set_result(work())
        return done

    def _take_stamp(self) -> tuple[int, ...]:
        return self._authority.take_stamp(self._identity)

    def _load(self) -> LoadedTls:
        return self._authority.load_files(self._identity)

    def _require_revocations(self) -> None:
        """Do nothing: no file is lost."""


@dataclass(frozen=True, slots=True)
class ShownCall:
    """A call, and the certificate of its connection in PEM."""

    message: Any
    shown: bytes


# ---- network ---------------------------------------------------------------------------------------------------------


class NetworkObserver:
    """The hooks that a network calls; each does nothing by default."""

    def cut_off(self, sender: str, receiver: str, both: bool) -> None:
        """Called when a message is lost on a parted link; `both`: the other direction is parted, too."""

    def passes_again(self, sender: str, receiver: str) -> None:
        """Called when the first message passes a link that was parted."""


class SimHost(Protocol):
    """A named host on which a process may run."""

    def on_message(self, sender: str, message: Any, answer: Answer) -> None:
        """Take a question; call `answer` once, now or later, or never. A dead host does nothing."""


@dataclass
class Weather:
    """The faults of the network: seconds, and shares of messages."""

    delay_s: float = 0.02
    spread_s: float = 0.05
    slow_share: float = 0.03  # messages that take up to `slow_s` more, so that messages overtake each other
    slow_s: float = 3.0
    lost_share: float = 0.03
    doubled_share: float = 0.05


CLOGGED_S = 6.0

CLEAR = Weather(slow_share=0.0, lost_share=0.0, doubled_share=0.0)


class Call:
    """One question in progress, as its sender sees it."""

    __slots__ = ("_done", "timer")

    def __init__(self, done: Answer) -> None:
        self._done: Answer | None = done
        self.timer: Timer | None = None  # timer of the deadline

    def end_call(self, answer: Any) -> None:
        """End the call with the first answer; later answers, or answers after the deadline, are ignored."""
        done, self._done = self._done, None
        if self.timer is not None:
            self.timer.alive = False
        if done is not None:
            done(answer)


class Network:
    """Delivers messages between hosts, with the faults of `weather`."""

    def __init__(self, heap: Heap, chance: Chance, monitor: NetworkObserver) -> None:
        self._heap = heap
        self._rng = chance.generator_for("network")
        self.weather = Weather()
        self._hosts: dict[str, SimHost] = {}
        self._cut: dict[tuple[str, str], float] = {}  # (sender, receiver) → end of the partition
        self._clogged: dict[str, float] = {}  # name → end of the clogging, in both directions
        self._monitor = monitor

    def attach_host(self, name: str, host: SimHost) -> None:
        self._hosts[name] = host

    def cut_link(self, sender: str, receiver: str, until: float) -> None:
        """Let nothing pass in this direction until the given time: partitions may be one-way."""
        self._cut[sender, receiver] = until

    def clog_host(self, name: str, until: float) -> None:
        """Delay the host's messages by random times up to CLOGGED_S until the given time."""
        self._clogged[name] = until

    def repair_links(self) -> None:
        """Repair all links: nothing is lost or doubled any more."""
        self._cut = dict.fromkeys(self._cut, self._heap.now)
        self._clogged.clear()
        self.weather = CLEAR

    def call_host(self, sender: str, receiver: str, message: Any, deadline_s: float, done: Answer) -> None:
        """Send a question; `done` gets the answer, or None at the deadline."""
        call = Call(done)
        call.timer = self._heap.call_later(deadline_s, "deadline of a call", lambda: call.end_call(None))

        def deliver_message() -> None:
            self._hosts[receiver].on_message(sender, message, send_reply)

        def send_reply(answer: Any) -> None:
            self._send_message(receiver, sender, "answer", lambda: call.end_call(answer))

        self._send_message(sender, receiver, "question", deliver_message)

    def ask_host(
        self, loop: SimLoop, sender: str, receiver: str, message: Any, deadline_s: float
    ) -> asyncio.Future[Any]:
        """Send a question of a process; the result is the answer, None if there is none before the deadline."""
        answered = loop.create_future()

        def on_answer(answer: Any) -> None:
            if not answered.done():
                answered.set_result(answer)

        self.call_host(sender, receiver, message, deadline_s, partial(loop.deliver, on_answer))
        return answered

    async def ask_master(self, loop: SimLoop, sender: str, message: Any, deadline_s: float) -> Any:
        """Ask the master and return its reply. Raises UnavailableMaster if none comes, or the master's error."""
        answer = await self.ask_host(loop, sender, "master", message, deadline_s)
        if answer is None:
            raise UnavailableMaster("the master does not answer")
        if isinstance(answer, Failed):
            raise answer.error(answer.message)
        return answer

    def _send_message(self, sender: str, receiver: str, what: str, arrive: Callable[[], None]) -> None:
        draw, weather = self._rng.random, self.weather
        # Always drawn, so that a change of one share does not affect the others.
        fate, slow, spread = draw(), draw(), draw()
        lost, doubled = fate < weather.lost_share, fate > 1.0 - weather.doubled_share
        now = self._heap.now
        if self._cut and self._cut.get((sender, receiver), 0.0) > now:
            self._monitor.cut_off(sender, receiver, self._cut.get((receiver, sender), 0.0) > now)
            return
        if lost:
            return
        if self._cut and self._cut.pop((sender, receiver), None) is not None:
            self._monitor.passes_again(sender, receiver)
        delay_s = _delay_s(weather, slow, spread)
        clogs = self._clogged
        clogged = clogs and (clogs.get(sender, 0.0) > now or clogs.get(receiver, 0.0) > now)
        label = f"{what} {sender} → {receiver}"
        self._heap.call_later(delay_s + CLOGGED_S * draw() if clogged else delay_s, label, arrive)
        if doubled:  # uses the same numbers reversed: the copy of a fast message is slow
            copy_s = _delay_s(weather, 1.0 - slow, 1.0 - spread)
            self._heap.call_later(copy_s + CLOGGED_S if clogged else copy_s, label, arrive)


def _delay_s(weather: Weather, slow: float, spread: float) -> float:
    """Return a delay; `slow` and `spread` are drawn from 0 to 1, and `slow` below its share adds to the delay."""
    delay_s = weather.delay_s + weather.spread_s * spread
    return delay_s + weather.slow_s * slow / weather.slow_share if slow < weather.slow_share else delay_s
