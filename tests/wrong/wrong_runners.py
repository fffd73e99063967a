"""Runners that break their contract, each in one way."""

import itertools
import math
import threading
from dataclasses import replace
from types import SimpleNamespace

from runnerctl import ModelError, ModelTransform, hookimpl
from runnerctl.models.checkpoint import read_config
from runnerctl.runner.step import FinishedStep, StepResult
from runnerctl_runner_v1.pooling_runner import PoolingRunnerV1
from runnerctl_runner_v1.runner import ModelRunnerV1


class ChangesResults(ModelRunnerV1):
    def change(self, plan, result):
        raise NotImplementedError

    def execute(self, plan):
        try:
            return FinishedStep(self.change(plan, super().execute(plan).result()))
        except Exception as error:
            return FinishedStep(error)


class DropsAToken(ChangesResults):
    def change(self, plan, result):
        tokens = dict(result.sampled_token_ids)
        if len(tokens) > 4:
            tokens.popitem()
        return replace(result, sampled_token_ids=tokens)


class SamplesForUnfinishedPrefills(ChangesResults):
    def change(self, plan, result):
        tokens = dict.fromkeys(plan.num_scheduled_tokens, 7)
        return replace(result, sampled_token_ids=tokens | dict(result.sampled_token_ids))


class GivesProbabilities(ChangesResults):
    """Where logarithms are asked for."""

    def change(self, plan, result):
        changed = {r: replace(x, logprob=math.exp(x.logprob)) for r, x in result.logprobs.items()}
        return replace(result, logprobs=changed)


class ForgetsLogprobs(ChangesResults):
    def change(self, plan, result):
        return replace(result, logprobs={})


class CountsStepsItself(ChangesResults):
    steps = -1

    def change(self, plan, result):
        self.steps += bool(plan.num_scheduled_tokens)
        return replace(result, step_id=self.steps)


class PadsIntoBlockZero(ChangesResults):
    def change(self, plan, result):
        for cache in self._serving._loaded.model._attention._caches.values():
            cache.key[0].zero_()
        return result


class ChangesPlans(ModelRunnerV1):
    def change(self, plan):
        raise NotImplementedError

    def execute(self, plan):
        return super().execute(self.change(plan))


class KeepsFinishedRequests(ChangesPlans):
    def change(self, plan):
        return replace(plan, finished_request_ids=frozenset())


class KeepsBlocksOfFinishedRequests(ChangesPlans):
    """Not by their ids, so that only the number of objects tells."""

    def __init__(self, context):
        super().__init__(context)
        self.blocks = []

    def change(self, plan):
        self.blocks += [(new.block_ids, object()) for new in plan.new_requests]
        return plan


class IgnoresResumed(ChangesPlans):
    def change(self, plan):
        cached = tuple(replace(entry, resumed=False) for entry in plan.cached_requests)
        return replace(plan, cached_requests=cached)


class ForgetsWhoIsLeftOut(ChangesPlans):
    def change(self, plan):
        left_out = self._requests.keys() - plan.num_scheduled_tokens.keys()
        return replace(plan, finished_request_ids=plan.finished_request_ids | left_out)


class ForgetsWhatItGenerated(ChangesPlans):
    """Of a request that resumes as new it takes the prompt only."""

    def change(self, plan):
        new = tuple(
            replace(x, prefill_token_ids=x.prefill_token_ids[: x.num_prompt_tokens])
            for x in plan.new_requests
        )
        return replace(plan, new_requests=new)


class DrawsFromASharedStream(ChangesPlans):
    def __init__(self, context):
        super().__init__(context)
        self.stream = itertools.count()

    def seed(self, params):
        return next(self.stream)

    def change(self, plan):
        new = tuple(
            replace(
                x, sampling_params=replace(x.sampling_params, seed=self.seed(x.sampling_params))
            )
            for x in plan.new_requests
        )
        return replace(plan, new_requests=new)


