"""The seal of an encrypted connection: what one end seals the other opens once, in order, and nobody else at all."""

from __future__ import annotations

import time
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.errors import RemoteProtocolError
from dips.transport import seal
from dips.transport.seal import Greeter, KeyPair, Session, Sessions, decode_key, new_keys
from dips.wire.frame import BadFrame, Buffer, Header, Kind, make_message, unpack_header
from tests.releases import FORMER

RUN, CHUNK_BYTES = 7, 1 << 16
RANK, SLAVE, OTHER = new_keys(), new_keys(), new_keys()
BODY = bytes(range(64))
CHUNK = Header(Kind.CHUNK, RUN, 9, len(BODY), 0, 3, 2, 16)
WANT = Header(Kind.WANT, RUN, 9, len(BODY), 0)
Ends = tuple[Session, Session]  # the rank's and the slave's


def meet(rank: KeyPair = RANK, slave: KeyPair = SLAVE, meant: str = SLAVE.public, known: str = RANK.public) -> Ends:
    """Both ends of a connection of `rank`, which means the lane of `meant`, to `slave`, whose ZAP has told `known`."""
    greeter, sessions, peer = Greeter(rank, meant), Sessions(slave, 4), known.encode() + b"route"
    part, body = make_message(Kind.GREETING, RUN, 9, sessions.greet_peer(peer, greeter.greeting))
    there = sessions.find_session(peer)
    assert there is not None
    return greeter.begin_session(unpack_header(part, RUN, len(body), CHUNK_BYTES), body), there


def pass_on(end: Session, parts: tuple[bytes, Buffer]) -> bytes:
    part, body = parts
    return bytes(end.open_frame(unpack_header(part, RUN, len(body), CHUNK_BYTES, end.tag_bytes), body))


def refusal(end: Session, parts: tuple[bytes, Buffer]) -> str:
    with pytest.raises(BadFrame) as refused:
        pass_on(end, parts)
    return refused.value.reason


@pytest.mark.parametrize("number", range(seal.seal_aegis is None, len(seal.CIPHERS)))
@pytest.mark.parametrize("nbytes", [0, 1, 1000, CHUNK_BYTES])
def test_what_is_sealed_is_opened(monkeypatch: pytest.MonkeyPatch, number: int, nbytes: int) -> None:
    """In both directions, by each cipher, also straight into its place; the body is not to be seen on the way."""
    monkeypatch.setattr(seal, "fastest_cipher", lambda: number)
    rank, slave = meet()
    for one, other in ((rank, slave), (slave, rank)):
        body = np.random.default_rng(nbytes).bytes(nbytes)
        part, sealed = one.seal_frame(Header(Kind.PROBE, RUN, 1, nbytes, 0), body)
        assert nbytes < 16 or body not in bytes(sealed)
        assert pass_on(other, (part, sealed)) == body
        place = np.zeros(nbytes, np.uint8)
        header = Header(Kind.CHUNK, RUN, 1, nbytes, 0)
        _, sealed = one.seal_frame(header, body)
        other.open_into(header._replace(counter=1), sealed, place)
        assert place.tobytes() == body


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.data())
def test_a_frame_counts_once_and_in_order(chunks: list[bool], data: st.DataObject) -> None:
    """Whatever an attacker repeats, drops and reorders: what is opened was sealed, rises, and is never opened twice."""
    rank, slave = meet()
    sent = []
    for k, chunk in enumerate(chunks):
        body = k.to_bytes(len(BODY), "little")
        sent.append((chunk, k, rank.seal_frame(CHUNK if chunk else WANT, body)))
    last = {True: -1, False: -1}
    for at in data.draw(st.lists(st.sampled_from(range(len(sent))), max_size=60)):
        chunk, k, parts = sent[at]
        if k > last[chunk]:
            assert int.from_bytes(pass_on(slave, parts), "little") == k
            last[chunk] = k
        else:
            assert refusal(slave, parts) == "replayed"


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=50), st.integers(1, 3))
def test_no_nonce_is_used_twice(frames: list[tuple[bool, bool]], connections: int) -> None:
    """Over directions, kinds of frames and reconnects of the same two: no key and nonce come together again."""
    used: set[tuple[bytes, bytes]] = set()

    class Noting:
        def __init__(self, key: bytes) -> None:
            self.key = key

        def encrypt_into(self, nonce: bytes, body: Buffer, header: bytes, out: object) -> None:
            assert (self.key, nonce) not in used
            used.add((self.key, nonce))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seal, "CIPHERS", (seal.Cipher(Noting, 16),) * len(seal.CIPHERS))
        for _ in range(connections):
            ends = meet()
            for from_rank, chunk in frames:
                ends[not from_rank].seal_frame(CHUNK if chunk else WANT, BODY)
    assert len(used) == connections * len(frames)


