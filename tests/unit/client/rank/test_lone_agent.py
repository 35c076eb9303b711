"""The same script without an agent: it trains, walks its ranges, saves and loads, and is told once that it is alone."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from dips.client import OuterLoop
from dips.client.rank.agent_client import JobCollectives
from dips.errors import ConfigError, LocalProtocolError
from dips.ids import GENESIS
from dips.protocol.data import BegunRange


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DIPS_CLUSTER_FILE", "DIPS_AGENT", "DIPS_ALONE", "DIPS_AGENT_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_without_an_agent_it_trains_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Every call is legal, the model is what the script makes of it; and no host memory is announced."""
    model = nn.Linear(3, 2)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match="OuterLoop trains alone.*dips-client --config"):
        outer = OuterLoop(model)
    for _ in range(3):
        outer.step(tokens=8, loss=1.0)
    outer.push()
    outer.install()
    assert (outer.version, outer.progress, outer.finished, outer.inner_steps) == (GENESIS, 0.0, False, 3)
    state = outer.state_dict()
    outer.step(tokens=8)
    assert outer.load_state_dict(state) == "it trains alone" and outer.inner_steps == 3
    with torch.no_grad():
        model.bias.add_(1.0)
    with pytest.warns(UserWarning, match="OuterLoop: the model does not hold"):
        assert "OuterLoop is made" in outer.load_state_dict(state)
    with torch.no_grad():
        model.bias.sub_(1.0)
    outer.close()
    assert capsys.readouterr().err == ""
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(model.parameters(), before, strict=True))


def test_it_is_not_told_what_it_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DIPS_ALONE=1 beside a cluster file: its data ranges in order, and no warning."""
    keys = {"shared": {"run": "r", "data": {"ranges": 3}}, "cluster": "c", "master": "127.0.0.1:1", "tls": False}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(keys))
    monkeypatch.setenv("DIPS_ALONE", "1")
    monkeypatch.setenv("DIPS_CLUSTER_FILE", str(tmp_path / "cluster.yaml"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with OuterLoop(nn.Linear(3, 2)) as outer:
            assert list(outer.ranges()) == [0, 1, 2]


def test_a_checkpoint_is_known_by_its_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of shared buffers, each rank of DistributedDataParallel has its own between two forwards, and the script saves
    those of one. A state of the release before, which counted them, still fits.
    """
    keys = {"shared": {"run": "r", "share_buffers": ["running_*"]}, "cluster": "c", "master": "127.0.0.1:1"}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({**keys, "tls": False}))
    monkeypatch.setenv("DIPS_ALONE", "1")
    monkeypatch.setenv("DIPS_CLUSTER_FILE", str(tmp_path / "cluster.yaml"))
    model = nn.BatchNorm1d(3)
    with OuterLoop(model) as outer:
        state = outer.state_dict()
        counted = {**state, "checksum": outer._shard_transfer.checksum(buffers=True)}
        assert counted != state and outer.load_state_dict(counted) == "it trains alone"
        model(torch.randn(4, 3))
        assert outer.load_state_dict(state) == "it trains alone"
        with pytest.warns(UserWarning, match="the model does not hold what the checkpoint was saved with"):
            outer.load_state_dict(counted)
        nn.init.zeros_(model.weight)
        with pytest.warns(UserWarning, match="the model does not hold what the checkpoint was saved with"):
            outer.load_state_dict(state)


def test_data_goes_on_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved with range 1 trained in part: another process begins there; trained whole, behind it."""
    keys = {"shared": {"run": "r", "data": {"ranges": 4}}, "cluster": "c", "master": "127.0.0.1:1", "tls": False}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(keys))
    monkeypatch.setenv("DIPS_ALONE", "1")
    monkeypatch.setenv("DIPS_CLUSTER_FILE", str(tmp_path / "cluster.yaml"))
    model, begun = nn.Linear(3, 2), BegunRange(1, 4, 9)
    with OuterLoop(model) as outer:
        outer.mark_ranges(())
        ranges = outer.ranges()
        assert [next(ranges), next(ranges)] == [0, 1]
        outer.mark_ranges((1,), begun)
        outer.step(tokens=8)
        state = outer.state_dict()
        outer.mark_ranges(())
        outer.step(tokens=8)
        later = outer.state_dict()
    with OuterLoop(model) as outer:
        outer.load_state_dict(state)
        ranges = outer.ranges()
        assert next(ranges) == 1 and outer.range_begun == begun
        assert list(ranges) == [2, 3] and outer.range_begun is None
        outer.load_state_dict(later)
        assert next(outer.ranges()) == 2


@pytest.mark.parametrize(("ahead", "first"), [((), 0), ((2, 3), 2)])
def test_a_clusters_checkpoint_is_loaded_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: tuple[int, ...], first: int
) -> None:
    """To look at a run's model on a workstation: its cluster held any number of ranges, or brought its own data."""
    keys = {"shared": {"run": "r", "data": {"ranges": 4}}, "cluster": "c", "master": "127.0.0.1:1", "tls": False}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(keys))
    monkeypatch.setenv("DIPS_ALONE", "1")
    monkeypatch.setenv("DIPS_CLUSTER_FILE", str(tmp_path / "cluster.yaml"))
    with OuterLoop(nn.Linear(3, 2)) as outer:
        state = {**outer.state_dict(), "cluster": "c", "base": "v7@r9", "ahead": list(ahead)}
        assert outer.load_state_dict(state) == "it trains alone"
        assert outer.resumed and next(outer.ranges()) == first


