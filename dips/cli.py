"""The command `dips`, for operators: makes a run, shows it, exports its model, runs a demonstration.

All subcommands use the exit codes in errors.py. This module only registers them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from dips import __version__
from dips.commands import (
    certs,
    check,
    demo,
    export,
    follow,
    history,
    init,
    logs,
    new,
    operator,
    plan,
    plot,
    profile,
    rebalance,
    recover,
    seed,
    simulate,
    status,
    study,
    trace,
    up,
    verify,
)
from dips.data import app as data
from dips.telemetry import exits

cli = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=exits.HELP_OPTIONS,
    help="""Di-PS: several training clusters, far apart and unequal, train one model through CPU parameter servers.

\b
First look:
  dips demo --seconds 60 --no-kill                          a run with two clusters, and its losses
  dips new my-run && cd my-run && dips up -- python train.py    a run of your own on this machine

\b
A run:
  dips plan memory --parameters N                           compute what it will need
  dips plan site sites.yaml                                 compute where its servers should stand
  dips profile --factory mymodel:build                      measure devices and layers, under torchrun
  dips plan cluster profile.yaml model.yaml                 compute what to run inside one cluster of unequal devices
  dips simulate table2                                      simulate its transfers and slaves by sizes and rates
  dips study study.yaml                                     find the outer step that suits its model
  dips new DIRECTORY                                        write its files
  dips init --config dips.yaml ...                          make it
  dips check --config dips.yaml --config cluster.yaml       find everything that the daemons would refuse
  dips seed --config dips.yaml --model FILE                 or send the model to waiting slaves
  dips-master --config dips.yaml                            serve it
  dips-slave --config dips.yaml --name NAME                 start each slave
  dips check --config cluster.yaml                          test a cluster's master, slaves and rates before it starts
  dips-client --config cluster.yaml -- torchrun ... train.py    start each cluster
  dips status --config dips.yaml --watch                    show its present state
  dips history --config dips.yaml                           list its rounds
  dips plot --config dips.yaml                              draw its losses
  dips trace master slave-0 slave-1 west                    write a trace of its pushes for ui.perfetto.dev
  dips export --config dips.yaml --output model.safetensors write the model to a file
  dips follow --config dips.yaml --command 'python evaluate.py'  run a command for each new version
  dips stop --config dips.yaml                              end it with its next version

\b
Operation:
  dips certs init ca/ --run RUN                             make an authority for certificates
  dips verify --config dips.yaml                            check all snapshots
  dips set KEY=VALUE --config dips.yaml                     change lr, window, gate or targets of a running run
  dips cluster quarantine|readmit NAME --config dips.yaml   exclude a cluster from the outer step, or readmit it
  dips rollback vN@rM --config dips.yaml                    make an older version the head again
  dips drain SLAVE|--all --config dips.yaml                 take one slave or all out of service without a skipped round
  dips finalise --config dips.yaml                          end an upgrade: nobody goes back to the former release
  dips rebalance --config new.yaml                          move the layers to more, fewer or different slaves
  dips-master replay master/                                repeat a master's decisions from its journal
  dips recover --config dips.yaml --model model.safetensors    continue from a saved model after a disk was lost
  dips-master recover --config dips.yaml                    prepare a restored ledger for serving

Exit codes: 0 done; 1 not done, or a check failed; 2 wrong usage of the command line; 65 corrupt bytes; 69 no process
answers; 78 the configuration is wrong. The message says what was expected, what came and what to do.""",
)

cli.add_typer(data.words, name="data")
cli.add_typer(operator.cluster_words, name="cluster")
cli.add_typer(certs.words, name="certs")
cli.add_typer(check.words, name="config")
cli.add_typer(plan.words, name="plan")


def main() -> None:
    """Entry point of the console script."""
    exits.run_command(cli)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dips {__version__}")
        raise typer.Exit


@cli.callback()
def _common_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the subcommand."""


for word in (
    demo.demo,
    new.new,
    up.up,
    logs.logs,
    init.init,
    check.check,
    seed.seed,
    status.status,
    history.history,
    plot.plot,
    profile.profile,
    trace.trace,
    verify.verify,
    export.export,
    follow.follow,
    operator.stop,
    operator.drain,
    operator.finalise,
    rebalance.rebalance,
    recover.recover,
    operator.rollback,
    simulate.simulate,
    study.study,
):
    cli.command()(word)
    if word is operator.stop:
        cli.command("set")(operator.set_options)


if __name__ == "__main__":
    main()
