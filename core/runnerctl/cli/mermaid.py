"""A decision as a mermaid flowchart: ballots, the count, the outcome."""

from __future__ import annotations

from runnerctl.cli import render
from runnerctl.decision import Decision
from runnerctl.selection_messages import says

# What could end a quoted label, start markup in it, or be taken for an entity or an escape.
_ESCAPED = {ord(c): f"#{ord(c)};" for c in '"#&<>`\\{}[]|'}
_CLASSES = {
    "decisive": "stroke:#1a7f37,stroke-width:3px",
    "overridden": "stroke:#9a6700",
    "moot": "stroke-dasharray:4 4",
    "failed": "stroke:#cf222e,stroke-width:3px",
}


def flowchart(decision: Decision, model: str | None) -> str:
    """Lines of mermaid, to be put in a ```mermaid block or in mermaid.live."""
    lines = ["flowchart LR"]
    if decision.explicit is not None:
        choice = f"{decision.explicit.setting}: {decision.explicit.runner}"
        lines += [f"    explicit[{_label('You asked', choice)}]", "    explicit --> count"]
    for number, ballot in enumerate(render.in_reading_order(decision.ballots)):
        status: str = ballot.status
        if ballot.overridden_by:
            status += f" by {ballot.overridden_by}"
        text = _label(says(ballot), ballot.reason)
        lines.append(f"    ballot{number}[{text}]:::{ballot.status}")
        lines.append(f"    ballot{number} -->|{_label(status)}| count")
    lines.append(f"    count{{{{{_label('The count')}}}}}")
    outcome = _label(render.outcome(decision, model), render.reason(decision))
    style = "decisive" if decision.ok else "failed"
    lines += [f"    outcome([{outcome}]):::{style}", "    count --> outcome"]
    for number, problem in enumerate(p for p in decision.problems if p.severity != "note"):
        style = "failed" if problem.severity == "error" else "overridden"
        text = _label(problem.severity, problem.message)
        lines.append(f"    problem{number}[{text}]:::{style}")
        lines.append(f"    outcome -.- problem{number}")
    used = [name for name in _CLASSES if any(line.endswith(f":::{name}") for line in lines)]
    lines += [f"    classDef {name} {_CLASSES[name]}" for name in used]
    return "\n".join(lines)


def _label(title: str, text: str = "") -> str:
    """A quoted label of one or two lines, in which nothing has a meaning to mermaid."""
    parts = [" ".join(part.split()).translate(_ESCAPED) for part in (title, text)]
    return f'"{"<br>".join(part for part in parts if part)}"'
