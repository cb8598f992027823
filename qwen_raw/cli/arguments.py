"""What all commands share on the command line: one-line errors, both spellings of a flag, sizes such as 4k."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from qwen_raw.errors import UsageError
from qwen_raw.generation.speculation import DEFAULT_GUESSES, LOOPS, MOST_GUESSES, VERIFY, Speculation

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UsageErrors: one line instead of a usage text."""

    def __init__(self, prog: str | None = None, **kwargs: object) -> None:
        super().__init__(
            prog=prog,
            allow_abbrev=False,  # an abbreviation that works today is ambiguous after the next flag
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **kwargs,  # type: ignore[arg-type]
        )

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Help and version. argparse's own drops what cannot be written, which would pass for success."""
        if message:
            (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def hyphenate(argv: Sequence[str]) -> list[str]:
    """`--max_tokens=8` means `--max-tokens=8`: underscores in flag names, up to a lone `--`, become hyphens."""
    out = list(argv)
    for index, word in enumerate(out):
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            out[index] = name.replace("_", "-") + equals + value
    return out


def unicode(text: str) -> str:
    """An argument as the user's terminal sent it, UTF-8, also where Python took the locale to be ASCII."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # Python keeps bytes that it could not decode as lone surrogates
        try:
            return os.fsencode(text).decode("utf-8")
        except UnicodeError:
            raise argparse.ArgumentTypeError("the text is not UTF-8") from None
    return text


def count(text: str) -> int:
    """A whole number, with k (times 1024) if wanted: 4k is 4096."""
    match = re.fullmatch(r"(-?\d+)(k?)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 4096 or 4k")
    return int(match[1]) * (1024 if match[2] else 1)


def positive(text: str) -> int:
    """A `count` of at least 1."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """A `count` of at least 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    value = count(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return value


def ordinals(text: str) -> list[int]:
    """GPU numbers with commas between, one a rank: 0,1."""
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of GPU numbers such as 0,1")
    return [int(word) for word in words]


def ordinal(text: str) -> int:
    """A GPU's number."""
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a GPU number such as 1")
    return int(text)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, where it runs and how: the same for every command that loads one."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m",
        "--model",
        help="folder in Hugging Face layout, or random:SIZE, 0.5b … 72b, for synthetic weights "
        "(default: the built-in tiny-shakespeare)",
    )
    group.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu", "sim"),
        default="auto",
        help="auto: a GPU if there is one, else the CPU; sim: the GPU's kernels simulated on the CPU (slow)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "bf16", "fp8"),
        default="auto",
        help="weights of the linears; auto: as the checkpoint has them",
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "bf16", "fp8"),
        default="auto",
        help="of keys and values; fp8: half the memory and reads (docs/decode.md); auto: bf16",
    )
    group.add_argument(
        "--tp",
        "--tensor-parallel-size",
        type=positive,
        metavar="N",
        help="ranks to split the model over, a GPU each (default 1, or one for each of --devices)",
    )
    group.add_argument(
        "--devices",
        type=ordinals,
        metavar="N,N,…",
        help="the ranks' GPUs (default 0,1,…); a GPU may repeat, for tests: its ranks share it",
    )
    group.add_argument(
        "--comm",
        choices=("auto", "host", "flag", "lamport", "twoshot", "inline"),
        default="auto",
        help="how ranks sum their shares of a token (docs/tp.md); auto: what is fastest",
    )
    group.add_argument(
        "--gemm",
        choices=("auto", "own", "cublaslt"),
        default="auto",
        help="what multiplies prompts (docs/prefill.md); auto: cuBLASLt where it is installed and measured as faster",
    )
    group.add_argument(
        "-c",
        "--max-model-len",
        "--ctx-size",
        type=positive,
        metavar="N",
        help="longest sequence, prompt included (4k = 4096); default: the model's context, at most 32768",
    )


def add_speculation_arguments(parser: argparse.ArgumentParser) -> None:
    """Guessing ids that are then verified together: what the text is, it stays."""
    group = parser.add_argument_group(
        "speculation (several ids a pass if guesses are right: --spec-verify says how much they are those without it)"
    )
    where = group.add_mutually_exclusive_group()
    where.add_argument(
        "--draft", "--model-draft", metavar="MODEL", help="a smaller model of the same tokenizer guesses"
    )
    where.add_argument(
        "--ngram", type=positive, metavar="N", help="guess what followed the last ids, up to N of them, the time before"
    )
    group.add_argument(
        "--draft-device",
        type=ordinal,
        metavar="N",
        help="the draft model's GPU, a stream of its own on it (default: in rank 0's stream)",
    )
    group.add_argument(
        "--guesses",
        "--draft-max",
        type=positive,
        metavar="K",
        help=f"a pass at the most, 1 to {MOST_GUESSES} (default {DEFAULT_GUESSES}); fewer or none if that pays",
    )
    group.add_argument(
        "--spec-loop",
        choices=LOOPS,
        help=f"passes are queued by the host, or repeat themselves on the device where it can (default {LOOPS[0]})",
    )
    group.add_argument(
        "--spec-verify",
        choices=VERIFY,
        help="exact: bit for bit what single steps compute, so every id is theirs; rows: faster for large models, a "
        f"near-tie may turn out otherwise; {VERIFY[0]} (default): exact for small models, else rows",
    )


def speculation(args: argparse.Namespace) -> Speculation | None:
    """What these arguments ask for. UsageError for a number of guesses without a way to make them."""
    if args.draft is None and args.draft_device is not None:
        raise UsageError("--draft-device needs --draft MODEL")
    if args.draft is None and args.ngram is None:
        if args.guesses is not None:
            raise UsageError("--guesses needs --draft MODEL or --ngram N")
        if args.spec_loop is not None:
            raise UsageError("--spec-loop needs --draft MODEL or --ngram N")
        if args.spec_verify is not None:
            raise UsageError("--spec-verify needs --draft MODEL or --ngram N")
        return None
    guesses = DEFAULT_GUESSES if args.guesses is None else args.guesses
    loop, verify = args.spec_loop or LOOPS[0], args.spec_verify or VERIFY[0]
    return Speculation(args.draft, args.ngram, guesses, args.draft_device, loop, verify)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """How much to tell on stderr, and in what form the result comes."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the text")
    group.add_argument("--stats", action="store_true", help="print the stats line even with --quiet")
    level = group.add_mutually_exclusive_group()
    level.add_argument("-q", "--quiet", action="store_true", help="nothing on stderr but errors")
    level.add_argument("-v", "--verbose", action="store_true", help="say more about the model on stderr")
