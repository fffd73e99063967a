"""A plugin that loads, and raises when it is asked."""

from runnerctl import hookimpl


@hookimpl
def select_runner(config):
    return config.facts.no_such_fact
