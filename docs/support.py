"""Write docs/support.md and docs/support.svg: what `runnerctl matrix` says, and what was run.

    make support

The built-in plugins decide; neither the environment nor installed plugins have a part in it.
What was run is read from docs/data/parity.json, if that is there:
{"LlamaForCausalLM": {"model_type": "llama", "status": "served", "reason": ""}, ...}.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runnerctl.cli.matrix import make_matrix
from runnerctl.cli.matrix_render import markdown
from runnerctl.cli.matrix_svg import drawing
from runnerctl.matrix import Matrix

DOCS = Path(__file__).parent
PARITY = DOCS / "data" / "parity.json"
MEANING = {
    "served": "its greedy tokens equal those of transformers in float32: alone, in a batch, in "
    "chunks, and after a preemption",
    "fallback": "the same, by a slower way that says so",
    "refused": "refused with a reason, before or while it is loaded",
    "wrong": "its tokens differ: a fault of ours",
    "not run": "not tried",
}
HEAD = """\
# What is served

<!-- written by docs/support.py (make support): change that, not this -->

Which runner the built-in plugins choose for well-known model types, as `runnerctl matrix` tells:
with no flags, with each runner asked for by name, and on two ranks of each kind. `refused` means an
error before anything is loaded; `runnerctl matrix --why jamba` gives the reasons. A model type
stands for a default config of `transformers`; a checkpoint is judged by its own `config.json`, and
may be of another kind than its family. What only shows while a model is loaded is not in these
columns but in the last, `parity`.

![The same as a picture](support.svg)

"""


def main() -> None:
    """Write both files."""
    for name in list(os.environ):
        if name.startswith(("RUNNERCTL_", "VLLM_")):
            del os.environ[name]
    matrix = built_in()
    (DOCS / "support.md").write_text(page(matrix, parity()), encoding="utf-8")
    (DOCS / "support.svg").write_text(drawing(matrix, tooltips=False), encoding="utf-8")


def built_in() -> Matrix:
    """The default table, by the built-in plugins alone."""
    return make_matrix([], [], {"allowed_plugins": ""}, None)


def parity() -> dict[str, Any]:
    """What was run, by architecture; empty if nothing was."""
    found = json.loads(PARITY.read_text(encoding="utf-8")) if PARITY.exists() else {}
    for architecture, entry in found.items():
        if entry["status"] not in MEANING:
            raise SystemExit(f"{PARITY}: {architecture} has the status {entry['status']!r}")
    return found


def page(matrix: Matrix, found: Mapping[str, Any]) -> str:
    """The text of support.md."""
    status = {}
    for row in matrix.rows:
        architectures = row.facts.architectures if row.facts else ()
        entry = next((found[name] for name in architectures if name in found), {})
        status[row.name] = entry.get("status", "not run")
    words = "".join(f"- `{word}`: {text}.\n" for word, text in MEANING.items())
    parts = [HEAD, markdown(matrix, {"parity": status})]
    parts.append("\n\n`parity` is what came out when a tiny random model of the type was run:\n\n")
    parts.append(words)
    if found:
        parts.append(every_architecture(found))
    return "".join(parts)


def every_architecture(found: Mapping[str, Any]) -> str:
    """A section with all that was tried."""
    order = list(MEANING)
    count = Counter(entry["status"] for entry in found.values())
    summary = ", ".join(f"{count[status]} {status}" for status in order if count[status])
    lines = [
        "\n## Every architecture that was tried\n",
        f"{len(found)} causal language models of `transformers`: {summary}.\n",
        "| architecture | model type | parity | reason |",
        "| --- | --- | --- | --- |",
    ]
    for name, entry in sorted(found.items(), key=lambda i: (order.index(i[1]["status"]), i[0])):
        reason = " ".join(entry.get("reason", "").split()).replace("|", "\\|")
        lines.append(f"| `{name}` | `{entry['model_type']}` | {entry['status']} | {reason} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
