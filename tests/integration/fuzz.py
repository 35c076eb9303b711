"""Messages that nobody should send, made from the proto descriptors: a seed names each of them.

What an identity alone could prevent is left out until there are identities: a stranger who names a living incarnation
rightly, in a message that is right in every field, speaks for it. So made-up messages never name incarnation 1, which
every living peer of the test has; poisoned ones do, and are wrong in one field.
"""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Sequence

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from dips.protocol.releases import PROTOCOL
from dips.wire.generated import cluster_pb2, names_pb2, operator_pb2, slave_pb2, status_pb2

RUN, CLUSTERS, SLAVES = "test", ("fast", "slow"), ("ps0", "ps1")
MODULES = (names_pb2, cluster_pb2, slave_pb2, status_pb2, operator_pb2)
REALS = (math.nan, math.inf, -math.inf, 1e300, -1e300, -1.0, 5e-324, 0.0, 1.0, 3.5)
WRONG_REALS = (math.nan, math.inf, -math.inf, 1e300, -2.0)
COUNTS = (0, 2, 3, 7, 1 << 31, (1 << 53) - 1, 1 << 53, (1 << 63) - 1, (1 << 64) - 1)
WRONG_COUNTS = (1 << 53, (1 << 63) - 1, (1 << 64) - 1)
TERMS = (0, (1 << 53) - 1, (1 << 63) - 1)  # one that may follow is the true master's successor, as far as can be known
NESTED = "[" * 20_000
TEXTS = ("", "x", "\0", "../..", "naïve ✓", "a" * 257, "a" * 70_000, NESTED, "v1@r1", "fp32", "live", "training")
NAMED = {"cluster": CLUSTERS, "slave": SLAVES, "name": SLAVES, "run": (RUN,)}
SHOWN = frozenset({"loss", "layer_sq", "acc_sq", "push_in_s"})  # may be what other floats may not


