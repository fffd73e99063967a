"""What a person reads: a decision and its plugins, laid out for 80 columns."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from runnerctl.decision import AttentionOutlook, CountedBallot, Decision, PluginRecord
from runnerctl.parallel import ParallelLayout
from runnerctl.problems import Problem
from runnerctl.selection_messages import VERB, says

_STYLE = {
    "error": "bold red",
    "warning": "yellow",
    "note": "cyan",
    "decisive": "green",
    "overridden": "yellow",
    "moot": "dim",
    "active": "green",
    "blocked": "dim",
    "failed": "bold red",
}
_SEVERITY_ORDER = ("error", "warning", "note")


def show(content: RenderableType, *, stderr: bool = False) -> None:
    """Print for a person: without escape codes when it is no terminal or NO_COLOR is set."""
    file = sys.stderr if stderr else sys.stdout
    color_system: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(file=file, color_system=color_system, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(content, crop=False)
    # tables fill their lines with blanks, which get in the way of copying
    lines = [line.rstrip() for line in capture.get().splitlines()]
    print("\n".join(lines), file=file)


def outcome(decision: Decision, model: str | None) -> str:
    """The result in one sentence."""
    name = model or "the model"
    if decision.ok:
        return f"{decision.runner} serves {name}."
    errors = len(decision.errors)
    count = f"{errors} error{'s' if errors != 1 else ''}"
    if decision.runner is None:
        return f"No runner serves {name}: {count}."
    return f"{decision.runner} would serve {name}, but there {_is(errors)} {count}."


def reason(decision: Decision) -> str:
    """Why this runner, in one sentence; "" if there is none."""
    if decision.runner is None:
        return ""
    if decision.explicit is not None:
        return f"You asked for it with {_explicit(decision)}."
    decisive = [b for b in decision.ballots if b.status == "decisive" and b.runner]
    mine = [b for b in decisive if b.runner == decision.runner and b.kind in ("vote", "require")]
    if mine:
        return " ".join(f"{b.plugin} {VERB[b.kind]} it: {_sentence(b.reason)}" for b in mine)
    against = [b for b in decisive if b.kind in ("discourage", "forbid")]
    if against:
        said = " ".join(_objection(b) for b in against)
        return f"It is the fallback, and no vote for another runner stands. {said}"
    return "It is the fallback, and no vote for another runner stands."


def decision_report(decision: Decision, model: str | None) -> RenderableType:
    """Everything `explain` shows."""
    parts: list[RenderableType] = [_verdict(decision, model)]
    errors = [p for p in decision.problems if p.severity == "error"]
    others = [p for p in decision.problems if p.severity != "error"]
    if why := reason(decision):
        parts.append(Text(why))
    if facts := _facts(decision):
        parts.append(Text(facts, "dim"))
        parts += [Text(line, "dim") for line in _supplied(decision)]
    if errors:
        parts += ["", problem_list(errors)]
    if decision.ballots:
        parts += ["", _heading("Ballots"), _indent(_ballots(decision.ballots))]
    if decision.needs:
        parts += ["", _heading("Needs"), _indent(_needs(decision))]
    if decision.attention:
        parts += ["", _heading("Attention"), _indent(_attention(decision.attention))]
    if decision.parallel != ParallelLayout():
        parts += ["", _heading("Ranks"), _indent(_ranks(decision.parallel))]
    if others:
        parts += ["", problem_list(others)]
    if decision.plugins:
        parts += ["", _heading("Plugins"), _indent(_plugins_in_short(decision.plugins))]
    return Group(*parts)


def validation_report(decision: Decision, model: str | None) -> RenderableType:
    """The problems only, or that there are none."""
    parts: list[RenderableType] = [_verdict(decision, model)]
    if all(problem.severity == "note" for problem in decision.problems):
        parts.append("Nothing is wrong with this configuration.")
    if decision.problems:
        parts += ["", problem_list(decision.problems)]
    return Group(*parts)


def plugin_table(plugins: Sequence[PluginRecord]) -> RenderableType:
    """`plugins list`."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("NAME", "STATUS", "DISTRIBUTION", "HOOKS"):
        table.add_column(column, overflow="fold")
    for p in plugins:
        detail = Text(p.error, "red" if p.status == "failed" else "") if p.error else None
        table.add_row(
            Text(p.name, "bold"),
            Text(p.status, _STYLE[p.status]),
            f"{p.distribution} {p.version}".strip(),
            detail or Text(", ".join(p.hooks), "dim"),
        )
    return table


def problem_list(problems: Iterable[Problem]) -> RenderableType:
    """Problems with their remedies, errors first."""
    table = _two_columns()
    for p in sorted(problems, key=lambda p: _SEVERITY_ORDER.index(p.severity)):
        named = p.setting is None or p.setting in p.message
        text = Text("" if named else f"{p.setting}: ")
        text.append(p.message)
        if p.plugin:
            text.append(f" ({p.plugin})", "dim")
        if p.remedy:
            text.append(f"\n-> {p.remedy}", "italic")
        table.add_row(Text(p.severity, _STYLE[p.severity]), text)
    return table


def _ballots(ballots: Iterable[CountedBallot]) -> RenderableType:
    table = _two_columns()
    for b in in_reading_order(ballots):
        text = Text(says(b), "bold" if b.status == "decisive" else "")
        if b.priority is not None:
            text.append(f", priority {b.priority}", "dim")
        text.append(f"\n{_sentence(b.reason)}", "not bold")
        if b.by_host:
            text.append(f"\n{b.runner} comes from {b.plugin}", "dim not bold")
        if b.overridden_by:
            text.append(f"\noverridden by {b.overridden_by}", _STYLE["overridden"])
        if b.note:
            text.append(f"\n{b.note}", "dim")
        table.add_row(Text(b.status, _STYLE[b.status]), text)
    return table


