"""Two releases in one run: who may take part, what each reads of what the other writes (docs/protocol.md#releases)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dips.dataclass import dataclass as fast_dataclass
from dips.errors import ConfigError, Corrupt, CorruptSnapshot
from dips.protocol import codec
from dips.protocol.claims import find_protocol_mismatch
from dips.protocol.effects import Acknowledged, Failed, Joined, Refused, Reply
from dips.protocol.enums import Activity, TrainerState
from dips.protocol.events import (
    ClusterJoined,
    ClusterLeft,
    FinaliseAsked,
    OperatorAsked,
    ProtocolTold,
    SlaveRegistered,
    SlaveSilent,
)
from dips.protocol.heartbeats import ClusterHeartbeat
from dips.protocol.membership import Judge
from dips.protocol.options import TimingOptions
from dips.protocol.records import OperatorActed, ProtocolRaised, Record
from dips.protocol.releases import OLDEST_PROTOCOL, PROTOCOL, added, why_refused
from dips.protocol.view import RunView
from dips.store.version import VersionManifest
from dips.view.judging import protocol_line, read_view, spell_view
from dips.wire.generated import cluster_pb2, slave_pb2
from dips.wire.messages import from_proto, to_proto
from tests.golden.files import DATA
from tests.unit.protocol.scripted_run import ScriptedRun

JOINED = ClusterJoined(0, "west", "n", "run", "{}", "digest")
REGISTERED = SlaveRegistered(0, "s0", "n", "run", "h:1", ("h:2",), 0, None, None, (), 2, "")

# ---- who may take part -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoken", "oldest", "newest", "advice"),
    [
        (1, 1, 1, ""),  # of a run that is not finalised: the release before
        (1, 1, 2, ""),  # this one
        (2, 1, 2, ""),  # finalised: this one
        (2, 2, 3, ""),  # the next
        (2, 1, 1, "install a release there that speaks it"),  # not the one before any more
        (1, 2, 3, "run `dips finalise` before this release"),  # not yet the next
        (1, 0, 0, "install a release there that speaks it"),  # from before the numbers
        (2, 5, 6, "or install the one before it"),  # from the future
    ],
)
def test_a_run_speaks_one_protocol_and_a_release_two(spoken: int, oldest: int, newest: int, advice: str) -> None:
    """Who does not speak the run's is refused in one sentence with both numbers, the peer and what to do."""
    for event in (JOINED, REGISTERED):
        peer = replace(event, protocol=oldest, newest_protocol=newest)
        answer = find_protocol_mismatch(spoken, peer)
        if not advice:
            assert answer is None
            continue
        assert answer is not None and answer.error is ConfigError
        name = "cluster west" if isinstance(event, ClusterJoined) else "slave s0"
        assert answer.message.startswith(f"protocol of {name}: expected {spoken}, which this run speaks, got {oldest}")
        assert advice in answer.message and "\n" not in answer.message


def test_a_peer_of_the_first_release_names_one_protocol() -> None:
    """It has no field for a second one, so the wire makes 0 of it; one from before the numbers says 0 for both."""
    joined = from_proto(cluster_pb2.ClusterJoined(cluster="west", run="run", protocol=1), ClusterJoined, req=0)
    assert (joined.protocol, joined.newest_protocol) == (1, 0)
    assert find_protocol_mismatch(1, joined) is None and find_protocol_mismatch(2, joined) is not None
    registered = from_proto(slave_pb2.SlaveRegistered(slave="s0", run="run", address="h:1"), SlaveRegistered, req=0)
    assert (registered.protocol, registered.newest_protocol) == (0, 0)
    assert find_protocol_mismatch(1, registered) is not None


def test_this_release_speaks_its_protocol_and_the_one_before() -> None:
    """A message of this release says so: the release before finds its own number in the field that it knows."""
    assert OLDEST_PROTOCOL == PROTOCOL - 1
    sent = to_proto(JOINED)
    assert (sent.protocol, sent.newest_protocol) == (OLDEST_PROTOCOL, PROTOCOL)  # type: ignore[attr-defined]
    assert why_refused(OLDEST_PROTOCOL, OLDEST_PROTOCOL, PROTOCOL) == why_refused(PROTOCOL, 1, PROTOCOL) == ""


