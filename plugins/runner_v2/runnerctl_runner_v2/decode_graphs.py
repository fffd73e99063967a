"""CUDA graphs of the decode step: preparation and forward, captured once per batch size.

A step replays the smallest graph that holds its requests; the places left over are
filled with the table's padding row, which writes to the scratch block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from runnerctl.runner.transfer import to_device


def batch_sizes(largest: int) -> list[int]:
    """The sizes to capture: powers of two to 8, then steps of 8 so that little is padded."""
    sizes = [size for size in (1, 2, 4) if size < largest]
    return [*sizes, *range(8, largest, 8), largest]


class DecodeGraphs:
    """One captured graph per batch size.

    Args:
        forward: from idx_mapping [num_reqs] to logits [num_reqs, vocab_size]; it must read
            nothing else from the host and must not wait for the device.
        largest: no step has more requests.
        padding_row: what unused places of a batch point to.
        device: a CUDA device. Everything is captured by the constructor.
    """

    def __init__(
        self,
        forward: Callable[[torch.Tensor], torch.Tensor],
        largest: int,
        padding_row: int,
        device: torch.device,
    ) -> None:
        self._padding_row = padding_row
        self._device = device
        self._sizes = batch_sizes(largest)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        # The largest first: the smaller ones then fit into its memory.
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture(forward, size, pool)

    def replay(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one decode step.

        Args:
            indices: the rows of the step.

        Returns:
            Logits [num_reqs, vocab_size], overwritten by the next replay, and the rows on
            the device, [num_reqs], int64.
        """
        count = len(indices)
        size = next(size for size in self._sizes if size >= count)
        graph, idx_mapping, logits = self._graphs[size]
        padding = [self._padding_row] * (size - count)
        rows = to_device([*indices, *padding], torch.int64, self._device)
        idx_mapping.copy_(rows)
        graph.replay()
        return logits[:count], rows[:count]

    def _capture(
        self, forward: Callable[[torch.Tensor], torch.Tensor], size: int, pool: tuple[int, int]
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
        idx_mapping = torch.full((size,), self._padding_row, device=self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # libraries allocate at their first call, before capture
            forward(idx_mapping)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = forward(idx_mapping)
        return graph, idx_mapping, logits
