"""A site's rules as options: pins of architectures to runners, and a limit on requests."""

from typing import Annotated

from pydantic import BaseModel, Field

from runnerctl import Forbid, Problem, Vote, hookimpl

requires_runnerctl = ">=0.1,<2"


class Options(BaseModel):
    pins: tuple[Annotated[str, Field(pattern=r"^[^=\s]+=[^=\s]+$")], ...] = Field(
        (), description="ARCHITECTURE=RUNNER: what this site runs an architecture on."
    )
    unreleased: tuple[str, ...] = Field(
        (), description="Runners that nobody may use here yet, not even by asking for them."
    )
    max_num_seqs: int | None = Field(
        None, gt=0, description="More requests at once than this are reported."
    )


@hookimpl
def register_options():
    return Options


@hookimpl
def select_runner(config):
    options = config.options(Options)
    pins = dict(pin.split("=") for pin in options.pins)
    for architecture in config.facts.architectures:
        if architecture in pins:
            yield Vote(pins[architecture], f"this site runs {architecture} on it")
    for runner in options.unreleased:
        yield Forbid(
            runner,
            "it is not released at this site",
            remedy="take another --runner, or remove it from the option site.unreleased",
        )


@hookimpl
def validate_config(config, decision):
    options = config.options(Options)
    wanted = config.scheduler.max_num_seqs
    if options.max_num_seqs is not None and wanted > options.max_num_seqs:
        where = config.where("max_num_seqs")
        yield Problem(
            "error",
            f"{where} is {wanted}, and this site allows {options.max_num_seqs} requests at once",
            remedy=f"set it to {options.max_num_seqs} or less",
            setting=where,
        )
    pins = dict(pin.split("=") for pin in options.pins)
    for architecture in config.facts.architectures:
        pin = pins.get(architecture, decision.runner)
        if pin != decision.runner:
            yield Problem(
                "warning",
                f"{architecture} is pinned to {pin}, but {decision.runner} serves it",
                remedy="`runnerctl explain` says why",
            )
