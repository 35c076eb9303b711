"""The protocols that a release speaks, by which processes of two releases make one run (docs/protocol.md#releases).

A run speaks one *protocol*, a number in its ledger: it counts the messages between processes, the ledger's tables, and
the records in its mirror. A release speaks two, its own and the one before, so that a run may be of both while it is
upgraded, in any order, and may go back. The run begins with the newest that the release of `dips init` speaks, and
goes up by one when an operator says `dips finalise`, which is refused while anybody in it speaks less.

What a release adds, so that the one before understands all that it is told:

* A field of a message, event or record: the last one, `added(PROTOCOL, missing)`. Who reads a message or a status
  ignores fields that it does not know, and takes `missing` for one that is not there.
* A table or a column of the ledger: a row of RAISES (dips/master/schema.py), which `dips finalise` carries out.
* An order, a question, a record, a word of an enum, a file: written only if the run speaks the protocol that has it.
* A key of `shared`: left out of the digest that clusters compare where it has its default (dips/config/shared.py).

tests/unit/test_former_release.py holds all of this against the release before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

PROTOCOL = 2  # the newest that this release speaks; raised once in each release that adds something
OLDEST_PROTOCOL = PROTOCOL - 1
_UNSET = object()


def added(protocol: int, missing: Any, default: Any = _UNSET) -> Any:
    """Return the field of a dataclass that a protocol added.

    missing  its value where a peer or a file has none. Encodings (codec.py) leave the field out where it has this
             value, so that the release before reads them: a record must not have another in a run that speaks less
    default  its value where the code that makes the object names none; `missing` if it is not given
    """
    own = missing if default is _UNSET else default
    return dataclasses.field(default=own, metadata={"added": protocol, "missing": missing})


def is_new(metadata: Mapping[str, Any]) -> bool:
    """Whether the release before does not know the field with this metadata."""
    return bool(metadata.get("added", 0) > OLDEST_PROTOCOL)


def why_refused(spoken: int, oldest: int, newest: int) -> str:
    """Return why a peer that speaks these protocols cannot take part in a run that speaks `spoken`; "" if it can."""
    if oldest <= spoken <= newest:
        return ""
    theirs = f"{oldest}" if newest <= oldest else f"{oldest} to {newest}"
    return f"expected {spoken}, which this run speaks, got {theirs}; " + (
        "run `dips finalise` before this release, or install the one before it"
        if oldest > spoken
        else "install a release there that speaks it: the master's, say"
    )
