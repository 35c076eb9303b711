"""Dataclasses of dips/protocol ⇄ protobuf messages: one walk over type hints serves every message of the control flow.

A dataclass and its message have the same name and the same field names (protos/dips/v1). A member of an enum travels
as its value. A union of dataclasses is a `oneof` with the field's name, whose members are the classes' names in
snake_case; `X | None` is an absent message. `req` names a question inside one process and never travels.

A long list that is told to many is spelled once: the field remembers the last one, as long as it is the same object.

What must stay true: what arrives is bounded and named well before anybody uses it. Which message is legal when, this
file does not know.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Hashable, Sequence
from enum import StrEnum
from functools import cache, partial
from math import inf, isnan
from operator import attrgetter
from typing import Any, TypeVar, Union, cast

from google.protobuf.message import Message

from dips import ids
from dips.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from dips.outer_step import MAX_FACTOR
from dips.printable import make_printable
from dips.protocol import effects, events, heartbeats
from dips.wire.generated import cluster_pb2, names_pb2, operator_pb2, slave_pb2, status_pb2
from dips.wire.packed_manifest import pack_text, unpack_text

MAX_MESSAGE_BYTES = 16 << 20  # one answer: a Registered of 100,000 layers has 5 MiB. Questions: limits.py
MAX_INTEGER = (1 << 53) - 1  # exact as a double and in JSON; a thousand of them still add up in SQLite's 64 bits
MAX_REAL = float(1 << 53)  # seconds, bytes/s, weights: products of two stay finite
MAX_ITEMS = 1 << 20  # in one list: data ranges, layers, ranks
LONG_LIST = 16  # items: a shorter one is spelled anew
MAX_TEXT = 256  # nonces, addresses, digests, states
MAX_REASON = 2000  # longer reasons are cut, not refused: a long complaint must not cost a push

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class RealBounds:
    """The bounds of a float in a message."""

    least: float = 0.0
    most: float = MAX_REAL
    nan: bool = False


_REAL = RealBounds()  # of every float that is not named here
_REALS = {
    # Shown to people only, and most worth showing when training diverges; the ledger gets 0 (push_pull.py), JSON null.
    ("ClusterHeartbeat", "loss"): RealBounds(-inf, inf, nan=True),
    ("PushFinished", "loss"): RealBounds(-inf, inf, nan=True),
    # A broken push has norms like these; the penalty gates it.
    ("Measured", "layer_sq"): RealBounds(0.0, inf, nan=True),
    ("Measured", "layer_dot"): RealBounds(-inf, inf, nan=True),
    # θ' may have overflowed: then how far it went is unknown.
    ("Prepared", "layer_sq"): RealBounds(0.0, inf, nan=True),
    # round.py skips a round whose sum is not finite.
    ("Folded", "acc_sq"): RealBounds(0.0, inf, nan=True),
    ("Fold", "layer_weights"): RealBounds(0.0, MAX_FACTOR),
    ("OuterStep", "scales"): RealBounds(0.0, MAX_FACTOR),
    ("OuterStep", "returned"): RealBounds(0.0, MAX_FACTOR),
    ("ClusterHeartbeatAnswer", "push_in_s"): RealBounds(heartbeats.OWN_PACE),
}

_NAMES = frozenset({"run", "cluster", "slave", "name"})  # become file names, metrics and log lines
_CUT_TEXT = frozenset({"reason"})
_PACKED_TEXT = frozenset({"manifest"})  # travels as packed_manifest.py says, which bounds it
_LOCAL = frozenset({"req", "rival_heard_s", "wall"})
_MODULES = (names_pb2, cluster_pb2, slave_pb2, status_pb2, operator_pb2)


def to_proto(obj: object) -> Message:
    """Spell a dataclass as the message of the same name."""
    message = _message_class(type(obj).__name__)()
    _spell_into(message, obj)
    return message


def _spell_into(message: Message, obj: object) -> None:
    plan, name = _field_plan(cast(Hashable, type(obj))), ""
    try:
        for name in plan.plain:
            setattr(message, name, getattr(obj, name))
        for name, spell in plan.spelled:
            spell(message, getattr(obj, name))
    except (TypeError, ValueError) as error:
        raise LocalProtocolError(f"{type(obj).__name__}.{name} cannot be spelled: {error}") from error


def from_proto(message: Message, cls: type[T], **extra: Any) -> T:
    """Read a message as `cls`; `extra` gives what does not travel (req=7).

    Raise RemoteProtocolError if a field is missing, too big, or a name that may not be one.
    """
    plan = _field_plan(cast(Hashable, cls))
    for name, read in plan.read:
        extra[name] = read(message)
    for name in plan.unbounded:
        extra[name] = getattr(message, name)
    for name in plan.integers:
        value = extra[name] = getattr(message, name)
        if value > MAX_INTEGER:
            raise RemoteProtocolError(f"{name}: expected at most {MAX_INTEGER}, got {value}")
    return cls(**extra)


def wrap_oneof(obj: object, wrapper: type[Message]) -> Message:
    """Put `obj` into a message that is one oneof (Answer, JoinReply); raise LocalProtocolError if it has no place."""
    (oneof,) = wrapper.DESCRIPTOR.oneofs
    message = wrapper()
    _set_member(message, oneof.name, obj)
    return message


def unwrap_oneof(message: Message) -> Any:
    """Read what lies in a message that is one oneof; raise RemoteProtocolError if nothing does."""
    (oneof,) = message.DESCRIPTOR.oneofs
    return _get_member(message, oneof.name)


# ---- the plan of a dataclass: for each field, how it is spelled and how it is read --------------------------------

_Spell = Callable[[Message, Any], None]
_Read = Callable[[Message], Any]


class _Plan(typing.NamedTuple):
    """The fields of a dataclass by how they are spelled and read; most are scalars, which take no call of their own."""

    plain: tuple[str, ...]  # spelled as they are
    spelled: tuple[tuple[str, _Spell], ...]
    unbounded: tuple[str, ...]  # read as they are
    integers: tuple[str, ...]
    read: tuple[tuple[str, _Read], ...]


_SCALARS = (int, float, str, bool, bytes)  # bytes are bounded by their message


@cache
def _field_plan(cls: Any) -> _Plan:
    hints = typing.get_type_hints(cls)
    fields = {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.name not in _LOCAL}
    pairs = {name: _field_pair(cls, name, hint) for name, hint in fields.items()}
    plain = [n for n, hint in fields.items() if hint in _SCALARS and n not in _PACKED_TEXT | _CUT_TEXT]
    unbounded = [n for n in plain if fields[n] in (bool, bytes)]
    integers = [n for n in plain if fields[n] is int]
    return _Plan(
        tuple(plain), tuple((n, spell) for n, (spell, _) in pairs.items() if n not in plain), tuple(unbounded),
        tuple(integers), tuple((n, read) for n, (_, read) in pairs.items() if n not in {*unbounded, *integers}),
    )  # fmt: skip


def _field_pair(cls: type, name: str, hint: Any) -> tuple[_Spell, _Read]:
    """Choose the pair by the hint; an unknown kind of hint is a bug of ours, found at the first use of the class."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        members = [a for a in arguments if a is not types.NoneType]
        return _message_pair(name, members[0], optional=True) if len(members) == 1 else _oneof_pair(name)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _list_pair(cls, name, arguments[0])
    if dataclasses.is_dataclass(hint):
        return _message_pair(name, cast(type, hint), optional=False)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _enum_pair(name, hint)
    if hint is str and name in _PACKED_TEXT:
        return _packed_pair(name)
    if hint in _SCALARS:
        return _scalar_pair(cls, name, hint)
    raise LocalProtocolError(f"{cls.__name__}.{name}: no spelling for {hint!r}")


