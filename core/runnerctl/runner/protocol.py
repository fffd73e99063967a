"""`ModelRunner`: what a runner plugin implements, and what it is given. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from runnerctl.config import EngineConfig
from runnerctl.decision import Decision
from runnerctl.parallel import Place
from runnerctl.runner.step import StepHandle, StepPlan

if TYPE_CHECKING:
    from runnerctl.plugins import PluginHost
    from runnerctl.runner.rank_groups import RankGroups
    from runnerctl.runner.transforms import AppliedTransform


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a runner's factory is called with.

    Attributes:
        config: the resolved configuration.
        decision: the one decision made at start.
        model_path: a local folder with `config.json` and safetensors weights.
        plugins: the plugins of this process: their attention backends and transforms.
        place: of this rank among all.
        groups: the process groups that this rank belongs to; None if it is the only one.
    """

    config: EngineConfig
    decision: Decision
    model_path: Path
    plugins: PluginHost
    place: Place = field(default_factory=Place)
    groups: RankGroups | None = None


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """What the engine has to know of a model that pools instead of generating.

    Attributes:
        task: `embed` gives a vector, `classify` a number per label.
        method: how, and who says so; for people.
        labels: of a classifier, in the order of its numbers.
        limited_by: what says how long a text may be; for messages.
        is_guess: the model's files do not say how it pools.
    """

    task: Literal["embed", "classify"]
    method: str
    labels: tuple[str, ...] = ()
    limited_by: str = ""
    is_guess: bool = False


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the engine has to know of a loaded model.

    Attributes:
        vocab_size: prompts may hold token ids below this.
        max_model_len: the context length in tokens, or None if unbounded.
        attention_backend: that was chosen; "" if the runner has none.
        transforms: of plugins, that changed the model.
        dtype: of the weights and of what is computed: "float32"; "" if it is not known.
        pooling: of a model that pools; None for one that generates.
        can_share_prefixes: what is computed of a prompt's beginning is right for every
            request that begins so. Not where a request has recurrent state.
        note: what the user should know of how the model is served, or "".
    """

    vocab_size: int
    max_model_len: int | None
    attention_backend: str = ""
    transforms: tuple[AppliedTransform, ...] = ()
    dtype: str = ""
    pooling: PoolingFacts | None = None
    can_share_prefixes: bool = True
    note: str = ""


@dataclass(frozen=True, slots=True)
class AttentionLayerSpec:
    """The KV cache one attention layer needs.

    Attributes:
        layer_idx: as the model counts its layers.
        num_kv_heads: heads stored on this rank.
        head_size: of keys; `head_size_v` of values (they differ in MLA models).
        dtype_bytes: bytes per element.
    """

    layer_idx: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V for one token in this layer."""
        return self.num_kv_heads * (self.head_size + self.head_size_v) * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The KV cache of the whole model on one rank.

    Attributes:
        layers: one per attention layer, in order of execution.
        available_bytes: memory the runner would give to the cache by default.
        free_bytes: memory there is in all; more cannot be asked for. None if unknown.
        state_bytes_per_request: what the runner keeps of each request beside the cache,
            whatever its length, for `max_num_seqs` of them.
    """

    layers: tuple[AttentionLayerSpec, ...]
    available_bytes: int
    free_bytes: int | None = None
    state_bytes_per_request: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V for one token over all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)


class ModelRunner(Protocol):
    """Executes a model, in the worker. Methods are called in the order they stand here.

    The factory named by `RunnerSpec.factory` is called with one `WorkerContext` and
    returns an object with these methods. It may import torch; the engine does not.
    """

    def load(self) -> LoadedModel:
        """Build the model and load its weights.

        Raises:
            ModelError: the checkpoint cannot be served; says why and what to do.
        """
        ...

    def kv_cache_spec(self) -> KVCacheSpec:
        """The cache the loaded model needs, and the memory there is for it."""
        ...

    def initialize_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate `num_blocks` blocks of `config.cache.block_size` tokens per layer.

        Args:
            num_blocks: block ids in plans are below this.
            max_model_len: no request grows beyond this many tokens.
        """
        ...

    def warm_up(self) -> None:
        """Run once what every step runs, so that the first request is not slow."""
        ...

    def execute(self, plan: StepPlan) -> StepHandle:
        """Submit one step. Errors of the step itself are raised by the handle.

        At most `RunnerSpec.concurrent_batches` steps are in flight: submitted, and
        `result` not called. What holds between them is in `runnerctl.runner.step`.
        """
        ...

    def shutdown(self) -> None:
        """Free memory and threads. Called once, also after a failed start.

        No step is in flight then.
        """
        ...
