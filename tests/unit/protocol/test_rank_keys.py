"""Keys of ranks on their way from requests into orders: none for plain lanes, and never more than there is room for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dips.errors import RemoteProtocolError
from dips.ids import GENESIS, PullId, PushId
from dips.protocol import events as ev
from dips.protocol import push_pull
from dips.protocol.effects import Acknowledged, AdmitProbe, Commit, Failed, Grant, OpenPull, OpenPush, Pending, RankKeys
from dips.protocol.rank_keys import KEY_CHARS, MOST_KEYS, find_wrong_keys, is_key
from dips.protocol.run_state import RunState
from tests.unit.protocol.scripted_run import MANIFEST, OPTIONS, ScriptedRun


def key(name: str) -> str:
    return name.ljust(KEY_CHARS, "0")


def register(run: ScriptedRun, lane_key: str) -> Any:
    question = ev.SlaveRegistered(0, "s", "n", "r", "s:1", ("s:2",), 0, GENESIS, None, (), 4, "", lane_key)
    return run.ask(question)


@pytest.fixture(name="run")
def encrypted_run() -> ScriptedRun:
    run = ScriptedRun()
    register(run, key("lane"))
    for name in "ab":
        run.ask(ev.ClusterJoined(0, name, "p", "r", MANIFEST.digest, "c"))
    return run


def pull_of(name: str, seq: int = 1, *keys: str) -> ev.PullRequested:
    return ev.PullRequested(0, PullId(name, 1, seq), len(keys) or 1, None, keys)


def push(run: ScriptedRun, name: str, *keys: str) -> Any:
    """A push with these keys, after a pull."""
    pushed = open_push(run, name, *keys)
    run.commit(pushed)
    return pushed


def open_push(run: ScriptedRun, name: str, *keys: str) -> PushId:
    run.ask(pull_of(name, 1, *keys))
    run.ask(ev.PullFinished(0, PullId(name, 1, 1), True))
    run._seqs[name] = 1
    pushed = run.next_push(name)
    assert isinstance(run.ask(ev.PushRequested(0, pushed, run.head, len(keys), keys=keys)), Pending)
    return pushed


def test_keys_are_named_in_every_order_that_opens(run: ScriptedRun) -> None:
    """The push's, the pull's that is asked for, and the pull's after the round; the grant has the lanes' own."""
    keys = key("r0"), key("r1")
    pushed = push(run, "a", *keys)
    granted = run.ask(ev.PushRequested(0, pushed, run.head, 2, keys=keys))
    assert not isinstance(granted, Grant), "it is committed, and answered as such"
    run.wait(11.0)
    assert [o.keys for o in run.all_of(OpenPull)] == [keys] and [o.keys for o in run.all_of(OpenPush)] == [keys]
    (commit,) = run.all_of(Commit)
    assert commit.pulls == (PullId("a", 1, 2),) and commit.keys == (RankKeys(keys),)
    assert run.outcome(pushed).pull.slaves[0].key == key("lane")


def test_keys_are_kept_as_long_as_a_transfer_may_need_them(run: ScriptedRun) -> None:
    """From a push's request to the end of the pull after it; nothing is kept of a cluster that rests or is gone."""
    a = run.machine._run.clusters["a"]
    pushed = push(run, "a", key("r0"))
    assert a.keys == (key("r0"),)
    run.wait(11.0)
    assert a.pull is not None and a.keys == (key("r0"),)
    run.outcome(pushed)
    assert a.pull is None and a.keys == ()
    run.ask(pull_of("a", 9, key("r1")))
    assert a.keys == (key("r1"),)
    run.ask(ev.ClusterLeft(0, "a", 1, 0))
    assert a.keys == ()


@pytest.mark.parametrize(
    ("keys", "ranks", "said"),
    [
        ((), 2, "expected 2, one for each rank, got none: the lanes of this run are encrypted"),
        ((key("r0"),), 2, "expected one for each of 2 ranks"),
        ((key("r0"), "short"), 2, "rank 1: expected 40 characters of Z85, got 'short'"),
        ((key("r0"), key("\x1b[2J")), 2, "rank 1: expected 40 characters"),
        ((key("r0"), key("r1") + "0"), 2, "rank 1: expected 40 characters"),
        ((key("r"),) * (MOST_KEYS + 1), MOST_KEYS + 1, f"at most {MOST_KEYS}"),
    ],
    ids=["none", "few", "short", "escapes", "long", "many"],
)
def test_wrong_keys_are_refused_at_the_master(run: ScriptedRun, keys: tuple[str, ...], ranks: int, said: str) -> None:
    """Before anything is ordered, in a sentence that bounds what it repeats."""
    for question in (
        ev.PullRequested(0, PullId("a", 1, 1), ranks, None, keys),
        ev.PushRequested(0, PushId("b", 1, 1), run.head, ranks, keys=keys),
    ):
        answer = run.ask(question)
        assert isinstance(answer, Failed) and answer.error is RemoteProtocolError and said in answer.message
        assert len(answer.message) < 200
    assert not run.all_of(OpenPull) and not run.all_of(OpenPush)


