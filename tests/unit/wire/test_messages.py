"""The control flow's spelling: every dataclass that travels comes back equal, and what arrives is bounded."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from enum import StrEnum
from math import inf, nan
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from dips.errors import LocalProtocolError, RemoteProtocolError
from dips.ids import PullId, PushId, VersionId
from dips.outer_step import OuterStep
from dips.printable import make_printable
from dips.protocol import effects, events, heartbeats
from dips.protocol.data import BegunRange
from dips.protocol.options import Targets, TunedOption
from dips.wire import messages
from dips.wire.generated import cluster_pb2, operator_pb2, slave_pb2, status_pb2

UNUSED_BY_WIRE = {"Reply", "Note", "Exit", "Failed", "OrderAnswered", "OrderFailed", "TrainerChanged"} | {
    "BandwidthMeasured",
    "ProtocolTold",
    "MirrorReported",
    "ClusterSilent",
    "TokensReported",
    "TransferAwaited",
    "SlaveSilent",
    "Blind",
    "Ticked",
    "OperatorAsked",
    "OperatorReported",
    "ClusterExpelled",
}  # facts and orders inside the master's process; Failed leaves as a gRPC status

PARTS = (OuterStep, VersionId, PushId, PullId, BegunRange, Targets, TunedOption)  # of messages, from other modules
ENDS = st.sampled_from("abcxyz019")
PRINTABLE = st.text(max_size=40).map(make_printable)
NAMES = st.builds(lambda a, b, c: a + b + c, ENDS, st.text("abcxyz019._-", max_size=20), ENDS) | ENDS


def dataclasses_that_travel() -> list[type]:
    found = []
    for module in (events, effects, heartbeats):
        for value in vars(module).values():
            mine = isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == module.__name__
            if mine and value.__name__ not in UNUSED_BY_WIRE:
                found.append(value)
    return found


@functools.cache
def built(cls: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{f.name: value_of(cls, f.name, hints[f.name]) for f in dataclasses.fields(cls)})


def value_of(cls: type, name: str, hint: Any) -> st.SearchStrategy[Any]:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return st.one_of(*[st.none() if a is types.NoneType else value_of(cls, name, a) for a in arguments])
    if typing.get_origin(hint) is tuple:
        return st.lists(value_of(cls, name, arguments[0]), max_size=3).map(tuple)
    if dataclasses.is_dataclass(hint):
        return built(typing.cast(type, hint))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(list(hint))
    if hint is str:
        return NAMES if name in ("run", "cluster", "slave", "name") else PRINTABLE
    if name == "req":
        return st.just(7)
    if name in messages._LOCAL:
        return st.just(cls.__dataclass_fields__[name].default)
    reals = messages._REALS.get((cls.__name__, name), messages._REAL)
    return {
        int: st.integers(0, messages.MAX_INTEGER),
        bool: st.booleans(),
        bytes: st.binary(max_size=99),
        float: st.floats(reals.least, reals.most, allow_nan=False),
    }[hint]


@pytest.mark.parametrize("cls", dataclasses_that_travel(), ids=lambda c: c.__name__)
@given(st.data())
def test_round_trip(cls: type, data: st.DataObject) -> None:
    """Every dataclass that crosses the wire comes back equal, after real serialisation."""
    obj = data.draw(built(cls))
    message = messages.to_proto(obj)
    again = type(message).FromString(message.SerializeToString())
    extra = {"req": 7} if any(f.name == "req" for f in dataclasses.fields(cls)) else {}
    assert messages.from_proto(again, cls, **extra) == obj


@pytest.mark.parametrize("cls", dataclasses_that_travel(), ids=lambda c: c.__name__)
def test_twins_have_the_same_fields(cls: type) -> None:
    """A field added to a dataclass or to its message, and not to the other, is noticed here."""
    descriptor = type(messages.to_proto(_example(cls))).DESCRIPTOR
    inside = {f.name for oneof in descriptor.oneofs for f in oneof.fields}
    theirs = {f.name for f in descriptor.fields if f.name not in inside} | {o.name for o in descriptor.oneofs}
    assert theirs == {f.name for f in dataclasses.fields(cls)} - messages._LOCAL


def _example(cls: type) -> Any:
    hints = typing.get_type_hints(cls)
    return cls(**{f.name: _plain(f.name, hints[f.name]) for f in dataclasses.fields(cls)})


def _plain(name: str, hint: Any) -> Any:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return None if types.NoneType in arguments else _plain(name, arguments[0])
    if typing.get_origin(hint) is tuple:
        return ()
    if dataclasses.is_dataclass(hint):
        return _example(typing.cast(type, hint))
    if issubclass(hint, StrEnum):
        return next(iter(hint))
    return "a" if hint is str else hint()


WRAPPERS = [m for m in vars(cluster_pb2).values() if isinstance(m, type) and m.__name__.endswith("Reply")]


@pytest.mark.parametrize("wrapper", [*WRAPPERS, slave_pb2.Answer], ids=lambda c: c.__name__)
def test_every_member_of_a_oneof_is_a_dataclass(wrapper: type[Message]) -> None:
    """Each answer that a call may get can be put into its reply and read again."""
    (oneof,) = wrapper.DESCRIPTOR.oneofs
    for field in oneof.fields:
        obj = _example(messages._dataclass_named(field.message_type.name))
        again = wrapper.FromString(messages.wrap_oneof(obj, wrapper).SerializeToString())
        assert messages.unwrap_oneof(again) == obj


def test_a_result_without_a_place_is_our_bug() -> None:
    """A Ranges can never answer AwaitRound: that is ours, with the legal answers named."""
    with pytest.raises(LocalProtocolError, match="outcome"):
        messages.wrap_oneof(effects.Ranges((1,), False), cluster_pb2.AwaitRoundReply)


def test_an_empty_oneof_is_theirs() -> None:
    """A reply of a newer or broken peer, with nothing that we know inside, is refused by name."""
    with pytest.raises(RemoteProtocolError, match="AwaitRoundReply"):
        messages.unwrap_oneof(cluster_pb2.AwaitRoundReply())


def test_a_missing_field_is_theirs() -> None:
    """A push without its name cannot be acted upon."""
    with pytest.raises(RemoteProtocolError, match="expected the field push"):
        messages.from_proto(cluster_pb2.RoundAwaited(), events.RoundAwaited, req=1)


@pytest.mark.parametrize("name", ["", "../../etc", "A", "x" * 64, "a\nb"])
def test_a_name_is_checked_before_use(name: str) -> None:
    """Names become file names and metrics, so anything but a name is refused on arrival."""
    with pytest.raises(RemoteProtocolError, match="cluster name"):
        messages.from_proto(cluster_pb2.ClusterLeft(cluster=name), events.ClusterLeft, req=1)


def test_integers_fit_the_ledger() -> None:
    """Tokens above 2^53 − 1 could not be added up in the ledger: refused on arrival."""
    with pytest.raises(RemoteProtocolError, match="tokens_consumed"):
        messages.from_proto(cluster_pb2.ClusterLeft(cluster="a", tokens_consumed=1 << 63), events.ClusterLeft, req=1)


def test_text_is_bounded_and_reasons_are_cut() -> None:
    """An endless nonce is refused; an endless reason is cut, since the drop that it explains must still happen."""
    with pytest.raises(RemoteProtocolError, match="nonce"):
        messages.from_proto(
            cluster_pb2.ClusterJoined(cluster="a", run="r", nonce="n" * 300), events.ClusterJoined, req=1
        )
    raw = cluster_pb2.Pending(reason="x" * 9999)
    assert len(messages.from_proto(raw, effects.Pending).reason) == messages.MAX_REASON
    raw = cluster_pb2.Pending(reason="\0" * 9999)  # grows when it is escaped
    assert len(messages.from_proto(raw, effects.Pending).reason) == messages.MAX_REASON


def test_lists_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list longer than MAX_ITEMS is refused before it is walked."""
    monkeypatch.setattr(messages, "MAX_ITEMS", 3)
    with pytest.raises(RemoteProtocolError, match="at most 3 items"):
        messages.from_proto(
            slave_pb2.Retire(versions=[slave_pb2.Retire().versions.add() for _ in range(4)]), effects.Retire
        )


