"""`qwen-raw`: finds the command, runs it, and turns what goes wrong into one line and an exit code.

Exit codes: 0 done; 1 it failed; 2 the request was wrong; 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from qwen_raw.cli.status import discard_stdout


def entry() -> NoReturn:
    """The console script."""
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()  # the reader of our output has seen enough
        code = 0
    except KeyboardInterrupt:
        code = _complain("interrupted", 130)
    sys.exit(code)


def main(argv: Sequence[str]) -> int:
    """Run one command; the exit code. Errors that a user can make or meet are printed as one line on stderr."""
    _use_utf8()
    # imported here, so that `entry` catches a Ctrl-C meanwhile
    from qwen_raw.cli.arguments import EXIT_FAILED, EXIT_USAGE
    from qwen_raw.errors import QwenRawError, UsageError

    try:
        return _dispatch(argv)
    except UsageError as error:
        return _complain(error, EXIT_USAGE)
    except QwenRawError as error:
        return _complain(error, EXIT_FAILED)
    except MemoryError as error:
        return _complain(f"not enough memory: {error}", EXIT_FAILED)
    except BrokenPipeError:
        raise  # `entry` ends quietly
    except OSError as error:
        discard_stdout()  # what could not be written must not fail again at exit
        return _complain(f"the output cannot be written: {error.strerror or error}", EXIT_FAILED)


def _dispatch(argv: Sequence[str]) -> int:
    from qwen_raw import __version__
    from qwen_raw.cli import devices, generate
    from qwen_raw.cli.arguments import Parser, hyphenate
    from qwen_raw.errors import UsageError

    parser = Parser(prog="qwen-raw", description="Qwen2-architecture inference from hand-written CUDA kernels.")
    parser.add_argument("--version", action="version", version=f"qwen-raw {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    for command in (generate, devices):
        command.add_parser(commands)
    if argv and argv[0] not in (*commands.choices, "-h", "--help", "--version"):
        known = ", ".join(commands.choices)
        raise UsageError(f"{argv[0]!r} is not a command: begin with one of {known} (see qwen-raw --help)")
    try:
        args = parser.parse_args(hyphenate(argv))
    except SystemExit as stop:  # argparse ends --help and --version so
        return int(stop.code or 0)
    if "run" not in args:
        parser.print_help()
        return 0
    code: int = args.run(args)
    return code


def _complain(problem: object, code: int) -> int:
    print("qwen-raw: " + " ".join(str(problem).splitlines()), file=sys.stderr)
    return code


def _use_utf8() -> None:
    """Text is UTF-8 whatever the locale says; what stderr cannot show is escaped."""
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        reconfigure = getattr(stream, "reconfigure", None)  # absent where a test or a notebook replaced the stream
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors=errors)