@given(st.integers(0, 64 * 8 - 1), st.integers(0, (len(BODY) + 32) * 8 - 1))
def test_any_flipped_bit_is_refused(in_header: int, in_body: int) -> None:
    """Of the header, whose checksum anybody can compute, or of the body or its tag; the next frame is opened."""
    rank, slave = meet()
    part, sealed = rank.seal_frame(CHUNK, BODY)
    body = bytearray(sealed)
    body[in_body // 8 % len(body)] ^= 1 << in_body % 8
    assert refusal(slave, (part, bytes(body))) == "seal"
    header = unpack_header(part, RUN, len(sealed), CHUNK_BYTES, rank.tag_bytes)
    for forged in (
        header._replace(offset=header.offset ^ 1 << in_header % 40),
        header._replace(stream=8),
        header._replace(counter=header.counter + 1 + in_header),
        header._replace(kind=Kind.PROBE, layer=0),
    ):
        with pytest.raises(BadFrame, match="not sealed with its connection's key, or altered"):
            slave.open_frame(forged, sealed)
    assert pass_on(slave, (part, sealed)) == BODY
    assert pass_on(slave, rank.seal_frame(CHUNK, BODY)) == BODY


def test_who_keeps_the_refusal_of_a_frame_keeps_no_pointer_into_it() -> None:
    """A traceback lives as long as its exception: libsodium's pointers in it would crash the garbage collector."""
    rank, slave = meet()
    part, sealed = rank.seal_frame(CHUNK, BODY)
    body = memoryview(bytearray(sealed))
    body[0] ^= 1
    header = unpack_header(part, RUN, len(body), CHUNK_BYTES, rank.tag_bytes)
    with pytest.raises(BadFrame, match="not sealed") as refused:
        slave.open_frame(header, body)
    body.release()  # BufferError while anything points into it
    assert refused.value.__cause__ is not None


def test_a_frame_that_is_cut_or_cut_anew_is_refused() -> None:
    """Its end, its beginning, half of it, or two of them in one: by its length, or by its seal."""
    rank, slave = meet()
    part, sealed = rank.seal_frame(CHUNK, BODY)
    header, body = unpack_header(part, RUN, len(sealed), CHUNK_BYTES, rank.tag_bytes), bytes(sealed)
    for cut in (body[:-1], body[:16], b"", body + body):
        assert refusal(slave, (part, cut)) == "length"
    for first, last in ((0, 32), (4, 64), (32, 64)):
        again = body[first:last] + body[-rank.tag_bytes :]
        with pytest.raises(BadFrame, match="not sealed"):
            slave.open_frame(
                header._replace(length=len(again) - rank.tag_bytes, offset=header.offset + first // 4), again
            )


@pytest.mark.parametrize(
    "ends",
    [
        lambda: (meet()[0], meet()[1]),
        lambda: meet(rank=OTHER),
        lambda: meet(slave=OTHER),
        lambda: meet(meant=OTHER.public),
        lambda: (meet()[0],) * 2,
    ],
    ids=["another connection", "another rank", "another slave", "another meant", "its own direction"],
)
def test_who_has_not_both_secrets_of_this_connection_opens_nothing(ends: object) -> None:
    """Frames of another connection of the same two, of others, or reflected."""
    one, other = ends()  # type: ignore[operator]
    assert refusal(other, one.seal_frame(CHUNK, BODY)) == "seal"
    assert refusal(other, one.seal_frame(WANT, BODY)) == "seal"


def test_both_secrets_stolen_later_open_nothing() -> None:
    """Forward secrecy: of what was recorded they give all but what the connection's own keys have agreed on."""
    greeter, sessions, peer = Greeter(RANK, SLAVE.public), Sessions(SLAVE, 4), RANK.public.encode() + b"route"
    answer = sessions.greet_peer(peer, greeter.greeting)
    mixed = seal._exchange(SLAVE.secret, greeter.greeting[1:]), seal._exchange(RANK.secret, answer[1:])
    known = b"".join((seal._exchange(RANK.secret, decode_key(SLAVE.public)), *sorted(mixed)))
    keys = seal._traffic_keys(known, RANK.public, SLAVE.public, greeter.greeting, answer)
    there = sessions.find_session(peer)
    assert there is not None
    thief = Session(seal.Cipher(type(there._send), there.tag_bytes), *keys)
    assert refusal(thief, there.seal_frame(CHUNK, BODY)) == "seal"
    assert refusal(there, thief.seal_frame(CHUNK, BODY)) == "seal"


def test_a_greeting_that_is_none_is_refused() -> None:
    """Of another size, of an unknown cipher, a key of low order, another kind of frame: and nothing is begun."""
    greeter, sessions, peer = Greeter(RANK, SLAVE.public), Sessions(SLAVE, 4), RANK.public.encode() + b"1"
    wrong = [
        b"",
        greeter.greeting[:-1],
        greeter.greeting + b"\0",
        b"\x02" + greeter.greeting[1:-1] + b"\0",
        b"\0" + bytes(32),
    ]
    for greeting in wrong:
        with pytest.raises(BadFrame) as refused:
            sessions.greet_peer(peer, greeting)
        assert refused.value.reason == "greeting" and len(sessions) == 0
        part, body = make_message(Kind.GREETING, RUN, 9, greeting)
        with pytest.raises(BadFrame) as refused:
            greeter.begin_session(unpack_header(part, RUN, len(body), CHUNK_BYTES), body)
        assert refused.value.reason == "greeting"
    part, body = make_message(Kind.GREETING, RUN, 9, sessions.greet_peer(peer, greeter.greeting))
    with pytest.raises(BadFrame, match="checksum"):  # damaged on its way
        greeter.begin_session(unpack_header(part, RUN, len(body), CHUNK_BYTES), body[:-1] + bytes([body[-1] ^ 1]))
    part, body = make_message(Kind.WELCOME, RUN, 9, b"\0" + bytes(32))
    with pytest.raises(BadFrame, match="expected the greeting of a lane, got a WELCOME"):
        greeter.begin_session(unpack_header(part, RUN, len(body), CHUNK_BYTES), body)


def test_the_slower_end_chooses_the_cipher(monkeypatch: pytest.MonkeyPatch) -> None:
    """So each has the one that is taken, and neither does what it is slow at: AES in software."""
    for here, there, taken in ((0, 0, "Aegis128L"), (0, 1, "AESGCM"), (1, 0, "AESGCM"), (1, 2, "ChaCha20Poly1305")):
        monkeypatch.setattr(seal, "fastest_cipher", lambda here=here: here)
        greeter, peer = Greeter(RANK, SLAVE.public), RANK.public.encode()
        monkeypatch.setattr(seal, "fastest_cipher", lambda there=there: there)
        sessions = Sessions(SLAVE, 4)
        part, body = make_message(Kind.GREETING, RUN, 9, sessions.greet_peer(peer, greeter.greeting))
        session = greeter.begin_session(unpack_header(part, RUN, len(body), CHUNK_BYTES), body)
        for end in (session, sessions.find_session(peer)):
            assert type(end._send).__name__ == taken  # type: ignore[union-attr]


def test_a_lane_cannot_choose_a_cipher_that_the_rank_may_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "fastest_cipher", lambda: 1)
    greeter = Greeter(RANK, SLAVE.public)
    part, body = make_message(Kind.GREETING, RUN, 9, seal._pack_greeting(0, new_keys().secret))
    with pytest.raises(BadFrame, match="expected a cipher from 1 to 2, got 0"):
        greeter.begin_session(unpack_header(part, RUN, len(body), CHUNK_BYTES), body)


@pytest.mark.parametrize("fastest", range(len(seal.CIPHERS)))
@pytest.mark.parametrize("old_rank", [True, False])
def test_the_release_before_understands_a_greeting(
    monkeypatch: pytest.MonkeyPatch, old_rank: bool, fastest: int
) -> None:
    """It knows AES-256-GCM and ChaCha20-Poly1305, and has measured them on the same processor."""
    monkeypatch.setattr(seal, "fastest_cipher", lambda: fastest)
    with zipfile.ZipFile(FORMER) as wheel:
        exec(
            compile(wheel.read("dips/transport/seal.py"), "former", "exec"),
            former := {"__name__": "dips.transport.seal"},
        )
    former["fastest_cipher"] = lambda: max(fastest - 1, 0)
    make_greeter, make_sessions = (former["Greeter"], Sessions) if old_rank else (Greeter, former["Sessions"])
    greeter, sessions, peer = make_greeter(RANK, SLAVE.public), make_sessions(SLAVE, 4), RANK.public.encode()
    part, body = make_message(Kind.GREETING, RUN, 9, sessions.greet_peer(peer, greeter.greeting))
    rank = greeter.begin_session(unpack_header(part, RUN, len(body), CHUNK_BYTES), body)
    slave = sessions.find_session(peer)
    assert pass_on(slave, rank.seal_frame(CHUNK, BODY)) == pass_on(rank, slave.seal_frame(CHUNK, BODY)) == BODY
    assert type(rank._send).__name__ == ("ChaCha20Poly1305" if fastest == 2 else "AESGCM")


@pytest.mark.parametrize(("fast", "number"), [("Aegis128L", 0), ("AESGCM", 1), ("ChaCha20Poly1305", 2)])
def test_the_fastest_cipher_is_found_by_a_measurement(monkeypatch: pytest.MonkeyPatch, fast: str, number: int) -> None:
    monkeypatch.setattr(seal, "seal_aegis", object())
    monkeypatch.setattr(seal, "_time_cipher", lambda cipher: 1.0 + (cipher.of_key.__name__ != fast))
    assert seal.fastest_cipher.__wrapped__() == number


def test_without_libsodium_it_is_one_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "seal_aegis", None)
    assert seal.fastest_cipher.__wrapped__() in (1, 2)


