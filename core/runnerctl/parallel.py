"""How the work is spread over ranks: the layout, decided once, and a rank's place in it.

No torch here. Ranks of one tensor parallel group are neighbours, since they talk most:
rank = place among those that share prefills x tensor parallel size + place among those
that share weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runnerctl.config import EngineConfig
    from runnerctl.runner.spec import RunnerSpec

PIPELINE_SIZE = 1
"""Stages that a step passes through one after the other. There is no pipelining yet."""


_WHERE = {
    "uni": "in this process",
    "mp": "in processes of this machine",
    "ray": "in actors of a Ray cluster",
}


def batches_in_flight(spec: RunnerSpec) -> int:
    """How many steps an engine has under way: one per stage, and those a runner takes ahead."""
    return PIPELINE_SIZE + spec.concurrent_batches - 1


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The ranks of an engine, and what starts them.

    Attributes:
        tensor_parallel_size: ranks that share each layer's weights.
        prefill_context_parallel_size: ranks that share the tokens of each prefill.
        executor: `uni` (this process), `mp` (processes of this machine) or `ray`.
    """

    tensor_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    executor: str = "uni"

    @classmethod
    def of(cls, config: EngineConfig) -> ParallelLayout:
        """What a configuration asks for."""
        parallel = config.parallel
        layout = cls(parallel.tensor_parallel_size, parallel.prefill_context_parallel_size)
        name: str = parallel.distributed_executor_backend
        if name == "auto":
            name = "mp" if layout.world_size > 1 else "uni"
        return cls(layout.tensor_parallel_size, layout.prefill_context_parallel_size, name)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.tensor_parallel_size * self.prefill_context_parallel_size

    @property
    def product(self) -> str:
        """How the number of ranks comes about, for messages."""
        return (
            f"tensor parallel {self.tensor_parallel_size} x prefill context parallel "
            f"{self.prefill_context_parallel_size}"
        )

    @property
    def summary(self) -> str:
        """How many ranks, where, and why so many; for people."""
        count = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        return f"{count} {_WHERE[self.executor]}: {self.product}"

    def places(self) -> Iterator[Place]:
        """Every rank's place, in the order of ranks."""
        for rank in range(self.world_size):
            pcp_rank, tp_rank = divmod(rank, self.tensor_parallel_size)
            yield Place(rank, tp_rank, pcp_rank, self)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank stands.

    Attributes:
        rank: among all.
        tp_rank: among those that hold parts of the same weights.
        pcp_rank: among those that run parts of the same prefills.
        layout: of all ranks.
    """

    rank: int = 0
    tp_rank: int = 0
    pcp_rank: int = 0
    layout: ParallelLayout = ParallelLayout()
