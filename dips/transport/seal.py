"""Encrypted lanes: keys of slaves and ranks, which keys a lane admits (ZAP), and the seal of each frame.

A slave makes a key pair when it starts, a rank one for each attempt, in memory only. Public keys travel by mutual TLS:
the lanes' in Register and Grant, the ranks' in RequestPush and RequestPull and on to the slaves. The master knows no
secret. What must stay true, and why nobody else can read, alter, replay or reorder a frame: docs/protocol.md#sealing.
Keys are spelled in Z85, 40 characters; without a key a lane is not encrypted.
"""

from __future__ import annotations

import hmac
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import zmq
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

from dips.dataclass import dataclass
from dips.errors import RemoteProtocolError
from dips.wire.frame import BadFrame, Buffer, HashBody, Header, Kind, check_body, hash_body, pack_header

try:  # beneath PyNaCl's own functions, which copy what they take and what they return
    from nacl._sodium import ffi, lib

    seal_aegis, open_aegis = lib.crypto_aead_aegis128l_encrypt, lib.crypto_aead_aegis128l_decrypt
    lib.sodium_init()  # it looks at what the processor has
except (ImportError, AttributeError):
    seal_aegis = open_aegis = None

# ---- keys -----------------------------------------------------------------------------------------------------------
# X25519 between a rank's key pair and a slave's. A rank shows a lane its public key, and a proof that it has the
# secret one, by ZeroMQ's PLAIN mechanism. Who reads the connection can repeat both, and can do nothing with the
# connection that it gets: frames are sealed with other keys.


KEY_CHARS = 40  # characters of a key
KEY_BYTES = 32
_PROOF, _TRAFFIC = b"dips lane proof", b"dips lane traffic"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """An X25519 key pair; the public key in Z85."""

    public: str
    secret: X25519PrivateKey = field(repr=False)

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Accept only peers whose key and proof ZAP admits; call before bind."""
        socket.setsockopt(zmq.PLAIN_SERVER, 1)

    def speak_to(self, socket: zmq.Socket[bytes], server: str) -> None:
        """Show our key and its proof to the lane with this public key; call before connect."""
        try:
            proof = self.prove_to(server)
        except ValueError as error:
            raise RemoteProtocolError(f"expected the public key of a lane, got {server!r:.60}: {error}") from error
        socket.setsockopt(zmq.PLAIN_USERNAME, self.public.encode())
        socket.setsockopt(zmq.PLAIN_PASSWORD, proof)

    def prove_to(self, other: str) -> bytes:
        """Return what only the two owners of this key and of `other` can compute; ValueError if `other` is no key."""
        return _derive(_exchange(self.secret, decode_key(other)), _PROOF, KEY_BYTES)


def new_keys() -> KeyPair:
    """Return a new key pair."""
    secret = X25519PrivateKey.generate()
    return KeyPair(z85.encode(secret.public_key().public_bytes_raw()).decode(), secret)


def decode_key(key: str) -> bytes:
    """Return the bytes of a public key; raise ValueError if it is none."""
    try:
        raw: bytes = z85.decode(key.encode())
    except (struct.error, KeyError, IndexError) as error:
        raise ValueError(f"no Z85: {error}") from error
    if len(raw) != KEY_BYTES:
        raise ValueError(f"{len(raw)} bytes")
    return raw


def _exchange(secret: X25519PrivateKey, public: bytes) -> bytes:
    """X25519; ValueError for a point of low order, with which anybody would know the result."""
    return secret.exchange(X25519PublicKey.from_public_bytes(public))


def _derive(secret: bytes, info: bytes, nbytes: int) -> bytes:
    return HKDF(SHA256(), nbytes, None, info).derive(secret)


# ---- zap ------------------------------------------------------------------------------------------------------------
# Decides for each connection to an encrypted lane whether its key is admitted (ZAP, ZeroMQ RFC 27).
#
# libzmq sends the request through its context to one known endpoint and holds the handshake open until it is answered.
# The answer's User-Id is the key: every later frame of that connection has it, and no other's does. A property of that
# name that a peer sends itself has no effect: libzmq sets ZAP's first and replaces none. Used by one thread, the
# lane's.


ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"
USER_ID = "User-Id"  # libzmq's name of it in a frame's metadata
PARTS = 8  # version, request, domain, address, identity, mechanism, key, proof

Admit = Callable[[str], bool]


class ZapHandler:
    """The answering side, in one context; must be made before the lane is bound."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: KeyPair, admit: Admit) -> None:
        """`admit` decides on a public key, in Z85, and counts its refusals."""
        self._keys, self._admit = keys, admit
        self.socket = context.socket(zmq.REP)
        self.socket.bind(ENDPOINT)

    def answer_handshakes(self) -> None:
        """Answer all waiting requests; returns at once."""
        while True:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._decide(parts))

    def _decide(self, parts: list[bytes]) -> list[bytes]:
        request = parts[1] if len(parts) > 1 else b""
        if len(parts) == PARTS and parts[0] == VERSION and parts[5] == b"PLAIN":
            key = parts[6].decode("ascii", "replace")
            if self._admit(key) and self._is_proven(key, parts[7]):
                return [VERSION, request, b"200", b"OK", parts[6], b""]
        return [VERSION, request, b"400", b"no open push or pull has this key", b"", b""]

    def _is_proven(self, key: str, proof: bytes) -> bool:
        """Whether a peer has the secret of an admitted key, and means this slave."""
        try:
            return hmac.compare_digest(self._keys.prove_to(key), proof)
        except ValueError:
            return False

    def close(self) -> None:
        self.socket.close(linger=0)


