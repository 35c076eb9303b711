"""A HELLO is taken if it is meant for this run, slave and incarnation; a new incarnation drops all of the last."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dips.ids import PullId, PushId, VersionId
from dips.protocol.manifest import Manifest
from dips.protocol.rank_keys import KEY_CHARS
from dips.slave.admission import Admission, Keyring
from dips.slave.ports import Say
from dips.slave.receiver import Receiver
from dips.slave.sender import Sender
from dips.transport.intake import Transit
from dips.wire.chunks import LayerLayout
from dips.wire.frame import BadFrame, Kind, Range, StreamName, decode_error

V1 = VersionId(1, 1)
WHOLE = (Range(0, 0, 0, 4),)
PUSHES = StreamName("demo", "push", "x", 1, 1, 0, "s", 3, 1, "")
PULLS = StreamName("demo", "pull", "x", 1, 1, 0, "s", 3, 1, str(V1))


def opened(keyring: Keyring | None = None) -> Admission:
    """Incarnation 3, with a push and a pull open."""
    layout, array = LayerLayout(Manifest.from_shapes([("a.w", (4,))]), (0,)), np.zeros(4, np.float32)
    receiver, sender = Receiver(1, 4096, Transit(1 << 20), 1, 10.0), Sender(4096, 10.0, lambda: 0.0)
    receiver.set_layers(layout)
    sender.set_layers(layout)
    admission = Admission("demo", "s", receiver, sender, keyring)
    admission.start(3)
    receiver.open_push(PushId("x", 1, 1), (0,), {0: array}, 60.0, 0.0)
    sender.open_pull(PullId("x", 1, 1), V1, {0: array}, 0.0)
    return admission


def answer(admission: Admission, name: StreamName, key: str = "") -> str:
    """WELCOME, or the code of the ERROR."""
    say = admission.on_hello(0, b"p", name.stream_id, name, WHOLE, 0.0, key=key)[0]
    assert isinstance(say, Say)
    return decode_error(say.body).code if say.kind is Kind.ERROR else say.kind.name


@pytest.mark.parametrize("name", [PUSHES, PULLS], ids=["push", "pull"])
def test_a_stream_is_for_one_slave_in_one_incarnation(name: StreamName) -> None:
    """Yesterday's rank, tomorrow's rank, and one that has the wrong address."""
    admission = opened()
    assert answer(admission, replace(name, slave="t")) == "invalid"
    assert answer(admission, replace(name, sinc=2)) == "stale_incarnation"
    assert answer(admission, replace(name, sinc=4)) == "stale_incarnation"
    assert answer(admission, name) == "WELCOME"


@pytest.mark.parametrize("name", [PUSHES, PULLS], ids=["push", "pull"])
def test_on_encrypted_lanes_a_stream_is_its_ranks_own(name: StreamName) -> None:
    """Also when it is begun anew after a break: no later epoch of it is anybody else's."""
    keyring, (own, other) = Keyring(), (k.ljust(KEY_CHARS, ".") for k in ("own", "other"))
    admission = opened(keyring)
    for transfer in (PushId("x", 1, 1), PullId("x", 1, 1)):
        keyring.open_transfer(transfer, (own,))
    assert answer(admission, name, other) == "denied" == answer(admission, name, "")
    assert answer(admission, name, own) == "WELCOME"
    assert answer(admission, replace(name, epoch=2), other) == "denied"
    assert answer(admission, replace(name, epoch=2), own) == "WELCOME"
    admission.start(4)
    assert answer(admission, replace(name, sinc=4), other) == "stale_push", "it is over: said to whoever asks"


@pytest.mark.parametrize("name", [PUSHES, PULLS], ids=["push", "pull"])
def test_a_new_incarnation_drops_what_was_open_and_the_same_one_does_not(name: StreamName) -> None:
    """A slave that registers again under its incarnation goes on; under another, nothing of the last one is served."""
    admission = opened()
    admission.start(3)
    assert answer(admission, name) == "WELCOME"
    admission.start(4)
    assert answer(admission, replace(name, sinc=4, epoch=2)) == "stale_push"


def test_a_hello_under_another_number_or_of_another_run_is_no_message() -> None:
    """The header's number is the name's, or chunks would be counted to another stream."""
    admission = opened()
    for name, stream in (
        (PUSHES, PULLS.stream_id),
        (replace(PUSHES, run="other"), replace(PUSHES, run="other").stream_id),
    ):
        with pytest.raises(BadFrame) as refused:
            admission.on_hello(0, b"p", stream, name, WHOLE, 0.0)
        assert refused.value.reason == "message"
