"""`qwen-raw`: finds the command and runs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from qwen_raw.cli.process import guarded


def entry() -> NoReturn:
    """The console script."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Run one command; the exit code. Errors that a user can make or meet are printed as one line on stderr."""
    return guarded("qwen-raw", lambda: _dispatch(argv))


def _dispatch(argv: Sequence[str]) -> int:
    # imported here, so that `guarded` meets a Ctrl-C meanwhile
    from qwen_raw import __version__
    from qwen_raw.cli import devices, generate
    from qwen_raw.cli.arguments import Parser, hyphenate
    from qwen_raw.errors import UsageError

    parser = Parser(
        prog="qwen-raw",
        description="Qwen2-architecture inference from hand-written CUDA kernels.",
        epilog="Compiled kernels are kept in $QWEN_RAW_CACHE, or $XDG_CACHE_HOME/qwen-raw, or ~/.cache/qwen-raw.\n"
        "The folder may be deleted at any time: they are compiled again, which takes a while once.",
    )
    parser.add_argument("--version", action="version", version=f"qwen-raw {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    for command in (generate, devices):
        command.add_parser(commands)
    if argv and argv[0] not in (*commands.choices, "-h", "--help", "--version"):
        known = ", ".join(commands.choices)
        raise UsageError(f"{argv[0]!r} is not a command: begin with one of {known} (see qwen-raw --help)")
    args, unknown = parser.parse_known_args(hyphenate(argv))
    if unknown:
        words = "prompt" in args and not any(word.startswith("-") for word in unknown)
        hint = "; a prompt of several words needs quotes" if words else ""
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}{hint} (see qwen-raw {argv[0]} --help)")
    if "run" not in args:
        parser.print_help()
        return 0
    code: int = args.run(args)
    return code
