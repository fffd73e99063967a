"""Texts to vectors and label numbers: what `LLM.embed` and `LLM.classify` run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runnerctl.engine.engine import Engine
from runnerctl.engine.live_request import LiveRequest
from runnerctl.engine.outputs import ClassificationOutput, EmbeddingOutput
from runnerctl.engine.pooling_params import PoolingParams
from runnerctl.engine.pooling_scheduler import PoolingRequest
from runnerctl.engine.prompts import (
    PromptLike,
    TextPair,
    check_token_ids,
    contents_of,
    no_tokenizer,
)
from runnerctl.engine.tokenizer import Tokenizer
from runnerctl.errors import PromptError, UserError
from runnerctl.models.sentence_transformers import INSTRUCTIONS, EmbeddingFiles
from runnerctl.runner.protocol import PoolingFacts

CountEnd = Callable[[LiveRequest, BaseException | None], None]


@dataclass(slots=True)
class _Text:
    """One checked text: what messages call it, its tokens, and of a pair whose they are."""

    where: str
    token_ids: tuple[int, ...] = ()
    token_type_ids: tuple[int, ...] = ()


class PoolingCalls:
    """The calls of an `LLM` whose model pools.

    Args:
        engine: with a model that pools.
        tokenizer: None if the model has none.
        files: what the checkpoint says of texts.
        count_end: called once for each text, when it has a result or will not get one.

    Attributes:
        facts: of the model.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        files: EmbeddingFiles,
        count_end: CountEnd,
    ) -> None:
        assert engine.model.pooling is not None
        self._engine = engine
        self.facts: PoolingFacts = engine.model.pooling
        self._tokenizer = tokenizer
        self._files = files
        self._count_end = count_end
        self._next_id = 0

    def embed(
        self, prompts: PromptLike | Sequence[PromptLike], params: PoolingParams | None
    ) -> list[EmbeddingOutput]:
        """See `LLM.embed`."""
        if self.facts.task != "embed":
            raise UserError(
                "this model classifies texts, and gives no embeddings",
                remedy="call LLM.classify (on the command line: runnerctl classify)",
            )
        done = self._run(prompts, params or PoolingParams())
        return [EmbeddingOutput(tuple(one.token_ids), one.pooled) for one in done]

    def classify(
        self, prompts: PromptLike | Sequence[PromptLike], params: PoolingParams | None
    ) -> list[ClassificationOutput]:
        """See `LLM.classify`."""
        if self.facts.task != "classify":
            raise UserError(
                "this model embeds texts, and has no labels",
                remedy="call LLM.embed (on the command line: runnerctl embed)",
            )
        labels = self.facts.labels
        outputs = []
        for one in self._run(prompts, params or PoolingParams()):
            best = max(range(len(labels)), key=one.pooled.__getitem__)
            ids = tuple(one.token_ids)
            outputs.append(ClassificationOutput(ids, one.pooled, labels[best], labels))
        return outputs

    def check(
        self, prompts: PromptLike | Sequence[PromptLike], params: PoolingParams | None
    ) -> None:
        """See `LLM.check_texts`."""
        self._read(prompts, params or PoolingParams())

    def _run(
        self, prompts: PromptLike | Sequence[PromptLike], params: PoolingParams
    ) -> list[PoolingRequest]:
        """Read everything, queue everything, wait for everything."""
        requests = []
        for text in self._read(prompts, params):
            request_id = str(self._next_id)
            self._next_id += 1
            requests.append(PoolingRequest(request_id, text.token_ids, params, text.token_type_ids))
        live = {
            request.request_id: LiveRequest(index, 0, request, None)
            for index, request in enumerate(requests)
        }
        # Those of a step have similar lengths then, and little is padded.
        for request in sorted(requests, key=lambda one: -one.num_tokens):
            self._engine.add_request(request)
        error: BaseException | None = None
        try:
            while live:
                for updated in self._engine.step():
                    entry = live.pop(updated.request_id)
                    self._engine.counts.count_first_token(updated, entry.age_s)
                    self._count_end(entry, None)
        except BaseException as caught:
            error = caught
            raise
        finally:
            for entry in live.values():
                self._engine.finish(entry.request, "abort")
                self._count_end(entry, error)
        return requests

    def _read(
        self, prompts: PromptLike | Sequence[PromptLike], params: PoolingParams
    ) -> list[_Text]:
        """Every text as tokens that the model takes.

        Raises:
            PromptError: names the text at fault.
        """
        limit = self._engine.cache_size.max_model_len
        cut = params.truncate_prompt_tokens
        cut = limit if cut == -1 else cut
        instruction = self._instruction(params)
        read = []
        plain: list[tuple[_Text, str]] = []
        for where, content in contents_of(prompts):
            text = _Text(where)
            read.append(text)
            if isinstance(content, str):
                plain.append((text, self._lowered(instruction + content)))
            elif isinstance(content, TextPair):
                pair = (self._lowered(content.first), self._lowered(content.second))
                self._encode_pair(text, *pair, cut)
            else:
                text.token_ids = content[:cut]
        if plain:
            tokenizer = self._tokenizer_for(plain[0][0].where)
            encoded = tokenizer.encode_many([content for _, content in plain], cut)
            for (text, _), ids in zip(plain, encoded, strict=True):
                text.token_ids = tuple(ids)
        for text in read:
            check_token_ids(text.token_ids, text.where, self._engine.model.vocab_size)
            if cut is not None and len(text.token_ids) > cut:
                raise UserError(
                    f"truncate_prompt_tokens is {cut}, which leaves no room beside special tokens",
                    remedy="raise it",
                    setting="truncate_prompt_tokens",
                )
            if len(text.token_ids) > limit:
                raise self._too_long(text, limit)
        return read

    def _encode_pair(self, text: _Text, first: str, second: str, cut: int | None) -> None:
        if self.facts.task != "classify":
            raise PromptError(
                f"{text.where} is a pair of texts, which only classifiers read",
                remedy="embed each of them by itself",
            )
        ids, types = self._tokenizer_for(text.where).encode_pair(first, second, cut)
        text.token_ids = tuple(ids)
        text.token_type_ids = tuple(types) if any(types) else ()

    def _instruction(self, params: PoolingParams) -> str:
        """The text to put in front of each text."""
        files = self._files
        name = files.default_prompt_name if params.prompt_name is None else params.prompt_name
        if not name or self.facts.task != "embed":
            return ""
        if name not in files.prompts:
            known = ", ".join(files.prompts) or "none"
            raise UserError(
                f"the model has no prompt {name!r} ({INSTRUCTIONS} has: {known})",
                remedy="take one of those, or put your own in front of the texts",
                setting="prompt_name",
            )
        if not files.pools_prompt:
            raise UserError(
                f"the model leaves the tokens of the prompt {name!r} out of its pooling, which "
                "is not supported",
                remedy="take another model, or prompt_name='' to go without",
                setting="prompt_name",
            )
        return files.prompts[name]

    def _lowered(self, text: str) -> str:
        return text.lower() if self._files.lower_case else text

    def _tokenizer_for(self, where: str) -> Tokenizer:
        if self._tokenizer is None:
            raise no_tokenizer(where)
        return self._tokenizer

    def _too_long(self, text: _Text, limit: int) -> PromptError:
        source = self._engine.cache_size.limited_by
        return PromptError(
            f"{text.where} has {len(text.token_ids)} tokens, but the limit is {limit} ({source})",
            remedy="shorten it, or cut it with truncate_prompt_tokens (-1: to the limit)",
        )