def test_a_long_list_that_is_told_again_is_the_same_on_the_wire() -> None:
    """It is spelled once, while it is the same object; another list in between, or an equal one, changes nothing."""
    lists = [tuple(PushId(name, 1, n + 1) for n in range(2 * messages.LONG_LIST)) for name in "ab"]
    for pushes in (lists[0], lists[0], lists[1], lists[0], (), lists[1][:1], tuple(lists[1])):
        told = heartbeats.LiveTransfers(1, pushes, ())
        assert messages.from_proto(messages.to_proto(told), heartbeats.LiveTransfers) == told


def test_what_has_no_spelling_names_its_field() -> None:
    """A negative count is our bug, reported with class and field rather than by protobuf."""
    with pytest.raises(LocalProtocolError, match=r"VersionId\.version"):
        messages.to_proto(VersionId(-1, 0))


# ---- every field of every message ---------------------------------------------------------------------------------

NOT_FOR_DECIDING = {  # JSON for people, or empty; an error of a stream, which transport/ordered_calls.py reads
    *("StatusRequest", "StatusReply", "DescribeRequest", "DescribeReply", "OrderError"),
}
TOO_MUCH: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.TYPE_DOUBLE: (nan, inf, -inf, 1e300, -1e300, -2.0),
    FieldDescriptor.TYPE_UINT64: (1 << 53, (1 << 64) - 1),
    FieldDescriptor.TYPE_STRING: ("x" * (messages.MAX_TEXT + 1),),
    FieldDescriptor.TYPE_BOOL: (),
    FieldDescriptor.TYPE_BYTES: (),  # bounded by gRPC's limit
}
LEGAL_ANYWAY = {  # (message, field) → what of TOO_MUCH it may be; the reasons stand in wire/messages.py
    ("ClusterHeartbeat", "loss"): (nan, inf, -inf, 1e300, -1e300, -2.0),
    ("PushFinished", "loss"): (nan, inf, -inf, 1e300, -1e300, -2.0),
    ("Measured", "layer_sq"): (nan, inf, 1e300),
    ("Measured", "layer_dot"): (nan, inf, -inf, 1e300, -1e300, -2.0),
    ("Prepared", "layer_sq"): (nan, inf, 1e300),
    ("Folded", "acc_sq"): (nan, inf, 1e300),
    ("Registered", "manifest"): TOO_MUCH[FieldDescriptor.TYPE_STRING],
}


