"""How many KV blocks there are, and how long a request may get."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runnerctl.config import EngineConfig
from runnerctl.errors import UserError
from runnerctl.runner.protocol import KVCacheSpec

# Of a model with neither a context length nor a cache.
_LENGTH_IF_UNBOUNDED = 131_072


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The paged cache of an engine.

    Attributes:
        num_blocks: blocks in the pool.
        max_model_len: the longest prompt plus answer, in tokens; one such request fits.
        limited_by: the setting that would allow longer ones, as the user spelled it.
    """

    num_blocks: int
    max_model_len: int
    limited_by: str


def cache_size(config: EngineConfig, context_length: int | None, spec: KVCacheSpec) -> CacheSize:
    """Size the cache for a loaded model.

    Args:
        config: what the user set.
        context_length: of the model, in tokens; None if unbounded.
        spec: the cache it needs, and the memory there is.

    A `max_model_len` that the user set has to fit; one that comes from the model is
    cut down to what the cache holds.

    Raises:
        UserError: the cache cannot hold one block, or not one request of the length
            the user asked for; names the settings that would help.
    """
    block_size = config.cache.block_size
    spec = _without_state(config, spec)
    num_blocks, setting = _num_blocks(config, context_length, spec)
    _check_memory(num_blocks * block_size * spec.bytes_per_token, spec, setting)
    capacity = num_blocks * block_size
    asked = config.model.max_model_len
    if asked is not None and asked > capacity:
        need = -(-asked // block_size)
        raise UserError(
            f"one request of {asked} tokens needs {need} KV blocks of {block_size} tokens, "
            f"but there is room for {num_blocks} ({capacity} tokens)",
            remedy=f"lower {config.where('max_model_len')} to {capacity} or less, or raise "
            f"{setting}",
            setting=config.where("max_model_len"),
        )
    limit = asked or context_length or capacity
    if limit > capacity:
        return CacheSize(num_blocks, capacity, setting)
    return CacheSize(num_blocks, limit, config.where("max_model_len"))


def _without_state(config: EngineConfig, spec: KVCacheSpec) -> KVCacheSpec:
    """The memory that is left for blocks when every request that may run has its state.

    Raises:
        UserError: there is none; says how many requests may run.
    """
    each, count = spec.state_bytes_per_request, config.scheduler.max_num_seqs
    if not each:
        return spec
    # Something has to be left for the blocks, if there are any.
    room = spec.available_bytes // 2 if spec.layers else spec.available_bytes
    if each * count > room:
        setting = config.where("max_num_seqs")
        raise UserError(
            f"the recurrent state of {count} requests takes {each * count:,} bytes "
            f"({each:,} each), and there is room for {room:,}",
            remedy=f"lower {setting} to {room // each} or less"
            if room >= each
            else "free memory, or take a smaller model",
            setting=setting,
        )
    free = None if spec.free_bytes is None else spec.free_bytes - each * count
    return replace(spec, available_bytes=spec.available_bytes - each * count, free_bytes=free)


def _num_blocks(
    config: EngineConfig, context_length: int | None, spec: KVCacheSpec
) -> tuple[int, str]:
    """The size of the pool, and the setting that would make it larger."""
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override, config.where("num_gpu_blocks_override")
    setting = config.where("kv_cache_memory_bytes")
    available = cache.kv_cache_memory_bytes or spec.available_bytes
    block_bytes = spec.bytes_per_token * cache.block_size
    longest = config.model.max_model_len or context_length
    if not block_bytes:
        # a model that keeps nothing per token: blocks are only numbers
        return _blocks_of_all(config, longest or _LENGTH_IF_UNBOUNDED), setting
    num_blocks = available // block_bytes
    if num_blocks < 1:
        raise UserError(
            f"a KV cache of {available:,} bytes does not hold one block of {cache.block_size} "
            f"tokens ({block_bytes:,} bytes)",
            remedy=f"raise {setting} or lower {config.where('block_size')}",
            setting=setting,
        )
    if cache.kv_cache_memory_bytes is None and longest is not None:
        # more than all requests at full length can use would never be touched
        num_blocks = min(num_blocks, _blocks_of_all(config, longest))
    return num_blocks, setting


def _blocks_of_all(config: EngineConfig, longest: int) -> int:
    """What all requests at full length can use."""
    return -(-longest // config.cache.block_size) * config.scheduler.max_num_seqs


def _check_memory(needed: int, spec: KVCacheSpec, setting: str) -> None:
    """Refuse a cache that is larger than the memory there is."""
    if spec.free_bytes is not None and needed > spec.free_bytes:
        raise UserError(
            f"a KV cache of {needed:,} bytes is more than the {spec.free_bytes:,} bytes of "
            "memory that are free",
            remedy=f"lower {setting}",
            setting=setting,
        )
