"""`dips-master recover`: a restored ledger is brought above every name that was given since."""

from __future__ import annotations

from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
import structlog
import xxhash
import yaml
from typer.testing import CliRunner

from dips.config import RunFile, load_run
from dips.errors import ConfigError
from dips.ids import VersionId
from dips.master import genesis, recover, restore
from dips.master.app import cli
from dips.master.ledger import Ledger
from dips.master.restore import SPARE
from dips.outer_step import NO_STEP
from dips.protocol.records import IncarnationGiven, RangesLeased, RoundReserved, VersionCommitted, VersionsRetired
from tests.run_files import write_run_file


@pytest.fixture
def config(tmp_path: Path) -> RunFile:
    """A run of two slaves whose ledger has seen term 2, round 5, one cluster and one incarnation of each slave."""
    config = load_run(write_run_file(tmp_path))
    genesis.make_run(config, {"a.w": np.ones(2, np.float32), "b.w": np.ones(2, np.float32)})
    with recover.open_ledger(config) as ledger:
        ledger.start_term()
        ledger.start_term()
        names = [("slave", "s0", 3), ("slave", "s1", 4), ("cluster", "west", 7)]
        ledger.write_records(
            [RoundReserved(5, 0.0), *(IncarnationGiven(role, name, inc, "n") for role, name, inc in names)]
        )
    return config


def plan(config: RunFile, **above: Any) -> recover.RecoveryPlan:
    with recover.open_ledger(config) as ledger:
        return recover.make_plan(config, ledger, **above)


def carry_out(config: RunFile, **above: Any) -> None:
    with recover.open_ledger(config) as ledger:
        recover.make_plan(config, ledger, **above).carry_out(ledger)


def test_everything_that_carries_a_name_is_looked_at(config: RunFile) -> None:
    """Journals show terms, snapshots show rounds; what the operator knows counts, too."""
    here = config.master.directory
    (here / "journal-9-1.jsonl").write_text("")
    for name, version in (("s0", "v3@r8"), ("s1", "v4@r11"), ("s1", "vx@ry")):
        (here.parent / name / version).mkdir(parents=True)
    found = plan(config)
    assert (found.found_term, found.found_round) == (9, 11)
    assert (found.term, found.round) == (9 + SPARE, 11 + SPARE)
    assert found.abandoned == (VersionId(3, 8), VersionId(4, 11))
    assert found.head == VersionId(0, 0)
    found = plan(config, term_above=40, round_above=50)
    assert (found.term, found.round) == (40 + SPARE, 50 + SPARE)


def test_the_next_master_uses_no_name_twice(config: RunFile) -> None:
    """Term, round and lives are above everything; old lives of clusters are over; doing it twice is harmless."""
    for times in (1, 2):
        carry_out(config)
        with recover.open_ledger(config) as ledger:
            state = ledger.read_state()
        assert state.term == 2 + times * SPARE
        assert state.next_round == 5 + times * SPARE + 1
        assert {p.name: p.inc for p in state.slaves} == {"s0": 3 + times * SPARE, "s1": 4 + times * SPARE}
        assert [(p.inc, p.ended) for p in state.clusters] == [(7 + times * SPARE, True)]
        assert state.incarnations_above == 7 + times * SPARE
        assert [v.version for v in state.versions] == [VersionId(0, 0)]
    with recover.open_ledger(config) as ledger:
        assert ledger.start_term() == 2 + 2 * SPARE + 1


def test_data_ranges_of_the_backups_time_are_free_again(config: RunFile) -> None:
    """An incarnation that lived when the backup was made is over: what it held is leased to others, whatever the next
    one is numbered.
    """
    with recover.open_ledger(config) as ledger:
        ledger.write_records([RangesLeased("west", 7, 1, (0, 1))])
        assert ledger.read_state().leased == (("west", 7, 1, (0, 1)),)
    for _ in range(2):
        carry_out(config)
        with recover.open_ledger(config) as ledger:
            assert ledger.read_state().leased == ()


def test_a_directory_elsewhere_is_said(config: RunFile) -> None:
    """What lies on other machines cannot be looked at: the operator learns which, and what to say."""
    (config.master.directory.parent / "s0").mkdir()
    lines = plan(config).describe_lines()
    assert "not on this machine" in lines and "s1" in lines and "--round-above" in lines
    assert "that all slaves offer" in lines


