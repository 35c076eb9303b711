"""`dips data`: the subcommands that make a data set and describe one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dips.data import index
from dips.data.build import BuildPlan, build_dataset, parse_source
from dips.data.deal import TOLERANCE, Balance
from dips.data.documents import make_tokenizer
from dips.data.reader import DataSet

words = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make the data set of a run, and look at one.")


@words.command("build")
def build_command(
    sources: Annotated[list[str], typer.Option("--source", metavar="NAME=PATH", help="Once for each source.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory to make.")],
    ranges: Annotated[int, typer.Option(min=1, help="How many: hundreds for each cluster.")],
    seed: Annotated[int, typer.Option(help="Of the order of the documents.")] = 0,
    tokenizer: Annotated[
        str | None, typer.Option(help="For text: bytes, the path of a tokenizer.json, or MODULE:FUNCTION.")
    ] = None,
    eos_token: Annotated[str | None, typer.Option(help="What ends a document in that tokenizer.json.")] = None,
    key: Annotated[str, typer.Option(help="Of the text in a line of JSON, or a column of Parquet.")] = "text",
    dtype: Annotated[str | None, typer.Option(help="Of raw .bin files: uint16 or uint32.")] = None,
    eos: Annotated[int | None, typer.Option(help="Token that ends a document in .bin and .npy files.")] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0001, max=1.0, help="How far a source's share of a range may be off.")
    ] = TOLERANCE,
    cut: Annotated[int | None, typer.Option(min=0, help="Cut documents of more tokens; 0: none.")] = None,
    step_tokens: Annotated[
        int, typer.Option(min=0, help="Of a cluster's inner step; a range with fewer is refused. 0: not compared.")
    ] = 0,
) -> None:
    """Deal documents into ranges, each a fair sample of all sources.

    The master leases ranges to clusters, so there should be many more ranges than clusters. Documents of each source
    are shuffled by the seed and dealt so that every range has its share of every source; long documents are cut where
    that is needed. The check of balance is printed.

    A source is a file, a directory or a pattern: .jsonl, .json (an object a line), .parquet, plain text, all but
    Parquet also packed by gzip, bzip2, xz or Zstandard; Megatron's .bin with .idx, or .npy and .bin of tokens with
    NAME.documents.npy beside it (where each document begins) or --eos. Other files are refused by name. Text
    is tokenised into the directory; files of tokens stay where they are and are read from there.

    A range should have many inner steps; what it has more than whole steps is trained with the next one. Put `ranges`
    and the printed digest under `shared.data` of the run. Exit code 1 if a range is off by more than the
    tolerance.

    \b
    Example:
      dips data build -o corpus --ranges 4096 --tokenizer tokenizer.json --eos-token "</s>" \\
        --source web='web/*.jsonl.gz' --source code=code/
      dips data build -o corpus --ranges 512 --dtype uint16 --eos 0 --source all=tokens.bin
    """
    made = make_tokenizer(tokenizer, eos_token) if tokenizer else None
    chosen = tuple(parse_source(spec) for spec in sources)
    plan = BuildPlan(chosen, output, ranges, seed, made, key, dtype, eos, tolerance, cut, step_tokens)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("reading", total=None)

        def show_progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        built = build_dataset(plan, show_progress)
    Console().print(_sources_table([s.name for s in chosen], built.sources, built.balance))
    many = f"{built.cut_documents} documents of more than {built.cut} tokens were cut into {built.cut_pieces} pieces"
    how = many if built.cut_documents else "no document was cut"
    print(f"{sum(built.documents)} documents, {built.tokens} tokens, {ranges} ranges; {how}")
    print(_say_vocabulary(built.vocabulary, made))
    shortest = built.balance.shortest
    print(f"the shortest range has {shortest} tokens: an inner step of a cluster should take far fewer")
    print(f"wrote {output}; in the run file:\n  shared:\n    data: {{ranges: {ranges}, digest: {built.digest}}}")
    if built.balance.deviation > tolerance:
        print(
            f"NOT BALANCED: a share is off by {built.balance.deviation:.2%}, more than {tolerance:.2%} of a range: "
            "take fewer ranges, or cut documents (--cut)"
        )
        raise typer.Exit(1)
    print(f"balanced: no share is off by more than {built.balance.deviation:.2%} of a range")


@words.command()
def show(
    directory: Annotated[Path, typer.Argument(help="A data set.")],
    verify: Annotated[bool, typer.Option("--verify", help="Compare every byte with its digest.")] = False,
) -> None:
    """Print what a data set holds, and whether it is complete."""
    data = DataSet(directory, verify=verify)
    manifest = index.open_index(directory).manifest
    balance = manifest["balance"]
    table = Table("source", "tokens", "share", title_justify="left")
    for one, weight in zip(manifest["sources"], balance["sources"], strict=True):
        table.add_row(one["name"], str(sum(f["tokens"] for f in one["files"])), f"{weight['share']:.2%}")
    Console().print(table)
    print(f"{manifest['tokens']} tokens, {data.ranges} ranges, digest {data.digest}")
    print(_say_vocabulary(manifest["vocabulary"], manifest["tokenizer"]))
    print(f"ranges of {balance['shortest']} to {balance['longest']} tokens")
    print("every byte is as it was written" if verify else "sizes are right; --verify compares every byte")


def _say_vocabulary(size: int, tokenizer: object) -> str:
    whose = f"of {getattr(tokenizer, 'name', tokenizer)}" if tokenizer else "the largest token plus 1"
    return f"vocabulary: {size}, {whose}; a model has as many embeddings or more"


def _sources_table(names: list[str], tokens: tuple[int, ...], balance: Balance) -> Table:
    columns = ("source", "tokens", "share", "least in a range", "most in a range", "off by")
    table = Table(*columns, title="balance", title_justify="left", title_style="bold")
    for name, count, one in zip(names, tokens, balance.sources, strict=True):
        shares = (f"{value:.2%}" for value in (one.share, one.least, one.most, one.deviation))
        table.add_row(name, str(count), *shares)
    table.add_row("a range", f"{balance.mean:.0f}", "", f"{balance.shortest}", f"{balance.longest}", "")
    return table