def _needs(decision: Decision) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for need in decision.needs:
        able = [
            r for r, offered in sorted(decision.capabilities.items()) if need.capability in offered
        ]
        offered = f"offered by {', '.join(able)}" if able else "offered by no runner"
        text = Text(f"{need.reason}; ")
        text.append(offered, "" if able else "bold red")
        table.add_row(Text(need.capability), text)
    return table


def _attention(backends: Sequence[AttentionOutlook]) -> RenderableType:
    """Backends in the order in which they are tried, then those that are not, and why."""
    table = _two_columns()
    status = "tried first"
    for b in sorted(backends, key=lambda b: bool(b.passed_over)):
        text = Text(b.name + (f" ({b.plugin})" if b.plugin else ""))
        if said := b.passed_over or b.note:
            text.append(f": {said}", "" if b.passed_over else "dim")
        table.add_row(Text("passed over" if b.passed_over else status, "dim"), text)
        status = "then"
    return table


def _ranks(layout: ParallelLayout) -> RenderableType:
    """What runs the ranks, how many there are, and what each has of the work."""
    table = _two_columns()
    table.add_row(layout.executor, layout.summary)
    tp, pcp = layout.tensor_parallel_size, layout.prefill_context_parallel_size
    for place in layout.places():
        weights = f"part {place.tp_rank + 1} of {tp} of the weights" if tp > 1 else "all weights"
        pieces = (
            f", pieces {place.pcp_rank + 1} and {2 * pcp - place.pcp_rank} of {2 * pcp} of each "
            "prefill"
            if pcp > 1
            else ""
        )
        if layout.world_size > 1:
            table.add_row(Text(f"rank {place.rank}", "dim"), weights + pieces)
    return table


def _plugins_in_short(plugins: Sequence[PluginRecord]) -> RenderableType:
    """One line for those that work, one for each that does not."""
    table = _two_columns()
    active = [p for p in plugins if p.status == "active"]
    if active:
        names = ", ".join(_with_distribution(active))
        table.add_row(Text("active", _STYLE["active"]), names)
    for p in plugins:
        if p.status != "active":
            text = f"{p.name} ({p.distribution} {p.version}): {p.error}"
            table.add_row(Text(p.status, _STYLE[p.status]), Text(text))
    return table


def _with_distribution(plugins: Iterable[PluginRecord]) -> list[str]:
    """Names; a third party's with the distribution it came from, if it came from one."""
    return [
        f"{p.name} ({p.distribution} {p.version})"
        if p.distribution not in ("", "runnerctl")
        else p.name
        for p in plugins
    ]


def _facts(decision: Decision) -> str:
    facts = decision.facts
    if facts is None:
        return ""
    kinds = {
        "mixture of experts": facts.is_moe,
        "hybrid": facts.is_hybrid,
        "attention-free": facts.is_attention_free,
        "latent attention": facts.is_mla,
        "encoder-decoder": facts.is_encoder_decoder,
        "multimodal": facts.is_multimodal,
    }
    named = [name for name, is_so in kinds.items() if is_so] or ["dense"]
    parts = [facts.model_type or "unknown type", *facts.architectures, facts.runner_type, *named]
    if facts.num_hidden_layers:
        parts.append(f"{facts.num_hidden_layers} layers")
    if facts.max_position_embeddings:
        parts.append(f"context of {facts.max_position_embeddings} tokens")
    return f"The model: {', '.join(parts)}."


def _supplied(decision: Decision) -> list[str]:
    """A sentence for each reason for which plugins supplied facts."""
    facts = decision.facts
    by_reason: dict[str, list[str]] = {}
    for name in facts.supplied_by if facts else ():
        said = facts.evidence.get(name, facts.supplied_by[name]) if facts else ""
        by_reason.setdefault(said, []).append(f"{name} = {getattr(facts, name)}")
    # a plugin's name stays as it is spelled
    return [f"{said.rstrip('.')} ({', '.join(values)})." for said, values in by_reason.items()]


def _verdict(decision: Decision, model: str | None) -> Text:
    # one line however long a path is, so that it can be copied and searched for
    style = "bold green" if decision.ok else "bold red"
    return Text(outcome(decision, model), style, no_wrap=True, overflow="ignore")


def _explicit(decision: Decision) -> str:
    choice = decision.explicit
    assert choice is not None
    if choice.setting.startswith("--"):
        return f"{choice.setting} {choice.runner}"
    if choice.setting.endswith("="):
        return f"{choice.setting}{choice.runner!r}"
    return choice.setting


def _objection(b: CountedBallot) -> str:
    said = f"{says(b)}: {_sentence(b.reason)}"
    return said[:1].upper() + said[1:] if b.by_host else said


def in_reading_order(ballots: Iterable[CountedBallot]) -> list[CountedBallot]:
    """What the outcome rests on first, what has no bearing last."""
    return sorted(ballots, key=lambda b: ("decisive", "overridden", "moot").index(b.status))


def _sentence(text: str) -> str:
    text = text.strip()
    # not `capitalize`, which lowers the rest
    text = text[:1].upper() + text[1:] if text[:1].isalpha() and text[1:2] != "_" else text
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _heading(text: str) -> RenderableType:
    return Text(text, "bold")


def _indent(content: RenderableType) -> RenderableType:
    return Padding(content, (0, 0, 0, 2))


def _two_columns(**kwargs: Any) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0), **kwargs)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table
