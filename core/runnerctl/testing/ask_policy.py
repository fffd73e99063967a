"""Asks a policy for its ballots in a process of its own; `PolicyConformance` starts it.

Reads one JSON object from standard input and writes one: the ballots for each
configuration, and the heavy packages that got imported on the way.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

from runnerctl.testing.configurations import Configuration
from runnerctl.testing.hosts import host_with

HEAVY = ("torch", "transformers")


def main() -> None:
    """See the module's docstring."""
    question = json.load(sys.stdin)
    name = question["name"]
    host = host_with({name: import_module(question["plugin"])}, runners=question["runners"])
    ballots = {}
    for title, (model, settings) in question["configurations"].items():
        config = Configuration(model, settings).resolved(host, name, question["options"])
        stamped, _ = host.ballots(config)
        ballots[title] = sorted((b for b in stamped if b.plugin == name), key=repr)
    imported = [package for package in HEAVY if package in sys.modules]
    json.dump({"ballots": ballots, "imported": imported}, sys.stdout)


if __name__ == "__main__":
    main()
