"""The `runnerctl` command: thin; each subcommand parses, calls the library and renders."""

from __future__ import annotations

from typing import Annotated

import typer

from runnerctl import __version__
from runnerctl.cli import (
    bench,
    chat,
    completion,
    config,
    embed,
    env,
    explain,
    generate,
    matrix,
    models,
    plugins,
)
from runnerctl.cli.flags import engine_flags
from runnerctl.cli.guard import guarded
from runnerctl.cli.help import SectionedCommand
from runnerctl.cli.plugins_commands import RootGroup
from runnerctl.cli.sampling_flags import sampling_flags

app = typer.Typer(
    name="runnerctl",
    help="Choose, explain and run the model runner that serves a language model.",
    no_args_is_help=True,
    cls=RootGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"runnerctl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            "-p",
            "--plugin",
            metavar="[no:]NAME",
            help="NAME: this plugin must load; no:NAME: do not import it, so that its commands "
            "are gone, too.",
            show_default=False,
            autocompletion=completion.plugins,
        ),
    ] = None,
) -> None:
    """Choose, explain and run the model runner that serves a language model."""


chatting = sampling_flags(chat.chat, without=chat.WITHOUT)
for command in (
    sampling_flags(generate.generate),
    chatting,
    embed.embed,
    embed.classify,
    bench.bench,
    explain.explain,
    explain.validate,
    matrix.matrix,
):
    app.command(cls=SectionedCommand)(guarded(engine_flags(command)))


def _group(name: str, text: str) -> typer.Typer:
    group = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name=name)
    return group


plugins_app = _group("plugins", "See which plugins take part, and their options.")
for name, lister in (("list", plugins.list_plugins), ("options", plugins.list_options)):
    command = guarded(engine_flags(lister, {"plugins"}))
    plugins_app.command(name, cls=SectionedCommand)(command)

config_app = _group("config", "See the settings and where each was made.")
config_app.command("show", cls=SectionedCommand)(guarded(engine_flags(config.show_config)))

models_app = _group("models", "See, fetch and remove models.")
models_app.command("list", cls=SectionedCommand)(guarded(models.list_models))
models_app.command("pull", cls=SectionedCommand)(guarded(models.pull))
models_app.command("rm", cls=SectionedCommand)(guarded(models.rm))

app.command("env", cls=SectionedCommand)(guarded(engine_flags(env.show_environment, {"plugins"})))
