"""`dips export --format hf`: a directory for `from_pretrained`, with configuration, tied weights and tokenizer."""

from __future__ import annotations

import importlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dips.errors import ConfigError
from dips.files import explain_unwritable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Files of a model's directory that are copied; weights and config.json are written.
COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "generation_config.json",
)
ASIDE = "unfinished"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The source of the transformers model: exactly one of the three."""

    factory: str | None = None  # MODULE:FUNCTION that makes the model
    like: Path | None = None  # a transformers directory with config.json, whose tokenizer is copied, too
    convert: str | None = None  # MODULE:FUNCTION from tensors by name to the model, for models with other names

    def check(self, output: Path) -> None:
        """Raise ConfigError for what is known before a version has come: not exactly one is given, there is no such
        function or directory, a package is missing, or `output` is not empty.
        """
        if sum(way is not None for way in (self.factory, self.like, self.convert)) != 1:
            raise ConfigError(
                "--format hf: of what model? give one of --factory MODULE:FUNCTION, --like DIR and, if the model that "
                "was trained is none of transformers, --convert MODULE:FUNCTION"
            )
        if not output.name:  # `.`: nothing can be renamed over it
            raise ConfigError(f"--output: {output} has no name of its own: name a new directory")
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ConfigError(f"--output: {output} is there and not empty: name a new directory")
        for package in ("torch", "transformers"):
            try:
                importlib.import_module(package)
            except ImportError as error:
                raise ConfigError(f"--format hf needs {package} here ({error}): pip install 'di-ps[hf]'") from error
        from dips.client.parallel.factory import find_function

        for spec, option in ((self.factory, "--factory"), (self.convert, "--convert")):
            if spec is not None:
                find_function(spec, option)
        if self.like is not None:
            _read_kind(self.like)


def write_hf_directory(file: Path, directory: Path, source: ModelSource) -> None:
    """Write the version in `file` as a transformers directory. `file` lies beside it in a directory of this export's
    own, where it is written first.

    Raises ConfigError if the file does not fit the model.
    """
    model, like = _read_model(file, source), source.like
    aside = file.with_name(ASIDE)
    with explain_unwritable(f"--output {directory}"):
        aside.mkdir(mode=0o700)  # as the file of another export: for its owner
        model.save_pretrained(aside)
        for pattern in COPIED if like else ():
            for path in sorted(like.glob(pattern)):  # type: ignore[union-attr]
                shutil.copyfile(path, aside / path.name)
        aside.rename(directory)  # also over an empty directory, over no other


def _read_model(file: Path, source: ModelSource) -> PreTrainedModel:
    if source.convert is not None:
        return _convert_file(file, source.convert)
    from dips.client.load import load_version

    model = _make_model(source.factory) if source.factory else _make_like(source.like)  # type: ignore[arg-type]
    load_version(model, file)
    return model


def _convert_file(file: Path, spec: str) -> PreTrainedModel:
    from safetensors.torch import load_file

    from dips.client.parallel.factory import find_function

    function = find_function(spec, "--convert")
    try:
        made = function(load_file(file))
    except (KeyError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--convert {spec}: cannot convert this version: {error!r}") from error
    return _require_pretrained(made, f"--convert {spec}")


def _make_model(factory: str) -> PreTrainedModel:
    from dips.client.parallel.factory import make_module

    return _require_pretrained(make_module(factory), f"--factory {factory}")


def _require_pretrained(made: object, option: str) -> PreTrainedModel:
    from transformers import PreTrainedModel

    if not isinstance(made, PreTrainedModel):
        raise ConfigError(f"{option}: expected a PreTrainedModel of transformers, got {type(made).__name__}")
    return made


def _make_like(directory: Path) -> PreTrainedModel:
    kind, config = _read_kind(directory)
    made: PreTrainedModel = kind(config)
    return made


def _read_kind(directory: Path) -> tuple[Any, Any]:
    """Return the class and the configuration of the model of which this is a directory."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--like {directory}: expected a directory with config.json: {error}") from error
    named = (config.architectures or ["none"])[0]
    kind = getattr(transformers, named, None)
    if kind is None:
        raise ConfigError(f"--like {directory}: its architecture {named} is not one of transformers; use --factory")
    return kind, config
