"""Whatever is said to a living master and slaves, they live on, and the run beside it loses no round."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
from collections import Counter
from pathlib import Path

import grpc
import pytest
import zmq

from dips.config import host_port
from dips.transport.control import ERROR_KEY
from dips.wire.frame import Kind, Range, StreamName, encode_hello, make_message, run_id
from dips.wire.generated.slave_pb2 import OrderReply
from tests.integration import cluster_harness as harness
from tests.integration import train_constant as script
from tests.integration.fuzz import RUN, MessageMaker, methods

HERE = Path(__file__).parent
AT_ONCE = 16
UNLIMITED = "from dips.transport.limits import CallLimits; CallLimits.find_excess = lambda *_: ''"  # calls a second
SERVICES = ("Cluster", "Slave", "Operator", "Status")  # of the master; slaves serve Order
OURS = "LocalProtocolError"  # a handler that failed: a bug


class Fuzzer:
    """Says so much to a run; `said` counts by what it was answered."""

    def __init__(self, run: harness.Run, seed: int) -> None:
        self.run, self.maker, self.said = run, MessageMaker(seed), Counter[str]()
        self.orders, self.lanes = list[str](), list[str]()

    async def find_slaves(self) -> None:
        """Where the slaves' control servers and lanes are."""
        async with grpc.aio.insecure_channel(self.run.address) as channel:
            call = channel.unary_unary("/dips.v1.StatusService/Status")
            reply = await call(b"")
        view = json.loads(reply[reply.index(b"{") :])
        self.orders = [slave["address"] for slave in view["slaves"].values()]
        self.lanes = [lane for slave in view["slaves"].values() for lane in slave["lanes"]]

    async def fuzz(self, messages: int) -> None:
        """Send so many messages, AT_ONCE at a time, to the master and to each slave in turn."""
        await self.find_slaves()
        calls = {s: {name: (path, kind) for path, name, kind in methods(s)} for s in (*SERVICES, "Order")}
        gate = asyncio.Semaphore(AT_ONCE)
        async with grpc.aio.insecure_channel(self.run.address) as master:
            slaves = [grpc.aio.insecure_channel(address) for address in self.orders]
            tasks = set[asyncio.Task[None]]()
            for number in range(messages):
                service, path, body = self._next(calls)
                channel = slaves[number % len(slaves)] if service == "Order" else master
                await gate.acquire()
                task = asyncio.create_task(self._say(channel, path, body))
                tasks.add(task)
                task.add_done_callback(lambda done: (tasks.discard(done), gate.release()))
            await asyncio.gather(*tasks)
            for slave in slaves:
                await slave.close()

    def _next(self, calls: dict[str, dict[str, tuple[str, type]]]) -> tuple[str, str, bytes]:
        rng, maker = self.maker.rng, self.maker
        kind = rng.random()
        if kind < 0.3:
            service, method, message = maker.living()
            return service, calls[service][method][0], maker.poison(message).SerializeToString()
        service = rng.choice([*calls, "Cluster", "Slave"])
        path, request = rng.choice(list(calls[service].values()))
        if kind < 0.35 and not path.endswith("/Drain"):  # a cut Order that names ps0 is a Drain of ps0, spelled rightly
            return service, path, maker.noise()
        return service, path, maker.make(request).SerializeToString()

    async def _say(self, channel: grpc.aio.Channel, path: str, body: bytes) -> None:
        try:
            reply = await channel.unary_unary(path)(body, timeout=30.0)
            error = OrderReply.FromString(reply).error if path.endswith("/Execute") else None  # of a stream's one order
            self.said[error.error if error and error.error else "answered"] += 1
            if error and error.error == OURS:
                self.said[f"{path}: {error.why} {body[:200]!r}"] += 1
        except grpc.aio.AioRpcError as error:
            named = [str(value) for key, value in error.trailing_metadata() or () if key == ERROR_KEY]
            self.said[named[0] if named else error.code().name] += 1
            silent = not named and error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            if OURS in named or silent:  # a slave says by its own UnavailableSlave that it will follow a higher term
                self.said[f"{path}: {error.details()} {body[:200]!r}"] += 1

    def fuzz_lanes(self, frames: int) -> None:
        """Frames that are none, HELLOs of anybody, and bytes that are no ZMTP, to every lane."""
        rng, context = self.maker.rng, zmq.Context()
        try:
            for lane in self.lanes:
                with context.socket(zmq.DEALER) as dealer:
                    dealer.setsockopt(zmq.LINGER, 1000)
                    dealer.connect(f"tcp://{lane}")
                    for _ in range(frames):
                        dealer.send_multipart(self._frame(rng))
                with socket.create_connection(host_port(lane)) as raw:
                    raw.sendall(rng.randbytes(4096))
        finally:
            context.destroy(linger=1000)

    def _frame(self, rng: random.Random) -> list[bytes]:
        if rng.random() < 0.4:
            return [rng.randbytes(rng.choice([0, 1, 64, 65])) for _ in range(rng.choice([1, 2, 3]))]
        number = lambda: rng.choice([0, 1, 2, (1 << 62) - 1])  # noqa: E731
        name = StreamName(
            RUN, rng.choice(["push", "pull"]), rng.choice(["fast", "slow", "x"]), number(), number() + 1_000, number(),
            rng.choice(["ps0", "ps1"]), 1, number(), rng.choice(["", "v0@r0"]), rng.choice([0, 1]),
        )  # fmt: skip
        kind = rng.choice([Kind.HELLO, Kind.HELLO, Kind.WANT, Kind.DONE, Kind.ERROR, Kind.PROBE])
        body = rng.randbytes(rng.choice([0, 10, 1_000]))
        if kind is Kind.HELLO:
            body = encode_hello(name, [Range(number(), number(), number(), number()) for _ in range(50)])
        return list(make_message(kind, run_id(RUN), name.stream_id, body))


