"""The `runnerctl` command: thin; each subcommand parses, calls the library and renders."""

from __future__ import annotations

import typer

from runnerctl import __version__
from runnerctl.cli import chat, explain, generate, plugins
from runnerctl.cli.flags import engine_flags
from runnerctl.cli.guard import guarded
from runnerctl.cli.help import SectionedCommand
from runnerctl.cli.sampling_flags import sampling_flags

app = typer.Typer(
    name="runnerctl",
    help="Choose, explain and run the model runner that serves a language model.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
plugins_app = typer.Typer(
    help="See which plugins take part.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(plugins_app, name="plugins")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"runnerctl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_print_version, is_eager=True
    ),
) -> None:
    """Choose, explain and run the model runner that serves a language model."""


chatting = sampling_flags(chat.chat, without=chat.WITHOUT)
for command in (
    sampling_flags(generate.generate),
    chatting,
    explain.explain,
    explain.validate,
):
    app.command(cls=SectionedCommand)(guarded(engine_flags(command)))
plugins_app.command("list", cls=SectionedCommand)(
    guarded(engine_flags(plugins.list_plugins, {"plugins"}))
)
