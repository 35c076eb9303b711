"""The codec of the deciding room: what is spelled is read back equal, whole, and by the same text in every process."""

from __future__ import annotations

import ast
import dataclasses
import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import pytest

from dips.errors import Corrupt, FailedDisk, LocalProtocolError, StalePush
from dips.ids import PushId, VersionId
from dips.protocol import codec, entities
from dips.protocol.coordinator import Coordinator
from dips.protocol.effects import Acknowledged, Effect, Failed, Note, OpenPush, Order, Reply, SlaveAddress
from dips.protocol.enums import FanoutKind
from dips.protocol.events import Event, OrderAnswered, OrderFailed, Persisted, Ticked
from dips.protocol.run_state import RunState
from dips.sim import master as sim_master
from tests.simulation.trial import play
from tests.unit.protocol.scripted_run import ScriptedRun

ROOT = Path(__file__).parents[3]


def back(value: Any) -> Any:
    return codec.decode_value(json.loads(codec.encode_text(value)))


def same(a: Any, b: Any, met: dict[int, int]) -> str:
    """Compare two graphs of objects without the codec's help; say where they differ, "" if they do not."""
    if type(a) is not type(b):
        return f"{type(a).__name__} became {type(b).__name__}"
    if type(a) in (int, str, bool, type(None)):
        return "" if a == b else f"{a!r} became {b!r}"
    if isinstance(a, Enum):
        return "" if a is b else f"{a} became {b}"
    if isinstance(a, float):
        return "" if a == b or (isnan(a) and isnan(b)) else f"{a} became {b}"
    if id(a) in met:
        return "" if met[id(a)] == id(b) else f"one {type(a).__name__} became two"
    if isinstance(a, list | tuple | deque):
        if isinstance(a, deque) and a.maxlen != b.maxlen:
            return "another bound"
        if len(a) != len(b):
            return f"{len(a)} items became {len(b)}"
        for x, y in zip(a, b, strict=True):
            if difference := same(x, y, met):
                return difference
        return ""
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()), met)  # in the same order
    ours, of_dataclass, changes = kind_of(type(a))
    if not ours:
        return "" if a == b else f"{a!r} became {b!r}"
    if changes:
        met[id(a)] = id(b)
    names = of_dataclass if of_dataclass is not None else tuple(vars(a))
    if of_dataclass is None and vars(a).keys() != vars(b).keys():
        return f"{type(a).__name__} has other attributes"
    for name in names:
        if difference := same(getattr(a, name), getattr(b, name), met):
            return f"{type(a).__name__}.{name}: {difference}"
    return ""


@cache
def kind_of(cls: Any) -> tuple[bool, tuple[str, ...] | None, bool]:
    """Whether a class is one of ours; its fields, None if it is no dataclass; whether its objects change.

    Without what is made of the other fields: it need not be equal as long as it says the same.
    """
    if not is_dataclass(cls):
        return cls.__module__.startswith("dips."), None, True
    return True, tuple(f.name for f in fields(cls) if f.compare), not cls.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_every_state_of_a_troubled_run_survives_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """state → text → state is equal in every field, of each sixteenth state in two simulated runs full of faults.

    And it is the same machine: what was read takes the next event as the original does, and leaves the same text.
    """
    met_classes, states = set[str](), 0

    class Watched(Coordinator):
        steps = 0

        def step(self, event: Event, now: float) -> list[Effect]:
            nonlocal states
            self.steps += 1
            if self.steps % 16:
                return super().step(event, now)
            written = codec.encode_text(self.capture_state())
            read = codec.decode_value(json.loads(written))
            assert same(self.capture_state(), read, {}) == ""
            assert codec.encode_text(read) == written
            met_classes.update(name for name in codec.CLASSES.keys() - met_classes if f'["{name}"' in written)
            reference = Coordinator.from_state(read)
            effects = super().step(event, now)
            assert reference.step(event, now) == effects
            assert codec.encode_text(reference.capture_state()) == codec.encode_text(self.capture_state())
            states += 1
            return effects

    monkeypatch.setattr(sim_master, "Coordinator", Watched)
    for seed in (21, 10):  # short ones
        assert play((seed, None)).failure is None
    assert states > 100
    assert {"RunState", "Penalty", "RangeBook", "Round", "Push", "Pull", "Fanout", "FanoutKind", "Lease"} <= met_classes


def test_one_object_stays_one() -> None:
    """A push that stands in its cluster and in a round is the same object again, also in a circle."""
    push = entities.Push(PushId("a", 1, 1), VersionId(0, 0), 1, 2.0, 3.0)
    cluster = entities.Cluster("a", 1, "n", push=push)
    one, other = back((cluster, push))
    assert one.push is other
    push.staged = {"s2", "s1"}
    fanout = entities.Fanout(FanoutKind.OPEN_PUSH, push.id, {"s1"})
    a, b = back([(fanout, 1), (fanout, 2)])
    assert a[0] is b[0]