class Pools:
    """The half of `LLM` that is for pooling models."""

    _engine: Engine | None
    _pooling: PoolingCalls | None

    @property
    def pooling_facts(self) -> PoolingFacts | None:
        """How a pooling model pools, and its labels; None of a model that generates."""
        return self._pooling.facts if self._pooling else None

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | None = None,
    ) -> list[EmbeddingOutput]:
        """A vector for each text, from an embedding model.

        Args:
            prompts: one or many, as `generate` takes them.
            pooling_params: for all texts. Default: as the model's own files say.

        Returns:
            One output per text, in their order. It does not depend on the texts beside it.

        Raises:
            UserError: the model generates or classifies.
            PromptError: a text is empty, too long or has unknown token ids. Nothing was
                computed then.
        """
        return self._pooling_calls("embed").embed(prompts, pooling_params)

    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | None = None,
    ) -> list[ClassificationOutput]:
        """As `embed`, but a number per label, from a classifier or a reward model.

        A prompt may also be `{"prompt": text, "text_pair": text}`, for cross-encoders.
        """
        return self._pooling_calls("classify").classify(prompts, pooling_params)

    def check_texts(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | None = None,
    ) -> None:
        """See whether `embed` or `classify` would take these; nothing is computed.

        Raises:
            UserError: as they do.
        """
        self._pooling_calls("embed").check(prompts, pooling_params)

    def _pooling_calls(self, call: str) -> PoolingCalls:
        if self._engine is None:
            raise UserError("this LLM was closed", remedy="make a new one")
        if self._pooling is None:
            raise UserError(
                f"this model generates text, which LLM.{call} does not do",
                remedy="call LLM.generate, or take a pooling model: one with the modules.json of "
                "sentence-transformers, or whose architecture in config.json is one "
                "(BertModel, Qwen3Model, LlamaForSequenceClassification ...)",
            )
        return self._pooling
