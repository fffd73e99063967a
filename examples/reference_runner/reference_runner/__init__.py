"""The plugin: one runner, `reference`, for whoever asks for it. No torch here."""

from runnerctl import RunnerSpec, hookimpl

requires_runnerctl = ">=0.1,<2"


@hookimpl
def register_runners():
    # No vote comes with it and it is not the fallback: only --runner reference takes it.
    return [
        RunnerSpec(
            name="reference",
            factory="reference_runner.runner:ReferenceRunner",
            capabilities=frozenset({"generate", "moe"}),
        )
    ]