def test_a_version_that_was_made_since_is_adopted(config: RunFile) -> None:
    """It becomes the head, child of the ledger's, without folds, with the digests that its slaves' manifests have."""
    here = config.master.directory.parent
    for name in ("s0", "s1"):
        (here / name / "v0@r8").mkdir(parents=True)
    assert plan(config).newer is None, "no version is named twice in a lineage"
    for name in ("s0", "s1"):
        for version in ("v3@r8", "v4@r9"):
            (here / name / version).mkdir(parents=True)
            (here / name / version / "manifest.json").write_text(name + version)
    assert "v4@r9 with --adopt v4@r9" in plan(config).describe_lines()
    (here / "s1" / "v4@r9" / "manifest.json").unlink()
    (here / "s1" / "v4@r9").rmdir()
    with pytest.raises(ConfigError, match="is not in the directory of s1"):
        plan(config, adopt=VersionId(4, 9))
    with pytest.raises(ConfigError, match="is not newer than this ledger"):
        plan(config, adopt=VersionId(3, 5))
    with pytest.raises(ConfigError, match="is not newer than this ledger"):
        plan(config, adopt=VersionId(0, 8))
    carry_out(config, adopt=VersionId(3, 8))
    with recover.open_ledger(config) as ledger:
        state, digests, (acted,) = ledger.read_state(), ledger.read_digests(), ledger.read_audit()
    assert [v.version for v in state.versions] == [VersionId(0, 0), VersionId(3, 8)]
    assert state.next_round == 9 + SPARE + 1
    assert digests[8, "s0"] == xxhash.xxh3_128_hexdigest(b"s0v3@r8")
    assert (acted.action, acted.refused) == ("dips-master recover", False)
    assert acted.arguments == f"term {state.term}, round {9 + SPARE} --adopt v3@r8"


def test_the_first_round_that_the_ledger_does_not_know_is_adopted(config: RunFile) -> None:
    """Everything from its next round on was made since; what it knew itself and did not name is no version."""
    here = config.master.directory.parent
    for name in ("s0", "s1"):
        for version in ("v1@r6", "v9@r5"):
            (here / name / version).mkdir(parents=True)
            (here / name / version / "manifest.json").touch()
    assert plan(config).newer == VersionId(1, 6)
    assert plan(config, adopt=VersionId(1, 6)).abandoned == (VersionId(9, 5),)


def test_what_was_made_after_a_mirror_had_lagged_is_adopted(config: RunFile) -> None:
    """A restored ledger has reserved the rounds above its copy: a version of those was refused as one of its own time,
    and slaves have no older one to go on from. Once it has made one itself, they are no successors any more.
    """

    def put(version: VersionId) -> None:
        for name in ("s0", "s1"):
            (config.master.directory.parent / name / str(version)).mkdir(parents=True)
            (config.master.directory.parent / name / str(version) / "manifest.json").write_text(name)

    made = VersionId(3, 8)
    put(made)
    with recover.open_ledger(config) as ledger:
        restore.rebuild(ledger, 2, ())
    assert plan(config).newer == made
    carry_out(config, adopt=made)
    with recover.open_ledger(config) as ledger:
        assert ledger.read_state().versions[-1].version == made
        unknown, _ = restore.rebuild(ledger, 2, ())
        own, state = VersionId(4, ledger.read_state().next_round), ledger.read_state()
        row = VersionCommitted(own, made, True, (), (), NO_STEP, 0.0, False, (), (), state.history, 0.0)
        put(VersionId(5, unknown.next_round))
        assert recover.make_plan(config, ledger).newer == VersionId(5, unknown.next_round)
        ledger.write_records([RoundReserved(own.round, 0.0), row])
    assert plan(config).newer is None