def full(cls: type) -> Any:
    """An example in which nothing is absent or empty."""
    hints = typing.get_type_hints(cls)
    return cls(**{f.name: _filled(f.name, hints[f.name]) for f in dataclasses.fields(cls)})


def _filled(name: str, hint: Any) -> Any:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return _filled(name, arguments[0])
    if typing.get_origin(hint) is tuple:
        return (_filled(name, arguments[0]),)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return next(iter(hint))
    if dataclasses.is_dataclass(hint):
        return full(typing.cast(type, hint))
    return {str: "a", int: 1, float: 1.0, bool: True, bytes: b"a"}[hint]


def spoilt(cls: type) -> list[tuple[str, Any, Message]]:
    """(field, value, the full example with this value there), for every own scalar of a message and all of TOO_MUCH."""
    found = []
    for field in type(messages.to_proto(full(cls))).DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            continue  # a message of its own
        for value in TOO_MUCH[field.type]:
            message = messages.to_proto(full(cls))
            if isinstance(getattr(message, field.name), str | int | float):
                setattr(message, field.name, value)
            else:
                getattr(message, field.name)[0] = value
            found.append((field.name, value, message))
    return found


@pytest.mark.parametrize(
    "cls", [*dataclasses_that_travel(), VersionId, PushId, PullId, BegunRange, TunedOption], ids=lambda c: c.__name__
)
def test_every_field_is_bounded(cls: type) -> None:
    """NaN, infinity, what is too large or negative, endless text: refused by name in every field that may not be so."""
    extra = {"req": 7} if any(f.name == "req" for f in dataclasses.fields(cls)) else {}
    for name, value, message in spoilt(cls):
        again = type(message).FromString(message.SerializeToString())
        legal = any(value is v or value == v for v in LEGAL_ANYWAY.get((cls.__name__, name), ()))
        if legal or name == "reason":
            messages.from_proto(again, cls, **extra)
            continue
        with pytest.raises(RemoteProtocolError, match=name):
            messages.from_proto(again, cls, **extra)


def test_no_message_is_forgotten() -> None:
    """Whatever a call of any service sends or answers, down to the innermost message, stands in the walk above."""
    walked = {cls.__name__ for cls in (*dataclasses_that_travel(), *PARTS)}
    stack: list[Descriptor] = []
    for module in (cluster_pb2, slave_pb2, operator_pb2, status_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            stack += [d for method in service.methods for d in (method.input_type, method.output_type)]
    seen = set[str]()
    while stack:
        descriptor = stack.pop()
        if descriptor.name not in seen:
            seen.add(descriptor.name)
            stack += [f.message_type for f in descriptor.fields if f.message_type is not None]
    wrappers = {name for name in seen if name.endswith("Reply")} | {"Answer"}
    assert len(walked & seen) > 50
    assert seen - walked - wrappers - NOT_FOR_DECIDING == set()


def test_a_bound_is_the_most_that_is_taken() -> None:
    """Not one less: of text, of numbers, of items."""
    assert messages._checked_text("why", "x" * messages.MAX_TEXT)
    assert messages._checked_integer("tokens", messages.MAX_INTEGER)
    assert messages._check_length("ranges", range(messages.MAX_ITEMS))