def test_every_collective_call_waits_for_all_ranks_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, so that a rank which never calls it is told from a slow one, after `collective_s`."""
    keys = {"shared": {"run": "r", "data": {"ranges": 1}}, "cluster": "c", "master": "127.0.0.1:1", "tls": False}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(keys))
    monkeypatch.setenv("DIPS_ALONE", "1")
    waited: list[str] = []
    monkeypatch.setattr(JobCollectives, "barrier", lambda _, call: waited.append(call))
    outer = OuterLoop(nn.Linear(3, 2), tmp_path / "cluster.yaml", optimizer=lambda: None)
    for call, run in {
        "push": outer.push,
        "pull": outer.pull,
        "ranges": lambda: list(outer.ranges()),
        "state_dict": outer.state_dict,
        "load_state_dict": lambda: outer.load_state_dict(outer.state_dict()),
        "close": outer.close,
    }.items():
        waited.clear()
        run()
        assert f"OuterLoop.{call}" in waited
        assert waited.count("OuterLoop.step") == (call == "push"), "as a step does that asks for an outer step"


def test_replicas_that_differ_meanwhile_move_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`may_push` says so: a push, a pull and the ranges, at whose end there is a push, are refused."""
    keys = {"shared": {"run": "r", "data": {"ranges": 1}}, "cluster": "c", "master": "127.0.0.1:1", "tls": False}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(keys))
    monkeypatch.setenv("DIPS_ALONE", "1")
    synced = [True]
    with OuterLoop(nn.Linear(3, 2), tmp_path / "cluster.yaml", may_push=lambda: synced[0]) as outer:
        outer.push()
        synced[0] = False
        for name, call in {"push": outer.push, "pull": outer.pull, "ranges": lambda: next(outer.ranges())}.items():
            with pytest.raises(LocalProtocolError, match=f"OuterLoop.{name}: replicas differ until their next"):
                call()


def test_an_agent_without_a_cluster_file_is_no_reason_to_be_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an environment is a mistake, and names the command that is missing."""
    monkeypatch.setenv("DIPS_AGENT", "unix:/nowhere")
    with pytest.raises(ConfigError, match=r"start this script as `dips-client --config cluster.yaml -- …`"):
        OuterLoop(nn.Linear(3, 2))


def test_a_script_that_steps_for_every_micro_batch_is_told() -> None:
    """With what to write; one of 16 bits without masters is told, too, and how much memory that takes."""
    with pytest.warns(UserWarning, match="OuterLoop") as told:
        step_often()
    texts = [str(warning.message) for warning in told]
    assert [text.split()[0] for text in texts] == ["OuterLoop", "weight:", "OuterLoop.step"]
    assert "16 bits without fp32 masters" in texts[1] and 'instead of "auto"' in texts[1]
    assert "called 16 times in 4 optimizer steps: call it once after each optimizer.step" in texts[2]


def step_often() -> None:
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with OuterLoop(model) as outer:
        for micro_batch in range(20):
            model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
            if micro_batch % 4 == 3:
                optimizer.step()
            outer.step(tokens=8)


def test_steps_of_an_optimizer_are_counted_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches are one step; `step` beside it would count twice and is refused; tokens may be a function."""
    monkeypatch.setenv("DIPS_ALONE", "1")
    model, tokens = nn.Linear(3, 2), [0]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def taken() -> int:
        now, tokens[0] = tokens[0], 0
        return now

    with OuterLoop(model) as outer:
        outer.follow_optimizer(optimizer, tokens=taken, loss=lambda: None)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.ones(4, 3)).sum().backward()
                tokens[0] += 4
            optimizer.step()
            assert tokens == [0]
        assert outer.inner_steps == 3
        with pytest.raises(LocalProtocolError, match="leave out step"):
            outer.step(tokens=8)
        outer.follow_optimizer(optimizer, tokens=-1)
        with pytest.raises(LocalProtocolError, match="tokens: expected a whole number, 0 or more, got -1"):
            optimizer.step()
    optimizer.step()
    assert outer.inner_steps == 3


def test_alone_any_optimizer_may_train() -> None:
    """One that would undo pulls ends a run's job; here nothing is pulled."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(UserWarning, match="OuterLoop trains alone"):
        outer = OuterLoop(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
        optimizer.state[p]["slow_buffer"] = p.detach().clone()
    optimizer.step()
    outer.push()
    outer.close()
