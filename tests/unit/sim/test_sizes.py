"""Links that transfers share by their rates, and transfers, work and peaks of a simulated run with sizes."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dips.cli import cli
from dips.commands.simulate import describe_run, describe_slaves, find_scenario, write_timeline
from dips.errors import ConfigError
from dips.sim.heap import Heap
from dips.sim.sizes import SAMPLE_S, LinkUse, SharedLinks, SimLinkRate, Sizes, share_fairly
from dips.sim.streams import Meter, PushStream
from dips.study import figures
from dips.study.figures import FIGURES, draw_figures, list_available, list_speeds
from dips.study.sized_run import (
    GBIT_BYTES,
    ClusterPhase,
    ClusterSpan,
    ClusterTimeline,
    RunTimeline,
    SimulatedRun,
    SizedReport,
    make_world,
    pull_at_once,
    read_scenario,
    simulate_sizes,
)


def make_links(heap: Heap) -> SharedLinks:
    """Two clusters of 10 and 30 bytes a second at a slave of 20; a simulated byte stands for two."""
    clusters = {"a": SimLinkRate(10.0, 10.0), "b": SimLinkRate(30.0, 30.0)}
    return SharedLinks(heap, Sizes(2.0, clusters, 20.0), ["s", "t"])


def play(heap: Heap) -> None:
    while (timer := heap.next_event()) is not None:
        timer.action()


def test_nobody_can_get_more_without_taking_it_from_who_has_no_more() -> None:
    """By hand: s is shared by three, 2 each; what `b` then has left goes to t, which `a` does not fill."""
    a, b, c, s, t = range(5)
    rates = np.array([100.0, 10.0, 100.0, 6.0, 50.0])
    shares = share_fairly(np.array([(a, s), (b, s), (c, s), (b, t)]), rates)
    assert shares == pytest.approx([2.0, 2.0, 2.0, 8.0])


@given(st.data())
def test_every_flow_has_a_full_link_on_which_nobody_has_more(data: st.DataObject) -> None:
    """What max-min fair means, on drawn links; no link carries more than its rate."""
    ends = np.array(data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(5, 8)), min_size=1, max_size=20)))
    rates = np.array(data.draw(st.lists(st.floats(1.0, 100.0), min_size=9, max_size=9)))
    shares = share_fairly(ends, rates)
    carried = np.bincount(ends.ravel(), weights=shares.repeat(2), minlength=9)
    assert (carried <= rates * (1 + 1e-9)).all()
    for flow, share in enumerate(shares):
        full = [link for link in ends[flow] if carried[link] >= rates[link] * (1 - 1e-9)]
        assert any(shares[(ends == link).any(axis=1)].max() <= share * (1 + 1e-9) for link in full)


def test_a_slow_cluster_leaves_the_rest_to_the_fast_one() -> None:
    """10 of 20 are a's, so b has 10 while both move; alone it has 20 of its 30."""
    heap, seen = Heap(), dict[str, float]()
    links = make_links(heap)
    for name, nbytes in (("a", 50), ("b", 100)):
        links.carry((name, "s", True), nbytes, None, name, lambda name=name: seen.update({name: heap.now}))
    play(heap)
    assert seen == pytest.approx({"a": 100 / 10, "b": 10 + (200 - 100) / 20})
    assert links.use["s"].links[True].nbytes == pytest.approx(300)
    assert links.use["s"].links[False].nbytes == 0 and links.use["t"].busy_s(heap.now) == 0


def test_directions_do_not_share_and_chunks_of_a_pair_follow_one_another() -> None:
    """a's two pushed chunks take 1 s each one after the other, its pull beside them 1 s."""
    heap, seen = Heap(), list[tuple[str, float]]()
    links = make_links(heap)
    for what, up in (("first", True), ("second", True), ("pull", False)):
        links.carry(("a", "s", up), 5, None, what, lambda what=what: seen.append((what, heap.now)))
    play(heap)
    assert [what for what, _ in seen] == ["first", "pull", "second"]
    assert [at for _, at in seen] == pytest.approx([1.0, 1.0, 2.0])


def test_chunks_of_a_closed_connection_leave_the_link_to_others() -> None:
    """a would need 10 s beside b; dropped after 1 s it has arrived then, and b has the slave's 20 from then on."""
    heap, seen = Heap(), dict[str, float]()
    links, owner = make_links(heap), object()
    links.carry(("a", "s", True), 50, owner, "a", lambda: seen.update(a=heap.now))
    links.carry(("b", "s", True), 105, None, "b", lambda: seen.update(b=heap.now))
    heap.call_later(1.0, "drop", lambda: links.drop_chunks(("a", "s", True), owner))
    heap.call_later(1.0, "drop", lambda: links.drop_chunks(("b", "s", True), owner))
    play(heap)
    assert seen == pytest.approx({"a": 1.0, "b": 1.0 + 200 / 20})


