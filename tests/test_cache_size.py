"""How many blocks an engine gets for a runner that keeps nothing per token."""

import pytest

from runnerctl import EngineConfig
from runnerctl.config.engine_config import CacheSection, ModelSection, SchedulerSection
from runnerctl.engine.cache_size import cache_size
from runnerctl.runner.protocol import KVCacheSpec

NOTHING = KVCacheSpec(layers=(), available_bytes=1000)


def config(max_model_len=None, **cache):
    return EngineConfig(
        model=ModelSection(model="m", max_model_len=max_model_len),
        scheduler=SchedulerSection(max_num_seqs=3),
        cache=CacheSection(block_size=16, **cache),
    )


@pytest.mark.parametrize(("context", "asked"), [(100, None), (None, 100), (500, 100)])
def test_without_layers_there_are_blocks_for_all_requests_at_full_length(context, asked):
    size = cache_size(config(asked), context, NOTHING)
    assert (size.num_blocks, size.max_model_len) == (3 * 7, 100)


def test_without_layers_and_without_a_context_length_there_is_still_an_end():
    size = cache_size(config(), None, NOTHING)
    assert size.max_model_len == size.num_blocks * 16 >= 100_000


def test_a_number_of_blocks_is_taken_as_it_is():
    assert cache_size(config(num_gpu_blocks_override=5), 100, NOTHING).num_blocks == 5
