"""The default model against transformers' `generate`, on 50 varied prompts in float32."""

import pytest

from runnerctl import LLM, SamplingParams
from test_parity import assert_same_tokens, watch_plans
from tiny_models import reference_generate

MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
# Languages, scripts, code, numbers, spaces, one character, long ones: what people type.
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "for (int i = 0; i < n; i++) {",
    "SELECT name, age FROM users WHERE",
    "1, 1, 2, 3, 5, 8,",
    "2 + 2 =",
    "The quick brown fox",
    "Dear Sir or Madam,\n\n",
    "Zutaten für einen Apfelkuchen:",
    "La vie est",
    "El sol sale por",
    "日本の首都は",
    "Москва - это",
    "🎉🎂 Happy",
    "A",
    " ",
    "\n\n",
    "Q: What is the boiling point of water?\nA:",
    "Translate to French: cheese ->",
    "# Shopping list\n- milk\n- eggs\n-",
    '{"name": "Ada", "age":',
    "<html><head><title>",
    "import numpy as np\n\nx = np.",
    "In 1969, humans first",
    "The opposite of hot is",
    "Roses are red,\nviolets are",
    "E = mc",
    "To be, or not to be,",
    "Mix the flour and the",
    "The three primary colours are",
    "Photosynthesis is the process by which",
    "git commit -m",
    "My favourite book is",
    "It was a dark and stormy night;",
    "ATGGCCATTGTAATG",
    "|a|b|\n|-|-|\n|1|",
    "Monday, Tuesday, Wednesday,",
    "x^2 + 5x + 6 = (x + 2)(",
    "Knock knock.\nWho's there?\n",
    "Breaking news:",
    "Once more. " * 40,
    "The cat sat on the mat. " * 30,
    "a b c d e f g " * 25,
    "\t\tif not self._closed:\n\t\t\t",
    "¿Dónde está la",
    "The following is a list of the planets, from the sun outwards: Mercury,",
    "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n",
    "99 bottles of beer on the wall, 99 bottles of beer. Take one down,",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prompts(smollm2):
    from runnerctl.engine.tokenizer import load_tokenizer

    assert len(set(TEXTS)) == 50
    tokenizer = load_tokenizer(smollm2)
    return [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def references(smollm2, prompts):
    references = [reference_generate(smollm2, prompt, MAX_TOKENS) for prompt in prompts]
    assert sum(len(set(tokens)) > MAX_TOKENS // 2 for tokens, _ in references) >= 35
    return references


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_alone_batched_and_cached(smollm2, prompts, references, runner):
    with LLM(smollm2, runner=runner, dtype="float32") as llm:
        assert_same_tokens([llm.generate(prompt, GREEDY)[0] for prompt in prompts], references)
        again = llm.generate(prompts, GREEDY)
        assert_same_tokens(again, references)
        long = [output for output in again if len(output.prompt_token_ids) > 16]
        assert len(long) >= 6
        assert all(output.num_cached_tokens > 0 for output in long)


def test_batched_from_text_without_a_cache(smollm2, references):
    with LLM(smollm2, dtype="float32", enable_prefix_caching=False) as llm:
        assert_same_tokens(llm.generate(TEXTS, GREEDY), references)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_chunked_and_preempted(smollm2, prompts, references, runner):
    settings = {"runner": runner, "num_gpu_blocks_override": 24, "max_num_batched_tokens": 48}
    with LLM(smollm2, dtype="float32", max_model_len=384, **settings) as llm:
        plans = watch_plans(llm)
        assert_same_tokens(llm.generate(prompts, GREEDY), references)
        assert llm.stats().num_preemptions > 0
        llm._engine.scheduler.pool.check_idle()
    assert max(plan.total_num_scheduled_tokens for plan in plans) == 48


def test_a_chat_ends_with_its_formats_own_stop_token(smollm2):
    with LLM(smollm2, dtype="float32") as llm:
        greedy = SamplingParams(temperature=0, max_tokens=40)
        output = llm.chat([{"role": "user", "content": "What is the capital of France?"}], greedy)
    completion = output.outputs[0]
    assert "Paris" in completion.text
    assert "<|im_end|>" not in completion.text
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 2)


def test_stop_strings_and_seeds_on_text(smollm2):
    with LLM(smollm2, dtype="float32") as llm:
        (full,) = llm.generate(TEXTS[37], GREEDY)
        text = full.outputs[0].text
        stop = text[5:8]
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, stop=stop)
        deltas = list(llm.stream(TEXTS[37], params))
        assert "".join(delta.text for delta in deltas) == text[: text.index(stop)]
        assert deltas[-1].finish_reason == "stop"
        (stopped,) = llm.generate(TEXTS[37], params)
        assert stopped.outputs[0].stop_reason == stop
        assert stopped.outputs[0].text == text[: text.index(stop)]
        assert not llm._engine.has_unfinished_requests
        sampled = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=MAX_TOKENS)
        (alone,) = llm.generate(TEXTS[1], sampled)
        batch = llm.generate(TEXTS[:8], sampled)
        assert batch[1].outputs[0].text == alone.outputs[0].text
        assert len({output.outputs[0].text for output in batch}) == 8