def test_plain_lanes_need_no_keys_and_pass_on_what_comes() -> None:
    run = ScriptedRun()
    run.train("a")
    assert [o.keys for o in run.all_of(OpenPull)] == [()]
    run.push("a")
    run.wait(11.0)
    assert run.all_of(Commit)[0].keys == ()
    assert find_wrong_keys((key("r"),) * MOST_KEYS, MOST_KEYS, needed=True) == ""
    assert find_wrong_keys((), 3, needed=False) == "" and find_wrong_keys((key("r"),), 3, needed=False)


def test_a_slave_with_half_a_key_is_refused() -> None:
    answer = register(ScriptedRun(), "half")
    assert isinstance(answer, Failed) and "key of slave s: expected 40 characters" in answer.message
    assert is_key(key("lane")) and not is_key(key("lane")[:-1]) and not is_key(key('"'))


def test_pulls_that_an_order_has_no_room_for_are_asked_for(run: ScriptedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of many ranks: the flip opens as many pulls as fit, the other clusters hear of no pull, and ask."""
    monkeypatch.setattr(push_pull, "MOST_FLIP_KEYS", 2)
    pushes = [open_push(run, name, key(f"{name}0"), key(f"{name}1")) for name in "ab"]
    for pushed in pushes:
        run.commit(pushed)
    run.wait(11.0)
    (commit,) = run.all_of(Commit)
    assert commit.pulls == (PullId("a", 1, 2),) and len(commit.keys) == 1
    assert (run.view.clusters["b"].state, run.view.clusters["b"].cause) == ("training", "awaits_pull")
    first, second = (run.ask(ev.RoundAwaited(0, p)) for p in pushes)
    assert first.pull is not None and second.pull is None and second.version == run.head
    assert isinstance(run.ask(pull_of("b", 3, key("b0"), key("b1"))), Pending)
    assert isinstance(run.ask(pull_of("b", 3, key("b0"), key("b1"))), Grant)


def test_a_probes_key_is_told_to_every_slave_once(run: ScriptedRun) -> None:
    """Pending until they know it; the same key again orders nothing, another one replaces it."""
    run.held = {AdmitProbe}
    asked = ev.ProbeAsked(0, "c", key("probe"))
    assert isinstance(run.ask(asked), Pending) and isinstance(run.ask(asked), Pending)
    run.held = set()
    run.answer()
    assert run.ask(asked) == Acknowledged()
    assert run.all_of(AdmitProbe) == [AdmitProbe("c", key("probe"))]
    run.ask(ev.ProbeAsked(0, "c", key("other")))
    assert len(run.all_of(AdmitProbe)) == 2


def test_probes_of_many_clusters_are_bounded(run: ScriptedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dips.protocol.clusters.MOST_PROBES", 2)
    for name in ("c", "d", "e", "e"):
        run.ask(ev.ProbeAsked(0, name, key("probe")))
    assert run.ask(ev.ProbeAsked(0, "e", key("probe"))) == Acknowledged()
    assert len(run.machine._run.probes) == 2 and len(run.all_of(AdmitProbe)) == 3
    run.ask(ev.ProbeAsked(0, "e", key("other")))  # takes the place of its own former key, not another's
    run.ask(ev.ProbeAsked(0, "d", key("probe")))
    assert len(run.all_of(AdmitProbe)) == 4


def test_plain_lanes_answer_every_probe() -> None:
    run = ScriptedRun()
    assert run.ask(ev.ProbeAsked(0, "c", key("probe"))) == Acknowledged() and not run.all_of(AdmitProbe)
    assert isinstance(run.ask(ev.ProbeAsked(0, "c", "short")), Failed)


def test_lanes_are_encrypted_also_while_a_slave_is_away() -> None:
    """After a restart of the master slaves register one by one; who has keys meanwhile is not refused for them."""
    state = ScriptedRun().first
    ((_, layers),) = state.row.placement
    run = RunState(
        replace(state, row=replace(state.row, placement=(("s", layers[:1]), ("t", layers[1:])))), MANIFEST, OPTIONS, 0.0
    )
    assert not run.has_encrypted_lanes()
    run.slaves["t"].key = key("lane")
    assert run.has_encrypted_lanes()
