"""Encodes the objects of this package as JSON text and decodes them: events, effects, the Coordinator's whole state.

One walk over the objects serves all of them, so no field can be forgotten: a dataclass is encoded by its fields;
RunState, Penalty, LastNorms and RangeBook by their attributes; any other object is an error. Mutable objects keep their
identity: a push that is referenced by a cluster and by a round is one object again after decoding. Sets are encoded in
ascending order, so equal states give equal text in every process. No pickle: text that names another class is refused.

    scalar                         as in JSON (Infinity and NaN as in Python)
    ["t", …] ["l", …]              tuple, list
    ["s", …] ["f", …]              set, frozenset; ["i", 0, 5, 9, 1]: the set of ints 0…4 and 9 (start, length)
    ["d", key, value, …]           dict, in its order
    ["q", most, …]                 deque of at most that many
    ["r", 3]                       the fourth mutable object, again
    ["VersionId", 12, 17]          a dataclass with its fields in their order, or a member of an enum; the last ones may
                                   be missing if they were added later (releases.py)
    ["e", "StaleTerm"]             a class of dips.errors
    ["RunState", {"head": …, …}]   one of the four classes that are no dataclasses
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, cast

from dips.errors import Corrupt, LocalProtocolError, class_named
from dips.protocol import data, penalty, run_state
from dips.protocol.gates import norms
from dips.protocol.releases import is_new

FORMAT = 1  # raised by every change of the encoding of a state
BELOW = ("dips.codecs", "dips.ids", "dips.outer_step")  # their classes are in fields of this package's
PLAIN: tuple[type, ...] = (
    run_state.RunState,
    penalty.Penalty,
    norms.LastNorms,
    data.RangeBook,
)  # encoded by their attributes
# Attributes of these that protocol 2 added, with what they are in a state of the release before (releases.py).
ADDED: dict[type, dict[str, Callable[[], Any]]] = {
    run_state.RunState: {
        "protocol": lambda: 1,
        "rebalance": lambda: None,
        "former_slaves": dict[str, int],
        "refused_changes": dict[str, str],
    },
    data.RangeBook: {"parts": dict[int, data.Parts]},
}
SCALARS = (bool, int, float, str, type(None))

spell_json: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode  # on one line

Encoder = Callable[["_StateWriter", Any], Any]


def encode_value(value: object) -> Any:
    """Encode a value as lists and scalars that JSON has; raise LocalProtocolError on a value of an unknown class."""
    return _StateWriter().write_value(value)


def encode_text(value: object) -> str:
    """Encode a value as one line of text; equal values give equal text in every process."""
    return spell_json(encode_value(value))


def value_digest(value: object) -> str:
    """Return 64 bits of a hash of a value's text, to compare effects without keeping them."""
    return blake2b(encode_text(value).encode(), digest_size=8).hexdigest()


def decode_value(spelled: Any) -> Any:
    """Decode what `encode_value` returned; raise Corrupt on anything else."""
    try:
        return _StateReader().read_value(spelled)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Corrupt(f"not a spelled value: {error!r}") from error


def field_names(spelled: Any) -> dict[str, list[str]]:
    """Return the field names of every class in an encoded value, for the head of a file."""
    found: dict[str, list[str]] = {}
    stack = [spelled]
    while stack:
        at = stack.pop()
        if isinstance(at, list) and at:
            if at[0] in CLASSES and is_dataclass(CLASSES[at[0]]):
                found.setdefault(at[0], _fields_of(CLASSES[at[0]]))
            stack += [item for item in at if isinstance(item, list | dict)]
        elif isinstance(at, dict):
            stack += at.values()
    return dict(sorted(found.items()))


def class_differences(written: dict[str, list[str]]) -> list[str]:
    """Describe how classes of a file that was written by another Di-PS differ from ours; empty if none does."""
    lines = []
    for name, theirs in written.items():
        ours = _fields_of(CLASSES[name]) if name in CLASSES else None
        if ours is None:
            lines.append(f"{name} is not known here")
        elif ours[: len(theirs)] != theirs or len(theirs) < _least_fields(CLASSES[name]):
            gone, new = [f for f in theirs if f not in ours], [f for f in ours if f not in theirs]
            lines.append(f"{name}: " + (f"has lost {gone}, gained {new}" if gone or new else "another order of fields"))
    return lines


# ---- classes --------------------------------------------------------------------------------------------------------