# ---- dips finalise ---------------------------------------------------------------------------------------------------


def make_former(**clusters: int) -> ScriptedRun:
    """A run that speaks the protocol before; each cluster with the newest that it says to speak."""
    run = ScriptedRun(protocol=PROTOCOL - 1)
    for name, newest in clusters.items():
        join(run, name, newest)
    return run


def join(run: ScriptedRun, name: str, newest: int) -> object:
    return run.ask(ClusterJoined(0, name, "n", "r", run.manifest.digest, "c", newest_protocol=newest))


def register(run: ScriptedRun, nonce: str, newest: int) -> object:
    registered = replace(REGISTERED, slave="s", nonce=nonce, run="r", memory=run.head, slots=4, newest_protocol=newest)
    return run.ask(registered)


def finalise(run: ScriptedRun, protocol: int = PROTOCOL) -> tuple[list[Record], object]:
    """Ask as an operator; return the records but for the audit's, and the answer."""
    effects = run.step(OperatorAsked(7, "operator.operator", 0.0, FinaliseAsked(0, protocol)))
    (reply,) = (effect for effect in effects if isinstance(effect, Reply))
    return [e for e in effects if isinstance(e, Record) and not isinstance(e, OperatorActed)], reply.result


def test_finalise_raises_the_protocol_once_all_speak_it() -> None:
    """It is recorded before the answer; from then on the release before is refused. A repetition changes nothing."""
    run = make_former(a=PROTOCOL, b=PROTOCOL)
    assert run.view.holdouts == () and protocol_line(run.view) == f"speaks 1, can speak {PROTOCOL}: dips finalise"
    assert finalise(run) == ([ProtocolRaised(PROTOCOL, run.now)], Acknowledged())
    assert run.view.protocol == PROTOCOL and protocol_line(run.view) == ""
    assert finalise(run) == ([], Acknowledged())
    assert isinstance(join(run, "c", 0), Failed) and isinstance(join(run, "d", PROTOCOL), Joined)


def test_finalise_is_refused_while_somebody_speaks_less() -> None:
    """A slave that is away counts, since every round needs it; a cluster that has left does not."""
    run = make_former(a=PROTOCOL, b=0)
    assert protocol_line(run.view) == f"speaks 1, can speak {PROTOCOL}: waits for cluster b"
    records, answer = finalise(run)
    assert records == [] and isinstance(answer, Refused) and "not known to speak 2: cluster b;" in answer.reason
    run.ask(ClusterLeft(0, "b", run.inc("b"), 0))
    run.step(SlaveSilent("s", run.view.slaves["s"].sinc, 10.0))
    records, answer = finalise(run)
    assert records == [] and isinstance(answer, Refused) and "slave s;" in answer.reason
    register(run, "n2", 0)
    assert run.view.holdouts == ("slave s",)
    register(run, "n3", PROTOCOL)
    assert finalise(run)[1] == Acknowledged()


@pytest.mark.parametrize("protocol", [0, PROTOCOL + 1, 99])
def test_only_the_next_protocol_can_be_asked_for(protocol: int) -> None:
    """The answer names what the run and its master speak."""
    _, answer = finalise(make_former(), protocol)
    assert isinstance(answer, Failed) and answer.error is ConfigError
    assert f"got {protocol}; this run speaks 1, its master up to {PROTOCOL}" in answer.message


def test_a_later_master_learns_from_heartbeats_what_clusters_speak() -> None:
    """It did not hear their Joins, and they do not join again; slaves register anew with each master."""
    judge = Judge(TimingOptions())
    judge.welcome_cluster("a", 3, 0.0)
    heartbeat = ClusterHeartbeat("a", 3, TrainerState.TRAINING, Activity.INNER, 1, 1, 0, 0, 0.0, None, 0, 0, 0.0)
    told = ProtocolTold("a", 3, PROTOCOL)
    assert judge.on_cluster_heartbeat(heartbeat, 1.0) == [told]
    assert judge.on_cluster_heartbeat(heartbeat, 2.0) == [], "it is told once"
    run = make_former(a=0)
    assert run.view.holdouts == ("cluster a",)
    run.step(replace(told, inc=99))
    assert run.view.holdouts == ("cluster a",), "it is another incarnation's"
    run.step(replace(told, inc=run.inc("a")))
    assert run.view.holdouts == ()