def _scalar_pair(cls: type, name: str, kind: type) -> tuple[_Spell, _Read]:
    check, get = _leaf_check(cls, name, kind), attrgetter(name)
    if name in _CUT_TEXT:
        return lambda message, value: setattr(message, name, value[:MAX_REASON]), lambda message: check(get(message))
    read = get if check is _unbounded else lambda message: check(get(message))
    return lambda message, value: setattr(message, name, value), read


def _packed_pair(name: str) -> tuple[_Spell, _Read]:
    """A manifest's JSON; nothing stays nothing."""

    def write_field(message: Message, value: str) -> None:
        if value:
            setattr(message, name, pack_text(value))

    def read_field(message: Message) -> str:
        packed = getattr(message, name)
        return unpack_text(packed) if packed else ""

    return write_field, read_field


def _enum_pair(name: str, words: type[StrEnum]) -> tuple[_Spell, _Read]:
    """A member travels as its value; a word that is none is refused."""

    def read_field(message: Message) -> Any:
        word = getattr(message, name)
        try:
            return words(word)
        except ValueError as error:
            raise RemoteProtocolError(f"{name}: expected {' or '.join(words)}, got {word!r:.80}") from error

    return lambda message, value: setattr(message, name, words(value).value), read_field


def _message_pair(name: str, cls: type, optional: bool) -> tuple[_Spell, _Read]:
    def write_field(message: Message, value: Any) -> None:
        if value is None and not optional:
            raise TypeError(f"expected a {cls.__name__}, got None")
        if value is not None:
            _spell_member(message, name, value)

    def read_field(message: Message) -> Any:
        if message.HasField(name):
            return from_proto(getattr(message, name), cls)
        if optional:
            return None
        raise RemoteProtocolError(f"{message.DESCRIPTOR.name}: expected the field {name}, it is missing")

    return write_field, read_field


