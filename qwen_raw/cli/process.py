"""What surrounds every command of the project: standard streams, errors as one line, exit codes.

Exit codes: 0 done; 1 it failed; 2 the request was wrong; 130 interrupted.

It imports nothing that takes a while, so that a Ctrl-C while a command imports the rest is met here.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import TextIO

from qwen_raw.errors import QwenRawError, UsageError

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def guarded(program: str, work: Callable[[], int]) -> int:
    """Do `work`; its exit code. What a user can make or meet goes wrong as one line on stderr, "program: what"."""
    if sys.stderr is None:  # closed by whoever started us: print() would then write to stdout
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process
    if sys.stdout is None:
        return _complain(program, "standard output is closed: send it to a file, or to /dev/null", EXIT_FAILED)
    _use_utf8()
    try:
        try:
            code = work()
        except SystemExit as stop:  # argparse ends --help and --version so
            if stop.code:
                raise
            code = EXIT_DONE
        sys.stdout.flush()
    except BrokenPipeError:
        code = EXIT_DONE  # the reader of our output has seen enough
    except KeyboardInterrupt:
        code = _complain(program, "interrupted", EXIT_INTERRUPTED)
    except UsageError as error:
        code = _complain(program, error, EXIT_USAGE)
    except QwenRawError as error:
        code = _complain(program, error, EXIT_FAILED)
    except MemoryError as error:
        code = _complain(program, f"not enough memory: {error}".removesuffix(": "), EXIT_FAILED)
    except OSError as error:
        code = _complain(program, _said(error), EXIT_FAILED)
    try:
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout)  # it has been told above, or something worse has
    return code


def _use_utf8() -> None:
    """Text is UTF-8 whatever the locale says; what stderr cannot show is escaped."""
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        reconfigure = getattr(stream, "reconfigure", None)  # absent where a test or a notebook replaced the stream
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors=errors)


def _said(error: OSError) -> str:
    """One line. Files are named in their errors; the standard streams are not."""
    what = error.strerror or str(error)
    if error.filename is not None:
        return f"{error.filename}: {what}"
    if error.errno is None:  # not from the system: the dynamic linker's, for one, which names the file
        return what
    if error.errno == errno.ENOMEM:
        return f"not enough memory: {what}"
    return f"the output cannot be written: {what}"


def _complain(program: str, problem: object, code: int) -> int:
    tell(f"{program}: " + " ".join(str(problem).splitlines()))
    return code


def tell(line: str) -> None:
    """One line on stderr. Where stderr cannot be written nobody can be told: the line is dropped."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """From now on, send what is written to a standard stream nowhere: it failed, and would fail again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
