"""How many blocks an engine gets for a runner that keeps nothing per token."""

from types import SimpleNamespace

import pytest

from runnerctl import LLM, EngineConfig
from runnerctl.config.engine_config import CacheSection, ModelSection, SchedulerSection
from runnerctl.engine.cache_size import cache_size
from runnerctl.runner.memory import step_bytes
from runnerctl.runner.protocol import KVCacheSpec
from tiny_models import make_tiny_model

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


def test_what_a_step_holds_grows_with_its_tokens_and_its_requests():
    model = SimpleNamespace(hidden_size=10, intermediate_size=40, vocab_size=1000)

    def bytes_of(tokens, seqs, itemsize=2):
        limits = SchedulerSection(max_num_batched_tokens=tokens, max_num_seqs=seqs)
        return step_bytes(limits, model, itemsize)

    assert bytes_of(2, 1) - bytes_of(1, 1) == (60 + 80) * 2
    assert bytes_of(8, 2) - bytes_of(8, 1) == 1000 * (2 + 4)
    assert bytes_of(8, 9) == bytes_of(8, 8)  # each has a token at least
    assert bytes_of(1, 1, itemsize=4) > bytes_of(1, 1)


def test_every_step_in_flight_is_left_its_memory(tmp_path):
    """V2 has two of them, V1 one: the cache gets less by as much."""
    folder = make_tiny_model("llama", tmp_path)
    reserved = []
    for name in ("v1", "v2"):
        with LLM(folder, runner=name, enforce_eager=True, dtype="float32") as llm:
            reserved.append(reserved_by(llm._engine._executor._runner))
    assert reserved[0] > 0
    assert reserved[1] == 2 * reserved[0]


def reserved_by(runner):
    serving = getattr(runner, "_serving", None)
    return (runner if serving is None else serving)._loaded.reserved_bytes