def _known_classes() -> dict[str, type]:
    """Return the dataclasses and enums of this package's modules and of BELOW, by name: text may name no others."""
    found: dict[str, type] = {}
    ours = (module.name for module in walk_packages([str(Path(__file__).parent)], "dips.protocol."))
    for module in map(import_module, (*BELOW, *sorted(ours))):
        for name, cls in vars(module).items():
            local = isinstance(cls, type) and cls.__module__ == module.__name__
            if local and (is_dataclass(cls) or cls in PLAIN or issubclass(cls, Enum)):
                assert name not in found, f"two classes are called {name}"
                found[name] = cls
    return found


CLASSES: dict[str, type] = _known_classes()


@cache
def _fields_of(cls: Hashable) -> list[str]:
    """Return the names of a dataclass's fields in their order, without those computed from others (`derived`)."""
    return [f.name for f in fields(cast(Any, cls)) if "derived" not in f.metadata]


@cache
def _added_fields(cls: Hashable) -> dict[str, Any]:
    """Return the fields that some protocol added to a dataclass, with their values in text that lacks them."""
    return {f.name: f.metadata["missing"] for f in fields(cast(Any, cls)) if "added" in f.metadata}


@cache
def _least_fields(cls: Hashable) -> int:
    """Return how many fields of a dataclass every text of it has."""
    return len(_fields_of(cls)) - len(_added_fields(cls))


@cache
def _omitted_fields(cls: Hashable) -> list[Any]:
    """Return the encoded values with which fields are left out, the last field first: the release before has none."""
    return [encode_value(f.metadata["missing"]) for f in reversed(fields(cast(Any, cls))) if is_new(f.metadata)]


def _is_mutable(cls: type) -> bool:
    """Whether objects of this class are mutable, so that their identity must be kept."""
    return cls in PLAIN or (is_dataclass(cls) and not cls.__dataclass_params__.frozen)  # type: ignore[attr-defined]


# ---- writing --------------------------------------------------------------------------------------------------------


class _StateWriter:
    def __init__(self) -> None:
        self._known: dict[int, int] = {}  # id of a mutable object → its number, or -1 for a container
        self._numbers = 0

    def write_value(self, value: Any) -> Any:
        cls = type(value)
        if cls in SCALARS:
            return value
        encoder = _ENCODERS.get(cls) or _choose_encoder(cls)
        return encoder(self, value)

    def number_object(self, value: Any) -> int | None:
        """Return the number of an object that was met before; else number it and return None."""
        known = self._known.get(id(value))
        if known is None:
            self._known[id(value)] = self._numbers
            self._numbers += 1
        return known

    def check_owner(self, container: Any) -> Any:
        """Raise LocalProtocolError if a container is referenced twice: it would be decoded as two."""
        if id(container) in self._known:
            raise LocalProtocolError(f"a {type(container).__name__} is held twice: {container!r:.80}")
        self._known[id(container)] = -1
        return container


def _choose_encoder(cls: type) -> Encoder:
    """Return the encoder for objects of a class, and remember it."""
    if CLASSES.get(cls.__name__) is not cls:
        raise LocalProtocolError(f"{cls.__module__}.{cls.__qualname__} has no spelling; see protocol/codec.py")
    encoder: Encoder
    if issubclass(cls, Enum):
        encoder = _encode_enum
    elif cls in PLAIN:
        encoder = _encode_plain
    else:
        encoder = _mutable_encoder(cls) if _is_mutable(cls) else _frozen_encoder(cls)
    _ENCODERS[cls] = encoder
    return encoder


def _encode_enum(_: _StateWriter, value: Enum) -> Any:
    return [type(value).__name__, value.value]


def _frozen_encoder(cls: type) -> Encoder:
    name, names, omitted = cls.__name__, _fields_of(cls), _omitted_fields(cls)

    def encode_frozen(w: _StateWriter, value: Any) -> Any:
        out = [name]
        for field in names:
            item = getattr(value, field)
            out.append(item if type(item) in SCALARS else w.write_value(item))
        for missing in omitted:
            if out[-1] != missing:
                break
            out.pop()
        return out

    return encode_frozen


def _mutable_encoder(cls: type) -> Encoder:
    plain_write, names = _frozen_encoder(cls), {f.name for f in fields(cast(Any, cls))}

    def encode_mutable(w: _StateWriter, value: Any) -> Any:
        extra = vars(value).keys() - names
        if extra:
            raise LocalProtocolError(f"{cls.__name__} has attributes that are no fields: {sorted(extra)}")
        known = w.number_object(value)
        return ["r", known] if known is not None else plain_write(w, value)

    return encode_mutable


