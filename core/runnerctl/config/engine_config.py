"""`EngineConfig`: every setting of an engine, in sections, frozen, each with its origin.

One word per setting: the field name here is the Python argument, with hyphens
the command-line flag, upper-cased behind `RUNNERCTL_` the variable, and the key
in a configuration file. The descriptions are the help texts of the flags.
`settings.resolve` builds an EngineConfig from those sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from runnerctl.config.facts import ModelFacts

OptionsT = TypeVar("OptionsT", bound=BaseModel)
PositiveInt = Annotated[int, Field(gt=0)]
Source = Literal["command line", "python", "file", "environment", "default"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
ExecutorName = Literal["auto", "uni", "mp", "ray"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: the kind of place, and how the user spelled it there."""

    source: Source
    setting: str


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSection(Section):
    """Which model, and in which shape."""

    model: str = Field(
        description="A folder, a config.json or GGUF file, a named model, or a hub id."
    )
    dtype: DtypeName = Field(
        "auto",
        description="Type of weights and activations. auto: the checkpoint's own where the "
        "hardware computes in it, else float32.",
    )
    max_model_len: PositiveInt | None = Field(
        None,
        description="Longest prompt plus answer, in tokens. Default: the model's context, or "
        "what the KV cache holds if that is less.",
    )
    trust_remote_code: bool = Field(
        False, description="Let the checkpoint's own Python code run on this machine."
    )


class ParallelSection(Section):
    """How the work is spread over ranks."""

    tensor_parallel_size: PositiveInt = Field(
        1, description="Ranks that share each layer's weights."
    )
    prefill_context_parallel_size: PositiveInt = Field(
        1, description="Ranks that share the tokens of each prefill."
    )
    distributed_executor_backend: ExecutorName = Field(
        "auto",
        description="What runs the ranks. uni: this process; mp: processes of this machine; ray: "
        "a Ray cluster, or a local one if there is none. auto: uni for one rank, else mp.",
    )
    worker_timeout: PositiveInt = Field(
        60,
        description="Seconds without a sign of life from a rank, or of ranks waiting for another "
        "one, after which all are given up.",
    )


class SchedulerSection(Section):
    """What one step may hold."""

    max_num_seqs: PositiveInt = Field(64, description="Requests that may run at the same time.")
    max_num_batched_tokens: PositiveInt = Field(
        2048,
        description="Tokens computed in one step at most; longer prefills are cut in chunks. "
        "May be smaller than max-num-seqs.",
    )


class CacheSection(Section):
    """The paged KV cache."""

    block_size: PositiveInt = Field(16, description="Tokens per KV cache block.")
    num_gpu_blocks_override: PositiveInt | None = Field(
        None, description="Number of KV cache blocks (on any device), instead of a measured one."
    )
    kv_cache_memory_bytes: PositiveInt | None = Field(
        None, description="Memory for the KV cache in bytes. Default: a share of what is free."
    )
    enable_prefix_caching: bool = Field(
        True, description="Reuse KV blocks of a prefix that was computed before."
    )


class RunnerSection(Section):
    """Which runner, and how it computes."""

    runner: str = Field(
        "auto", description="A runner's name, or auto: let the plugins vote.", min_length=1
    )
    attention_backend: str = Field(
        "auto", description="Kernels for attention, or auto: the best that fits.", min_length=1
    )
    enforce_eager: bool = Field(
        False, description="Run without compiled or captured graphs, on runners that have them."
    )


class PluginSection(Section):
    """Which plugins take part."""

    plugins: tuple[str, ...] = Field(
        (), description="NAME: this plugin must load; no:NAME: do not import it. Repeatable."
    )
    allowed_plugins: tuple[str, ...] | None = Field(
        None,
        description="The only third-party plugins that may load. Default: all that are installed.",
    )
    strict_plugins: bool = Field(
        False, description="A plugin that cannot load, and a tied vote, are errors."
    )


class ObservabilitySection(Section):
    """What an engine writes down about itself."""

    log_json: Path | None = Field(
        None,
        description="Append a line of JSON for each decision and each finished request to this "
        "file; - is stderr. No text of prompts or answers is in it.",
    )


class EngineConfig(BaseModel):
    """The resolved configuration. Frozen; passed to every plugin and to the runner.

    Attributes:
        model, parallel, scheduler, cache, runner, plugins, observability: the sections.
        plugin_options: one validated options object per plugin that declares options,
            by entry-point name.
        facts: what the model is. None only in a configuration whose model could not
            be read; plugins never see such a one.
        origins: where each setting came from, by field name; defaults are absent.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    model: ModelSection
    parallel: ParallelSection = ParallelSection()
    scheduler: SchedulerSection = SchedulerSection()
    cache: CacheSection = CacheSection()
    runner: RunnerSection = RunnerSection()
    plugins: PluginSection = PluginSection()
    observability: ObservabilitySection = ObservabilitySection()
    plugin_options: Mapping[str, Any] = Field(default_factory=dict)
    facts: ModelFacts | None = None
    origins: Mapping[str, Origin] = Field(default_factory=dict)

    def origin(self, name: str) -> Origin:
        """Where the setting `name` (a field name, `block_size`) came from.

        Raises:
            KeyError: no setting has this name.
        """
        if name not in SETTINGS:
            raise KeyError(f"no setting is called {name!r}")
        return self.origins.get(name, Origin("default", flag(name)))

    def where(self, name: str) -> str:
        """The setting `name` as the user spelled it, for messages; a default gives its flag.

        Raises:
            KeyError: no setting has this name.
        """
        return self.origin(name).setting

    def options(self, kind: type[OptionsT]) -> OptionsT:
        """The options of the plugin that declared `kind` in `register_options`.

        A configuration made without that plugin (in a test, say) gives the defaults.
        """
        for value in self.plugin_options.values():
            if isinstance(value, kind):
                return value
        return kind()


SECTIONS: dict[str, type[Section]] = {
    "model": ModelSection,
    "parallel": ParallelSection,
    "scheduler": SchedulerSection,
    "cache": CacheSection,
    "runner": RunnerSection,
    "plugins": PluginSection,
    "observability": ObservabilitySection,
}

SETTINGS: dict[str, str] = {
    name: section for section, kind in SECTIONS.items() for name in kind.model_fields
}
"""The section each setting lives in, by field name."""


def flag(name: str) -> str:
    """The command-line flag of a setting."""
    return {"model": "MODEL", "plugins": "-p"}.get(name, "--" + name.replace("_", "-"))
