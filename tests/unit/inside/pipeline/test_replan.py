"""The search for a new plan beside training: its files, and that whatever fails in it leaves the ranks alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch.distributed as dist
import yaml
from typer.testing import CliRunner

from dips.cli import cli
from dips.client.rank.agent_client import JobCollectives
from dips.errors import ConfigError
from dips.inside.pipeline import pipeline, replan
from dips.inside.pipeline.orders import read_gears, read_pipeline
from dips.inside.pipeline.replan import PlanReplacement, Replanner, digest_plan
from dips.inside.planning.adapt import WINDOW, Adapting, PlanChange, PlanVerdict, TimedTransfer
from tests.forkserver.fixtures import end_of_servers, forked_commands, real_commands  # noqa: F401  forks

LAYER = {"name": "l", "parameters": 1e6, "flops": 1e10, "activation_bytes": 4e6, "border_bytes": 1e6, "repeat": 6}
MODEL = {"name": "m", "batch": 16, "recompute": False, "layers": [LAYER]}
SECONDS = {key: [0.01, 0.001] for key in ("forward", "input", "weight")}
MACHINES = {
    "nodes": [{"name": name, "kind": "k", "site": name} for name in "abc"],
    "kinds": {"k": {"memory_gb": 40, "tflops": 100}},
    "links": {a: {b: {"gbit": 10, "latency_us": 100} for b in "abc" if b != a} for a in "abc"},
    "measured": {"k": {"l": SECONDS}},
}
SAGGED = 60.0  # times the seconds that a transfer takes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """plan.yaml of three devices, beside what it was made from."""
    made = tmp_path_factory.mktemp("made")
    (made / "profile.yaml").write_text(yaml.safe_dump(MACHINES))
    (made / "model.yaml").write_text(yaml.safe_dump(MODEL))
    words = ["plan", "cluster", f"{made}/profile.yaml", f"{made}/model.yaml", "--for", "pipeline"]
    assert CliRunner().invoke(cli, [*words, "-o", f"{made}/plan.yaml"]).exit_code == 0
    return made


@pytest.fixture(autouse=True)
def plain_command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search is a plain Python command, without `nice` before it, which is what the fork server knows."""
    if request.node.get_closest_marker("real_commands") is None:
        monkeypatch.setattr(replan.shutil, "which", lambda _: None)


@pytest.fixture
def plan(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "plan.yaml"


def make(plan: Path, adapting: Adapting) -> Replanner:
    data = yaml.safe_load(plan.read_text())
    return Replanner(plan, data, read_gears(data, read_pipeline(data, "plan"), "plan")[1], adapting)


def windows(plan: Path, slow: float) -> Iterator[list[TimedTransfer]]:
    """Three windows of each link of the plan, a window at a time; between its first two devices transfers are slow."""
    pipeline = yaml.safe_load(plan.read_text())["pipeline"]
    first = {stage["devices"][0] for stage in pipeline["stages"][:2]}
    for _ in range(3):
        made = []
        for link in pipeline["costs"]["links"]:
            by = slow if {link["from"], link["to"]} == first else 1.0
            seconds = link["latency_s"] + by * max(cost for _, cost in link["uses"]) * 1e6
            made += [TimedTransfer(link["from"], link["to"], 1e6, seconds, waited=True)] * WINDOW
        yield made


def search(replanner: Replanner, plan: Path, slow: float) -> PlanChange | None:
    """Let it search for a plan with such links, and come to an end."""
    for transfers in windows(plan, slow):
        assert replanner.take_transfers(transfers, 0.0) is None
    if replanner._process is not None:
        replanner._process.wait(100)
    return replanner.take_transfers([], 1.0)


def names(plan: Path) -> set[str]:
    return {path.name for path in plan.parent.iterdir()}


@pytest.mark.parametrize("adapting", [Adapting.ASK, Adapting.AUTO])
def test_a_better_plan_lies_beside_the_present_one_or_takes_its_place(plan: Path, adapting: Adapting) -> None:
    """Whole and playable, with the measured rates in the profile, made from the same files and one more in a row; the
    plan is newer than its profile, and nothing else is left. One that is taken is the last of this job.
    """
    was, taken = plan.read_text(), adapting is Adapting.AUTO
    replanner = make(plan, adapting)
    change = search(replanner, plan, SAGGED)
    assert change is not None and change.new_s < 0.9 * change.old_s
    assert change.verdict is (PlanVerdict.ADOPTED if taken else PlanVerdict.OFFERED)
    ends = ".yaml" if taken else ".new.yaml"
    new, profile = (plan.with_name(name + ends) for name in ("plan", "profile"))
    data = yaml.safe_load(new.read_text())
    read_pipeline(data, "plan")
    assert data["step_s"] == change.new_s and data["plan"] == change.plan and change.file == str(new)
    assert data["made_from"] == {"profile": "profile.yaml", "model": "model.yaml", "replans": 1}
    link = yaml.safe_load(profile.read_text())["links"][change.link[0]][change.link[1]]
    assert link == {"gbit": pytest.approx(10 / SAGGED, rel=1e-3), "latency_us": 100}
    assert new.stat().st_mtime_ns >= profile.stat().st_mtime_ns
    kept = {"plan.old.yaml", "profile.old.yaml"} if taken else {"plan.new.yaml", "profile.new.yaml"}
    assert names(plan) == {"profile.yaml", "model.yaml", "plan.yaml", *kept}
    if taken:
        assert plan.with_name("plan.old.yaml").read_text() == was
        assert [replanner.take_transfers(each, 2.0) for _ in range(4) for each in windows(plan, 1.0)] == [None] * 12
        assert make(plan, adapting)._watch.needed == 6, "a link that flaps has few new plans"  # type: ignore[union-attr]
    else:
        assert plan.read_text() == was
        replanner._watch._doublings = 0  # type: ignore[union-attr]
        back = search(replanner, plan, 1.0)
        assert back is not None and back.verdict is PlanVerdict.WITHDRAWN
        assert names(plan) == {"profile.yaml", "model.yaml", "plan.yaml"}
    replanner.close()


@pytest.mark.real_commands
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda plan: plan.with_name("model.yaml").write_text("name: m"), "dips plan cluster: exit 78: "),
        (lambda plan: plan.with_name("profile.yaml").write_text("["), "profile.yaml: cannot be read"),
        (lambda plan: plan.with_name("profile.yaml").unlink(), "profile.yaml: cannot be read"),
    ],
)
def test_a_search_that_fails_is_logged_and_not_more(plan: Path, spoil: Any, why: str) -> None:
    """Files that were edited or removed meanwhile: training goes on by the plan of before."""
    replanner, was = make(plan, Adapting.AUTO), plan.read_text()
    spoil(plan)
    with structlog.testing.capture_logs() as logs:
        assert search(replanner, plan, SAGGED) is None
    (failed,) = [log for log in logs if log["event"] == "plan_search_failed"]
    assert why in failed["why"], failed
    assert plan.read_text() == was and not [name for name in names(plan) if name.startswith(".")]