# ---- sessions -------------------------------------------------------------------------------------------------------
# The traffic keys of one connection: of X25519 between the key pairs of both ends, and two that are made for it and
# told in the GREETINGs, so no two connections ever have the same. One key for each direction.
#
# A frame's nonce is its kind of counter (messages, chunks) and its counter, which its header tells. A counter is
# counted by one thread: messages are sealed as they leave, chunks by a stage. What arrives is taken in rising order, so
# a frame counts once.


WORN_BYTES = 1 << 38  # sealed with one key: 2^34 blocks, below TLS 1.3's 2^34.5, which keep its margin of 2^-57
TRIAL_BYTES = 1 << 18  # of the measurement that chooses a cipher
_NONCE = struct.Struct("<IQ")
_GREETING = struct.Struct(f"<B{KEY_BYTES}s")  # the cipher, the connection's public key


class Aegis128L:
    """AEGIS-128L (draft-irtf-cfrg-aegis-aead) by libsodium, called as the ciphers of `cryptography` are."""

    TAG_BYTES = 32
    _PAD = bytes(4)  # its nonce has 16 bytes, and so has its key

    def __init__(self, key: bytes) -> None:
        self._key = key[:16]

    def encrypt_into(self, nonce: bytes, data: Buffer, associated_data: bytes, out: Any) -> None:
        """Write the sealed data to `out`, which is longer by TAG_BYTES."""
        with _point_to(data) as body, _point_to(out, writable=True) as into:
            _check_room(into, len(body) + self.TAG_BYTES)
            known, nonce = associated_data, nonce + self._PAD
            seal_aegis(into, ffi.NULL, body, len(body), known, len(known), ffi.NULL, nonce, self._key)

    def decrypt_into(self, nonce: bytes, data: Buffer, associated_data: bytes, out: Any) -> None:
        """Write what was sealed to `out`, which is shorter by TAG_BYTES; raise InvalidTag if it is not authentic."""
        with _point_to(data) as body, _point_to(out, writable=True) as into:
            _check_room(into, len(body) - self.TAG_BYTES)
            known, nonce = associated_data, nonce + self._PAD
            if open_aegis(into, ffi.NULL, ffi.NULL, body, len(body), known, len(known), nonce, self._key):
                raise InvalidTag


def _point_to(data: Any, writable: bool = False) -> Any:
    """A context with a pointer to these bytes. To keep one longer, as a traceback would, can crash the process: the
    garbage collector may clear the memoryview before the pointer.
    """
    return ffi.from_buffer("unsigned char[]", data, require_writable=writable)


def _check_room(out: Any, nbytes: int) -> None:
    if len(out) != nbytes:
        raise ValueError(f"expected room for {nbytes} bytes, got {len(out)}")