# ---- fields from the future, and missing ones ------------------------------------------------------------------------


def test_a_message_with_a_field_of_the_next_release_is_read_without_it() -> None:
    """What a later release adds to a message is ignored; what it does not send is the default."""
    wire = to_proto(JOINED).SerializeToString() + b"\xf8\x07\x05"  # field 127: 5
    assert from_proto(cluster_pb2.ClusterJoined.FromString(wire), ClusterJoined, req=0) == JOINED


@fast_dataclass(frozen=True, slots=True)
class _Former:
    name: str
    at: float


@fast_dataclass(frozen=True, slots=True)
class _Present:
    name: str
    at: float
    mood: int = added(PROTOCOL, 0)


@fast_dataclass(frozen=True, slots=True)
class _Settled:
    name: str
    at: float
    mood: int = added(OLDEST_PROTOCOL, 0)


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (_Former, _Present, _Settled):
        monkeypatch.setitem(codec.CLASSES, cls.__name__, cls)


@pytest.mark.usefixtures("classes")
def test_a_record_of_the_release_before_is_read_with_defaults() -> None:
    """In journals and in the mirror's transactions: the fields that were added are the last ones."""
    spelled = codec.encode_value(_Former("x", 1.0))
    assert codec.decode_value(["_Present", *spelled[1:]]) == _Present("x", 1.0, 0)
    with pytest.raises(Corrupt, match="not a spelled value"):
        codec.decode_value(["_Present", "x"])  # one is missing that was never added


@pytest.mark.usefixtures("classes")
def test_a_record_of_a_run_that_is_not_finalised_is_readable_by_the_release_before() -> None:
    """A field keeps its default until then, and is left out; one that both releases know is always written."""
    assert codec.encode_value(_Present("x", 1.0)) == ["_Present", "x", 1.0]
    assert codec.encode_value(_Present("x", 1.0, 3)) == ["_Present", "x", 1.0, 3]
    assert codec.encode_value(_Settled("x", 1.0)) == ["_Settled", "x", 1.0, 0]


@pytest.mark.usefixtures("classes")
def test_a_record_of_the_next_release_is_refused() -> None:
    """It may mean what this release does not know; a journal of it is named so, class by class."""
    with pytest.raises(Corrupt, match="not a spelled value"):
        codec.decode_value(["_Former", "x", 1.0, 3])
    assert codec.class_differences({"_Former": ["name", "at", "mood"]}) == ["_Former: has lost ['mood'], gained []"]
    assert codec.class_differences({"_Present": ["name", "at"]}) == []
    assert codec.class_differences({"_Present": ["name"]}) == ["_Present: has lost [], gained ['at', 'mood']"]


def test_a_snapshot_s_manifest_of_the_next_release_is_read_without_its_keys() -> None:
    """Keys that are not known are ignored, one that is missing is named; another number is refused."""
    (path,) = DATA.glob("snapshot/**/manifest.json")
    raw = json.loads(path.read_bytes())
    read = VersionManifest.from_json(path.read_bytes(), "here")
    more = {**raw, "mood": 3, "layers": [{**layer, "mood": 3} for layer in raw["layers"]]}
    assert VersionManifest.from_json(json.dumps(more).encode(), "here") == read
    del more["sinc"]
    with pytest.raises(CorruptSnapshot, match="is no version's manifest: KeyError\\('sinc'\\)"):
        VersionManifest.from_json(json.dumps(more).encode(), "here")
    with pytest.raises(CorruptSnapshot, match="expected a version of format 1"):
        VersionManifest.from_json(json.dumps({**raw, "format": 2}).encode(), "here")


def test_the_status_of_a_master_of_either_release_is_drawn() -> None:
    """The one before says nothing of protocols, a later one may say more."""
    spelled = json.loads(spell_view(RunView(run="r", protocol=PROTOCOL, protocol_newest=PROTOCOL)))
    assert read_view({**spelled, "mood": 3}).protocol == PROTOCOL
    for key in ("protocol", "protocol_newest", "holdouts"):
        del spelled[key]
    former = read_view(spelled)
    assert (former.protocol, former.protocol_newest) == (1, 1) and protocol_line(former) == ""
