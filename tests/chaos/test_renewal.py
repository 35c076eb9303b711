"""While clusters train, all certificates and the authority are replaced, and one cluster is revoked and comes back.

Nothing is started anew for it, and by the ledger no other cluster loses a round.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dips.identity.names import PeerRole
from dips.transport.tls import LOOK_S
from tests.chaos.certificates import SECURE, RunCertificates, is_secured
from tests.chaos.deployment import SEEN_S, Deployment

DEPLOYMENT = {"secure": True}
DENIED = 77
LOOKED_S = 3 * LOOK_S  # all have looked at their files
pytestmark = pytest.mark.skipif(not is_secured(True), reason=f"{SECURE}=0: no run has certificates")


@contextmanager
def undisturbed(deployment: Deployment, *but: str) -> Iterator[RunCertificates]:
    """Nobody is started anew, gone or lost meanwhile, no round is skipped, no push of the others dropped."""
    others = [name for name in ("master", *deployment.slaves, *deployment.clusters) if name not in but]
    pids, skipped = {name: deployment.process(name).pid for name in others}, len(deployment.skipped())
    trainers, since = {name: deployment.ranks(name) for name in deployment.clusters if name not in but}, time.time()
    assert deployment.certificates is not None
    yield deployment.certificates
    deployment.progress(2, by=[name for name in deployment.clusters if name not in but])
    assert {name: deployment.process(name).pid for name in others} == pids
    assert {name: deployment.ranks(name) for name in trainers} == trainers
    assert len(deployment.skipped()) == skipped, deployment.skipped()
    for kind, who in (("cluster_gone", "cluster"), ("slave_lost", "slave")):
        gone = {m[who] for m in deployment.marks(deployment.master_timeline, kind) if m["at"] > since}
        assert gone <= set(but), gone


def test_every_certificate_is_renewed(deployment: Deployment) -> None:
    """The former ones are revoked at once: whoever showed one on, would be refused."""
    with undisturbed(deployment) as certificates:
        former = certificates.serials()
        certificates.enroll_all()
        time.sleep(LOOKED_S)
        certificates.revoke(*former)
        deployment.progress(2, by=deployment.clusters)


def test_the_authority_is_replaced(deployment: Deployment) -> None:
    """Both are trusted, then all have certificates of the new one, then the old one is gone."""
    with undisturbed(deployment) as certificates:
        certificates.add_authority()
        time.sleep(LOOKED_S)
        certificates.enroll_all()
        time.sleep(LOOKED_S)
        certificates.remove_old_authority()


def test_a_cluster_is_revoked_in_mid_push_and_enrolled_again(deployment: Deployment) -> None:
    """Its agent ends with 77 and says why; its push is dropped; under a new certificate it takes part again."""
    with undisturbed(deployment, "east") as certificates:
        deployment.hold_push("east", ["ps0"])
        since, agent = time.time(), deployment.process("east")
        certificates.revoke("east.cluster")
        deployment.wait_for_end(agent, DENIED)
        deployment.count_untold("east", since)
        deployment.lanes["ps0"].heal()
        assert "the certificate of cluster 'east' of run 'test' is revoked" in agent.log.read_text()
        deployment.progress(2, by=("west",))
        certificates.enroll("east", PeerRole.CLUSTER)
        deployment.cluster("east")
        deployment.progress(2, by=deployment.clusters, within_s=2 * SEEN_S)
