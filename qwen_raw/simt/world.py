"""The scheduler and address space that simulated devices share: the ranks of an engine, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Literal

import numpy as np

from qwen_raw.errors import QwenRawError
from qwen_raw.simt.kernel import Prepared
from qwen_raw.simt.library import Library, variant_of
from qwen_raw.simt.native import Options, SimError, Stats

IDLE, WAITS, FAILED = 0, 1, 2


class SimWorld:
    """`ranks` devices under one scheduler.

    `seed`: None runs blocks one after another, in order, and stores to peers at once: the fast way. A number makes the
    schedule random: which blocks are resident together, who runs next, when and in which order stores to other ranks
    land (and, with `weak_local`, volatile stores to the own rank), what dependent launches overlap; the same seed gives
    the same run. `adversary`: the seed also chooses slow ranks and stalled links; False: all are alike.
    `race`: kernels are instrumented; every access is checked for races, bounds, alignment and, in shared memory, for
    having been written. `sanitize`: "address" compiles kernels with AddressSanitizer and UndefinedBehaviorSanitizer,
    which works only in a process started by `python -m qwen_raw.simt.run`.
    `memory`: bytes a rank. `trace`: how many of the last observable accesses to remember. `library`: compiled code to
    share with other worlds; it must be of the same variant.
    """

    def __init__(
        self,
        ranks: int = 1,
        *,
        seed: int | None = None,
        weak_local: bool = False,
        adversary: bool = True,
        race: bool = False,
        sanitize: Literal["address"] | None = None,
        memory: int = 4 << 30,
        trace: int = 0,
        library: Library | None = None,
    ) -> None:
        variant = variant_of(race, sanitize)
        self.library = Library(variant) if library is None else library
        if self.library.variant != variant:
            raise QwenRawError(f"the world wants kernels of variant {variant}, the library has {self.library.variant}")
        self.ranks = ranks
        self.seed = seed
        self.memory = memory
        self.runtime = self.library.runtime
        options = Options(
            seed=seed or 0,
            rank_bytes=memory,
            random=seed is not None,
            weak_links=seed is not None,
            weak_local=weak_local,
            adversary=adversary,
            race=race,
            trace=trace,
        )
        self._keep: list[Prepared] = []
        self._pointed_to: dict[bytes, tuple[tuple[int, int], ...]] = {}  # what is known until memory comes or goes
        self._held = False
        self._failure = ""
        self._handle: int | None = self.runtime.world_create(ranks, options)

    @property
    def handle(self) -> int:
        """The runtime's handle.

        Raises QwenRawError once the world is closed, and after a failure: what is in memory then means nothing.
        """
        if self._handle is None:
            raise QwenRawError("the simulated device has been closed")
        if self._failure:
            raise QwenRawError(f"the simulated device failed earlier: {self._failure}")
        return self._handle

    @property
    def closed(self) -> bool:
        """Whether close() has been called."""
        return self._handle is None

    def launch(self, prepared: Prepared) -> None:
        """Queues a launch, and runs what can run."""
        self.runtime.launch(self.handle, prepared.launch)
        self._keep.append(prepared)
        self.advance()

    def advance(self) -> int:
        """Runs until every queue is empty (IDLE) or what runs waits for something not yet queued (WAITS).

        Does nothing inside `together()`. Raises SimError when a kernel fails.
        """
        if self._held:
            return WAITS
        return self._advance(waiting=False)

    def _advance(self, *, waiting: bool) -> int:
        state = self.runtime.advance(self.handle, waiting=waiting)
        if state == FAILED:
            self._fail(self.runtime.error(self.handle))
        if state == IDLE:
            self._keep.clear()
        return state

    def wait(self, rank: int) -> None:
        """Runs until everything queued on `rank` has finished, as the host waiting for it.

        Polls that nobody will answer run into their deadline, if they have one (no real time passes).
        Raises SimError with every waiting thread's place if the rank can never finish.
        """
        if self._held:
            raise QwenRawError("the host cannot wait for a device while launches are held together")
        if self.advance() == WAITS and not self.runtime.rank_idle(self.handle, rank):
            self._advance(waiting=True)
        if not self.runtime.rank_idle(self.handle, rank):
            self._fail(self.runtime.stuck(self.handle))
        self.runtime.host_synced(self.handle, rank)

    def run(self) -> None:
        """Runs until every rank has finished.

        Raises SimError for a failure or a deadlock.
        """
        self.advance()
        for rank in range(self.ranks):
            self.wait(rank)

    def together(self) -> AbstractContextManager[None]:
        """Holds back what the with-block queues, so that all ranks start from one point: the block's end."""
        return self._hold()

    @contextmanager
    def _hold(self) -> Iterator[None]:
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.advance()

    def allocate(self, rank: int, nbytes: int) -> int:
        """The address of new memory of `rank`, or 0 when it is full."""
        self._pointed_to.clear()
        return self.runtime.allocate(self.handle, rank, nbytes)

    def pointed_to(self, struct: bytes) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of the allocations that the 8-byte words of a struct point into."""
        views = self._pointed_to.get(struct)
        if views is None:
            words = np.frombuffer(struct[: len(struct) // 8 * 8], np.uint64)
            found = [self.runtime.find(self.handle, int(word)) for word in words]
            views = tuple(dict.fromkeys(view for view in found if view is not None))
            self._pointed_to[struct] = views
        return views

    def release(self, ptr: int) -> None:
        """Frees memory: what a buffer's finaliser calls, so it never raises."""
        self._pointed_to.clear()
        if self._handle is not None:
            self.runtime.release(self._handle, ptr)

    def stats(self) -> Stats:
        """Scheduling steps and other counters since the beginning."""
        return self.runtime.stats(self.handle)

    def trace(self) -> str:
        """The last observable accesses, one a line: step, rank, kernel and launch, block, thread, access, value, place.

        "lands": a store, whose line is further up, becomes visible to other ranks. Works after a failure too.
        """
        if self._handle is None:
            raise QwenRawError("the simulated device has been closed")
        return self.library.relative(self.runtime.trace(self._handle))

    def close(self) -> None:
        """Frees everything; a second call does nothing."""
        if self._handle is not None:
            self.runtime.world_destroy(self._handle)
            self._handle = None
            self._keep.clear()

    def __enter__(self) -> SimWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fail(self, message: str) -> None:
        self._failure = self.library.relative(message)
        raise SimError(self._failure)
