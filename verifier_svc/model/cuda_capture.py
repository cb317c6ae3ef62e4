"""Recording what a function does on a GPU, as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

from verifier_svc.model.pass_graphs import Outputs


class CudaCapture:
    """CUDA graphs that share one pool of memory: they never run at the same time, and results are read in between."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Outputs]) -> tuple[Callable[[], object], Outputs]:
        """As `Capture` has it."""
        # Once outside the graph: compiling kernels and making library handles cannot be recorded.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls count: others, of the event loop for example, have nothing to do with the graph.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        return graph.replay, result
