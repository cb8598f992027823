"""The two errors a user can meet: both print as one line, never as a traceback."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class QwenRawError(Exception):
    """Something failed at run time (exit code 1). The message says what is wrong and what would be right."""


class UsageError(QwenRawError):
    """The request itself is wrong (exit code 2): a flag, a prompt, a model that cannot be what was asked for."""


class UnavailableError(QwenRawError):
    """This machine cannot do it in this way, and the message says why: the caller takes another one."""


def require(condition: bool, message: str) -> None:
    """Raise QwenRawError(message) unless `condition`: how a launcher checks a kernel's PRECONDs."""
    if not condition:
        raise QwenRawError(message)


def close_all(actions: Sequence[Callable[[], None]]) -> None:
    """Do all of it, whatever fails; then raise the first QwenRawError."""
    failures = []
    for action in actions:
        try:
            action()
        except QwenRawError as error:
            failures.append(error)
    if failures:
        raise failures[0]
