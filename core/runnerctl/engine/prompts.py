"""Prompts in the forms that callers write them, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runnerctl.errors import PromptError

if TYPE_CHECKING:
    from runnerctl.engine.tokenizer import Tokenizer

PromptLike = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A checked prompt: its text, if it came as text, and its token ids."""

    text: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that a classifier looks at together, as a query and a document."""

    first: str
    second: str


Content = str | TextPair | tuple[int, ...]
"""What a prompt is before it is all tokens."""


def as_prompts(
    prompts: PromptLike | Sequence[PromptLike],
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    max_model_len: int,
    length_setting: str,
) -> list[Prompt]:
    """Every accepted spelling as a list of `Prompt`.

    Args:
        prompts: one prompt or a list: text, token ids, `{"prompt": text}` or
            `{"prompt_token_ids": ids}`.
        tokenizer: for prompts that are text; None if the model has none.
        vocab_size: token ids are below this.
        max_model_len: prompts must leave room for one token below this.
        length_setting: how the user spelled that limit, for messages.

    Raises:
        PromptError: names the prompt at fault by its place in the list.
    """
    checked = []
    for where, content in contents_of(prompts):
        one = _encoded(content, tokenizer, where)
        check_token_ids(one.token_ids, where, vocab_size)
        if len(one.token_ids) >= max_model_len:
            raise PromptError(
                f"{where} has {len(one.token_ids)} tokens; prompt and answer together may have "
                f"{max_model_len}",
                remedy="shorten it, or raise the setting",
                setting=length_setting,
            )
        checked.append(one)
    return checked


def contents_of(prompts: PromptLike | Sequence[PromptLike]) -> list[tuple[str, Content]]:
    """What each prompt is called in messages, and its text or token ids.

    Raises:
        PromptError: a prompt is none of the accepted spellings.
    """
    many: Sequence[object] = [prompts]
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, str)
    if is_list and not _is_token_ids(prompts):
        many = prompts  # type: ignore[assignment]
    named = [
        (f"prompt {index}" if len(many) > 1 else "the prompt", prompt)
        for index, prompt in enumerate(many)
    ]
    return [(where, _content(prompt, where)) for where, prompt in named]


def _is_token_ids(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(type(item) is int for item in value)
    )


def _content(prompt: object, where: str) -> Content:
    text: object = prompt
    if isinstance(prompt, Mapping):
        if set(prompt) == {"prompt", "text_pair"}:
            pair = [prompt["prompt"], prompt["text_pair"]]
            if not all(isinstance(one, str) for one in pair):
                raise PromptError(f"{where} is a pair, but not of two texts")
            return TextPair(*(_text(one, where) for one in pair))
        known = {"prompt", "prompt_token_ids"} & set(prompt)
        if set(prompt) != known or len(known) != 1:
            raise PromptError(
                f"{where} is a dict with the keys {sorted(map(str, prompt))}",
                remedy="give either 'prompt' (text) or 'prompt_token_ids' (a list of ints)",
            )
        if "prompt_token_ids" in prompt:
            return _token_ids(prompt["prompt_token_ids"], where)
        text = prompt["prompt"]
    if not isinstance(text, str):
        return _token_ids(text, where)
    return _text(text, where)


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{where} has half a character at position {error.start} (a lone surrogate)",
            remedy="decode the text again from its bytes, with errors='replace'",
        ) from error
    return text


def _encoded(content: Content, tokenizer: Tokenizer | None, where: str) -> Prompt:
    if isinstance(content, TextPair):
        raise PromptError(
            f"{where} is a pair of texts, which only classifiers read",
            remedy="give one text with 'prompt'",
        )
    if not isinstance(content, str):
        return Prompt(None, content)
    if tokenizer is None:
        raise no_tokenizer(where)
    return Prompt(content, tuple(tokenizer.encode(content)))


def no_tokenizer(where: str) -> PromptError:
    """The error for a prompt of text that nothing can turn into tokens."""
    return PromptError(
        f"{where} is text, but this model has no tokenizer",
        remedy="give token ids: {'prompt_token_ids': [...]}",
    )


def _token_ids(value: object, where: str) -> tuple[int, ...]:
    if isinstance(value, Sequence) and not value:
        return ()
    if not _is_token_ids(value):
        raise PromptError(
            f"{where} is {type(value).__name__}, neither text nor a list of token ids",
            remedy="give a str, a list of ints, or {'prompt_token_ids': [...]}",
        )
    assert isinstance(value, Sequence)
    return tuple(value)


def check_token_ids(token_ids: Sequence[int], where: str, vocab_size: int) -> None:
    """See to it that there are tokens, and that the model knows them.

    Raises:
        PromptError: there are none, or one is unknown.
    """
    if not token_ids:
        raise PromptError(f"{where} is empty", remedy="give at least one token to continue from")
    bad = [token for token in token_ids if not 0 <= token < vocab_size]
    if bad:
        raise PromptError(
            f"{where} has the token id {bad[0]}, but this model knows 0 to {vocab_size - 1}",
            remedy="was it encoded with another model's tokenizer?",
        )