def spoil_file(path: Path, **keys: Any) -> None:
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **keys}))


def test_a_search_ends_in_time_and_with_the_pipeline(plan: Path) -> None:
    """By the clock, and when the pipeline is closed; its process is gone each time."""
    replanner = make(plan, Adapting.ASK)
    for ends in (lambda: replanner.take_transfers([], replan.SEARCH_S + 1), replanner.close):
        replanner._watch._doublings = 0  # type: ignore[union-attr]
        for transfers in windows(plan, SAGGED):
            replanner.take_transfers(transfers, 0.0)
        process = replanner._process
        assert process is not None and process.poll() is None
        ends()
        assert process.poll() is not None and replanner._process is None
        assert names(plan) == {"profile.yaml", "model.yaml", "plan.yaml"}


def test_a_closed_pipeline_searches_no_more_and_gives_its_groups_back(plan: Path) -> None:
    """A search took a core for minutes beside the next job; a group holds its connections. It may be closed twice."""
    data = yaml.safe_load(plan.read_text())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = len(dist.distributed_c10d._world.pg_map)
        gears = read_gears(data, read_pipeline(data, "plan"), "plan")[1]
        rank = SimpleNamespace(_closed=False, _alone=dist.new_group([0]), _between=dist.new_group([0]))
        rank._replacement, rank._collectives = PlanReplacement(plan, data, gears, Adapting.ASK, 0), JobCollectives(9.0)
        for transfers in windows(plan, SAGGED):
            rank._replacement.take_transfers(transfers, 0.0)
        search_of_it = rank._replacement._replanner._process
        for _ in range(2):
            pipeline.Pipeline.close(rank)  # type: ignore[arg-type]
            assert search_of_it.poll() is not None and len(dist.distributed_c10d._world.pg_map) == groups
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda plan: spoil_file(plan, made_from=None), "made_from: expected profile, model and replans for adapt=ask"),
        (lambda plan: spoil_file(plan, made_from={"profile": "p"}), "made_from: expected profile, model and replans"),
        (lambda plan: plan.with_name("model.yaml").unlink(), "model.yaml, from which adapt=ask plans: not there"),
    ],
)
def test_a_plan_of_unknown_origin_is_refused(plan: Path, spoil: Any, told: str) -> None:
    """One that an earlier version has written, and one that was copied without its files."""
    spoil(plan)
    with pytest.raises(ConfigError) as refused:
        make(plan, Adapting.ASK)
    assert told in str(refused.value)


def test_a_plan_of_one_stage_has_no_links_to_look_at(plan: Path) -> None:
    """It is played as it is, whatever `adapt` says: a plan that came of slow links may be one."""
    data = yaml.safe_load(plan.read_text())
    replanner = Replanner(plan, data, {}, Adapting.AUTO)
    assert replanner.take_transfers([], 0.0) is None
    replanner.close()


