"""`LLM`: text in, text out. The offline API, and what the command line runs on."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from runnerctl.engine.admission import for_answer, for_this_model, per_prompt
from runnerctl.engine.answers import PromptAnswers
from runnerctl.engine.engine import Engine
from runnerctl.engine.journal import Journal
from runnerctl.engine.live_request import LiveRequest
from runnerctl.engine.outputs import RequestOutput, StreamDelta
from runnerctl.engine.pooling import PoolingCalls, Pools
from runnerctl.engine.prompts import Prompt, PromptLike, as_prompts
from runnerctl.engine.requirements import check_engine_installed
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.engine.stats import EngineStats
from runnerctl.engine.tokenizer import eos_token_ids_of, load_tokenizer
from runnerctl.errors import ConfigError, PromptError, UserError
from runnerctl.models.sentence_transformers import read_embedding_files
from runnerctl.models.store import ensure_local
from runnerctl.resolve import Resolved, resolve
from runnerctl.runner.protocol import WorkerContext

if TYPE_CHECKING:
    from runnerctl.config import EngineConfig
    from runnerctl.decision import Decision

T = TypeVar("T")

# What `stream` takes from its generator to start it; no caller sees it.
_STARTED = StreamDelta("", 0, "", ())


class LLM(Pools):
    """A model on the runner that the plugins voted for.

    Args:
        model: a folder, a GGUF file, a named model or a hub id; or an `EngineConfig`,
            which has all settings in it.
        runner: a runner's name; None or `auto` lets the plugins vote.
        settings: every flag of the command line, with underscores: `dtype`,
            `max_model_len`, `max_num_seqs`, `block_size`, `plugins` ...

    Raises:
        ConfigError: the configuration cannot be served; carries the Decision.
        ModelError: the model cannot be fetched or loaded.
        UserError: the model does not fit, or a setting is out of place.

    Example:
        with LLM("smollm2-135m") as llm:
            print(llm.decision.runner)
            [output] = llm.generate("The capital of France is", SamplingParams(temperature=0))
            print(output.outputs[0].text)
    """

    def __init__(
        self, model: str | Path | EngineConfig, *, runner: str | None = None, **settings: Any
    ) -> None:
        self._start(resolve(model, runner=runner, **settings))

    @classmethod
    def from_resolved(cls, resolved: Resolved) -> LLM:
        """An LLM from a configuration that was resolved, and perhaps shown, before."""
        llm = cls.__new__(cls)
        llm._start(resolved)
        return llm

    def _start(self, resolved: Resolved) -> None:
        self.decision: Decision = resolved.decision
        if not self.decision.ok or resolved.config is None or self.decision.runner is None:
            raise ConfigError(self.decision)
        check_engine_installed()
        config = resolved.config
        log = config.observability.log_json
        self._journal = Journal(log, config.where("log_json")) if log else None
        trust = config.model.trust_remote_code
        model = resolved.reference or config.model.model
        folder = ensure_local(model, trust_remote_code=trust)
        self._tokenizer = load_tokenizer(folder, trust_remote_code=trust)
        eos = self._tokenizer.eos_token_ids if self._tokenizer else eos_token_ids_of(folder)
        self._engine: Engine | None = Engine(
            resolved.host.runners[self.decision.runner],
            WorkerContext(config, self.decision, folder, resolved.host),
            frozenset(eos),
        )
        self._pooling = None
        if self._engine.model.pooling is not None:
            files = read_embedding_files(folder)
            self._pooling = PoolingCalls(self._engine, self._tokenizer, files, self._count_pooled)
        self._live: dict[str, LiveRequest] = {}
        self._next_id = 0
        self._plugin_seconds = resolved.host.timings

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus answer, in tokens."""
        return self._running_engine().cache_size.max_model_len

    @property
    def vocab_size(self) -> int:
        """Prompts may hold token ids below this."""
        return self._running_engine().model.vocab_size

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or many, together.

        Args:
            prompts: text, a list of token ids, `{"prompt": text}` or
                `{"prompt_token_ids": ids}`, or a list of those.
            sampling_params: for all prompts, or one per prompt. Default: `SamplingParams()`.

        Returns:
            One output per prompt, in their order.

        Raises:
            PromptError: a prompt is empty, too long or has unknown token ids. Nothing
                was generated then.
        """
        answers = self._admit(prompts, sampling_params)
        try:
            while not _all_finished(answers):
                self._step()
        finally:
            self._release(answers)
        return [one.output() for one in answers]

    def stream(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[StreamDelta, None, None]:
        """As `generate`, but each step's new text as it comes.

        Closing the iterator early, or dropping it, aborts what is not finished. Several
        streams of one LLM may be read in turns; their requests share steps.
        """
        # Not itself a generator: a bad prompt is to raise here, not at the first delta.
        deltas = self._stream(self._admit(prompts, sampling_params))
        # Python runs no `finally` of a generator that never started.
        next(deltas)
        return deltas

    def generate_each(
        self, prompts: Iterable[tuple[T, PromptLike, SamplingParams]], *, window: int
    ) -> Iterator[tuple[T, RequestOutput]]:
        """Outputs in the order in which they are finished, of prompts beyond number.

        A prompt is read as soon as another is done, so that the batch stays full to the
        end while never more than `window` prompts are held. Closing the iterator early
        aborts what is not finished.

        Args:
            prompts: each with something to know it by, and its parameters.
            window: prompts in the engine at the same time.

        Raises:
            UserError: as `generate`, when the prompt at fault is read. `check` tells before.
        """
        unread = iter(prompts)
        running: list[tuple[T, PromptAnswers]] = []
        try:
            while True:
                while len(running) < window and (one := next(unread, None)):
                    tag, prompt, params = one
                    running.append((tag, self._admit([prompt], params)[0]))
                if not running:
                    return
                self._step()
                done = [one for one in running if one[1].finished]
                running = [one for one in running if not one[1].finished]
                for _, answers in running:
                    answers.drop_deltas()
                self._release([answers for _, answers in done])
                yield from [(tag, answers.output()) for tag, answers in done]
        finally:
            self._release([answers for _, answers in running])

    def check(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> None:
        """See whether `generate` would take these; nothing is computed.

        Raises:
            UserError: as `generate`.
        """
        self._checked(prompts, sampling_params)

    def abort(self, request_id: str) -> None:
        """End one running answer, as a delta of `stream` names it; its stream goes on.

        Its last delta has the finish reason `abort`. An id that is not running is ignored.
        """
        entry = self._live.get(request_id)
        if entry is None or entry.finished:
            return
        engine = self._running_engine()
        engine.finish(entry.request, "abort")
        entry.take_abort()
        self._count_end(engine, entry)
        self._start_followers(entry)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
    ) -> RequestOutput:
        """Answer a conversation: `[{"role": "user", "content": ...}, ...]`.

        Raises:
            PromptError: the model has no chat template.
        """
        self._generating_engine()
        token_ids = self.chat_prompt(messages)
        if token_ids is None:
            raise PromptError(
                "this model has no chat template",
                remedy="use generate with a plain prompt, or take an instruction-tuned model",
            )
        return self.generate({"prompt_token_ids": token_ids}, sampling_params)[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        """A conversation as prompt tokens, or None if the model has no chat template."""
        return self._tokenizer.chat(messages) if self._tokenizer else None

    def stats(self) -> EngineStats:
        """What this LLM has done so far."""
        return replace(self._running_engine().stats(), plugin_seconds=self._plugin_seconds)

    def close(self) -> None:
        """Free the model and its memory. Doing it again changes nothing."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        for entry in self._live.values():
            self._count_end(engine, entry)
        engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise UserError("this LLM was closed", remedy="make a new one")
        return self._engine

    def _generating_engine(self) -> Engine:
        engine = self._running_engine()
        if engine.model.pooling is not None:
            raise UserError(
                "this model does not generate text: it is a pooling model",
                remedy=f"call LLM.{engine.model.pooling.task}",
            )
        return engine

    def _count_pooled(self, entry: LiveRequest, error: BaseException | None) -> None:
        self._count_end(self._running_engine(), entry, error)

    def _admit(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[PromptAnswers]:
        """Check everything, then queue everything."""
        engine = self._running_engine()
        checked = self._checked(prompts, sampling_params)
        answers = [self._new_answers(*one) for one in enumerate(checked)]
        for one in answers:
            self._live |= {entry.request.request_id: entry for entry in one.entries}
            engine.add_request(one.entries[0].request)
        return answers

    def _checked(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[tuple[Prompt, SamplingParams]]:
        engine = self._generating_engine()
        checked = as_prompts(
            prompts,
            self._tokenizer,
            vocab_size=engine.model.vocab_size,
            max_model_len=engine.cache_size.max_model_len,
            length_setting=engine.cache_size.limited_by,
        )
        params = [
            for_this_model(one, self._tokenizer, engine.model.vocab_size)
            for one in per_prompt(sampling_params, len(checked))
        ]
        return list(zip(checked, params, strict=True))

    def _new_answers(
        self, index: int, prompt_and_params: tuple[Prompt, SamplingParams]
    ) -> PromptAnswers:
        """The `n` answers to one prompt, none of them queued yet."""
        engine = self._running_engine()
        prompt, params = prompt_and_params
        request_id = str(self._next_id)
        self._next_id += 1
        entries = []
        for i in range(params.n):
            answer_id = f"{request_id}.{i}" if i else request_id
            request = engine.new_request(answer_id, prompt.token_ids, for_answer(params, i))
            entries.append(LiveRequest(index, i, request, self._tokenizer))
        entries[0].followers = entries[1:]
        return PromptAnswers(request_id, prompt, entries, self._tokenizer)

    def _stream(self, answers: list[PromptAnswers]) -> Generator[StreamDelta, None, None]:
        try:
            yield _STARTED
            ended = False
            while not ended:
                # Asked before: while the caller has a delta, another's step may end all.
                ended = _all_finished(answers)
                for one in answers:
                    yield from one.take_deltas()
                if not _all_finished(answers):
                    self._step()
        finally:
            self._release(answers)

    def _step(self) -> None:
        """One engine step; its tokens become text in their requests."""
        engine = self._running_engine()
        try:
            updated = engine.step()
        except BaseException as error:
            self._abort_all(engine, error)
            raise
        for request in updated:
            entry = self._live[request.request_id]
            if entry.time_to_first_token_s is None:
                entry.time_to_first_token_s = entry.age_s
                engine.counts.count_first_token(request, entry.time_to_first_token_s)
            entry.take_token()
            self._start_followers(entry)
            if request.finish_reason is not None:
                engine.finish(request, request.finish_reason)
                self._count_end(engine, entry)

    def _abort_all(self, engine: Engine, error: BaseException) -> None:
        """After a step that raised, tell all readers; answers not yet queued end too."""
        for entry in self._live.values():
            engine.finish(entry.request, "abort")
            if entry.request.finish_reason == "abort":
                entry.take_abort()
            self._count_end(engine, entry, error)

    def _count_end(
        self, engine: Engine, entry: LiveRequest, error: BaseException | None = None
    ) -> None:
        """Count and log the end of an answer, once."""
        if entry.counted:
            return
        entry.counted = True
        engine.counts.count_end(entry.request)
        if self._journal is not None:
            self._journal.request(entry, error)

    def _start_followers(self, entry: LiveRequest) -> None:
        """Queue the further answers to a prompt, now that it is computed."""
        followers, entry.followers = entry.followers, []
        for follower in followers:
            if not follower.finished:
                self._running_engine().add_request(follower.request)

    def _release(self, answers: list[PromptAnswers]) -> None:
        """Forget requests; those still running are aborted."""
        for entry in (entry for one in answers for entry in one.entries):
            if self._engine is not None:
                self._engine.finish(entry.request, "abort")
                self._count_end(self._engine, entry)
            self._live.pop(entry.request.request_id, None)


def _all_finished(answers: list[PromptAnswers]) -> bool:
    return all(one.finished for one in answers)