class MessageMaker:
    """Messages from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def make(self, kind: type[Message]) -> Message:
        """A message of this kind in which anything may stand."""
        message = kind()
        self._fill(message, depth=0)
        if isinstance(message, slave_pb2.SlaveRegistered) and message.slave in SLAVES and message.run == RUN:
            message.term_seen = TERMS[-1]  # else it would be a slave that starts anew
        if isinstance(message, operator_pb2.DrainAsked) and message.slave in SLAVES:
            message.slave = "nobody"  # operators may
        if isinstance(message, operator_pb2.QuarantineAsked) and message.cluster in CLUSTERS:
            message.cluster = "nobody"
        return message

    def _fill(self, message: Message, depth: int) -> None:
        fields = list(message.DESCRIPTOR.fields)
        for oneof in message.DESCRIPTOR.oneofs:
            members = [f for f in fields if f.containing_oneof is oneof]
            chosen = self.rng.choice([*members, None])
            fields = [f for f in fields if f not in members or f is chosen]
        for field in fields:
            if self.rng.random() < 0.15:
                continue
            if field.is_repeated:
                self._fill_list(message, field, depth)
            elif field.type == FieldDescriptor.TYPE_MESSAGE:
                child = getattr(message, field.name)
                child.SetInParent()
                self._fill(child, depth + 1)
            else:
                setattr(message, field.name, self._scalar(field))

    def _fill_list(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        values = getattr(message, field.name)
        for _ in range(self.rng.choice([0, 1, 2, 5 if depth else 300])):
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                self._fill(values.add(), depth + 1)
            else:
                values.append(self._scalar(field))

    def _scalar(self, field: FieldDescriptor) -> float | int | str | bool | bytes:
        if field.type == FieldDescriptor.TYPE_DOUBLE:
            return self.rng.choice(REALS)
        if field.type == FieldDescriptor.TYPE_BOOL:
            return self.rng.random() < 0.5
        if field.type == FieldDescriptor.TYPE_STRING:
            return self._text(field.name)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self.rng.choice([b"", b"junk", zlib.compress(self._manifest().encode())])
        if field.name in ("term", "term_seen"):
            return self.rng.choice(TERMS)
        return self.rng.choice([*COUNTS, PROTOCOL] if field.name != "inc" and field.name != "sinc" else COUNTS)

    def _text(self, name: str) -> str:
        usual: Sequence[str] = NAMED.get(name, ())
        if name == "manifest" and self.rng.random() < 0.5:
            return self._manifest()
        return self.rng.choice([*usual, *usual, *usual, *TEXTS])

    def _manifest(self) -> str:
        shape = self.rng.choice([NESTED, "Infinity", "NaN", "-1", "1e400", "true", str(1 << 70), '{"a":' * 500, "4"])
        return f'{{"format":1,"layers":[{{"name":"l","parameters":[["l.w",[{shape}]]]}}]}}'

    def poison(self, message: Message) -> Message:
        """Make one field of a message that is right wrong: no bound of the wire may let it pass."""
        places = list(_scalars(message))
        while True:
            owner, field = self.rng.choice(places)
            if field.type == FieldDescriptor.TYPE_DOUBLE and field.name not in SHOWN:
                setattr(owner, field.name, self.rng.choice(WRONG_REALS))
                return message
            if field.cpp_type == FieldDescriptor.CPPTYPE_UINT64:
                setattr(owner, field.name, self.rng.choice(WRONG_COUNTS))
                return message
            if field.type == FieldDescriptor.TYPE_STRING and field.name not in ("reason", "manifest"):
                setattr(owner, field.name, self.rng.choice(["a" * 257, "a" * 70_000]))
                return message

    def living(self) -> tuple[str, str, Message]:
        """(service, method, a message that a living peer could send now), to be poisoned."""
        cluster, slave, seq = self.rng.choice(CLUSTERS), self.rng.choice(SLAVES), self.rng.randrange(1, 50)
        push = names_pb2.PushId(cluster=cluster, inc=1, seq=seq)
        pull = names_pb2.PullId(cluster=cluster, inc=1, seq=seq)
        genesis = names_pb2.VersionId()
        choices: list[tuple[str, str, Message]] = [
            ("Cluster", "Heartbeat", cluster_pb2.ClusterHeartbeat(cluster=cluster, inc=1, trainer="training",
                                                                  activity="inner", base=genesis)),
            ("Cluster", "RequestPush", cluster_pb2.PushRequested(push=push, base=genesis, ranks=1)),
            ("Cluster", "FinishPush", cluster_pb2.PushFinished(push=push, tokens=64, inner_steps=1)),
            ("Cluster", "RequestPull", cluster_pb2.PullRequested(pull=pull, ranks=1)),
            ("Cluster", "FinishPull", cluster_pb2.PullFinished(pull=pull, installed=True)),
            ("Cluster", "RequestRanges", cluster_pb2.RangesRequested(cluster=cluster, inc=1, seq=1, count=1)),
            ("Cluster", "Leave", cluster_pb2.ClusterLeft(cluster=cluster, inc=1)),
            ("Slave", "Heartbeat", slave_pb2.SlaveHeartbeat(
                slave=slave, sinc=1, term=1, memory=genesis, transfers=[slave_pb2.Transfer(cluster=cluster, inc=1)])),
            ("Slave", "Staged", slave_pb2.PushStaged(slave=slave, sinc=1, push=push, nbytes=4)),
            ("Slave", "Refused", slave_pb2.PushRefused(slave=slave, sinc=1, push=push)),
            ("Order", "Execute", slave_pb2.Order(
                slave=slave, sinc=1, term=1, number=1, deadline_s=1.0,
                apply=slave_pb2.Apply(
                    round=1, version=names_pb2.VersionId(version=1, round=1), step=slave_pb2.OuterStep(scales=[1.0])))),
        ]  # fmt: skip
        return self.rng.choice(choices)

    def noise(self) -> bytes:
        """Bytes that are no message, or a piece of one."""
        kind = self.rng.choice(["random", "json", "cut"])
        if kind == "json":
            return json.dumps({"a": [1, 2, {"b": NESTED[:100]}]}).encode()
        if kind == "cut":
            whole = self.make(slave_pb2.Order).SerializeToString()
            return whole[: self.rng.randrange(len(whole) + 1)]
        return self.rng.randbytes(self.rng.choice([1, 64, 5_000]))


def methods(service: str) -> list[tuple[str, str, type[Message]]]:
    """(path, name, kind of request) of each method of a service, from its descriptor.

    Without DrainAll, whose request has nothing that could be wrong: operators may end the run's service by it.
    """
    for module in MODULES:
        found = module.DESCRIPTOR.services_by_name.get(f"{service}Service")
        if found is not None:
            path = f"/{found.full_name}"
            return [
                (f"{path}/{m.name}", m.name, _class(m.input_type.name)) for m in found.methods if m.name != "DrainAll"
            ]
    raise KeyError(service)


def _class(name: str) -> type[Message]:
    found: type[Message] = next(getattr(module, name) for module in MODULES if hasattr(module, name))
    return found


def _scalars(message: Message) -> list[tuple[Message, FieldDescriptor]]:
    """Every field of a message, or of those in it, that is one value."""
    found = []
    for field in message.DESCRIPTOR.fields:
        if field.type != FieldDescriptor.TYPE_MESSAGE and not field.is_repeated:
            found.append((message, field))
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            children = value if field.is_repeated else [value]
            found += [place for child in children for place in _scalars(child)]
    return found
