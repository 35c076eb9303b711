"""The release before, from its wheel: it reads what is written here until `dips finalise`, and is read here."""

from __future__ import annotations

import ast
import json
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from dips.client.agent.state import list_remarks
from dips.config import load_run
from dips.ids import GENESIS
from dips.master import schema
from dips.master.ledger import Ledger
from dips.protocol import codec
from dips.protocol.enums import RemarkSubject
from dips.protocol.records import ProtocolRaised, RoundReserved
from dips.protocol.releases import OLDEST_PROTOCOL
from dips.wire.messages import _MODULES
from tests.releases import FORMER, make_venv
from tests.unit.master.test_ledger import A1, A2, OLD_ROW, V1, V2, committed

ROOT = Path(__file__).parents[2]
Fields = dict[int, tuple[str, int, int, str]]  # number → name, type, label, class

# What the release before does here: it reads a ledger, a transaction of a mirror and a run file, and writes rows.
# Of its classes the status and the Judge are in no file.
THERE = """
import json, sys
from pathlib import Path
from dips import __version__
from dips.config import load_run
from dips.ids import VersionId
from dips.master.ledger import Ledger
from dips.protocol import codec
from dips.protocol.records import RoundReserved
path, config = map(Path, sys.argv[1:])
transaction = codec.decode_value(json.loads(sys.stdin.read()))
ledger = Ledger.open(path)
ledger.start_term()
ledger.write_records(transaction)
state = ledger.read_state()
nowhere = "dips.protocol.view", "dips.protocol.membership"
kept = {name: cls for name, cls in codec.CLASSES.items() if cls.__module__ not in nowhere}
classes = {name: codec._fields_of(cls) for name, cls in kept.items() if hasattr(cls, "__dataclass_fields__")}
print(json.dumps([__version__, [str(v.version) for v in state.versions], load_run(config).shared.digest, classes]))
ledger.close()
"""


def read_former(path: str) -> str:
    with zipfile.ZipFile(FORMER) as wheel:
        return wheel.read(path).decode()


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_venv(tmp_path_factory.mktemp("former") / "venv")


def test_the_first_tables_are_those_of_the_release_before() -> None:
    """Bit for bit, since a ledger's chain has their digest. What this release adds is in RAISES."""
    tree = ast.parse(read_former("dips/master/schema.py"))
    told = next(n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "SCHEMA")
    assert isinstance(told, ast.Constant)
    assert schema.tables_of(OLDEST_PROTOCOL) == told.value, "put new tables and columns into RAISES (schema.py)"


def list_messages(file: FileDescriptorProto) -> Iterator[tuple[str, Fields]]:
    for message in file.message_type:
        yield (
            f"{file.name} {message.name}",
            {f.number: (f.name, f.type, f.label, f.type_name) for f in message.field},
        )


def read_descriptor(module: str) -> FileDescriptorProto:
    """Return the descriptor that a generated module of the release before adds to its pool."""
    for node in ast.walk(ast.parse(read_former(f"dips/wire/generated/{module}.py"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "AddSerializedFile":
            assert isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, bytes)
            return FileDescriptorProto.FromString(node.args[0].value)
    raise AssertionError(f"{module} has no descriptor")


def test_no_message_has_lost_or_changed_a_field() -> None:
    """Numbers are the meaning of bytes: a field keeps its number, name and type; a new field has a new number."""
    ours: dict[str, Fields] = {}
    for module in _MODULES:
        ours |= list_messages(FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb))
    for module in _MODULES:
        for name, fields in list_messages(read_descriptor(module.__name__.rpartition(".")[2])):
            gone = {number: field for number, field in fields.items() if ours.get(name, {}).get(number) != field}
            assert not gone, f"{name}: {gone}"
    assert FieldDescriptorProto.TYPE_UINT64 in {field[1] for fields in ours.values() for field in fields.values()}


def test_remarks_have_words_of_the_release_before() -> None:
    """A master of it refused each heartbeat with another one: a pipeline that changed its gear lost its cluster's lease
    again and again.
    """
    tree = ast.parse(read_former("dips/protocol/enums.py"))
    told = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == RemarkSubject.__name__)
    known = {n.value.value for n in told.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)}
    ours: Any = SimpleNamespace(remarks=dict.fromkeys(RemarkSubject, "why"))
    assert {remark.subject.value for remark in list_remarks(ours)} <= known


def test_the_release_before_takes_a_ledger_and_gives_it_back(former: Path, tmp_path: Path) -> None:
    """Its ledger goes on here, a mirror's transaction written here is read there, and the same run file has the same
    digest, by which clusters of both releases join. After `dips finalise` it refuses the file in one sentence.
    """
    config, path = tmp_path / "dips.yaml", tmp_path / "ledger.sqlite"
    config.write_text(
        "shared: {run: run}\nmaster: {listen: '127.0.0.1:1', directory: master}\ntls: false\n"
        "slaves: [{name: s0, master: '127.0.0.1:1', directory: s0}]\n"
    )
    with closing(Ledger.create(path, OLD_ROW)) as ledger:
        ledger.write_records([RoundReserved(1, 0.0), committed(V1, GENESIS, A1)])
    transaction = codec.encode_value((RoundReserved(3, 0.0), committed(V2, V1, A2)))
    done = run_there(former, path, config, transaction)
    assert done.returncode == 0, done.stderr
    version, lineage, digest, classes = json.loads(done.stdout)
    assert version == "0.1.0" and lineage == [str(v) for v in (GENESIS, V1, V2)]
    assert digest == load_run(config).shared.digest, "a new key is left out of it at its default (config/shared.py)"
    assert codec.class_differences(classes) == [], "a field that is new is the last one, and `added` (releases.py)"
    ours = {name: codec.CLASSES[name] for name in classes}
    written = {name: len(codec._fields_of(cls)) - len(codec._omitted_fields(cls)) for name, cls in ours.items()}
    longer = [name for name, theirs in classes.items() if written[name] > len(theirs)]
    assert not longer, "the release before would be told a field that it does not know"
    with closing(Ledger.open(path)) as ledger:
        assert [str(row.version) for row in ledger.read_state().versions] == lineage
        ledger.write_records([ProtocolRaised(2, 0.0)])
    refused = run_there(former, path, config, codec.encode_value(()))
    assert refused.returncode != 0 and "expected ledger format 1, got 2" in refused.stderr
    taken_back = run_there(former, tmp_path / "ledger.format1.sqlite", config, codec.encode_value(()))
    assert taken_back.returncode == 0, taken_back.stderr


def run_there(python: Path, path: Path, config: Path, transaction: Any) -> subprocess.CompletedProcess[str]:
    words = [str(python), "-E", "-P", "-c", THERE, str(path), str(config)]
    return subprocess.run(words, input=json.dumps(transaction), capture_output=True, text=True, timeout=60)


def list_attributes(source: str, name: str) -> set[str]:
    """Return what the methods of a class assign to `self`."""
    cls = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
    stored = (n for n in ast.walk(cls) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return {n.attr for n in stored if getattr(n.value, "id", "") == "self"}


@pytest.mark.parametrize("cls", codec.PLAIN, ids=lambda cls: cls.__name__)
def test_a_state_that_lacks_a_new_attribute_is_given_one(cls: type) -> None:
    """So that a journal of the release before can be decided again by this one."""
    path = f"{cls.__module__.replace('.', '/')}.py"
    new = list_attributes((ROOT / path).read_text(), cls.__name__) - list_attributes(read_former(path), cls.__name__)
    assert new == set(codec.ADDED.get(cls, {})), "a new attribute stands in ADDED (protocol/codec.py)"
