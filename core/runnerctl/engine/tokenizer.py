"""The tokenizer of a checkpoint: a thin wrapper around transformers' own.

`AutoTokenizer` rather than `tokenizers` directly: it costs 0.1 s more at start (0.24
against 0.12 s, next to 4 s of imports) and knows what `tokenizer.json` does not say:
special tokens, chat template, vocabularies in older formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from runnerctl.engine.detokenizer import IncrementalDetokenizer
from runnerctl.engine.outputs import Logprob, Logprobs
from runnerctl.errors import ModelError, PromptError
from runnerctl.runner.step import TokenLogprobs

# A folder without any of these has no tokenizer, though AutoTokenizer may make up an empty one.
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.tiktoken",
)
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Tokenizer | None:
    """The tokenizer in a checkpoint folder, or None if it has none.

    Raises:
        ModelError: there is one, but it cannot be read.
    """
    if not any(path.is_file() for name in _VOCABULARIES for path in folder.glob(name)):
        return None
    from transformers import AutoTokenizer

    from runnerctl.models.quiet import quiet_transformers

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelError(
            f"the tokenizer in {folder} cannot be loaded: {error}",
            remedy="fetch its files again, or remove them and give prompts as token ids",
        ) from error
    return Tokenizer(tokenizer, eos_token_ids_of(folder))


def eos_token_ids_of(folder: Path) -> frozenset[int]:
    """The end-of-sequence tokens that `generation_config.json` and `config.json` name."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        config = json.loads(path.read_text(encoding="utf-8"))
        for section in (config, config.get("text_config") or {}):
            ids.update(_as_ids(section.get("eos_token_id")))
    return frozenset(ids)


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        eos_token_ids: tokens that end an answer, as the checkpoint's files and the
            tokenizer name them.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids) | _as_ids(tokenizer.eos_token_id)

    @property
    def vocab_size(self) -> int:
        """Tokens it knows, added ones included; a model's table of embeddings may be larger."""
        return len(self._tokenizer)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text; with `special` as a prompt, as the model expects one."""
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def encode_many(self, texts: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """The tokens of many texts, each as `encode` has them, cut to `max_length`.

        What is left of a text that is cut has its special tokens.
        """
        if not texts:
            return []
        cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
        return [list(ids) for ids in self._tokenizer(list(texts), **cut)["input_ids"]]

    def encode_pair(
        self, first: str, second: str, max_length: int | None = None
    ) -> tuple[list[int], list[int]]:
        """The tokens of two texts in one, and which of the two each belongs to (0 or 1).

        The latter is empty where the model is not told.
        """
        cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
        encoded = self._tokenizer(first, second, **cut)
        return list(encoded["input_ids"]), list(encoded.get("token_type_ids", ()))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all these tokens together, unbeautified."""
        text = self._tokenizer.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            # It moves spaces around punctuation, so text would depend on what follows.
            clean_up_tokenization_spaces=False,
        )
        return str(text)

    def is_byte_fallback(self, token_id: int) -> bool:
        """Whether the token stands for one byte (`<0xE2>`)."""
        return token_id in self._byte_fallback_ids

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int] | None:
        """The tokens of a conversation up to where the answer begins.

        Returns:
            None if the model has no chat template.

        Raises:
            PromptError: the template refuses these messages.
        """
        if not self._tokenizer.chat_template:
            return None
        try:
            ids = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:  # templates are programs: they raise anything
            raise PromptError(
                f"the model's chat template does not take these messages: {error}",
                remedy="give roles and contents as the model's card shows, or a plain prompt",
            ) from error
        return list(ids)

    def stream(
        self, *, skip_special_tokens: bool = True, stop: tuple[str, ...] = ()
    ) -> IncrementalDetokenizer:
        """A detokeniser for one request."""
        return IncrementalDetokenizer(self, skip_special_tokens, stop)

    @cached_property
    def _byte_fallback_ids(self) -> frozenset[int]:
        vocab: dict[str, int] = self._tokenizer.get_vocab()
        return frozenset(i for token, i in vocab.items() if _BYTE_TOKEN.fullmatch(token))


def as_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> Logprobs:
    """A runner's log-probabilities by token id, with the text of each token."""
    ranks = {entry.token_id: (entry.logprob, entry.rank)}
    for rank, (token_id, logprob) in enumerate(
        zip(entry.top_token_ids, entry.top_logprobs, strict=True), 1
    ):
        ranks.setdefault(token_id, (logprob, rank))
    return {
        token_id: Logprob(
            logprob,
            rank,
            tokenizer.decode([token_id], skip_special_tokens=False) if tokenizer else "",
        )
        for token_id, (logprob, rank) in ranks.items()
    }


def _as_ids(value: Any) -> frozenset[int]:
    if isinstance(value, int):
        return frozenset({value})
    return frozenset(int(token) for token in value or ())