@pytest.mark.parametrize(
    "value",
    [
        (1, 2.5, "θ", True, None, inf, -inf),
        [(), [], {}, set()],
        {"a": (1,), PushId("a", 1, 2): {3, 4, 5, 9}},
        {"b", "a"},
        frozenset({VersionId(2, 2), VersionId(1, 1)}),
        deque([1.0, 2.0], maxlen=2),
        VersionId(12, 17),
        (Ticked(), OrderAnswered("s", 1, 2, Persisted(VersionId(1, 1), "d"))),
        Order("s", 1, 1, 1, OpenPush(PushId("a", 1, 1), 2, 5.0), 1.0),
        (Reply(1, Acknowledged()), Note("x", (("a", "b"),))),
        (Reply(1, Failed(StalePush, "old")), OrderFailed("s", 1, 2, FailedDisk, "full")),
    ],
)
def test_values(value: Any) -> None:
    """Scalars, containers, names, events and effects come back equal."""
    assert back(value) == value


def test_nan() -> None:
    """What is not a number stays so."""
    assert isnan(back(nan))


def test_text_does_not_depend_on_the_order_of_hashes() -> None:
    """Sets are spelled in ascending order: two processes with other hash seeds write the same text."""
    code = "from dips.protocol import codec; print(codec.encode_text({'s%d' % i for i in range(40)}))"
    said = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            check=True, capture_output=True, text=True,
        ).stdout
        for seed in ("0", "1", "2")
    }  # fmt: skip
    assert len(said) == 1


@dataclass
class Foreign:
    """Of no room of the deciding part."""

    x: int = 0


def test_what_has_no_spelling_is_refused() -> None:
    """A field of a new kind, an attribute that is no field, a container with two owners: errors, nothing is lost."""
    push = entities.Push(PushId("a", 1, 1), VersionId(0, 0), 1, 2.0, 3.0)
    push.verdict = Foreign()  # type: ignore[assignment]
    with pytest.raises(LocalProtocolError, match="Foreign has no spelling"):
        codec.encode_text(push)
    push.verdict = None
    push.hidden = 3  # type: ignore[attr-defined]
    with pytest.raises(LocalProtocolError, match="hidden"):
        codec.encode_text(push)
    shared: list[int] = []
    with pytest.raises(LocalProtocolError, match="held twice"):
        codec.encode_text((shared, shared))
    with pytest.raises(LocalProtocolError, match="object has no spelling"):
        codec.encode_text({"x": object()})
    with pytest.raises(LocalProtocolError, match=r"no class of dips\.errors"):
        codec.encode_text(Failed(ValueError, ""))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spelled",
    [
        ["os.system", "x"],
        ["VersionId", 1],
        ["VersionId", 1, 2, 3],
        ["r", 7],
        ["RoundState", "?"],
        [],
        ["RunState", 3],
        ["e", "NoSuchError"],
        ["FanoutKind", "?"],
    ],
)
def test_what_is_no_spelling_is_refused(spelled: Any) -> None:
    """Foreign classes, wrong numbers of fields, unknown references and states are Corrupt."""
    with pytest.raises(Corrupt):
        codec.decode_value(spelled)


def test_another_shape_is_named() -> None:
    """A state that was written by another Di-PS is recognised by the fields of its classes."""
    spelled = codec.encode_value((VersionId(1, 2), entities.Push(PushId("a", 1, 1), VersionId(0, 0), 1, 2.0, 3.0)))
    written = codec.field_names(spelled)
    assert {"VersionId", "Push", "PushId"} == written.keys()
    assert codec.class_differences(written) == []
    theirs = {**written, "VersionId": ["version", "lap"], "Verdikt": []}
    assert codec.class_differences(theirs) == [
        "VersionId: has lost ['lap'], gained ['round']",
        "Verdikt is not known here",
    ]


def test_nothing_walks_over_a_set() -> None:
    """Nothing in the deciding room iterates over a set: its order differs between processes (docs/rationale.md#30)."""
    found = [
        f"{path.name}:{node.iter.lineno}" for path in (ROOT / "dips/protocol").glob("*.py") for node in loops(path)
    ]
    assert found == []


def loops(path: Path) -> Iterator[Any]:
    """For loops and comprehensions over what is plainly a set: a display, set(…), frozenset(…), a set comprehension."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.For | ast.comprehension):
            over = node.iter
            called = isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id
            if isinstance(over, ast.Set | ast.SetComp) or called in ("set", "frozenset"):
                yield node


def test_a_state_of_the_release_before_has_what_it_meant() -> None:
    """It lacks the attributes that protocol 2 added; they begin as that release had them."""
    tag, attributes = codec.encode_value(ScriptedRun().machine.capture_state())
    added = {name: attributes.pop(name) for name in codec.ADDED[RunState]}
    assert added["protocol"] == 2
    attributes["untuned"] = ["t", "outer.lr=-1: not above 0"]  # that release had no key of it
    state = codec.decode_value([tag, attributes])
    assert Coordinator.from_state(state).build_view(0.0).untuned == ()
    assert (state.protocol, state.rebalance, state.former_slaves, state.refused_changes) == (1, None, {}, {})


def test_a_new_field_is_left_out_where_it_has_what_the_release_before_means() -> None:
    """Also if that is a tuple, which is a list in the text: else no journal of theirs could be decided again."""
    old = SlaveAddress("s", 1, ("a:1",), (0,))
    assert codec.encode_value(old) == ["SlaveAddress", "s", 1, ["t", "a:1"], ["t", 0], ""]
    assert codec.encode_value(dataclasses.replace(old, digests=("x",)))[-1] == ["t", "x"]
    assert codec.decode_value(codec.encode_value(old)) == old
