"""Streaming text: no piece is ever taken back, and stop strings cut it exactly."""

from __future__ import annotations

from functools import lru_cache

import pytest

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from tokenizers import Tokenizer as Backend  # noqa: E402
from tokenizers import decoders, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from runnerctl.engine.detokenizer import IncrementalDetokenizer  # noqa: E402
from runnerctl.engine.tokenizer import Tokenizer  # noqa: E402

SPECIAL = ["<|end|>", "<pad>"]
WORDS = [
    *("Hello", " world", "日本", "语", "é", "e\u0301", "👩\u200d👩\u200d👧", "🇯🇵"),
    *(" a", "ab", "abc", "\n\n", " ", "  "),
]
TEXTS = st.text(alphabet=st.sampled_from("ab c日本é\u0301👩\u200d🇯🇵\ufffd\n"), max_size=12)


def wrap(backend: Backend) -> Tokenizer:
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[0]))


@lru_cache
def byte_level() -> Tokenizer:
    """Like GPT-2, Llama 3, Qwen, SmolLM: every token is a string of bytes."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab += [spell.pre_tokenize_str(word)[0][0] for word in WORDS if len(word.encode()) > 1]
    vocab += ["ðŁ", "ĳ©Ġa"]  # the first half of an emoji; a second half and more
    backend = Backend(models.BPE({token: i for i, token in enumerate(vocab)}, []))
    backend.pre_tokenizer, backend.decoder = spell, decoders.ByteLevel()
    return wrap(backend)


@lru_cache
def byte_fallback() -> Tokenizer:
    """Like Llama 2, Mistral, Gemma: pieces of text, and one token per byte for the rest."""
    vocab = [
        "<unk>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        *dict.fromkeys(word.replace(" ", "▁") for word in WORDS if word != " "),
    ]
    backend = Backend(
        models.BPE(
            {token: i for i, token in enumerate(vocab)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return wrap(backend)


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


@st.composite
def token_ids(draw, tokenizer: Tokenizer):
    """Whole words, characters cut into bytes, special tokens and bytes that fit nowhere."""
    anything = st.integers(0, tokenizer.vocab_size - 1)
    text = TEXTS.map(lambda t: tokenizer._tokenizer.encode(t, add_special_tokens=False))
    special = st.sampled_from(sorted(tokenizer._tokenizer.get_added_vocab().values()))
    part = st.one_of(anything.map(lambda i: [i]), text, special.map(lambda i: [i]))
    return [i for ids in draw(st.lists(part, max_size=8)) for i in ids]


def chunked(ids: list[int], size: int) -> list[list[int]]:
    return [ids[i : i + size] for i in range(0, len(ids), size)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=400, deadline=None)
@given(data=st.data(), skip=st.booleans(), size=st.integers(1, 3))
def test_the_pieces_together_are_the_whole_text(kind, data, skip, size):
    tokenizer = KINDS[kind]()
    ids = data.draw(token_ids(tokenizer))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    detokenizer = tokenizer.stream(skip_special_tokens=skip)
    text = ""
    for chunk in chunked(ids, size):
        piece = detokenizer.add(chunk)
        text += piece
        assert whole.startswith(text)
        assert detokenizer.text == text
        # A replacement character is passed on only where the whole text has one for good.
        assert piece.count("\ufffd") <= whole.count("\ufffd")
    text += detokenizer.finish()
    assert text == whole == detokenizer.text
    assert detokenizer.finish() == ""
    assert detokenizer.stop_reason is None


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=400, deadline=None)
@given(data=st.data(), size=st.integers(1, 3))
def test_the_earliest_stop_string_cuts_the_text(kind, data, size):
    tokenizer = KINDS[kind]()
    ids = data.draw(token_ids(tokenizer))
    whole = tokenizer.decode(ids)
    inside = st.tuples(st.integers(0, 20), st.integers(1, 5)).map(lambda x: whole[x[0] :][: x[1]])
    stop = data.draw(st.lists(st.one_of(inside, TEXTS).filter(bool), min_size=1, max_size=3))
    found = [(at, s) for s in stop if (at := whole.find(s)) >= 0]
    expected = whole[: min(found)[0]] if found else whole

    detokenizer = tokenizer.stream(stop=tuple(stop))
    text = ""
    for chunk in chunked(ids, size):
        text += detokenizer.add(chunk)
        assert expected.startswith(text)
    text += detokenizer.finish()
    assert text == expected == detokenizer.text
    if found:
        assert (min(found)[0], detokenizer.stop_reason) in found
    else:
        assert detokenizer.stop_reason is None


class Letters:
    """Each token id is one of these strings, so that a test can say where tokens end."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(self.tokens[i] for i in token_ids)

    def is_byte_fallback(self, token_id):
        return False


def deltas(tokens: list[str], *stop: str) -> tuple[list[str], str | None]:
    detokenizer = IncrementalDetokenizer(Letters(*tokens), stop=stop)
    pieces = [detokenizer.add([i]) for i in range(len(tokens))]
    return [*pieces, detokenizer.finish()], detokenizer.stop_reason


@pytest.mark.parametrize(
    ("tokens", "stop", "pieces", "reason"),
    [
        # held back only while it can still become the stop string
        (["x<", "a", "b"], ["<end>"], ["x", "<a", "b", ""], None),
        (["x<e", "nd", ">y"], ["<end>"], ["x", "", "", ""], "<end>"),
        # the end comes first: what was held back is text
        (["x<e", "nd"], ["<end>"], ["x", "", "<end"], None),
        # one token holds more than the stop string, on both sides
        (["one STOP two"], ["STOP"], ["one ", ""], "STOP"),
        # the earliest wins, in whichever order they are given
        (["a. b! c"], ["!", "."], ["a", ""], "."),
        (["a. b! c"], [".", "!"], ["a", ""], "."),
        # an earlier beginning that may still become a match is waited for
        (["abc", "d"], ["abcd", "bc"], ["", "", ""], "abcd"),
        (["abc", "x"], ["abcd", "bc"], ["", "a", ""], "bc"),
        (["abc"], ["abcd", "bc"], ["", "a"], "bc"),
        # a beginning that fails contains another beginning
        (["aa", "ab"], ["aab"], ["", "a", ""], "aab"),
    ],
)
def test_what_is_held_back_and_when(tokens, stop, pieces, reason):
    assert deltas(tokens, *stop) == (pieces, reason)


def test_nothing_follows_a_stop_string():
    detokenizer = IncrementalDetokenizer(Letters("a", "#", "b"), stop=("#",))
    assert detokenizer.add([0, 1, 2]) == "a"
    assert detokenizer.add([2]) == detokenizer.finish() == ""
    assert detokenizer.text == "a"


def test_an_emoji_cut_into_tokens_comes_out_whole():
    tokenizer = byte_level()
    ids = tokenizer.encode("👩")
    assert len(ids) > 1
    detokenizer = tokenizer.stream()
    assert [detokenizer.add([i]) for i in ids] == [""] * (len(ids) - 1) + ["👩"]


def test_special_tokens_are_text_only_when_asked_for():
    tokenizer = byte_level()
    end = next(iter(tokenizer.eos_token_ids))
    ids = [*tokenizer.encode("a"), end, *tokenizer.encode("b")]
    for skip, expected in ((True, "ab"), (False, "a<|end|>b")):
        detokenizer = tokenizer.stream(skip_special_tokens=skip)
        assert detokenizer.add(ids) + detokenizer.finish() == expected
