"""Changes of the outer step, the gates and the deadlines by an operator in a running run (`dips set`).

The ledger keeps each change, so every later master has it. A change takes effect with the next decision: a round that
is being applied ends with the numbers of its Apply, and these are in the version's row. The run file, and the digest
that clusters compare, keep the initial values.
"""

from __future__ import annotations

from dips.errors import ConfigError
from dips.protocol.effects import Failed, Tuned
from dips.protocol.events import TuningAsked
from dips.protocol.options import Options
from dips.protocol.records import OptionsTuned
from dips.protocol.run_state import RunState
from dips.protocol.tunable import complete_changes, describe_changes, tune_options


def on_tuning_asked(run: RunState, event: TuningAsked) -> None:
    """Legal any time; a repetition changes nothing and is answered with the present values."""
    if run.refuse_unproven(event.req):
        return
    try:
        changes = complete_changes(event.changes)
        options = tune_options(run.options, changes)
        _check_momentum(run, options)
    except ConfigError as error:
        run.reply_to(event.req, Failed(ConfigError, str(error)))
        return
    if options != run.options:
        run.options = options
        run.penalty.change_options(options.penalty)
        run.tuned |= {change.key: change for change in changes}
        run.emit_record(OptionsTuned(changes, run.now))
        run.emit_note("options_tuned", changes=describe_changes(changes))
    run.reply_to(event.req, Tuned(tuple(run.tuned.values())))


def _check_momentum(run: RunState, options: Options) -> None:
    """Refuse momentum 0: through m, updates give back what rounding leaves over (docs/protocol.md#updates)."""
    if run.options.outer.momentum and not options.outer.momentum:
        raise ConfigError("outer.momentum: 0 would lose what updates carry over in m; expected a number above 0")
