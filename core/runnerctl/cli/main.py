"""Where the `runnerctl` command starts. Light, so that an early Ctrl-C finds it ready."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process and exit."""
    try:
        from runnerctl.cli.app import app
    except KeyboardInterrupt:  # later ones are caught in `guard`
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    app(prog_name="runnerctl")
