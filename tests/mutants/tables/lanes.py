"""Mutants of who may speak on a lane (dips/slave/keyring.py, dips/transport/zap.py, dips/protocol/rank_keys.py)."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

KEYRING = "tests/unit/slave/test_keyring.py"
ADMISSION = "tests/unit/slave/test_admission.py"
ZAP = "tests/unit/transport/test_zap.py"
KEYS = "tests/unit/protocol/test_rank_keys.py"
CURVE = "tests/integration/test_curve.py"

MUTANTS = (
    Mutant("every key is admitted", "dips/slave", "return key in self._uses or any(", "return True or any(", KEYRING),
    Mutant("a probe is admitted for ever", "dips/slave", "key == k and now < until for", "key == k for", KEYRING),
    Mutant("a key stays after its transfer", "dips/slave", "if self._uses[key] <= 0:", "if False:", KEYRING),
    Mutant("a key goes with the first of its transfers", "dips/slave", "if self._uses[key] <= 0:", "if True:", KEYRING),
    Mutant(
        "any key is every rank's", "dips/slave", 'return "" if keys[name.rank] == key else', 'return "" or', KEYRING
    ),
    Mutant("an order without keys opens to all", "dips/slave", "ranks, needed=True)", "ranks, needed=False)", KEYRING),
    Mutant(
        "a HELLO in another's name is taken",
        "dips/slave/admission.py",
        'return ("denied", why) if why else None',
        "return None",
        ADMISSION,
    ),
    Mutant("ZAP lets in whoever asks", "dips/transport", "if self._admit(key.decode()):", "if key:", ZAP),
    Mutant("another mechanism has a key", "dips/transport", 'parts[5] == b"CURVE" and ', "", ZAP),
    Mutant("a peer is its route alone", "dips/transport/lane.py", "if not self._key_chars:", "if True:", CURVE),
    Mutant(
        "a probe whose key is gone is answered",
        "dips/slave/flow.py",
        "not self._keyring.admits(self._key_of(peer), self._clock()):",
        "False:",
        CURVE,
    ),
    Mutant("a push without keys is granted", "dips/protocol", "if not keys and not needed:", "if not keys:", KEYS),
    Mutant("a flip of any size", "dips/protocol", "if keys <= MOST_FLIP_KEYS:", "if True:", KEYS),
    Mutant("a probe's key is ordered again", "dips/protocol", "known is None or known.key != event.key", "True", KEYS),
)
