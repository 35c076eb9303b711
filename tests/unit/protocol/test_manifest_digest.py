"""Peers agree on the model by its manifest's digest; the manifest itself travels only to whoever needs it."""

from __future__ import annotations

import pytest

from dips.ids import GENESIS
from dips.protocol.effects import Joined, ManifestWanted, Registered
from dips.protocol.events import ClusterJoined, SlaveRegistered
from dips.protocol.manifest import Layer, Manifest, Parameter
from tests.unit.protocol.scripted_run import MANIFEST, ScriptedRun

OTHER = Manifest((Layer("l", (Parameter("l.w", (999,)),)),))


def test_a_cluster_joins_by_the_digest_of_the_runs_model() -> None:
    """The master wants to see another one, which begins no incarnation; it is compared beside the run."""
    run = ScriptedRun()
    assert run.ask(ClusterJoined(0, "west", "n", "r", OTHER.digest, "c")) == ManifestWanted(MANIFEST.digest)
    joined = run.ask(ClusterJoined(0, "west", "n", "r", MANIFEST.digest, "c"))
    assert isinstance(joined, Joined) and joined.inc == 1


@pytest.mark.parametrize(
    ("known", "told"), [("", MANIFEST.to_json()), (OTHER.digest, MANIFEST.to_json()), (MANIFEST.digest, "")]
)
def test_a_slave_is_told_the_manifest_unless_it_knows_it(known: str, told: str) -> None:
    """It registers again and again while it waits; a large manifest would fill the links each time."""
    said = SlaveRegistered(0, "s", "n", "r", "s:1", ("s:2",), 0, GENESIS, None, (), 4, "", manifest_digest=known)
    answer = ScriptedRun().ask(said)
    assert isinstance(answer, Registered) and answer.manifest == told
