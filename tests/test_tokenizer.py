"""The tokenizer of a checkpoint: text to tokens, chat templates, which tokens end an answer."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from runnerctl.engine.tokenizer import eos_token_ids_of, load_tokenizer
from runnerctl.errors import ModelError, PromptError
from tiny_models import make_tiny_model

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('no such role') }}"
    "{% endif %}<u>{{ m.content }}</u>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with a byte-level tokenizer that puts <s> before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<stop>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    make_tiny_model("llama", tmp_path, vocab_size=300, eos_token_id=[257, 258])
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def write(folder, name, **content):
    (folder / name).write_text(json.dumps(content))


def test_a_folder_without_a_tokenizer_has_none(tmp_path):
    make_tiny_model("gpt2", tmp_path)
    assert load_tokenizer(tmp_path) is None
    write(tmp_path, "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    assert load_tokenizer(tmp_path) is None


def test_a_prompt_gets_the_special_tokens_the_model_expects(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("a")[0] == 256
    assert tokenizer.decode(tokenizer.encode("a <s>b")) == "a b"
    assert tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=False) == "<s>a"
    assert tokenizer.vocab_size == 259


def test_a_chat_is_rendered_once_and_gets_no_second_start_token(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.chat([{"role": "user", "content": "hé"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<u>hé</u><a>"


def test_messages_the_template_refuses_are_the_users_to_mend(folder):
    with pytest.raises(PromptError, match="no such role"):
        load_tokenizer(folder).chat([{"role": "nobody", "content": ""}])


def test_a_template_cannot_reach_into_python(folder):
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(PromptError):
        load_tokenizer(folder).chat([{"role": "user", "content": "x"}])


def test_without_a_template_there_is_no_chat(folder):
    (folder / "chat_template.jinja").unlink()
    assert load_tokenizer(folder).chat([{"role": "user", "content": "x"}]) is None


def test_all_end_tokens_are_found_wherever_they_are_named(folder):
    config = json.loads((folder / "config.json").read_text())
    write(folder, "generation_config.json", eos_token_id=7)
    assert eos_token_ids_of(folder) == {7, 257, 258}
    assert load_tokenizer(folder).eos_token_ids == {7, 257, 258}
    write(folder, "config.json", **{**config, "eos_token_id": None, "text_config": None})
    assert eos_token_ids_of(folder) == {7}
    (folder / "generation_config.json").unlink()
    assert eos_token_ids_of(folder) == frozenset()
    assert load_tokenizer(folder).eos_token_ids == {257}
    write(folder, "config.json", text_config={"eos_token_id": [8]})
    assert eos_token_ids_of(folder) == {8}


def test_a_broken_tokenizer_is_an_error(folder):
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": ')
    with pytest.raises(ModelError, match="tokenizer in"):
        load_tokenizer(folder)


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2):
    return load_tokenizer(smollm2)


def test_the_default_model_ends_its_answers_with_im_end(smollm2, smollm2_tokenizer):
    end = smollm2_tokenizer.encode("<|im_end|>")
    assert len(end) == 1
    assert smollm2_tokenizer.eos_token_ids == eos_token_ids_of(smollm2) == set(end)


def test_the_default_models_chat_template(smollm2_tokenizer):
    ids = smollm2_tokenizer.chat([{"role": "user", "content": "Hi <|im_end|>"}])
    assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("In 1984", ["In", " ", "1", "9", "8", "4"]),
        ("List:\n\n1.", ["List", ":", "\n\n", "1", "."]),
        ("a  2", ["a", "  ", "2"]),
        (" don't", [" don", "'t"]),
    ],
)
def test_the_default_model_sees_each_digit_alone(text, tokens, smollm2_tokenizer):
    ids = smollm2_tokenizer.encode(text)
    assert [smollm2_tokenizer.decode([token]) for token in ids] == tokens


@pytest.mark.parametrize(
    "text", ["Grüße, 日本語! 👩\u200d👩\u200d👧", "\tif x:\n\n\n  y  ", "<|im_end|>"]
)
def test_the_default_model_gives_a_text_back_as_it_was(text, smollm2_tokenizer):
    ids = smollm2_tokenizer.encode(text)
    assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=12),
    text=st.text(max_size=8),
    skip=st.booleans(),
)
def test_the_default_models_text_streams_without_loss(smollm2_tokenizer, ids, text, skip):
    ids = [*ids, *smollm2_tokenizer.encode(text), *ids[:3]]
    whole = smollm2_tokenizer.decode(ids, skip_special_tokens=skip)
    stream = smollm2_tokenizer.stream(skip_special_tokens=skip)
    pieces = [stream.add([token]) for token in ids]
    assert whole.startswith("".join(pieces))
    assert "".join(pieces) + stream.finish() == whole