AEGIS_VECTOR = (  # 5 of draft-irtf-cfrg-aegis-aead's for AEGIS-128L: data and tag of 256 bits, sealed
    "b31052ad1cca4e291abcf2df3502e6bdb1bfd6db36798be3607b1f94d34478aa7ede7f7a990fec10"
    "b91e2947a33da8bee89b6794e647baf0fc835ff574aca3fc27c33be0db2aff98"
)


@pytest.mark.skipif(seal.seal_aegis is None, reason="PyNaCl has no AEGIS here")
def test_aegis_is_the_published_one() -> None:
    """And it writes into nothing that is too short or too long for it."""
    cipher, nonce, known = seal.Aegis128L(b"\x10\x01" + bytes(30)), b"\x10\0\2" + bytes(9), bytes(range(42))
    body, sealed = bytes(range(16, 56)), np.empty(40 + 32, np.uint8)
    cipher.encrypt_into(nonce, body, known, sealed)
    assert sealed.tobytes().hex() == AEGIS_VECTOR
    opened = np.empty(40, np.uint8)
    cipher.decrypt_into(nonce, sealed, known, opened)
    assert opened.tobytes() == body
    for wrong in (39, 41):
        with pytest.raises(ValueError, match=f"expected room for 40 bytes, got {wrong}"):
            cipher.decrypt_into(nonce, sealed, known, np.empty(wrong, np.uint8))
        with pytest.raises(ValueError, match=f"expected room for 72 bytes, got {wrong + 32}"):
            cipher.encrypt_into(nonce, body, known, np.empty(wrong + 32, np.uint8))


