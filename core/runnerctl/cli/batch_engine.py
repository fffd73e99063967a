"""Many prompts through one `LLM`, a window of them at a time, each handed out when finished."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from runnerctl.engine.admission import for_this_model
from runnerctl.engine.prompts import PromptLike, as_prompts
from runnerctl.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from runnerctl.engine.answers import PromptAnswers
    from runnerctl.engine.llm import LLM
    from runnerctl.engine.outputs import RequestOutput

T = TypeVar("T")


def check(llm: LLM, prompt: PromptLike, params: SamplingParams) -> None:
    """Whether this LLM can answer a prompt; nothing is computed.

    Raises:
        UserError: as `LLM.generate` does.
    """
    engine = llm._running_engine()
    as_prompts(
        prompt,
        llm._tokenizer,
        vocab_size=engine.model.vocab_size,
        max_model_len=engine.cache_size.max_model_len,
        length_setting=engine.cache_size.limited_by,
    )
    for_this_model(params, llm._tokenizer, engine.model.vocab_size)


def answer_all(
    llm: LLM, prompts: Iterable[tuple[T, PromptLike, SamplingParams]], window: int
) -> Iterator[tuple[T, RequestOutput]]:
    """Answers in the order in which they are finished.

    A new prompt is taken as soon as another is done, so that the batch stays full to the
    end, while the engine never holds more than `window` prompts.

    Args:
        llm: nothing else may run on it meanwhile.
        prompts: each with something to know it by; read as they are needed.
        window: prompts in the engine at the same time.
    """
    waiting = iter(prompts)
    running: list[tuple[T, PromptAnswers]] = []
    try:
        while True:
            while len(running) < window and (one := next(waiting, None)):
                tag, prompt, params = one
                running.append((tag, llm._admit([prompt], params)[0]))
            if not running:
                return
            llm._step()
            done = [one for one in running if one[1].finished]
            running = [one for one in running if not one[1].finished]
            for _, answers in running:
                for _ in answers.take_deltas():
                    pass  # nobody reads them; they would pile up
            llm._release([answers for _, answers in done])
            yield from [(tag, answers.output()) for tag, answers in done]
    finally:
        llm._release([answers for _, answers in running])
