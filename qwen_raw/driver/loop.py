"""A graph that repeats a part of itself on the device: a WHILE node, whose body a kernel of its own tells to go on.

The kernel calls set_again (cuda_src/include/graph_loop.cuh) with the handle of the node. Needs a driver of CUDA 12.4.
"""

from __future__ import annotations

import numpy as np

from qwen_raw.device import LoopPart
from qwen_raw.driver.check import DriverError, call
from qwen_raw.driver.context import Captured, Context
from qwen_raw.driver.graph import CudaGraph, recording
from qwen_raw.driver.stream import Stream
from qwen_raw.errors import UnavailableError

MINIMUM = 12040  # what cuDriverGetVersion says of CUDA 12.4


def require_loops(context: Context) -> None:
    """Raises UnavailableError, with the reason, where graphs cannot loop on the device."""
    version = int(call(context.driver.cuDriverGetVersion))
    if version < MINIMUM:
        raise UnavailableError(f"the driver is of CUDA {version // 1000}.{version % 1000 // 10}, loops begin with 12.4")
    if not hasattr(context.driver, "cuGraphConditionalHandleCreate"):
        raise UnavailableError("the installed cuda-python has no conditional graph nodes: 12.4 or later has")


def capture_loop(context: Context, stream: Stream, begin: LoopPart, body: LoopPart) -> CudaGraph:
    """A graph of what `begin` queues on `stream`, then of what `body` queues while the handle is set to go on.

    At the start of a replay it is set to stop: `begin` is to set it, and so is every body. Nothing runs now.
    """
    require_loops(context)
    try:
        return _capture(context, stream, begin, body)
    except DriverError as error:
        if error.name != "CUDA_ERROR_NOT_SUPPORTED":
            raise
        raise UnavailableError(str(error)) from error


def _capture(context: Context, stream: Stream, begin: LoopPart, body: LoopPart) -> CudaGraph:
    context.not_capturing("starting a capture")
    context.use()
    driver = context.driver
    template = call(driver.cuGraphCreate, 0)
    captured = Captured()
    try:
        assign = int(driver.CU_GRAPH_COND_ASSIGN_DEFAULT)
        handle = call(driver.cuGraphConditionalHandleCreate, template, context.handle, 0, assign)
        name = np.array([int(handle)], np.uint64)
        with recording(context, stream, captured, template):
            begin(name)
        context.use()
        count = int(call(driver.cuGraphGetNodes, template)[1])
        before = call(driver.cuGraphGetNodes, template, count)[0][:count]
        node = driver.CUgraphNodeParams()
        node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle = handle
        node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        node.conditional.size = 1
        node.conditional.ctx = context.handle
        # cuda-python 12 calls cuGraphAddNode_v2 what 13 calls cuGraphAddNode.
        add = getattr(driver, "cuGraphAddNode_v2", driver.cuGraphAddNode)
        call(add, template, before, [driver.CUgraphEdgeData()] * count, count, node)
        inner = driver.CUgraph(int(node.conditional.phGraph_out[0]))  # the node's: not to be destroyed
        with recording(context, stream, captured, inner):
            body(name)
    except BaseException:
        context.use()
        call(driver.cuGraphDestroy, template)
        raise
    return CudaGraph(context, stream, template, captured)
