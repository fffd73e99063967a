"""Policies that break their contract, each in one way."""

import random
import sys
from collections.abc import Mapping

from runnerctl import FactOverrides, Forbid, PluginHost, Problem, Require, Vote, hookimpl


def unchecked(kind, **fields):
    """A ballot whose fields nobody looked at."""
    ballot = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(ballot, name, value)
    return ballot


class VotesByRegistrationOrder:
    first = True

    @hookimpl
    def register_runners(self):
        frame = sys._getframe()
        while not isinstance(frame.f_locals.get("self"), PluginHost):
            frame = frame.f_back
        self.first = not frame.f_locals["self"].records
        return []

    @hookimpl
    def select_runner(self):
        return Vote("v2" if self.first else "v1", "whoever comes first decides")


class TossesACoin:
    @hookimpl
    def select_runner(self):
        return Vote(random.choice(["v1", "v2"]), "the coin says so")


class CountsHowOftenItIsAsked:
    asked = 0

    @hookimpl
    def select_runner(self):
        self.asked += 1
        return Vote("v1" if self.asked % 2 else "v2", "every other time")


class GivesNoReason:
    @hookimpl
    def select_runner(self):
        return unchecked(Vote, runner="v2", reason="", priority=0)


class GivesAReasonOverTwoLines:
    @hookimpl
    def select_runner(self):
        return Vote("v2", "it is\nfaster")


class GivesNoRemedy:
    @hookimpl
    def select_runner(self):
        return Require("v2", "only v2 can serve this")


class ForbidsWithoutARemedy:
    @hookimpl
    def select_runner(self, config):
        return Forbid("v2", "v2 cannot serve this") if config.facts.is_hybrid else None


class ImportsTorchInAHook:
    @hookimpl
    def select_runner(self):
        import torch

        return Vote("v2", f"torch {torch.__version__} is there")


class WritesToTheFacts:
    @hookimpl
    def select_runner(self, config):
        object.__setattr__(config.facts, "model_type", "mine")


class WritesWhileValidating:
    @hookimpl
    def validate_config(self, config, decision):
        object.__setattr__(decision, "runner", "mine")


class RaisesOnAnUnknownModel:
    @hookimpl
    def select_runner(self, config):
        known: Mapping[str, str] = {"llama": "v2", "mixtral": "v2"}
        return Vote(known[config.facts.model_type], "it is on the list")


class RaisesWhileValidating:
    @hookimpl
    def validate_config(self, config, decision):
        if decision.runner == "v2":
            raise ValueError("no")


class TakesLayersForGranted:
    @hookimpl
    def register_model_facts(self, config_json):
        layers = config_json["num_hidden_layers"]
        return FactOverrides("half of them are recurrent", is_hybrid=layers > 1)


class GuessesFacts:
    @hookimpl
    def register_model_facts(self):
        return FactOverrides("a feeling about it", is_moe=random.random() < 0.5)


class KnowsFactsForNoReason:
    @hookimpl
    def register_model_facts(self):
        return FactOverrides("because", is_moe=True)


class SaysWhatIsWrongAndNotWhatToDo:
    @hookimpl
    def validate_config(self, config):
        if config.parallel.tensor_parallel_size > 1:
            yield Problem("error", "this cannot be split")


class InventsASeverity:
    @hookimpl
    def validate_config(self, config):
        yield unchecked(
            Problem, severity="fatal", message="it is bad", remedy="", setting=None, plugin=None
        )


class CannotBeWrittenDown:
    @hookimpl
    def select_runner(self):
        return unchecked(Vote, runner="v2", reason=["it", "is", "faster"], priority=0)


class MisspeltHook:
    @hookimpl
    def select_runer(self):
        return None
