"""Keys of clusters that measure the path to encrypted lanes before they join (`dips check`), sent to every
slave.

Such a key gives no access: for a while slaves answer its PROBEs (slave/keyring.py), and no other frame.
"""

from __future__ import annotations

from dips.errors import RemoteProtocolError
from dips.protocol.effects import Acknowledged, AdmitProbe, Failed, Pending
from dips.protocol.entities import ProbeAdmission
from dips.protocol.enums import FanoutKind
from dips.protocol.events import ProbeAsked
from dips.protocol.rank_keys import KEY_CHARS, is_key
from dips.protocol.run_state import RunState

MOST_PROBES = 64  # clusters whose last probe is remembered; a forgotten one is ordered again


def on_probe_asked(run: RunState, event: ProbeAsked) -> None:
    """Legal any time. A repetition with the same key gets Pending until every slave has it."""
    if not is_key(event.key):
        run.reply_to(event.req, Failed(RemoteProtocolError, f"key: expected {KEY_CHARS} characters of Z85"))
        return
    if not run.has_encrypted_lanes():
        run.reply_to(event.req, Acknowledged())
        return
    known = run.probes.get(event.cluster)
    if known is None or known.key != event.key:
        known = run.probes[event.cluster] = _admit_probe(run, event)
    waiting = ", ".join(known.fanout.waiting)
    run.reply_to(event.req, Pending(f"waits for {waiting}") if waiting else Acknowledged())


def _admit_probe(run: RunState, event: ProbeAsked) -> ProbeAdmission:
    run.probes.pop(event.cluster, None)
    if len(run.probes) >= MOST_PROBES:
        del run.probes[next(iter(run.probes))]
    order = AdmitProbe(event.cluster, event.key)
    return ProbeAdmission(event.key, run.order_all(FanoutKind.STANDALONE, run.head, order, run.options.timing.order_s))
