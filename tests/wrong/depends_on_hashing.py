"""A policy whose reason depends on the order of a set, which is another in each process."""

from runnerctl import Vote, hookimpl


@hookimpl
def select_runner():
    return Vote("v2", "good at " + ", ".join({"decoding", "prefill", "batches", "sampling", "all"}))