class Cipher(NamedTuple):
    """An authenticated cipher."""

    of_key: Any  # makes one for a key
    tag_bytes: int  # that what is sealed is longer


# An end that wants one of them has all after it.
CIPHERS = (Cipher(Aegis128L, Aegis128L.TAG_BYTES), Cipher(AESGCM, 16), Cipher(ChaCha20Poly1305, 16))


@cache
def fastest_cipher() -> int:
    """The cipher that is the fastest one here, by its place: one by AES, if that is in hardware. Cost: 2 ms, once."""
    first = 0 if seal_aegis else 1
    times = [_time_cipher(cipher) for cipher in CIPHERS[first:]]
    return first + times.index(min(times))


def _time_cipher(cipher: Cipher) -> float:
    """Seconds to seal TRIAL_BYTES, the best of a few tries."""
    sealing, best = cipher.of_key(bytes(KEY_BYTES)), float("inf")
    body, out = bytes(TRIAL_BYTES), np.empty(TRIAL_BYTES + cipher.tag_bytes, np.uint8)
    for number in range(4):
        begun = time.perf_counter()
        sealing.encrypt_into(_NONCE.pack(0, number), body, b"", out)
        best = min(best, time.perf_counter() - begun)
    return best


class Session:
    """Seals and opens the frames of one connection, at one end (`frame.FrameGuard`)."""

    def __init__(self, cipher: Cipher, send: bytes, receive: bytes) -> None:
        """`send` and `receive` are the keys of the directions."""
        self._send, self._receive, self.tag_bytes = cipher.of_key(send), cipher.of_key(receive), cipher.tag_bytes
        self._sent = [0, 0]  # counters of messages, of chunks: each is one thread's
        self._taken = [0, 0]  # the last that was opened
        self._bytes = [0, 0]  # of chunks, sealed and opened

    @property
    def worn(self) -> bool:
        """Whether the keys have done enough: the rank takes a new connection."""
        return max(self._bytes) >= WORN_BYTES

    def seal_frame(self, header: Header, body: Buffer, digest: HashBody = hash_body) -> tuple[bytes, Buffer]:
        """Return the header and the sealed body of a frame. Cost: reads the body and allocates as much."""
        del digest  # the tag is in its place
        chunk = header.kind is Kind.CHUNK
        self._sent[chunk] += 1
        self._bytes[0] += header.length * chunk
        spelled = pack_header(header._replace(counter=self._sent[chunk]))
        sealed = np.empty(header.length + self.tag_bytes, np.uint8)
        self._send.encrypt_into(_NONCE.pack(chunk, self._sent[chunk]), body, spelled, sealed)
        return spelled, sealed.data

    def open_frame(self, header: Header, body: Buffer) -> Buffer:
        """Return the body that was sealed; raise BadFrame if it is not the peer's next one."""
        opened = np.empty(header.length, np.uint8)
        self.open_into(header, body, opened)
        return opened.data

    def open_into(self, header: Header, body: Buffer, target: Any) -> None:
        """Check a body and write it to `target` in one pass; after BadFrame what lies there is undefined."""
        chunk = header.kind is Kind.CHUNK
        if header.counter <= self._taken[chunk]:
            raise BadFrame(
                "replayed", f"counter {header.counter} of a {header.kind.name} came after {self._taken[chunk]}"
            )
        try:
            self._receive.decrypt_into(_NONCE.pack(chunk, header.counter), body, pack_header(header), target)
        except InvalidTag as error:
            raise BadFrame(
                "seal", f"a {header.kind.name} is not sealed with its connection's key, or altered"
            ) from error
        self._taken[chunk] = header.counter
        self._bytes[1] += header.length * chunk


class Greeter:
    """The rank's end of a new connection."""

    def __init__(self, keys: KeyPair, server: str) -> None:
        self._keys, self._server = keys, server
        self._once, self._wish = X25519PrivateKey.generate(), fastest_cipher()
        self.greeting = _pack_greeting(self._wish, self._once)

    def begin_session(self, header: Header, answer: Buffer) -> Session:
        """Return the session that the lane's GREETING begins; raise BadFrame if it is none."""
        if header.kind is not Kind.GREETING:
            raise BadFrame("seal", f"expected the greeting of a lane, got a {header.kind.name}")
        check_body(header, answer)
        number, once = _read_greeting(answer, self._wish)
        secret = _agree(self._keys, self._server, self._once, once)
        send, receive = _traffic_keys(secret, self._keys.public, self._server, self.greeting, bytes(answer))
        return Session(CIPHERS[number], send, receive)


