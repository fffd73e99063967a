"""`runnerctl chat`: a conversation in the terminal, or with what is piped in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from runnerctl.cli.chat_session import ChatSession
from runnerctl.cli.chat_terminal import StandardStreams
from runnerctl.cli.generate_load import ModelFlag, SystemFlag, as_unicode, load, resolve_model
from runnerctl.engine.sampling_params import SamplingParams

# one answer per message, and nobody reads numbers between the words
WITHOUT = ("n", "logprobs", "prompt_logprobs")


def chat(
    *,
    settings: dict[str, Any],
    config_file: Path | None,
    params: SamplingParams,
    model: ModelFlag = None,
    system: SystemFlag = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Report tokens and times below each answer.")
    ] = False,
) -> None:
    """Hold a conversation with a language model.

    Each line is a message; /help lists the commands. Ctrl-C stops an answer. At the empty
    prompt, Ctrl-C or Ctrl-D ends the conversation. Answers go to stdout, everything else
    to stderr.
    """
    system = None if system is None else as_unicode(system, "--system")
    terminal = StandardStreams()
    llm = load(resolve_model(model, settings, config_file))
    try:
        session = ChatSession(llm, params, terminal, system=system, stats=stats)
        if terminal.interactive:
            terminal.note("Ctrl-C stops an answer, Ctrl-D ends the conversation; /help")
        session.run()
    finally:
        llm.close()