def _encode_plain(w: _StateWriter, value: Any) -> Any:
    known = w.number_object(value)
    if known is not None:
        return ["r", known]
    return [type(value).__name__, {name: w.write_value(item) for name, item in vars(value).items()}]


def _error_class(_: _StateWriter, value: type) -> Any:
    if class_named(value.__name__) is not value:
        raise LocalProtocolError(f"{value.__qualname__} is no class of dips.errors: it has no spelling")
    return ["e", value.__name__]


def _encode_items(w: _StateWriter, tag: str, values: Iterable[Any]) -> Any:
    return [tag, *(v if type(v) in SCALARS else w.write_value(v) for v in values)]


def _encode_dict(w: _StateWriter, value: dict[Any, Any]) -> Any:
    out: list[Any] = ["d"]
    for key, item in w.check_owner(value).items():
        out += (w.write_value(key), w.write_value(item))
    return out


def _encode_set(w: _StateWriter, value: set[Any]) -> Any:
    ordered = sorted(w.check_owner(value))
    if not ordered or any(type(item) is not int for item in ordered):
        return _encode_items(w, "s", ordered)
    runs: list[Any] = ["i"]
    begin = last = ordered[0]
    for number in ordered[1:]:
        if number != last + 1:
            runs += (begin, last + 1 - begin)
            begin = number
        last = number
    return [*runs, begin, last + 1 - begin]


_ENCODERS: dict[type, Encoder] = {
    tuple: lambda w, v: _encode_items(w, "t", v),
    list: lambda w, v: _encode_items(w, "l", w.check_owner(v)),
    dict: _encode_dict,
    set: _encode_set,
    frozenset: lambda w, v: _encode_items(w, "f", sorted(v)),
    type: _error_class,
    deque: lambda w, v: ["q", v.maxlen, *(w.write_value(item) for item in w.check_owner(v))],
}


# ---- reading --------------------------------------------------------------------------------------------------------


class _StateReader:
    def __init__(self) -> None:
        self._known: list[Any] = []

    def read_value(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        tag, rest = value[0], value[1:]
        decoder = _DECODERS.get(tag)
        if decoder is not None:
            return decoder(self, rest)
        if tag == "r":
            return self._known[rest[0]]
        return self._read_object(CLASSES[tag], rest)

    def _read_object(self, cls: type, rest: list[Any]) -> Any:
        if issubclass(cls, Enum):
            return cls(rest[0])
        made = cls.__new__(cls)
        if _is_mutable(cls):
            self._known.append(made)
        items = rest[0].items() if cls in PLAIN else self._pair_fields(cast(Hashable, cls), rest, made)
        for name, item in items:
            object.__setattr__(made, name, self.read_value(item))  # also works for frozen dataclasses
        for name, make_missing in ADDED.get(cls, {}).items():
            vars(made).setdefault(name, make_missing())
        if hasattr(made, "build_derived"):
            made.build_derived()
        return made

    def _pair_fields(self, cls: Hashable, rest: list[Any], made: Any) -> Iterable[tuple[str, Any]]:
        """Pair field names with their values; those that the text lacks get their values here."""
        names = _fields_of(cls)
        if _least_fields(cls) <= len(rest) < len(names):
            for name in names[len(rest) :]:
                object.__setattr__(made, name, _added_fields(cls)[name])
            names = names[: len(rest)]
        return zip(names, rest, strict=True)


def _decode_pairs(r: _StateReader, rest: list[Any]) -> dict[Any, Any]:
    return {r.read_value(rest[i]): r.read_value(rest[i + 1]) for i in range(0, len(rest), 2)}


def _decode_numbers(_: _StateReader, rest: list[Any]) -> set[int]:
    return {n for i in range(0, len(rest), 2) for n in range(rest[i], rest[i] + rest[i + 1])}


def _read_error_class(_: _StateReader, rest: list[Any]) -> type:
    found = class_named(rest[0])
    if found is None:
        raise ValueError(f"no class of dips.errors: {rest[0]!r}")
    return found


_DECODERS: dict[Any, Callable[[_StateReader, list[Any]], Any]] = {
    "t": lambda r, rest: tuple(map(r.read_value, rest)),
    "l": lambda r, rest: list(map(r.read_value, rest)),
    "d": _decode_pairs,
    "s": lambda r, rest: set(map(r.read_value, rest)),
    "i": _decode_numbers,
    "f": lambda r, rest: frozenset(map(r.read_value, rest)),
    "e": _read_error_class,
    "q": lambda r, rest: deque(map(r.read_value, rest[1:]), rest[0]),
}