class HasANoiseOfItsOwn(DrawsFromASharedStream):
    """The same text alone and in a batch, and another than on every other runner."""

    def seed(self, params):
        return params.seed ^ 1


class SwallowsErrors(ModelRunnerV1):
    def execute(self, plan):
        try:
            return FinishedStep(super().execute(plan).result())
        except Exception:
            return FinishedStep(StepResult(plan.step_id, {}))


class RaisesFromExecute(ModelRunnerV1):
    def execute(self, plan):
        return FinishedStep(super().execute(plan).result())


class BreaksDownAfterAnError(ModelRunnerV1):
    broken = None

    def execute(self, plan):
        if self.broken:
            return FinishedStep(self.broken)
        try:
            return FinishedStep(super().execute(plan).result())
        except Exception as error:
            self.broken = error
            return FinishedStep(error)


class GivesResultsAgain(ModelRunnerV1):
    def execute(self, plan):
        outcome = super().execute(plan).result()

        class Handle:
            def result(self):
                return outcome

        return Handle()


class TakesOneStepAtATime(ModelRunnerV1):
    """Whatever its spec says."""

    waiting = False

    def execute(self, plan):
        if self.waiting:
            return FinishedStep(RuntimeError("a step is under way"))
        self.waiting = True
        runner, outcome = self, super().execute(plan)

        class Handle:
            def result(self):
                runner.waiting = False
                return outcome.result()

        return Handle()


class OwesNothingTo(ModelRunnerV1):
    """Leaves those out of a result that a later plan said are gone."""

    gone = frozenset()

    def those_gone(self, plan):
        raise NotImplementedError

    def execute(self, plan):
        self.gone = (self.gone | self.those_gone(plan)) - plan.num_scheduled_tokens.keys()
        runner, outcome = self, super().execute(plan)

        class Handle:
            def result(self):
                result = outcome.result()
                tokens = dict(result.sampled_token_ids)
                for request_id in runner.gone & tokens.keys():
                    del tokens[request_id]
                return replace(result, sampled_token_ids=tokens)

        return Handle()


class OwesNothingToFinishedRequests(OwesNothingTo):
    def those_gone(self, plan):
        return plan.finished_request_ids


class OwesNothingToPreemptedRequests(OwesNothingTo):
    def those_gone(self, plan):
        return plan.preempted_request_ids


class CannotLoadExperts(ModelRunnerV1):
    """Whatever its spec says."""

    def load(self):
        if "num_experts" in read_config(self._context.model_path):
            raise ModelError("experts are not served")
        return super().load()


class IsServedWithAPlugin(ModelRunnerV1):
    """Right in itself; the plugin changes what the model says."""


def turn_the_head(model):
    head = model.get_output_embeddings()
    head.weight.data = head.weight.data.roll(1, 0)
    return "turned 1 head"


@hookimpl
def transform_model():
    return [ModelTransform("turn", "fuse", turn_the_head)]


TURNS_THE_HEAD = SimpleNamespace(transform_model=transform_model)


class KeepsItsMemory(ModelRunnerV1):
    def shutdown(self):
        pass


EVERYONE = []


class IsKeptBySomebody(ModelRunnerV1):
    def load(self):
        EVERYONE.append(self)
        return super().load()


class LeavesAThread(ModelRunnerV1):
    def load(self):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().load()


class CannotShutDownWhatDidNotStart(ModelRunnerV1):
    def shutdown(self):
        self._batch.request_ids.clear()
        super().shutdown()


class HidesWhyALoadFailed(ModelRunnerV1):
    def load(self):
        try:
            return super().load()
        except ModelError as error:
            raise RuntimeError("load failed") from error


class PoolsPaddingToo(PoolingRunnerV1):
    """Takes every row of a padded batch for as long as the longest."""

    def load(self):
        facts = super().load()
        forward = self._loaded.model.forward

        def padded(texts, token_types=None):
            output, lengths = forward(texts, token_types)
            return output, lengths.clamp(min=int(lengths.max()))

        self._loaded.model.forward = padded
        return facts
