"""How long one decision takes with 100 plugins. `python benchmarks/bench_decide.py`."""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter
from types import SimpleNamespace

from runnerctl import Discourage, EngineConfig, ModelFacts, PluginHost, RunnerSpec, Vote, hookimpl
from runnerctl.config.engine_config import ModelSection
from runnerctl.deciding import decide_config


def silent(number: int) -> object:
    return lambda config: None


def voting(number: int) -> object:
    ballot = Vote(f"r{number % 3}", "a reason")
    return lambda config: ballot


def mixed(number: int) -> object:
    kinds = (Vote, Discourage)
    ballot = kinds[number % 2](f"r{number % 3}", "a reason", number % 5)
    return lambda config: ballot


def host_of(answer: object, plugins: int) -> PluginHost:
    host = PluginHost()
    specs = [RunnerSpec(f"r{i}", "module:factory", fallback=i == 0) for i in range(3)]
    runners = SimpleNamespace(register_runners=hookimpl(lambda: specs))
    host.register(runners, name="runners", distribution="bench", version="1")
    for number in range(plugins):
        plugin = SimpleNamespace(select_runner=hookimpl(answer(number)))  # type: ignore[operator]
        host.register(plugin, name=f"plugin{number}", distribution="bench", version="1")
    return host


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plugins", type=int, default=100)
    parser.add_argument("--runs", type=int, default=500)
    args = parser.parse_args()
    config = EngineConfig(model=ModelSection(model="m"), facts=ModelFacts())
    for answer in (silent, voting, mixed):
        host = host_of(answer, args.plugins)
        decide_config(config, host)
        times = []
        for _ in range(args.runs):
            start = perf_counter()
            decide_config(config, host)
            times.append(perf_counter() - start)
        times.sort()
        print(
            f"{args.plugins} {answer.__name__:7} plugins: median {median(times) * 1e3:.3f} ms, "
            f"fastest {times[0] * 1e3:.3f} ms"
        )


if __name__ == "__main__":
    main()
