"""What a user calls a model → a Checkpoint: a folder, `random:SIZE[:SEED]`, a built-in model's name, or nothing."""

import os
from pathlib import Path
from typing import Literal

from loaders.checkpoint import Checkpoint, open_checkpoint
from loaders.synthetic import SIZES, parse_random, random_checkpoint, random_config
from loaders.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from qwen_raw.errors import UsageError

__all__ = ["BUILTIN", "DEFAULT_MODEL", "Checkpoint", "open_model", "open_tokenizer"]

BUILTIN = ("tiny-shakespeare", "tiny-shakespeare-draft")
DEFAULT_MODEL = BUILTIN[0]


def builtin_path(name: str) -> Path:
    """The folder of a built-in model, which is installed beside this file."""
    return Path(__file__).parent / "builtin" / name


def open_model(
    spec: str | os.PathLike[str] | None = None,
    dtype: Literal["auto", "bf16", "fp8"] = "auto",
    *,
    what: str = "model",
) -> Checkpoint:
    """Open what `spec` names; None is the built-in tiny-shakespeare. A `Path` always names a folder.

    A folder called like a built-in model is "./name" (or Path("name")).

    `dtype` is what a random model is made in; anything else has the dtype it is stored in. `what`: messages call it.
    Raises UsageError, one line, for what is no model that can be run: a folder that lacks a file, or whose files are
    damaged or not supported.
    """
    if spec is None:
        spec = DEFAULT_MODEL
    if not isinstance(spec, str):
        return open_checkpoint(_folder(spec, what))
    if spec in BUILTIN:
        return open_checkpoint(builtin_path(spec))
    if spec == "random" or spec.startswith("random:"):
        size, seed = parse_random(spec, what)
        return random_checkpoint(random_config(size), "fp8" if dtype == "fp8" else "bf16", seed)
    return open_checkpoint(_folder(spec, what))


def _folder(spec: str | os.PathLike[str], what: str) -> Path:
    """The folder that `spec` names, which exists."""
    if not isinstance(spec, str | os.PathLike) or not isinstance(os.fspath(spec), str):
        raise UsageError(
            f"{what} is {spec!r} ({type(spec).__name__}), expected a str or a Path, or None for the built-in"
        )
    folder = Path(spec).expanduser()
    if not spec or not folder.is_dir():
        problem = "is a file, not a folder" if spec and folder.exists() else "is not a folder"
        raise UsageError(
            f"{what} {os.fspath(spec)!r} {problem}; expected a folder with config.json and *.safetensors, "
            f"{', '.join(BUILTIN)}, or random:SIZE with SIZE one of {', '.join(SIZES)} (nothing is downloaded)"
        )
    return folder


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's tokenizer; bytes for a model that has no folder."""
    if checkpoint.path is None:
        return ByteTokenizer(checkpoint.config.V)
    return load_tokenizer(checkpoint.path, checkpoint.config.V)
