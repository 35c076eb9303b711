"""The command `dips export`: writes a version as one checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from dips.commands.completing import complete_version
from dips.commands.options import CREDENTIALS, MASTER, WHOSE, find_master, open_ledger, read_version
from dips.config import load_run
from dips.errors import ConfigError
from dips.files import explain_unwritable
from dips.ids import GENESIS, VersionId

SAFETENSORS, HF = "safetensors", "hf"


def export(
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write; with --format hf the directory.")],
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    version: Annotated[
        str | None,
        typer.Option(
            metavar="vN@rM",
            help="The version to write; default the head, with --config the newest on all disks.",
            autocompletion=complete_version,
        ),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", help="safetensors: one file; hf: a directory for from_pretrained.")
    ] = SAFETENSORS,
    factory: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="hf: a function that returns the PreTrainedModel.")
    ] = None,
    like: Annotated[
        Path | None, typer.Option(help="hf: a directory with config.json, whose tokenizer is copied.")
    ] = None,
    convert: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="hf: a function from tensors by name to the PreTrainedModel."),
    ] = None,
) -> None:
    """Write one version as a safetensors file, or as a directory of transformers.

    Parameters have the model's own names; `dips.load(model, file)` reads the file into a plain module. With
    --config it reads the slaves' snapshots, so it works while the run goes on and after it has ended; the directories
    of all slaves must be readable from here. With --master it pulls the version over the lanes, as a cluster does, from
    any host that reaches them; master and slaves must be up, and the version still kept (`master.keep_every`).

    \b
    Example:
      dips export --config dips.yaml --output model.safetensors
      dips export --config dips.yaml --output early.safetensors --version v12@r17
      dips export --master 127.0.0.1:7800 --output model.safetensors
      dips export --config dips.yaml --output my-model --format hf --factory mymodel:build
      dips export --config dips.yaml --output my-model --format hf --convert mymodel:to_llama
    """
    if form not in (SAFETENSORS, HF):
        raise ConfigError(f"--format: expected {SAFETENSORS} or {HF}, got {form!r}")
    if form == SAFETENSORS:
        written = _write_file(config, master, credentials, version, output)
        print(f"wrote {written} to {output} ({output.stat().st_size / 1e6:.1f} MB)")
        return
    from dips.commands.export_hf import ModelSource, write_hf_directory

    (source := ModelSource(factory, like, convert)).check(output)
    with explain_unwritable(f"--output {output}"):
        output.parent.mkdir(parents=True, exist_ok=True)
        beside = TemporaryDirectory(dir=output.parent, prefix=".unfinished-")
    with beside as aside:
        written = _write_file(config, master, credentials, version, file := Path(aside) / "model.safetensors")
        write_hf_directory(file, output, source)
    print(f"wrote {written} to {output}: AutoModelForCausalLM.from_pretrained({str(output)!r})")


def _write_file(
    config: Path | None, master: str | None, credentials: Path | None, version: str | None, output: Path
) -> VersionId:
    peer = find_master(config, master, credentials, pulls=True)
    wanted = read_version(version) if version else None
    if config is not None:
        return _write_from_disks(config, wanted or _newest_on_disks(config), output)
    from dips.commands.export_lanes import export_over_lanes

    return export_over_lanes(peer, wanted, output)


def _write_from_disks(config: Path, wanted: VersionId | None, output: Path) -> VersionId:
    from dips.master.genesis import INITIAL, fetch_initial, ledger_path, mirror_of
    from dips.slave.export import export_snapshot
    from dips.store.files import find_complete

    run_file = load_run(config)
    if wanted == GENESIS:  # slaves have no snapshot of it
        initial = run_file.master.directory / INITIAL
        here = (initial / str(GENESIS)).exists
        if not here() and ledger_path(run_file).exists() and (store := mirror_of(run_file)) is not None:
            fetch_initial(store, run_file.shared.run, run_file.master.directory)  # of a former standby
        if not here():
            raise ConfigError(f"{initial}: `dips seed` brought v0@r0 to the slaves alone: take it with --master")
        return export_snapshot([initial], GENESIS, output)
    directories = [s.directory for s in run_file.slaves]
    for directory in directories:
        for version, manifest in find_complete(directory).items():
            if version == (wanted or version) and manifest.run != run_file.shared.run:
                told = f"of run {run_file.shared.run} as in {config}, got one of run {manifest.run}"
                raise ConfigError(f"{directory / str(version)}: expected a version {told}")
    return export_snapshot(directories, wanted, output)


def _newest_on_disks(config: Path) -> VersionId | None:
    """Return the newest committed version that is on all disks, or None if the ledger is not here: then the newest
    complete snapshot is used. Raise ConfigError if there is none but v0@r0, and the run has gone on.
    """
    from dips.master.genesis import ledger_path

    path = ledger_path(run_file := load_run(config))
    if not path.exists():
        print(f"note: no ledger at {path}: taking the newest version that all slaves have", file=sys.stderr)
        return None
    with open_ledger(run_file) as ledger:
        versions = ledger.read_state().versions
    newest, head = next(row.version for row in reversed(versions) if row.durable), versions[-1].version
    if newest == GENESIS != head:
        raise ConfigError(f"no version of the run is on all disks yet: take its head {head} with --master")
    if newest != head:
        print(f"note: the head {head} is not on all disks yet: taking {newest}; --master has it", file=sys.stderr)
    return newest
