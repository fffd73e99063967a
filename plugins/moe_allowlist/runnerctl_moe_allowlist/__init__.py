"""Keeps mixture-of-experts models off V2 by default, save those on a list.

The list can be extended or replaced:

    runnerctl explain MODEL --plugin-option moe_allowlist.extend=MixtralForCausalLM
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from runnerctl import BUILTIN, Discourage, hookimpl

if TYPE_CHECKING:
    from runnerctl import EngineConfig

ALLOWLIST = ("DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM")


class Options(BaseModel):
    """Which mixture-of-experts architectures v2 serves by default."""

    extend: tuple[str, ...] = Field((), description="Architectures added to the list.")
    replace: tuple[str, ...] | None = Field(
        None, description="The whole list, in place of the built-in one."
    )


@hookimpl
def register_options() -> type[Options]:
    """The list is configurable."""
    return Options


@hookimpl
def select_runner(config: EngineConfig) -> Discourage | None:
    """Discourage v2 for experts of an architecture that is not on the list."""
    facts = config.facts
    if facts is None or not facts.is_moe:
        return None
    options = config.options(Options)
    allowed = (ALLOWLIST if options.replace is None else options.replace) + options.extend
    if set(facts.architectures) & set(allowed):
        return None
    named = ", ".join(facts.architectures) or "this architecture"
    return Discourage("v2", f"mixture of experts, and {named} is not on the allowlist", BUILTIN)
