"""Whose keys a slave's lanes admit: those of what is open, each for its own rank, and probes for a while."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.errors import RemoteProtocolError
from dips.ids import PullId, PushId
from dips.protocol.rank_keys import KEY_CHARS
from dips.slave.admission import MOST_PROBES, PROBE_S, Keyring
from dips.wire.frame import StreamName

K0, K1, K2 = (name.ljust(KEY_CHARS, ".") for name in ("k0", "k1", "k2"))
PUSH, PULL = PushId("west", 1, 4), PullId("west", 1, 4)
HELLO = StreamName("r", "push", "west", 1, 4, 0, "s", 1, 1, "")


def test_a_key_is_admitted_while_something_of_it_is_open() -> None:
    """A push and the pull after it have the same keys: the first that ends does not take them along."""
    ring = Keyring()
    assert not ring.admits(K0, 0.0)
    ring.open_transfer(PUSH, (K0, K1), 2)
    ring.open_transfer(PULL, (K0, K1))
    ring.open_transfer(PULL, (K2,))  # again: it stays as it is
    ring.close_transfer(PUSH)
    assert ring.admits(K0, 0.0) and ring.admits(K1, 0.0) and not ring.admits(K2, 0.0)
    ring.close_transfer(PUSH)  # twice is once
    ring.close_transfer(PULL)
    assert not ring.admits(K0, 0.0) and not ring.admits(K1, 0.0)


def test_one_key_for_two_ranks_is_counted_once() -> None:
    ring = Keyring()
    ring.open_transfer(PUSH, (K0, K0))
    ring.close_transfer(PUSH)
    assert not ring.admits(K0, 0.0)


def test_a_hello_is_its_ranks_own() -> None:
    """Another rank's key, or a rank that there is not: it is said why. What is not open is not known here."""
    ring = Keyring()
    ring.open_transfer(PUSH, (K0, K1))
    assert ring.find_stranger(HELLO, K0) == "" == ring.find_stranger(replace(HELLO, rank=1), K1)
    assert "not that of rank 0" in ring.find_stranger(HELLO, K1)
    assert "not that of rank 0" in ring.find_stranger(HELLO, "")
    assert "has 2 ranks" in ring.find_stranger(replace(HELLO, rank=2), K1)
    for other in (replace(HELLO, kind="pull"), replace(HELLO, seq=5), replace(HELLO, cluster="east")):
        assert ring.find_stranger(other, K2) == ""
    ring.close_all()
    assert ring.find_stranger(HELLO, K2) == "" and not ring.admits(K0, 0.0)


@pytest.mark.parametrize(("keys", "ranks"), [((), 1), ((K0,), 2), (("no key",), 1)])
def test_nothing_is_open_to_everybody(keys: tuple[str, ...], ranks: int) -> None:
    """An order without a key for each rank opens nothing."""
    ring = Keyring()
    with pytest.raises(RemoteProtocolError, match="keys: "):
        ring.open_transfer(PUSH, keys, ranks)
    assert ring.find_stranger(HELLO, K0) == ""


def test_a_probe_is_admitted_for_a_while() -> None:
    """One key for each cluster, and so many clusters."""
    ring = Keyring()
    ring.admit_probe("west", K0, 0.0)
    ring.admit_probe("west", K1, 1.0)
    assert not ring.admits(K0, 1.0) and ring.admits(K1, PROBE_S) and not ring.admits(K1, PROBE_S + 1.0)
    for number in range(MOST_PROBES):
        ring.admit_probe(f"c{number}", K2, 2.0)
    assert not ring.admits(K1, 2.0) and ring.admits(K2, 2.0)


def test_a_cluster_that_probes_again_takes_nobody_s_place() -> None:
    """Its new key is admitted instead of its old one, also when as many clusters probe as are known."""
    ring = Keyring()
    for number in range(MOST_PROBES):
        ring.admit_probe(f"c{number}", K0 if number == 0 else K1, 0.0)
    ring.admit_probe("c1", K2, 0.0)
    assert ring.admits(K0, 0.0) and ring.admits(K2, 0.0)
