"""The `runnerctl` command."""
