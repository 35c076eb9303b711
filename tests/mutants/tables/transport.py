"""Mutants of frames, codecs and streams (dips/wire, dips/transport)."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

WIRE, ROOM = "dips/wire", "dips/transport"
TABLE, QUANTISERS = "dips/codecs.py", "dips/quantisers.py"
FRAME = "tests/unit/wire/test_bites_frame.py tests/unit/wire/test_frame.py"
CHUNKS = "tests/unit/wire/test_chunks.py"
CODECS = "tests/unit/wire/test_bites_bodies.py tests/unit/wire/test_bodies.py"
INTAKE = "tests/unit/transport/test_bites_intake.py tests/unit/transport/test_intake.py"
TURNS = "tests/unit/transport/test_turns.py"
SHARES = "tests/unit/transport/test_shares.py"
LIMITS = "tests/unit/transport/test_limits.py"

RECEPTION = "tests/unit/transport/test_reception.py"

MUTANTS = (
    Mutant(
        "a peer takes all places of messages",
        "dips/transport",
        "async with self._peers[peer].places, self._all:",
        "async with self._all:",
        RECEPTION,
    ),
    Mutant(
        "any number of messages arrives at once",
        "dips/transport",
        "async with self._peers[peer].places, self._all:",
        "async with self._peers[peer].places:",
        RECEPTION,
    ),
    Mutant(
        "a peer calls over any number of connections",
        "dips/transport",
        "and len(calls.connections) >= most:",
        "and not most:",
        RECEPTION,
    ),
    Mutant("who has gone is kept among those who call", "dips/transport", "del self._peers[peer]", "pass", RECEPTION),
    Mutant(
        "a message is waited for without end",
        "dips/transport",
        "async with asyncio.timeout(within_s):",
        "async with asyncio.timeout(9):",
        RECEPTION,
    ),
    Mutant(
        "a header's checksum is not checked",
        WIRE,
        "if _CHECKSUM.unpack_from(",
        "if False and _CHECKSUM.unpack_from(",
        FRAME,
    ),
    Mutant(
        "a body's checksum is not checked",
        WIRE,
        "if xxhash.xxh3_64_intdigest(body) != header.body_xxh3:",
        "if False:",
        FRAME,
    ),
    Mutant("a body of another length", WIRE, "if header.length != body_bytes:", "if False:", FRAME),
    Mutant(
        "a chunk of twice the size",
        WIRE,
        "header.length <= chunk_bytes or",
        "header.length <= 2 * chunk_bytes or",
        FRAME,
    ),
    Mutant("an empty chunk", WIRE, "if not 0 < header.length", "if not 0 <= header.length", FRAME),
    Mutant("reserved bits are ignored", WIRE, "    if reserved:", "    if False:", FRAME),
    Mutant("a frame of another run", WIRE, "if its_run != run:", "if False:", FRAME),
    Mutant("a place beyond 2^62", WIRE, "header.offset > 1 << 62:", "header.offset > 1 << 63:", FRAME),
    Mutant(
        "a message of twice the limit",
        WIRE,
        "if header.length > MESSAGE_LIMIT:",
        "if header.length > 2 * MESSAGE_LIMIT:",
        FRAME,
    ),
    Mutant("half an element of bf16", TABLE, "nbytes % (codec.bits // 8) == 0", "True", FRAME),
    Mutant(
        "a step without elements",
        TABLE,
        "codec.bits // 8) <= ITEM_BYTES",
        "codec.bits // 8) < ITEM_BYTES",
        FRAME,
    ),
    Mutant(
        "a message that names a place",
        WIRE,
        "header.layer or header.param or header.offset",
        "header.layer or header.offset",
        FRAME,
    ),
    Mutant(
        "a range beyond its parameter",
        WIRE,
        "piece.offset + piece.length > field.numel:",
        "piece.offset > field.numel:",
        CHUNKS,
    ),
    Mutant("an empty range", WIRE, "if piece.length < 1 or", "if piece.length < 0 or", CHUNKS),
    Mutant("overlaps are not seen", WIRE, "elif offset < at:", "elif False:", CHUNKS),
    Mutant("the last gap is not seen", WIRE, "if at < field.numel:", "if False:", CHUNKS),
    Mutant("chunks beyond their range", WIRE, "min(most, length - begin)", "most", CHUNKS),
    Mutant(
        "a short block's step is not counted",
        TABLE,
        "-(-length // self.block)",
        "length // self.block",
        CODECS,
    ),
    Mutant("bf16 rounds halves up", QUANTISERS, "odd += 0x7FFF\n", "odd += 0x8000\n", CODECS),
    Mutant("a NaN becomes an infinity", QUANTISERS, "np.uint16(0x7FC0)", "np.uint16(0x7F80)", CODECS),
    Mutant("steps below the normal numbers", TABLE, "max(-119, self", "max(-149, self", CODECS),
    Mutant(
        "what is not finite becomes zero",
        QUANTISERS,
        "steps[~np.isfinite(steps)] = np.nan",
        "steps[~np.isfinite(steps)] = 0",
        CODECS,
    ),
    Mutant("int8 overflows", TABLE, "256,    127,", "256,    129,", CODECS),
    Mutant("int4 overflows", TABLE, "128,      7,", "128,      9,", CODECS),
    Mutant("a step of fp8 below the normal numbers", TABLE, "self.largest.bit_length() - 126", "-126", CODECS),
    Mutant("fp8 sends NaN", QUANTISERS, "np.minimum(odd, _MOST_E4M3, out=odd)", "pass", CODECS),
    Mutant("fp8 leaves half of its range", TABLE, "256,    448,", "256,    224,", CODECS),
    Mutant("fp8 rounds halves up", QUANTISERS, "odd += 0x7FFFF\n", "odd += 0x80000\n", CODECS),
    Mutant("fp8 has no subnormal numbers", QUANTISERS, "where=magnitude < _SUBNORMAL", "where=magnitude < 0", CODECS),
    Mutant("fp8 has no sign", QUANTISERS, ">> 24 & 0x80", ">> 24 & 0", CODECS),
    Mutant("int4 swaps the two of a byte", QUANTISERS, "pairs |= pairs << 4", "pairs |= pairs >> 4", CODECS),
    Mutant("int4 has no zero of its own", QUANTISERS, "whole -= _ZERO4", "whole -= 7", CODECS),
    Mutant("blocks are cut in two", TABLE, "ITEM_BYTES * max(1, self.block)", "ITEM_BYTES", CODECS),
    # ---- streams
    Mutant(
        "a chunk of another length is claimed",
        ROOM,
        "(chunk.nbytes, chunk.dtype) != (header.length, header.dtype)",
        "False",
        INTAKE,
    ),
    Mutant(
        "one chunk too many in flight",
        ROOM,
        "len(self._asked) < MOST_CHUNKS:",
        "len(self._asked) <= MOST_CHUNKS:",
        INTAKE,
    ),
    Mutant(
        "what was asked is lost with its connection",
        ROOM,
        "for chunk in reversed(self._asked.values()):",
        "for chunk in ():",
        INTAKE,
    ),
    Mutant(
        "asked again in reverse",
        ROOM,
        "for chunk in reversed(self._asked.values()):",
        "for chunk in list(self._asked.values()):",
        INTAKE,
    ),
    Mutant(
        "a claimed chunk is given to nobody", ROOM, "        self._claimed -= 1", "        self._claimed -= 0", INTAKE
    ),
    Mutant("credit of one bandwidth-delay product", ROOM, "2 * max(self._rtt", "1 * max(self._rtt", INTAKE),
    Mutant(
        "credit below its least", ROOM, "min(max(wanted, LEAST_BYTES), MOST_BYTES)", "min(wanted, MOST_BYTES)", INTAKE
    ),
    Mutant(
        "credit above its most", ROOM, "min(max(wanted, LEAST_BYTES), MOST_BYTES)", "max(wanted, LEAST_BYTES)", INTAKE
    ),
    Mutant("transit above its limit", ROOM, "self._used + nbytes > self.limit", "self._used > self.limit", INTAKE),
    Mutant("small chunks cost nothing", ROOM, "FLOOR_BYTES = 4096", "FLOOR_BYTES = 1", INTAKE),
    Mutant("a turn's debt is forgiven", ROOM, "self._debt[key] = min(left, 0)", "self._debt[key] = 0", TURNS),
    Mutant("a slow stream keeps its turn", ROOM, "elif slow(key) or (", "elif (", TURNS),
    Mutant("a turn ends in flight", ROOM, "(left <= 0 and drained(key))", "left <= 0", TURNS),
    Mutant("one stream too many is asked", ROOM, "len(self._active) < self.", "len(self._active) <= self.", TURNS),
    Mutant("a view beyond its piece", ROOM, "offset + length <= end:", "offset < end:", SHARES),
    Mutant("a view before its piece", ROOM, "if first <= offset and", "if", SHARES),
    Mutant("a piece of another dtype is sent", ROOM, "if array.dtype != np.float32 or", "if", SHARES),
    Mutant("a bucket is never empty", ROOM, "if self._left < 1.0:", "if False:", LIMITS),
    Mutant("a bucket holds any number", ROOM, "self._left = min(self._burst, ", "self._left = max(0.0, ", LIMITS),
    Mutant("peers are remembered for ever", ROOM, "if len(self._peers) >= MOST_PEERS:", "if False:", LIMITS),
    Mutant("a handshake that fails is forgotten", ROOM, 'count_refusal("handshake")', "pass", LIMITS),
    Mutant(
        "an update's block is cut in two",
        "dips/wire/chunks.py",
        "most + -(self.offset + most) % UPDATE_BLOCK if self.depth else most",
        "most",
        "tests/unit/wire/test_updates.py",
    ),
)
