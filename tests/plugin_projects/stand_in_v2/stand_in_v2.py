"""A runner named v2 that exists only to be voted for."""

from runnerctl import RunnerSpec, hookimpl


@hookimpl
def register_runners():
    return [RunnerSpec("v2", "stand_in_v2:Runner", {"generate", "moe", "mla"})]
