"""`runnerctl journal FILE`: how many requests a journal has, how they ended, how fast they were."""

import json
from collections import Counter
from pathlib import Path
from statistics import median

from runnerctl import UserError, hookimpl

requires_runnerctl = ">=0.1,<2"


@hookimpl
def register_commands(app):
    @app.command()
    def journal(file: Path):
        """Sum up a FILE that --log-json wrote."""
        for what, value in summary(read(file)).items():
            print(f"{what:20} {value}")


def read(file):
    """The lines of a journal as dicts. One that is cut off, as it is written now, is left out."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read {file}: {error}", remedy="name a file that --log-json wrote"
        ) from error
    whole = text[: text.rfind("\n") + 1].splitlines()
    try:
        lines = [json.loads(line) for line in whole]
        return [line for line in lines if line["event"] in ("decision", "request")]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} is not a journal", remedy="see --log-json") from error


def summary(lines):
    requests = [line for line in lines if line["event"] == "request"]
    runners = Counter(line["runner"] or "none" for line in lines if line["event"] == "decision")
    reasons = Counter(line["finish_reason"] for line in requests)
    waits = [r["time_to_first_token_s"] for r in requests if r["time_to_first_token_s"] is not None]
    found = {
        "decisions": counted(runners),
        "requests": f"{len(requests)}: {counted(reasons)}" if requests else "0",
        "prompt tokens": sum(r["num_prompt_tokens"] for r in requests),
        "generated tokens": sum(r["num_generated_tokens"] for r in requests),
    }
    if waits:
        found["first token after"] = f"{median(waits):.3f} s (median), {max(waits):.3f} s at most"
    return found


def counted(counts):
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
