"""The whole contract between runnerctl and its plugins.

A plugin is a module or object, published under the entry-point group
`runnerctl.plugins`, with functions marked `@hookimpl` that bear these names.
An implementation may leave out arguments it does not use.

Hooks are called by the host one implementation at a time: an exception in one
plugin is reported under its name and loses nobody else's answer. The order of
plugins never matters, so `tryfirst`, `trylast` and wrappers have no place here;
wrappers are refused.

A plugin may say which hosts it works with: `requires_runnerctl = ">=0.1,<2"` beside
its hooks. A host outside that range leaves it out and says so.

Plugin modules are imported by every command, `--help` included: import torch
inside functions, never at the top.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import typer
    from pydantic import BaseModel

    from runnerctl.ballots import Ballot
    from runnerctl.config import EngineConfig, FactOverrides
    from runnerctl.decision import Decision
    from runnerctl.problems import Problem
    from runnerctl.runner.attention.spec import AttentionBackendSpec
    from runnerctl.runner.batch_transform import BatchTransformSpec
    from runnerctl.runner.spec import RunnerSpec
    from runnerctl.runner.transforms import ModelTransform

PROJECT = "runnerctl"
ENTRY_POINT_GROUP = "runnerctl.plugins"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_runners() -> Iterable[RunnerSpec]:  # type: ignore[empty-body]
    """Name the runners this plugin provides.

    Called once per host, right after all plugins are loaded, in the process that
    decides and again in each worker; must give the same answer in each.

    Returns:
        `RunnerSpec`s; an empty list if there are none here (on this hardware, say).
        A name that another plugin provides too, and a second spec with
        `fallback=True`, are errors that name both plugins.

    Example:
        @hookimpl
        def register_runners():
            return [RunnerSpec(name="mine", factory="my_package.runner:MyRunner")]
    """


@hookspec
def register_attention_backends() -> Iterable[AttentionBackendSpec]:  # type: ignore[empty-body]
    """Name the attention backends this plugin provides.

    Called once per host, right after all plugins are loaded, in the process that
    decides and again in each worker; must give the same answer in each.

    Returns:
        `AttentionBackendSpec`s; an empty list if there are none here. A name that another
        plugin or the host itself provides too is an error that names both. `auto` tries
        the backends of all plugins and the host's own by priority, those of the same
        priority by name.

    Example:
        @hookimpl
        def register_attention_backends():
            return [AttentionBackendSpec("mine", "my_package.attention:MyBackend")]
    """


@hookspec
def register_batch_transforms() -> Iterable[BatchTransformSpec]:  # type: ignore[empty-body]
    """Name the batch transforms of this plugin: ways to share a step among ranks.

    Called once per host, right after all plugins are loaded, in the process that
    decides and again in each worker; must give the same answer in each.

    Returns:
        `BatchTransformSpec`s; an empty list if there are none here. The feature of each is
        counted among the capabilities of the runners that it fits. A feature that another
        plugin gives to the same runner is an error that names both.

    Example:
        @hookimpl
        def register_batch_transforms():
            return [BatchTransformSpec("mine", "pcp", {"v9"}, "my_package.split:MySplit")]
    """


@hookspec
def register_options() -> type[BaseModel]:  # type: ignore[empty-body]
    """Declare the options of this plugin as a pydantic model.

    Called once per host, right after all plugins are loaded. Every field needs a
    default. Users set them with `--plugin-option NAME.key=value`, in the
    configuration file under `plugin_options: {NAME: {key: value}}` or from Python
    with `plugin_options={"NAME": {"key": value}}`, where NAME is the plugin's
    entry-point name. Unknown keys and wrong types are errors with a suggestion.

    Returns:
        The model class. Hooks read the values with `config.options(ThatClass)`.

    Example:
        class Options(BaseModel):
            extra: tuple[str, ...] = ()

        @hookimpl
        def register_options():
            return Options
    """


@hookspec
def register_model_facts(
    config_json: Mapping[str, Any],
) -> FactOverrides | Iterable[FactOverrides] | None:
    """Supply facts of a model that the host does not know, or reads wrongly.

    Called once per decision, before any ballot is asked for, in the process that decides;
    never in a worker, and not for a configuration that was made with its facts. Must be a
    pure function of its argument.

    Args:
        config_json: the object in the model's `config.json` (of a GGUF file, one made from
            its metadata); a copy for this plugin alone. Any key may be missing or odd.

    Returns:
        `FactOverrides`, or None for every model that is not this plugin's business. The
        facts in it go before what the host read; `explain` shows each that changed with
        the plugin's name and reason. Two plugins that contradict each other on a fact are
        an error that names both.

    Example:
        @hookimpl
        def register_model_facts(config_json):
            if config_json.get("model_type") == "tidal":
                return FactOverrides("tidal's `tide` layers are recurrent", is_hybrid=True)
    """


@hookspec
def select_runner(config: EngineConfig) -> Ballot | Iterable[Ballot] | None:
    """Say which runner should, must, should not or cannot serve this configuration.

    Called once per decision, in the process that decides; never in a worker.
    Must be a pure function of its argument and of this machine: the same
    configuration gets the same ballots every time.

    Args:
        config: the resolved configuration. `config.facts` is what the model is
            (never None here), `config.where(key)` names the place a setting was made.

    Returns:
        A `Vote`, `Discourage`, `Require` or `Forbid`, several of them, or None
        (nothing to say; the usual answer).

    Example:
        @hookimpl
        def select_runner(config):
            if config.facts.is_moe:
                return Discourage("mine", "mine has no expert kernels yet")
            return Vote("mine", "mine is the fastest on this machine")
    """


@hookspec
def validate_config(config: EngineConfig, decision: Decision) -> Iterable[Problem] | None:
    """Report what is wrong with this configuration, given the runner that was chosen.

    Called once per decision, after the count, in the process that decides; not
    called when the selection failed. All plugins are asked, and all problems
    reported together.

    Args:
        config: as in `select_runner`.
        decision: the outcome so far; `decision.runner` is never None here.

    Returns:
        `Problem`s, or None.

    Example:
        @hookimpl
        def validate_config(config, decision):
            if decision.runner == "mine" and config.cache.block_size % 16:
                yield Problem(
                    "error",
                    "the mine runner needs a block size that is a multiple of 16",
                    remedy="pass --block-size 16",
                    setting=config.where("block_size"),
                )
    """


@hookspec
def transform_model(
    model: Any, config: EngineConfig, decision: Decision
) -> Iterable[ModelTransform] | None:
    """Offer changes to a model whose weights are loaded: fuse, pack, quantise, compile.

    Called once each time a runner applies stages, in the process that holds the model,
    after its weights are loaded: by most runners before the first forward for `fuse` and
    `pack`, and once more for `compile`. Nothing is to be changed here, only in `apply`.

    Args:
        model: an `nn.Module`, as the stages before have left it.
        config: the resolved configuration.
        decision: the decision made at start; `decision.runner` says for which runner.

    Returns:
        `ModelTransform`s, or None. They are applied stage by stage and by name within a
        stage. One that raises ends the start, since the model may be half changed.

    Example:
        @hookimpl
        def transform_model(model, config, decision):
            if decision.runner == "mine":
                yield ModelTransform("mine-pack", "pack", pack_linear_layers)
    """


@hookspec
def register_commands(app: typer.Typer) -> None:
    """Add commands to `runnerctl`.

    Called once per run of the command, in the process of the command line, when it may
    need them: for `runnerctl --help`, for a command that is not one of the host's own and
    for shell completion. Never in a worker, and never by the library.

    Args:
        app: an empty `typer.Typer` for this plugin alone. Each command and group added to
            it becomes `runnerctl NAME`, with the host's exit codes and `--traceback`: a
            `UserError` it raises is shown as a message and exits with 2.

    Returns:
        None. A name that is one of the host's own commands or another plugin's is left
        out, and the fault names both. A plugin blocked with `-p no:NAME` is not asked.

    Example:
        @hookimpl
        def register_commands(app):
            @app.command()
            def doctor(device: str = "cuda:0"):
                "Check that this machine can run the mine runner."
                print("fine")
    """