class Sessions:
    """The sessions of a lane's connections. The lane's thread writes, any may look one up."""

    def __init__(self, keys: KeyPair, most: int) -> None:
        """`most` are kept: beyond that, the one that was used longest ago is forgotten, and its rank connects anew."""
        self._keys, self._most, self._wish = keys, most, fastest_cipher()
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def find_session(self, peer: bytes) -> Session | None:
        """Return the session of a peer, None if it has not greeted."""
        return self._sessions.get(peer)

    def keep_session(self, peer: bytes) -> None:
        """Count a session as used; called by the lane's thread for each frame that arrives."""
        with suppress(KeyError):
            self._sessions.move_to_end(peer)

    def forget_session(self, peer: bytes) -> None:
        """End the session of a peer whose connection has ended. Idempotent."""
        self._sessions.pop(peer, None)

    def greet_peer(self, peer: bytes, greeting: Buffer) -> bytes:
        """Begin the session of a peer, whose name begins with its key, and return the answer; raise BadFrame if the
        greeting is none.
        """
        wish, theirs = _read_greeting(greeting, 0)
        once, key = X25519PrivateKey.generate(), peer[:KEY_CHARS].decode()
        number = max(wish, self._wish)  # the first that both have, and that neither finds slow
        answer = _pack_greeting(number, once)
        secret = _agree(self._keys, key, once, theirs)
        receive, send = _traffic_keys(secret, key, self._keys.public, bytes(greeting), answer)
        while len(self._sessions) >= self._most:
            self._sessions.popitem(last=False)
        self._sessions[peer] = Session(CIPHERS[number], send, receive)
        return answer


# wart: release 0.1.0 has two numbers, of AES-256-GCM and ChaCha20-Poly1305. AEGIS is spelled as the first, and by the
# highest bit of the key: keys have none there, and X25519 leaves it out of account (RFC 7748).
_AEGIS_BIT = 0x80


def _pack_greeting(cipher: int, once: X25519PrivateKey) -> bytes:
    key = bytearray(once.public_key().public_bytes_raw())
    key[-1] |= 0 if cipher else _AEGIS_BIT
    return _GREETING.pack(max(cipher - 1, 0), bytes(key))


def _read_greeting(body: Buffer, first: int) -> tuple[int, bytes]:
    """The cipher, `first` or a later one, and the key that a greeting names."""
    if len(body) != _GREETING.size:
        raise BadFrame("greeting", f"expected a greeting of {_GREETING.size} bytes, got {len(body)}")
    number, once = _GREETING.unpack(body)
    cipher = 0 if once[-1] & _AEGIS_BIT else number + 1
    if not first <= cipher < len(CIPHERS):
        raise BadFrame("greeting", f"expected a cipher from {first} to {len(CIPHERS) - 1}, got {cipher}")
    return cipher, once


def _agree(keys: KeyPair, other: str, once: X25519PrivateKey, other_once: bytes) -> bytes:
    """Return what both ends alone can compute, as by Noise KK: of their key pairs, and of those of the connection."""
    static = decode_key(other)
    try:
        mixed = _exchange(once, static), _exchange(keys.secret, other_once)
        return b"".join((_exchange(keys.secret, static), _exchange(once, other_once), *sorted(mixed)))
    except ValueError as error:
        raise BadFrame("greeting", f"no key can be agreed on: {error}") from error


def _traffic_keys(secret: bytes, rank: str, slave: str, greeting: bytes, answer: bytes) -> tuple[bytes, bytes]:
    """The keys from rank to slave and from slave to rank: of all that both have seen."""
    info = _TRAFFIC + rank.encode() + slave.encode() + greeting + answer
    both = _derive(secret, info, 2 * KEY_BYTES)
    return both[:KEY_BYTES], both[KEY_BYTES:]