def test_a_slave_is_busy_while_it_works_or_moves_anything() -> None:
    """Work from 0 to 4 s, a chunk from 0 to 1 s and work from 10 to 12 s are 6 s of business and 6 s of work."""
    heap = Heap()
    links = make_links(heap)
    links.note_work("s", int, 4.0)
    links.carry(("a", "s", True), 5, None, "chunk", lambda: None)
    heap.call_later(10.0, "work", lambda: links.note_work("s", int, 2.0))
    play(heap)
    assert links.use["s"].work_s == {"int": 6.0} and links.use["s"].busy_s(heap.now) == pytest.approx(6.0)


def test_work_beyond_the_end_of_the_run_is_not_counted() -> None:
    """Of 12 s that begin at 4 s a run of 10 s has 6: a slave that writes all the time is idle for no negative share."""
    heap = Heap()
    links = SharedLinks(heap, Sizes(1.0, {}, 1.0), ["s"], lasts_s=10.0)
    heap.call_later(4.0, "work", lambda: links.note_work("s", int, 12.0))
    play(heap)
    assert links.use["s"].work_s == {"int": 6.0}


def test_what_moves_at_the_end_of_the_run_is_counted() -> None:
    """Of a chunk of 20 s in a run of 10 s half: slaves received up to one push of each cluster less than they had."""
    heap = Heap()
    links = SharedLinks(heap, Sizes(2.0, {"a": SimLinkRate(10.0, 10.0)}, 20.0), ["s"], lasts_s=10.0)
    links.carry(("a", "s", True), 100, None, "chunk", lambda: None)
    heap.call_later(12.0, "the first event after the end", links.end_run)
    play(heap)
    assert links.use["s"].links[True].nbytes == pytest.approx(100)


def test_a_peak_is_a_mean_over_a_sample() -> None:
    """A burst of a tenth of a sample counts as a tenth of its rate; a long transfer as its rate."""
    link = LinkUse()
    link.move(0.0, SAMPLE_S / 10, 100.0)
    assert link.peak == pytest.approx(10.0)
    link.move(SAMPLE_S / 2, 3.5 * SAMPLE_S, 20.0)
    assert link.peak == pytest.approx(20.0) and link.nbytes == pytest.approx(10 * SAMPLE_S + 60 * SAMPLE_S)
    link.move(4 * SAMPLE_S, 5 * SAMPLE_S, 30.0)
    assert link.peak == pytest.approx(30.0)


def test_the_last_chunk_of_a_push_counts_before_the_push_ends() -> None:
    """The agent was told the bytes of a push without its last chunk, and planned the next ones by too slow a link."""
    meter, seen = Meter(0.0, 0, 8), list[int]()
    lane: Any = SimpleNamespace(take_chunk=lambda peer, header, body: seen.append(meter.nbytes))
    stream: Any = object.__new__(PushStream)
    stream.net = SimpleNamespace(lanes=SimpleNamespace(lane_of=lambda name: lane), heap=Heap())
    stream.address, stream.moving = SimpleNamespace(name="s"), SimpleNamespace(meter=meter)
    stream._lane, stream._peer = lane, b""
    stream._on_chunk(b"", bytes(8))
    assert seen == [8]


ROOT = Path(__file__).parents[3]

# ---- dips simulate --------------------------------------------------------------------------------------------------

SMALL = SimulatedRun.model_validate(
    {
        "parameters": 1_000_000_000, "hours": 0.4, "slaves": 2, "slave_gbit": 2.0, "update_s": 7.0, "inner_steps": 8,
        "window_s": 100, "heartbeat_s": 30,
        "clusters": [
            {"name": "east", "step_s": 50, "up_gbit": 0.5},
            {"name": "west", "step_s": 50, "push_s": 40, "pull_s": 20, "expected_pull_s": 22},
        ],
    }
)  # fmt: skip


@pytest.fixture(name="report", scope="module")
def simulated_once() -> SizedReport:
    return simulate_sizes(SMALL)