def test_the_session_that_was_used_longest_ago_is_forgotten() -> None:
    """So their number is bounded, and one that moves bytes is kept."""
    sessions, greeter = Sessions(SLAVE, 3), Greeter(RANK, SLAVE.public)
    peers = [RANK.public.encode() + bytes([k]) for k in range(4)]
    for peer in peers[:3]:
        sessions.greet_peer(peer, greeter.greeting)
    sessions.keep_session(peers[0])
    sessions.keep_session(b"a stranger")
    sessions.greet_peer(peers[3], greeter.greeting)
    assert [sessions.find_session(peer) is not None for peer in peers] == [True, False, True, True]


def test_keys_are_worn_by_what_they_have_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "WORN_BYTES", 2 * len(BODY))
    rank, slave = meet()
    seen = []
    for _ in range(2):
        pass_on(slave, rank.seal_frame(CHUNK, BODY))
        seen.append((rank.worn, slave.worn))
    assert seen == [(False, False), (True, True)]


@pytest.mark.parametrize("key", ["", "0" * 39, "~" * 40, "#" * 40, "0" * 40, "é" * 40])
def test_a_key_that_is_none_is_refused(key: str) -> None:
    """By a rank that was granted it, in a sentence; the last but one is of low order."""
    with pytest.raises(RemoteProtocolError, match="expected the public key of a lane, got"):
        RANK.speak_to(None, key)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        RANK.prove_to(key)


def test_a_proof_is_of_both_keys_and_says_nothing_else() -> None:
    assert RANK.prove_to(SLAVE.public) == SLAVE.prove_to(RANK.public)
    assert len({RANK.prove_to(SLAVE.public), OTHER.prove_to(SLAVE.public), RANK.prove_to(OTHER.public)}) == 3
    assert "secret" not in repr(RANK)


def test_a_cipher_is_timed_by_its_best_try() -> None:
    """The first pays for what is done once, as caches and tables."""

    class Warming:
        slow_s = 0.02

        def __init__(self, key: bytes) -> None: ...

        def encrypt_into(self, *_: object) -> None:
            time.sleep(self.slow_s)
            self.slow_s = 0.001

    assert 0.001 <= seal._time_cipher(seal.Cipher(Warming, 16)) < 0.02
