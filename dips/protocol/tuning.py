"""An operator changes numbers of the outer step, the gate and the deadlines while the run goes on (`dips set`).

The ledger keeps each change, so every later master has it. A change holds from the next decision on: a round that is
being applied ends with the numbers that its Apply named, and these are what the version's row says. The run file, and
the digest that clusters compare, keep what the run began with.
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
    """Legal any time; a repetition changes nothing and is answered with what holds."""
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
    """Updates give back what rounding leaves over through m (docs/protocol.md#updates): without it nothing would."""
    if run.options.outer.momentum and not options.outer.momentum:
        raise ConfigError("outer.momentum: 0 would lose what updates carry over in m; expected a number above 0")