def test_a_file_has_a_digest_or_none(tmp_path: Path) -> None:
    """By which ranks know that they have one plan."""
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("x")
    assert digest_plan(tmp_path / "a") == digest_plan(tmp_path / "b") != digest_plan(tmp_path / "c") == ""


def test_ranks_end_for_a_plan_that_all_have_after_a_push(plan: Path, tmp_path: Path) -> None:
    """What rank 0 found all know a step later, with one sentence. A rank in another directory lacks the file: rank 0
    says so once. When it is there, all end after the next push that is accepted, not before.
    """
    data, other = yaml.safe_load(plan.read_text()), tmp_path / "other" / "plan.yaml"
    other.parent.mkdir()
    for name in ("plan.yaml", "profile.yaml", "model.yaml"):
        shutil.copy(plan.with_name(name), other.with_name(name))
    gears = read_gears(data, read_pipeline(data, "plan"), "plan")[1]
    ranks = [PlanReplacement(path, data, gears, Adapting.AUTO, rank) for rank, path in enumerate((plan, other))]

    def step(pushes: int) -> list[str]:
        told = [one.tell() for one in ranks]
        return [one.follow(told, pushes) for one in ranks]

    assert step(0) == ["", ""] and [one.change for one in ranks] == [None, None]
    plan.write_text(plan.read_text() + "\n# another plan\n")
    ranks[0]._found = PlanChange(PlanVerdict.ADOPTED, 2.0, 1.0, 3, ("a", "b"), 4.0, "plan.yaml")
    first, second = step(0)
    assert first == second == str(ranks[1].change) and first.startswith("new plan taken: ")
    ranks[0]._found = None
    with structlog.testing.capture_logs() as logs:
        for _ in range(replan.LOOKS + 1):
            assert step(1) == ["", ""] and not ranks[1].is_whole
    assert [log["why"].split(":")[0] for log in logs] == [f"ranks [1] do not have rank 0's {plan}"]
    shutil.copy(plan, other)
    step(1)
    assert all(one.is_whole and one.say_why_over(1) == "" for one in ranks)
    assert [one.say_why_over(2).partition(",")[0] for one in ranks] == ["a push was accepted"] * 2
    for one in ranks:
        one.close()


def test_a_search_of_a_killed_rank_writes_into_no_other(plan: Path) -> None:
    """A rank 0 that gets SIGKILL leaves its search running: what that writes is not taken for the next life's, whose
    search removes it.
    """
    killed, replanner = make(plan, Adapting.ASK), make(plan, Adapting.ASK)
    for transfers in windows(plan, SAGGED):
        killed.take_transfers(transfers, 0.0)
    orphan = killed._process
    assert orphan is not None
    orphan.kill()
    orphan.wait()
    for transfers in windows(plan, SAGGED):
        replanner.take_transfers(transfers, 0.0)
    assert replanner._process is not None
    replanner._process.wait(100)
    written = Path(orphan.args[-1])  # type: ignore[index, arg-type]
    written.write_text("plan: of the rates of before\n")
    change = replanner.take_transfers([], 1.0)
    assert change is not None and change.verdict is PlanVerdict.OFFERED
    assert names(plan) == {"profile.yaml", "model.yaml", "plan.yaml", "plan.new.yaml", "profile.new.yaml"}
    replanner.close()
    killed.close()


def test_a_search_for_a_plan_whose_name_ends_alike_keeps_its_files(plan: Path) -> None:
    """As of west-plan.yaml in the same directory: another job's search would have failed each time."""
    other = plan.with_name(f"{replan.FOUND}0123abcd-west-{plan.name}")
    other.touch()
    make(plan, Adapting.ASK).close()
    assert other.exists()


@pytest.mark.parametrize("adapts", [True, False])
@pytest.mark.parametrize("replans", [True, False])
def test_a_gear_is_decided_by_who_changes_gears(monkeypatch: pytest.MonkeyPatch, adapts: bool, replans: bool) -> None:
    """A plan of one gear may be replaced all the same."""
    seen = list[tuple[str, Any]]()

    class Taking:
        def __init__(self, name: str) -> None:
            self.name = name

        def take_transfers(self, *transfers: Any) -> str:
            seen.append((self.name, transfers[0]))
            return self.name

    monkeypatch.setattr(pipeline, "match_transfers", lambda *_: "measured")
    rank = SimpleNamespace(
        _gear=SimpleNamespace(plan=None, pieces=1),
        _border_bytes=(1,),
        _adapter=Taking("gear") if adapts else None,
        _replacement=Taking("plan") if replans else None,
    )
    pipeline.Pipeline._decide(rank, [])  # type: ignore[arg-type]
    assert rank._decided == ("gear" if adapts else None)
    assert seen == [(name, "measured") for name, there in (("gear", adapts), ("plan", replans)) if there]
