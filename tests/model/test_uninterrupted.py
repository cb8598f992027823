"""Ctrl-C during a block that must end: it comes, but at the block's end."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from qwen_raw.model.uninterrupted import uninterrupted


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    """A shell that runs the tests in the background has the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        done.append(1)
        interrupt()
        interrupt()
        done.append(2)
    assert done == [1, 2]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_of_the_block_goes_on_and_the_handler_is_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="of the block"), uninterrupted():
        raise ValueError("of the block")
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_other_threads_and_ignored_interrupts_are_left_alone() -> None:
    done: list[str] = []

    def work() -> None:
        with uninterrupted():
            done.append("thread")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            interrupt()
            done.append("ignored")
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["thread", "ignored"]