def test_transfers_take_what_the_links_give(report: SizedReport) -> None:
    """East: 32 Gbit at 0.5 Gbit/s, both ways; west as fitted. Of each slave's links both use less than half."""
    east, west = report.clusters
    assert east.push_s == pytest.approx(64, rel=0.02) and east.pull_s == pytest.approx(64, rel=0.02)
    assert west.push_s == pytest.approx(40, rel=0.02) and west.pull_s == pytest.approx(20, rel=0.02)
    assert west.pull_off == pytest.approx(0.1, abs=0.02) and east.pull_off is None
    assert min(east.wait_s, west.wait_s) > 7.0 and report.versions >= 1
    assert east.standstill > (64 + 64) / (8 * 50 + 300)
    for slave in report.slaves:
        assert slave.worked >= report.versions * 7.0 / (3600 * 0.4)
        assert slave.idle + slave.worked + slave.received + slave.sent == pytest.approx(1.0)
        assert 0.0 < slave.idle < 1.0 and slave.busy > slave.worked
        assert slave.peak_sent_gbit == pytest.approx((0.5 + 1.6) / 2, rel=0.1)  # both pull as they join
    said = describe_slaves(report)
    assert "2 pulls at once" in said and said.endswith("given: west")


def test_a_slave_whose_link_is_full_slows_all() -> None:
    """0.4 Gbit/s at each of two slaves: with all of them east's 64 s are 80 s or more; it has a fair half meanwhile."""
    slow = simulate_sizes(SMALL.model_copy(update={"slave_gbit": 0.2, "hours": 0.6}))
    assert slow.clusters[0].push_s >= 80.0 * 0.99
    assert max(slave.peak_sent_gbit for slave in slow.slaves) == pytest.approx(0.2, rel=0.01)


def test_rounds_may_have_more_steps_than_ranges_are_leased_at_once() -> None:
    """Leases are of 1,024 ranges at most, each a step; a round of 1,500 needs two."""
    report = simulate_sizes(SMALL.model_copy(update={"inner_steps": 1500, "hours": 22.0, "heartbeat_s": 600.0}))
    assert all(cluster.pushes == 1 for cluster in report.clusters)


