"""`dips`: what an operator types: make a run, look at it, take a model out of it, see it all work.

Every word ends with the exit codes of errors.py. Nothing here decides or moves; each word calls the room that does.
"""

from __future__ import annotations

from typing import Annotated

import typer

from dips import __version__
from dips.commands import (
    certs,
    cluster,
    config,
    demo,
    drain,
    export,
    history,
    init,
    logs,
    new,
    plan,
    plot,
    rebalance,
    recover,
    rollback,
    seed,
    set_options,
    status,
    stop,
    study,
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
  dips demo --seconds 60 --no-kill                          a run with two clusters, and what it claims
  dips new my-run && cd my-run && dips up -- python train.py    a run of your own on this machine

\b
A run:
  dips plan memory --parameters N                           what it will need
  dips study study.yaml                                     which outer step suits its model
  dips new DIRECTORY                                        write its files
  dips init --config dips.yaml ...                          make it
  dips config check dips.yaml cluster.yaml                  all that the daemons would refuse
  dips seed --config dips.yaml --model FILE                 or bring the model to slaves that wait for it
  dips-master --config dips.yaml                            serve it
  dips-slave --config dips.yaml --name NAME                 once for each slave
  dips-client --config cluster.yaml -- torchrun ... train.py    once for each cluster
  dips status --config dips.yaml --watch                    look at it: now,
  dips history --config dips.yaml                           and round by round,
  dips plot --config dips.yaml                              and as a curve
  dips export --config dips.yaml --output model.safetensors take the model out
  dips stop --config dips.yaml                              let it end with its next version

\b
Keeping it going:
  dips certs init ca/ --run RUN                             certificates: who is who
  dips verify --config dips.yaml                            read all snapshots through
  dips set KEY=VALUE --config dips.yaml                     change lr, window, gate or the end while the run goes on
  dips cluster quarantine|readmit NAME --config dips.yaml   keep a cluster out of the outer step, and let it in again
  dips rollback vN@rM --config dips.yaml                    go back to an older version, by hand
  dips drain SLAVE --config dips.yaml                       take a slave out of service, no round skipped
  dips rebalance --config new.yaml --old dips.yaml          move the layers to more, fewer or other slaves
  dips-master replay master/                                decide again what a master decided
  dips recover --config dips.yaml --model model.safetensors    go on from a saved model when a disk is lost
  dips-master recover --config dips.yaml                    make a restored ledger fit to serve

Exit codes: 0 done; 1 not done, or a check failed; 2 wrong words on the command line; 65 corrupt bytes; 69 nobody
answers; 78 the configuration is wrong. The message says what was expected, what came and what to do.""",
)

cli.add_typer(data.words, name="data")
cli.add_typer(cluster.words, name="cluster")
cli.add_typer(certs.words, name="certs")
cli.add_typer(config.words, name="config")
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say it and end.")
    ] = False,
) -> None:
    """Options before the word."""


for word in (
    demo.demo,
    new.new,
    up.up,
    logs.logs,
    init.init,
    seed.seed,
    status.status,
    history.history,
    plot.plot,
    verify.verify,
    export.export,
    stop.stop,
    set_options.set_options,
    drain.drain,
    rebalance.rebalance,
    recover.recover,
    rollback.rollback,
    study.study,
):
    cli.command(None if word is not set_options.set_options else "set")(word)


if __name__ == "__main__":
    main()