def fuzz_beside_a_run(directory: Path, messages: int, seed: int) -> None:
    """Two clusters of the constant model train while the fuzz goes on; each push of theirs is in a version."""
    print(f"seed {seed}")
    tensors = script.tensors()
    shared = {"run": RUN, "stop": {"versions": 1_000_000}, "penalty": {"gates": []}}
    path = str(HERE / "train_constant.py")
    with harness.Run(directory, tensors, shared=shared) as run:
        *python, code = run.commands["master"]  # what is only turned away is not looked at
        run.commands["master"] = [*python, f"{UNLIMITED}; {code}"]
        daemons = [run.start_master(), *run.start_slaves()]
        for name in ("fast", "slow"):
            run.start_cluster(name, [sys.executable, path, name, "64", "2", str(directory / f"{name}.out")], steps=2)
        run.until(lambda: len(run.history()) >= 2, 90, "the run moves")
        before = len(run.history())
        fuzzer = Fuzzer(run, seed)
        asyncio.run(fuzzer.fuzz(messages))
        fuzzer.fuzz_lanes(messages // 20)
        print(fuzzer.said)
        after = len(run.history())
        run.until(lambda: len(run.history()) >= after + 2, 60, "the run moves on")
        rounds = run.history()
    assert [daemon.code for daemon in daemons] == [0, 0, 0], "they ended when they were told to, not before"
    kinds = Counter(r.kind for r in rounds)
    assert set(kinds) <= {"applied", "unfinished"} and kinds["unfinished"] <= 1, kinds  # the one that is open
    assert after > before
    strange = [said for said in fuzzer.said if said.startswith("/")]
    assert strange == [] and fuzzer.said[OURS] == 0, strange
    assert fuzzer.said["RemoteProtocolError"] > messages // 4
    for daemon in daemons:
        assert "flow_failed" not in daemon.log.read_text()


@pytest.mark.timeout(240)
def test_five_hundred_messages(tmp_path: Path) -> None:
    """The short variant: about 1 s of fuzz."""
    fuzz_beside_a_run(tmp_path, 500, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_thousand_messages(tmp_path: Path) -> None:
    """The long variant."""
    fuzz_beside_a_run(tmp_path, 20_000, seed=2)
