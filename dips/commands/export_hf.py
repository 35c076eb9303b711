"""`dips export --format hf`: a directory that `from_pretrained` reads, with configuration, ties and tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from dips.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Beside the weights and config.json, which are written: what a model's directory has for its users.
COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "generation_config.json",
)


def write_hf_directory(file: Path, directory: Path, factory: str | None, like: Path | None) -> None:
    """Write the version in `file` as a directory of transformers.

    factory  MODULE:FUNCTION that makes the model; or
    like     a directory of transformers with its config.json, whose tokenizer is copied, too

    Raise ConfigError if `directory` is not empty, or the file is not of that model.
    """
    if (factory is None) == (like is None):
        raise ConfigError("--format hf: of what model? give --factory MODULE:FUNCTION or --like DIR, one of them")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"--output: {directory} is there and not empty: name a new directory")
    from dips.client.load import load_version

    model = _make_model(factory) if factory else _make_like(like)  # type: ignore[arg-type]
    load_version(model, file)
    aside = directory.with_name(f".unfinished-{directory.name}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        model.save_pretrained(aside)
        for pattern in COPIED if like else ():
            for path in sorted(like.glob(pattern)):  # type: ignore[union-attr]
                shutil.copyfile(path, aside / path.name)
        if directory.exists():
            directory.rmdir()
        aside.rename(directory)
    except OSError as error:
        raise ConfigError(f"--output: {directory} cannot be written: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _make_model(factory: str) -> PreTrainedModel:
    from transformers import PreTrainedModel

    from dips.client.parallel.factory import make_module

    made = make_module(factory)
    if not isinstance(made, PreTrainedModel):
        raise ConfigError(f"--factory {factory}: expected a PreTrainedModel of transformers, got {type(made).__name__}")
    return made


def _make_like(directory: Path) -> PreTrainedModel:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--like {directory}: expected a directory with config.json: {error}") from error
    named = (config.architectures or ["none"])[0]
    kind = getattr(transformers, named, None)
    if kind is None:
        raise ConfigError(f"--like {directory}: its architecture {named} is not one of transformers; use --factory")
    made: PreTrainedModel = kind(config)
    return made
