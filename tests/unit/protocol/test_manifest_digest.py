"""Peers agree on the model by its manifest's digest; the manifest itself travels only to whoever needs it."""

from __future__ import annotations

import pytest

from dips.errors import CorruptManifest, DifferentModel
from dips.ids import GENESIS
from dips.protocol.effects import Failed, Joined, ManifestWanted, Registered
from dips.protocol.events import ClusterJoined, SlaveRegistered
from dips.protocol.manifest import Layer, Manifest, Parameter
from tests.unit.protocol.scripted_run import MANIFEST, ScriptedRun

OTHER = Manifest((Layer("l", (Parameter("l.w", (999,)),)),))


def join(digest: str, text: str = "") -> ClusterJoined:
    return ClusterJoined(0, "west", "n", "r", digest, "c", text)


def test_a_cluster_with_the_runs_model_joins_by_its_digest() -> None:
    """Whatever text comes with it is not looked at."""
    for text in ("", "junk"):
        assert isinstance(ScriptedRun().ask(join(MANIFEST.digest, text)), Joined)


def test_another_model_is_compared_when_it_is_sent() -> None:
    """First the master wants it, then it says where the two differ; neither begins an incarnation."""
    run = ScriptedRun()
    assert run.ask(join(OTHER.digest)) == ManifestWanted(MANIFEST.digest)
    refused = run.ask(join(OTHER.digest, OTHER.to_json()))
    assert refused == Failed(DifferentModel, "this model is not the run's: l.w: expected shape (1000,), got (999,)")
    joined = run.ask(join(MANIFEST.digest))
    assert isinstance(joined, Joined) and joined.inc == 1


@pytest.mark.parametrize(
    ("text", "words"), [("junk", "not a manifest"), (MANIFEST.to_json(), "as announced"), ("{" * 100, "not a manifest")]
)
def test_a_text_that_is_not_the_announced_manifest_is_refused(text: str, words: str) -> None:
    """Even the run's own, under another digest."""
    refused = ScriptedRun().ask(join(OTHER.digest, text))
    assert isinstance(refused, Failed) and refused.error is CorruptManifest and words in refused.message


@pytest.mark.parametrize(
    ("known", "told"), [("", MANIFEST.to_json()), (OTHER.digest, MANIFEST.to_json()), (MANIFEST.digest, "")]
)
def test_a_slave_is_told_the_manifest_unless_it_knows_it(known: str, told: str) -> None:
    """It registers again and again while it waits; a large manifest would fill the links each time."""
    said = SlaveRegistered(0, "s", "n", "r", "s:1", ("s:2",), 0, GENESIS, None, (), 4, "", manifest_digest=known)
    answer = ScriptedRun().ask(said)
    assert isinstance(answer, Registered) and answer.manifest == told
