"""CUDA graphs: capture a sequence of launches once, replay it without parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qwen_raw.driver.check import DriverError, call
from qwen_raw.driver.context import Captured, Context
from qwen_raw.driver.stream import Stream
from qwen_raw.errors import QwenRawError


class CudaGraph:
    """An instantiated graph. It keeps every buffer and kernel that its launches use alive."""

    def __init__(self, context: Context, stream: Stream, template: object, captured: Captured) -> None:
        """Instantiates `template` (a CUgraph, destroyed here) for launches on `stream`."""
        self._context = context
        self._stream = stream
        self._captured = captured
        driver = context.driver
        context.use()
        try:
            self.nodes = int(call(driver.cuGraphGetNodes, template)[1])
            self._exec = call(driver.cuGraphInstantiate, template, 0)
        finally:
            call(driver.cuGraphDestroy, template)
        self._open = True

    def launch(self) -> None:
        """Queues one replay on the device's main stream; the host does not wait.

        Calls first what `Device.when_queued` was given during the capture; what that raises leaves nothing queued.
        """
        if not self._open:
            raise QwenRawError("a graph was launched after close()")
        self._context.not_capturing("launching a graph")
        for call_first in self._captured.when_queued:
            call_first()
        self._context.use()
        call(self._context.driver.cuGraphLaunch, self._exec, self._stream.handle)

    def close(self) -> None:
        """Waits for running replays, destroys the graph and lets go of what it kept; a second call does nothing."""
        if self._open:
            self._stream.synchronize()
            self._open = False
            call(self._context.driver.cuGraphExecDestroy, self._exec)
            self._captured = Captured()


class CudaCapture:
    """What capture() yields; `graph` exists once the with-block has ended without an error."""

    def __init__(self) -> None:
        self._graph: CudaGraph | None = None

    @property
    def graph(self) -> CudaGraph:
        """The captured graph."""
        if self._graph is None:
            raise QwenRawError("the graph exists only after the capture's with-block has ended")
        return self._graph

    @graph.setter
    def graph(self, graph: CudaGraph) -> None:
        self._graph = graph


@contextmanager
def capture(context: Context, stream: Stream) -> Iterator[CudaCapture]:
    """Captures what the with-block queues on `stream`; nothing of it runs until the graph is launched.

    An allocation, an upload, a download or a wait inside raises QwenRawError before the driver sees it, and the
    stream is usable afterwards.
    """
    captured, result = Captured(), CudaCapture()
    with recording(context, stream, captured) as recorded:
        yield result
    result.graph = CudaGraph(context, stream, recorded.template, captured)


class Recorded:
    """What recording() yields."""

    template: object = None  # the CUgraph, once the with-block has ended without an error


@contextmanager
def recording(context: Context, stream: Stream, captured: Captured, into: object | None = None) -> Iterator[Recorded]:
    """Records what the with-block queues in a new CUgraph, which the caller must destroy, or `into` an empty one."""
    context.not_capturing("starting a capture")
    context.use()
    driver = context.driver
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    if into is None:
        call(driver.cuStreamBeginCapture, stream.handle, mode)
    else:
        call(driver.cuStreamBeginCaptureToGraph, stream.handle, into, None, None, 0, mode)
    context.captured = captured
    result = Recorded()
    try:
        yield result
    except BaseException:
        context.captured = None
        _abandon(context, stream, owned=into is None)
        raise
    context.captured = None
    context.use()
    result.template = call(driver.cuStreamEndCapture, stream.handle)


def _abandon(context: Context, stream: Stream, *, owned: bool) -> None:
    """Ends a capture whose with-block failed; a capture that the failure has invalidated has no graph to destroy."""
    driver = context.driver
    context.use()
    try:
        template = call(driver.cuStreamEndCapture, stream.handle)
    except DriverError as error:
        if error.name != "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED":
            raise
    else:
        if owned:
            call(driver.cuGraphDestroy, template)