def test_what_stands_only_in_a_mirror_counts(config: RunFile, tmp_path: Path) -> None:
    """Its slave brings it back: its round is never given again, it may be the next head, and it may be adopted."""
    raw = yaml.safe_load((tmp_path / "dips.yaml").read_text())
    raw["slaves"][1]["mirror"] = "mirror"
    (tmp_path / "dips.yaml").write_text(yaml.safe_dump(raw))
    mirrored = load_run(tmp_path / "dips.yaml")
    for name in ("s0", "s1"):
        (tmp_path / name).mkdir()
    assert plan(mirrored).unread == (
        f"slaves.s1.mirror: mirror: {tmp_path}/mirror is not there: mount it, or make the directory",
    )
    assert "or make the directory; name what is newer there by --round-above" in plan(mirrored).describe_lines()
    (tmp_path / "s0" / "v3@r8").mkdir()
    (tmp_path / "s0" / "v3@r8" / "manifest.json").write_text("s0")
    for version in ("v3@r8", "v4@r11"):
        (tmp_path / "mirror/r/s1" / version).mkdir(parents=True)
    found = plan(mirrored)
    assert (found.found_round, found.newer, found.unread) == (11, VersionId(3, 8), ())
    assert found.abandoned == (VersionId(3, 8), VersionId(4, 11))
    with pytest.raises(ConfigError, match=r"mirror/r/s1/v3@r8 has no manifest.json: it was not copied to its end"):
        plan(mirrored, adopt=VersionId(3, 8))
    with pytest.raises(ConfigError, match="v4@r11 is not in the directory of s0, nor in its mirror"):
        plan(mirrored, adopt=VersionId(4, 11))
    (tmp_path / "s1" / "v3@r8").mkdir()
    (tmp_path / "s1" / "v3@r8" / "manifest.json").write_text("of the disk, which is read first")
    own = xxhash.xxh3_128_hexdigest(b"of the disk, which is read first")
    assert dict(plan(mirrored, adopt=VersionId(3, 8)).digests)["s1"] == own
    rmtree(tmp_path / "s1" / "v3@r8")
    (tmp_path / "mirror/r/s1/v3@r8/manifest.json").write_text("s1")
    carry_out(mirrored, adopt=VersionId(3, 8))
    with recover.open_ledger(mirrored) as ledger:
        assert ledger.read_digests()[8, "s1"] == xxhash.xxh3_128_hexdigest(b"s1")
        assert ledger.read_state().next_round == 11 + SPARE + 1
    (tmp_path / "s0" / "v3@r8").rename(tmp_path / "mirror/r/s1/aside")
    assert "v3@r8 is not in all slaves' directories or mirrors any more" in plan(mirrored).describe_lines()
    with recover.open_ledger(mirrored) as ledger:  # from then on nobody offers the initial model
        ledger.write_records([VersionsRetired((VersionId(3, 8),))])
    assert plan(mirrored).head is None and "no version of this ledger is in all" in plan(mirrored).describe_lines()


def test_a_term_that_stands_only_in_the_ledgers_mirror_counts(config: RunFile, tmp_path: Path) -> None:
    """A standby that took over twice was thousands of terms ahead: the next master begins a later one, or would be told
    that its file is an old copy.
    """
    raw = yaml.safe_load((tmp_path / "dips.yaml").read_text())
    raw["master"]["mirror"] = "mirror"
    (tmp_path / "dips.yaml").write_text(yaml.safe_dump(raw))
    mirrored = load_run(tmp_path / "dips.yaml")
    assert any(why.startswith("master.mirror: ") for why in plan(mirrored).unread)
    (tmp_path / "mirror").mkdir()
    store = genesis.mirror_of(mirrored)
    assert store is not None and plan(mirrored).found_term == 2
    assert restore.claim_term(store, "r", "a standby", claimable=True, above=2 * SPARE)
    log = structlog.get_logger()
    with pytest.raises(ConfigError, match="this file is an old copy"):
        restore.restore_if_lost(mirrored, log)
    carry_out(mirrored)
    restore.restore_if_lost(mirrored, log)
    with recover.open_ledger(mirrored) as ledger:
        assert ledger.start_term() > 3 * SPARE + 1


def test_it_asks(config: RunFile, tmp_path: Path) -> None:
    """Without --yes it asks, and no changes nothing; a ledger of another run, or one in use, is refused."""
    words = ["recover", "--config", str(tmp_path / "dips.yaml")]
    refused = CliRunner().invoke(cli, words, input="n\n")
    assert refused.exit_code == 1 and "abandoned" in refused.stdout
    with recover.open_ledger(config) as ledger:
        assert ledger.read_state().term == 2
        held = CliRunner().invoke(cli, [*words, "--yes"])
        assert isinstance(held.exception, ConfigError) and "in use" in str(held.exception)
    assert CliRunner().invoke(cli, words, input="y\n").exit_code == 0
    with recover.open_ledger(config) as ledger:
        assert ledger.read_state().term == 2 + SPARE
    (tmp_path / "dips.yaml").write_text((tmp_path / "dips.yaml").read_text().replace("run: r", "run: other"))
    other = CliRunner().invoke(cli, [*words, "--yes"])
    assert "ledger of run 'r'" in str(other.exception)


@pytest.mark.parametrize("word", ["replay", "recover"])
def test_help_teaches(word: str) -> None:
    """Every word says what it does, its exit codes, and shows an example."""
    text = CliRunner().invoke(cli, [word, "--help"]).stdout
    assert "Example:" in text and f"dips-master {word}" in text and "Exit codes: 0" in text


def test_which_run_must_be_said() -> None:
    """dips-master without a word and without --config names what is missing."""
    result = CliRunner().invoke(cli, [])
    assert result.exit_code == 2 and "--config" in result.output


def test_a_term_above(tmp_path: Path, config: RunFile) -> None:
    """A term begins above what is named, and above every earlier one."""
    with recover.open_ledger(config) as ledger:
        assert [ledger.start_term(above=10), ledger.start_term(above=3), ledger.start_term()] == [11, 12, 13]
    with pytest.raises(ConfigError):
        Ledger.open(tmp_path / "nothing.sqlite")
