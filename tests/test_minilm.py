"""A real embedding model: equal to transformers' own forward, and sensible."""

import pytest
import torch

from runnerctl import LLM, PoolingParams
from runnerctl.errors import PromptError

TEXTS = [
    "A man is eating food.",
    "Somebody is having a meal.",
    "The stock market fell sharply on Monday.",
    "Share prices dropped at the start of the week.",
    "def add(a, b): return a + b",
    "A function that sums two numbers.",
    "x",
    "",
    "Der Hund schläft. 日本の首都は東京です。🎉",
    "The quick brown fox jumps over the lazy dog. " * 12,
]
RELATED = [(0, 1), (2, 3), (4, 5)]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected(minilm):
    """Each text alone, with the mean and the length written out."""
    from transformers import AutoTokenizer, BertModel

    tokenizer = AutoTokenizer.from_pretrained(minilm)
    model = BertModel.from_pretrained(minilm, dtype=torch.float32).eval()
    vectors, ids = [], []
    for text in TEXTS:
        encoded = tokenizer(text, return_tensors="pt", padding=False, truncation=False)
        with torch.inference_mode():
            hidden = model(**encoded).last_hidden_state[0]
        mean = hidden.mean(0)
        vectors.append(mean / mean.norm())
        ids.append(tuple(encoded["input_ids"][0].tolist()))
    assert len({len(one) for one in ids}) > 6
    return torch.stack(vectors), ids


@pytest.fixture(scope="module")
def llm(minilm):
    with LLM(minilm) as llm:
        yield llm


def test_alone_and_in_a_batch_it_says_what_transformers_says(llm, expected):
    vectors, ids = expected
    together = llm.embed(TEXTS)
    assert [output.prompt_token_ids for output in together] == ids
    alone = [llm.embed(text)[0] for text in TEXTS]
    from_ids = llm.embed([{"prompt_token_ids": list(one)} for one in ids])
    for outputs in (together, alone, from_ids):
        said = torch.tensor([output.embedding for output in outputs])
        torch.testing.assert_close(said, vectors, rtol=0, atol=1e-5)
    assert llm.decision.runner == "v1"
    assert llm.stats().pooling.startswith("mean pooling (1_Pooling/config.json of the model)")


def test_related_texts_are_closer_than_unrelated_ones(llm):
    vectors = torch.tensor([output.embedding for output in llm.embed(TEXTS[:6])])
    similarity = vectors @ vectors.T
    related = torch.zeros(6, 6, dtype=torch.bool)
    for one, other in RELATED:
        related[one, other] = related[other, one] = True
    unrelated = ~related & ~torch.eye(6, dtype=torch.bool)
    assert similarity[related].min() > similarity[unrelated].max() + 0.2


def test_longer_texts_than_it_was_trained_for_are_refused_or_cut(llm):
    long = "word " * 300
    with pytest.raises(PromptError, match=r"302 tokens, but the limit is 256 .sentence_bert"):
        llm.embed(long)
    [cut] = llm.embed(long, PoolingParams(truncate_prompt_tokens=-1))
    assert len(cut.prompt_token_ids) == 256
    assert (cut.prompt_token_ids[0], cut.prompt_token_ids[-1]) == (101, 102)  # CLS and SEP
    assert cut == llm.embed("word " * 254)[0]


def test_by_its_name_as_a_user_would(expected):
    with LLM("all-minilm-l6-v2", max_num_batched_tokens=256) as llm:
        said = torch.tensor([output.embedding for output in llm.embed(TEXTS)])
    torch.testing.assert_close(said, expected[0], rtol=0, atol=1e-5)