def test_table_2_is_in_the_rates_of_its_pushes() -> None:
    """C, D and E pull within 15 %; A and B need two rates; nine pulls at once as measured are 16.0 Gbit/s."""
    run = read_scenario(find_scenario("table2"))
    ours, measured = pull_at_once(run)
    assert measured == pytest.approx(16.0, abs=0.05) and ours == pytest.approx(16.4, rel=0.02)  # Figure 16: 16.4
    one_slave = {"slaves": 1, "slave_gbit": 16 * run.slave_gbit, "hours": 3.0}  # as many bytes a second in all
    report = simulate_sizes(run.model_copy(update=one_slave))
    by_name = {cluster.cluster: cluster for cluster in report.clusters}
    off = {name: by_name[name].pull_off or 0.0 for name in "CDE"}
    assert off == pytest.approx({"C": 7 / 60, "D": -6 / 86, "E": 5 / 116}, abs=0.01)
    assert [name for name, cluster in by_name.items() if cluster.two_rates] == ["A", "B"]
    assert abs(by_name["A"].expected_pull_s / by_name["A"].push_s - 1.0) > 0.15  # one rate would be wrong
    assert report.slaves[0].idle > 0.95


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hours": -1}, "hours"),
        ({"colour": "red"}, "colour"),
        ({"clusters": [{"name": "a", "step_s": 1}]}, "a: expected up_gbit, the rate of its link, or push_s"),
        ({"clusters": [{"name": "a", "step_s": 1, "up_gbit": 1, "down_gbit": 1, "pull_s": 1}]}, "got both"),
        ({"clusters": [{"name": "a", "step_s": 1, "up_gbit": -1}]}, "up_gbit"),
        ({"clusters": [{"name": "a", "step_s": 1, "up_gbit": 1, "number": 0}]}, "number"),
        ({"clusters": [{"name": "a", "step_s": 1, "up_gbit": 1, "joins": 0.5, "leaves": 0.5}]}, "joins before leaves"),
        ({"clusters": [{"name": "a", "step_s": 1, "up_gbit": 1, "failures": -1}]}, "failures"),
        ({"clusters": [{"name": "a", "step_s": s, "up_gbit": 1} for s in (1, 2)]}, "clusters: 2 are called a"),
        ({"seed": -1}, "seed"),
        ({"hours": 0.01}, "too short: east"),
    ],
)
def test_a_scenario_that_is_not_usable_is_refused_by_its_key(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    """Exit code 78, with the key."""
    import yaml

    file = tmp_path / "scenario.yaml"
    file.write_text(yaml.safe_dump(SMALL.model_dump(mode="json", exclude_none=True) | change))
    with pytest.raises(ConfigError, match=said):
        simulate_sizes(read_scenario(file))


def test_the_command_plays_a_file_prints_a_template_and_names_what_it_does_not_know(
    report: SizedReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template is table2 itself, and can be read. The timeline and the figures are those of the run it played."""
    drawn = list[tuple[SizedReport, Path]]()
    monkeypatch.setattr(figures, "draw_figures", lambda *given: drawn.append(given))
    runner = CliRunner()
    printed = runner.invoke(cli, ["simulate", "--template"])
    assert printed.exit_code == 0 and printed.stdout == find_scenario("table2").read_text()
    import yaml

    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(SMALL.model_dump(mode="json", exclude_none=True)))
    played = runner.invoke(cli, ["simulate", str(file)])
    assert played.exit_code == 0 and "east" in played.stdout and "slaves are idle for" in played.stdout
    outputs = [f"--timeline={tmp_path / 'run.json'}", f"--plots={tmp_path / 'plots'}"]
    as_json = runner.invoke(cli, ["simulate", str(file), "--json", *outputs])
    import json

    again = json.loads(json.dumps(asdict(report)))
    assert json.loads(as_json.stdout) == again | {"master_s": json.loads(as_json.stdout)["master_s"]}
    assert len(json.loads((tmp_path / "run.json").read_text())["versions_s"]) == report.versions
    assert [(one.versions, path) for one, path in drawn] == [(report.versions, tmp_path / "plots")]
    assert runner.invoke(cli, ["simulate"]).exit_code == 2
    with pytest.raises(ConfigError, match=r"expected a file, as in table3\.yaml, or one of table2, month"):
        find_scenario("table3")


def test_a_timeline_has_the_rounds_and_figures_what_there_is_to_see(report: SizedReport, tmp_path: Path) -> None:
    """Every push has its seconds, every step its hour; without failures there is no downtime to draw. What cannot be
    written is said.
    """
    import json

    write_timeline(report, tmp_path / "run.json")
    told = json.loads((tmp_path / "run.json").read_text())
    east = [s["end_s"] - s["begin_s"] for s in told["spans"] if s["cluster"] == "a" and s["phase"] == "push"]
    assert len(east) == report.clusters[0].pushes and east == pytest.approx([64] * len(east), rel=0.02)
    assert len(told["versions_s"]) == report.versions
    assert [c["kind"] for c in told["clusters"]] == [c.name for c in SMALL.clusters]
    moved = sum(gbit for _, gbit in told["received_gbit"]) * GBIT_BYTES * told["sample_s"]
    assert moved == pytest.approx(report.slaves[0].received * SMALL.slave_gbit * GBIT_BYTES * 3600 * SMALL.hours)
    drawn = draw_figures(report, tmp_path / "plots" / "of a run")
    assert [path.name for path in drawn] == [name for name in FIGURES if name != "downtime.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_timeline(report, tmp_path / "none" / "run.json")
    with pytest.raises(ConfigError, match=r"run\.json: cannot be written"):
        draw_figures(report, tmp_path / "run.json")


def test_without_matplotlib_nothing_is_simulated_for_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said at once, not after minutes."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused = CliRunner().invoke(cli, ["simulate", "nowhere.yaml", "--plots", "plots"])
    assert isinstance(refused.exception, ConfigError) and "--plots needs matplotlib" in str(refused.exception)


@pytest.mark.parametrize("output", ["--timeline=none/run.json", "--timeline=.", "--plots=mine.yaml", "--plots=/proc"])
def test_an_output_that_cannot_be_written_is_told_before_the_run(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a month's simulation, of some minutes, ended with that sentence and without its file. /proc is a directory
    that is there, and into which nobody can write.
    """
    import yaml

    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(yaml.safe_dump(SMALL.model_dump(mode="json", exclude_none=True)))
    monkeypatch.setattr("dips.study.sized_run.simulate_sizes", lambda read: pytest.fail("it was simulated"))
    refused = CliRunner().invoke(cli, ["simulate", "mine.yaml", output])
    assert isinstance(refused.exception, ConfigError) and "cannot be written" in str(refused.exception)


def test_a_run_that_gives_nothing_leaves_no_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was only looked at, whether it can be written, is not there as an empty file."""

    def refuse(read: Any) -> Any:
        raise ConfigError("too short for a round")

    monkeypatch.setattr("dips.study.sized_run.simulate_sizes", refuse)
    refused = CliRunner().invoke(cli, ["simulate", "table2", f"--timeline={tmp_path / 'run.json'}"])
    assert isinstance(refused.exception, ConfigError) and not list(tmp_path.iterdir())


def test_hours_count_what_a_cluster_was_there_for() -> None:
    """It comes at half an hour, is down over the end of the second hour, and steps once a minute otherwise."""
    steps = {0: 30, 1: 45, 2: 30}
    cluster = ClusterTimeline("a", "east", 8, 60.0, 1800.0, 9000.0, steps)
    down = ClusterSpan("a", ClusterPhase.DOWN, 6300.0, 7200.0 + 900.0)
    others = (ClusterSpan("b", ClusterPhase.DOWN, 0.0, 9000.0), ClusterSpan("a", ClusterPhase.PULL, 0.0, 9000.0))
    timeline = RunTimeline(4, (cluster,), (down, *others), (), 10.0, (), ())
    assert list_available(timeline, cluster) == [4.0, 6.0, 2.0, 0.0]
    *speeds, last = list_speeds(timeline, cluster)
    assert speeds == [1.0, 0.75, 1.0] and last != last


def test_whoever_fails_is_down_until_its_next_step_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """East fails three times, west never; a slave and the master fail once. West joins late and leaves early. In each
    downtime is the pull with which east goes on.
    """
    (east, west), hours = SMALL.clusters, 4.0
    failing = SMALL.model_copy(
        update={
            "hours": hours, "slave_failures": 1, "master_failures": 1, "restart_s": 60.0, "clusters": (
                east.model_copy(update={"failures": 3, "repair_h": 0.2, "devices": 3}),
                west.model_copy(update={"joins": 0.25, "leaves": 0.75}),
            ),
        }
    )  # fmt: skip
    report = simulate_sizes(failing)
    one, other = report.clusters
    assert sum(report.failures.values()) == 5 and report.failures["a slave"] == report.failures["the master"] == 1
    assert one.down > 0.0 == other.down and one.pushes > other.pushes > 0
    assert report.devices_up == pytest.approx(1.0 - 3 * one.down / (3 + 0.5))
    assert 0.5 < report.servers_up < 1.0 and other.standstill < 0.6
    down = [span for span in report.timeline.spans if span.phase == "down"]
    assert sum(span.end_s - span.begin_s for span in down) == pytest.approx(one.down * hours * 3600)
    returns = [span for span in report.timeline.spans if span.phase is ClusterPhase.RETURN]
    assert len(down) == len(returns) == 3
    assert all(off.begin_s < back.begin_s < back.end_s <= off.end_s for off, back in zip(down, returns, strict=True))
    monkeypatch.setattr(figures, "FIGURES", {"downtime.png": FIGURES["downtime.png"]})
    assert draw_figures(report, tmp_path) == [tmp_path / "downtime.png"]
    assert "devices were up for" in describe_run(report)


def test_whoever_stays_down_is_down_until_the_end() -> None:
    """A slave that is never started again is missing up to the end, not to the event after it, and a cluster that
    fails before its first pull and is not repaired is named with the hours that it was down.
    """
    east, west = SMALL.clusters
    lone = SMALL.model_copy(update={"hours": 0.401, "restart_s": 1e9})
    world, watch, failures = make_world(lone)
    world.call_later(600.0, "a slave fails", failures._fail_slave)
    world.run([watch, failures])
    assert failures.unserved_s == lone.hours * 3600.0 - 600.0
    never = SMALL.model_copy(update={"clusters": (east.model_copy(update={"failures": 40, "repair_h": 1e6}), west)})
    with pytest.raises(ConfigError, match=r"too short: east has not pulled what it pushed, and was down for 0\.\d+ of"):
        simulate_sizes(never)


def test_more_clusters_than_letters() -> None:
    """Seventeen: letters end with the sixteenth."""
    many = SMALL.model_copy(update={"clusters": (SMALL.clusters[0].model_copy(update={"number": 17}),)})
    report = simulate_sizes(many.model_copy(update={"slave_gbit": 10.0, "hours": 0.25}))
    assert len(report.clusters) == 17 and min(cluster.pushes for cluster in report.clusters) >= 1


@pytest.mark.parametrize("name", ["table2", "month", "configs/scenarios/int8.yaml", "configs/scenarios/thousand.yaml"])
def test_scenarios_that_come_with_it_are_read(name: str) -> None:
    """The month's clusters are those of Table 1; the last has a thousand."""
    run = read_scenario(find_scenario(name) if "/" not in name else ROOT / name)
    assert len(run.members) == (1000 if "thousand" in name else 9)
    if name == "month":
        active = {kind.name: 33 * (kind.leaves - kind.joins) for kind in run.clusters}
        assert active == pytest.approx({"A": 33, "B": 33, "C": 29.2, "D": 6.0, "E": 27.9}, abs=0.1)
        assert sum(kind.devices for kind in run.members.values()) == 10_112
        assert [kind.failures for kind in run.clusters] == [3, 1, 4, 2, 31]