def _oneof_pair(name: str) -> tuple[_Spell, _Read]:
    return (lambda message, value: _set_member(message, name, value), lambda message: _get_member(message, name))


def _list_pair(cls: type, name: str, item: Any) -> tuple[_Spell, _Read]:
    spell_item, read_item = _item_pair(cls, name, item)
    last: list[tuple[Sequence[Any], list[Any]]] = [((), [])]  # one assignment, so that no thread sees half of it

    def write_field(message: Message, values: Sequence[Any]) -> None:
        told, spelled = last[0]
        if told is not values or not values:
            spelled = [spell_item(v) for v in values]
            if len(values) >= LONG_LIST:
                last[0] = (values, spelled)
        getattr(message, name).extend(spelled)

    return write_field, lambda message: tuple(read_item(v) for v in _check_length(name, getattr(message, name)))


def _item_pair(cls: type, name: str, item: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    if dataclasses.is_dataclass(item):
        return to_proto, lambda raw: from_proto(raw, cast(type, item))
    return _unbounded, _leaf_check(cls, name, item)


# ---- leaves -------------------------------------------------------------------------------------------------------


def _set_member(message: Message, oneof: str, obj: object) -> None:
    member = _snake_case(type(obj).__name__)
    members = _members(cast(Hashable, type(message)), oneof)
    if member not in members:
        raise LocalProtocolError(f"{message.DESCRIPTOR.name}.{oneof}: expected one of {members}, got {obj!r}")
    _spell_member(message, member, obj)


def _spell_member(message: Message, name: str, obj: object) -> None:
    """Spell `obj` in place, as the field `name`; a member without a value of its own is there all the same."""
    member = getattr(message, name)
    member.SetInParent()
    _spell_into(member, obj)


def _get_member(message: Message, oneof: str) -> Any:
    member = message.WhichOneof(oneof)
    if member is None:
        raise RemoteProtocolError(f"{message.DESCRIPTOR.name}: expected one of {oneof}, nothing is there")
    raw = getattr(message, member)
    return from_proto(raw, _dataclass_named(raw.DESCRIPTOR.name))


def _leaf_check(cls: type, name: str, kind: type) -> Callable[[Any], Any]:
    """Return what bounds one leaf that arrived, by its kind; text is cut only where it is a reason."""
    if kind is str:
        return partial(_checked_text, name)
    if kind is int:
        return partial(_checked_integer, name)
    if kind is float:
        return partial(_checked_real, name, _REALS.get((cls.__name__, name), _REAL))
    return _unbounded


def _unbounded(value: Any) -> Any:
    return value


def _checked_integer(name: str, value: int) -> int:
    if value > MAX_INTEGER:
        raise RemoteProtocolError(f"{name}: expected at most {MAX_INTEGER}, got {value}")
    return value


def _checked_real(name: str, reals: RealBounds, value: float) -> float:
    if not reals.least <= value <= reals.most and not (reals.nan and isnan(value)):
        raise RemoteProtocolError(f"{name}: expected a number from {reals.least:g} to {reals.most:g}, got {value:g}")
    return value


def _checked_text(name: str, value: str) -> str:
    if name in _NAMES:
        try:
            return ids.check_name(value, name)
        except ConfigError as error:
            raise RemoteProtocolError(str(error)) from error
    if name in _CUT_TEXT:
        return make_printable(value[:MAX_REASON])[:MAX_REASON]
    if len(value) > MAX_TEXT:
        raise RemoteProtocolError(f"{name}: expected at most {MAX_TEXT} characters, got {len(value)}")
    if not value.isprintable():
        raise RemoteProtocolError(f"{name}: expected text that prints, got {make_printable(value)!r}")
    return value


def _check_length(name: str, values: Any) -> Any:
    if len(values) > MAX_ITEMS:
        raise RemoteProtocolError(f"{name}: expected at most {MAX_ITEMS} items, got {len(values)}")
    return values


@cache
def _message_class(name: str) -> type[Message]:
    for module in _MODULES:
        if hasattr(module, name):
            return cast(type[Message], getattr(module, name))
    raise LocalProtocolError(f"{name} has no message in protos/dips/v1")


@cache
def _dataclass_named(name: str) -> type:
    for module in (ids, effects, events, heartbeats):
        if hasattr(module, name):
            return cast(type, getattr(module, name))
    raise LocalProtocolError(f"the message {name} has no dataclass in dips.protocol")


@cache
def _members(wrapper: Any, oneof: str) -> tuple[str, ...]:
    return tuple(field.name for field in wrapper.DESCRIPTOR.oneofs_by_name[oneof].fields)


@cache
def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
