"""`transform_model`: stages, order, reports, and whose fault it is."""

import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import runnerctl_runner_v1
from runnerctl import LLM, ModelTransform, PluginHost, SamplingParams, hookimpl
from runnerctl.cli.stats import stats_report
from runnerctl.errors import PluginError
from runnerctl.resolve import resolve
from runnerctl.runner.transforms import AppliedTransform, apply_transforms

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CONFIG = SimpleNamespace(plugins=SimpleNamespace(strict_plugins=False))
STRICT = SimpleNamespace(plugins=SimpleNamespace(strict_plugins=True))
DECISION = SimpleNamespace(runner="v1")


class Offers:
    def __init__(self, *transforms):
        self.transforms = transforms

    @hookimpl
    def transform_model(self):
        yield from self.transforms


def host_of(**plugins):
    host = PluginHost()
    for name, plugin in plugins.items():
        assert host.register(plugin, name=name).status == "active"
    return host


def noting(name, stage, report="done"):
    """A transform that writes down that it was applied."""

    def apply(model):
        model.append(name)
        return report

    return ModelTransform(name, stage, apply)


def test_stages_come_in_order_and_names_within_a_stage_whoever_offers_them():
    model = []
    host = host_of(
        a=Offers(noting("c", "compile"), noting("p2", "pack"), noting("f", "fuse")),
        b=Offers(noting("p1", "pack"), noting("b", "compile")),
    )
    done = apply_transforms(model, CONFIG, DECISION, host)
    assert model == ["f", "p1", "p2", "b", "c"]
    assert [(one.stage, one.name, one.plugin) for one in done] == [
        ("fuse", "f", "a"),
        ("pack", "p1", "b"),
        ("pack", "p2", "a"),
        ("compile", "b", "b"),
        ("compile", "c", "a"),
    ]


def test_the_order_does_not_depend_on_the_order_of_registration():
    one, two = Offers(noting("same", "pack", "one")), Offers(noting("same", "pack", "two"))
    left = apply_transforms([], CONFIG, DECISION, host_of(a=one, b=two))
    right = apply_transforms([], CONFIG, DECISION, host_of(b=two, a=one))
    assert left == right
    assert [one.report for one in left] == ["one", "two"]


def test_the_caller_says_which_stages_are_due():
    model = []
    host = host_of(a=Offers(*(noting(stage, stage) for stage in ("compile", "fuse", "pack"))))
    first = apply_transforms(model, CONFIG, DECISION, host, stages=("pack", "fuse"))
    assert model == ["fuse", "pack"]
    later = apply_transforms(model, CONFIG, DECISION, host, stages=("compile",))
    assert model == ["fuse", "pack", "compile"]
    assert [one.stage for one in first + later] == model


def test_what_found_nothing_to_do_is_not_reported():
    model = []
    host = host_of(a=Offers(noting("idle", "pack", None), noting("busy", "pack")))
    assert apply_transforms(model, CONFIG, DECISION, host) == (
        AppliedTransform("pack", "busy", "a", "done"),
    )
    assert model == ["busy", "idle"]


def test_plugins_are_asked_about_the_model_the_configuration_and_the_decision():
    asked = []

    class Asks:
        @hookimpl
        def transform_model(self, model, config, decision):
            asked.append((model, config, decision))

    model = object()
    assert apply_transforms(model, CONFIG, DECISION, host_of(a=Asks())) == ()
    assert asked == [(model, CONFIG, DECISION)]


def fails(model):
    raise ArithmeticError("odd width")


@pytest.mark.parametrize(
    ("offered", "why"),
    [
        (ModelTransform("t", "pack", fails), "half changed: ArithmeticError: odd width"),
        (noting("t", "pack", 3), "must return what it did as text"),
        (noting("t", "pack", " "), "must return what it did as text"),
        (noting("t", "packing"), "no stage 'packing'; did you mean 'pack'?"),
        (noting(" ", "pack"), "needs a name"),
        ("t", "must give ModelTransform, not str"),
    ],
)
def test_what_may_have_left_the_model_wrong_ends_the_start_and_names_the_plugin(offered, why):
    with pytest.raises(PluginError) as caught:
        apply_transforms([], CONFIG, DECISION, host_of(acme=Offers(offered)))
    said = str(caught.value)
    assert "plugin 'acme'" in said
    assert why in said
    assert "-p no:acme" in said
    if isinstance(offered, ModelTransform):
        assert repr(offered.name) in said


def test_a_wrong_offer_is_found_before_anything_is_changed():
    model = []
    host = host_of(a=Offers(noting("first", "fuse")), b=Offers(noting("t", "later")))
    with pytest.raises(PluginError):
        apply_transforms(model, CONFIG, DECISION, host)
    assert model == []


class Raises:
    @hookimpl
    def transform_model(self):
        yield noting("half an answer", "pack")
        raise LookupError("no driver")


def test_a_hook_that_raises_costs_only_its_own_transforms_and_is_told(caplog):
    model = []
    host = host_of(acme=Raises(), other=Offers(noting("t", "pack")))
    apply_transforms(model, CONFIG, DECISION, host)
    assert model == ["t"]
    [record] = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "plugin 'acme' failed in hook 'transform_model': LookupError" in record.message
    assert "-p no:acme" in record.message


@pytest.mark.parametrize("where", ["host", "setting"])
def test_with_strict_plugins_it_is_an_error(where):
    host = PluginHost(strict=where == "host")
    host.register(Raises(), name="acme")
    config = STRICT if where == "setting" else CONFIG
    with pytest.raises(PluginError, match="'acme' failed in hook 'transform_model'"):
        apply_transforms([], config, DECISION, host)


class Turned(torch.nn.Module):
    """A head whose logits belong to the neighbouring token."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden).roll(1, dims=-1)


class TurnsTheHead:
    @hookimpl
    def transform_model(self, decision):
        assert decision.runner == "v1"
        return [ModelTransform("turn", "fuse", self.apply)]

    def apply(self, model):
        model.lm_head = Turned(model.lm_head)
        return "turned 1 head"


def first_token(folder, **plugins):
    host = host_of(runner_v1=runnerctl_runner_v1, **plugins)
    resolved = resolve(folder, host=host, environ={}, runner="v1", dtype="float32")
    with LLM.from_resolved(resolved) as llm:
        [output] = llm.generate([[5, 6, 7]], GREEDY)
        return output.outputs[0].token_ids[0], llm.stats()


def test_a_third_party_s_transform_changes_what_the_model_says_and_stats_tell(tiny_model):
    plain, stats = first_token(tiny_model)
    assert (stats.transforms, stats.attention_backend) == ((), "sdpa")
    turned, stats = first_token(tiny_model, acme=TurnsTheHead())
    assert turned == plain + 1
    assert stats.transforms == (AppliedTransform("fuse", "turn", "acme", "turned 1 head"),)
    assert stats.plugin_seconds["acme"]["transform_model"] > 0
    written = json.loads(json.dumps(stats.to_dict()))
    assert written["attention_backend"] == "sdpa"
    assert written["transforms"] == [
        {"stage": "fuse", "name": "turn", "plugin": "acme", "report": "turned 1 head"}
    ]
    console = Console(width=100)
    with console.capture() as shown:
        console.print(stats_report(stats))
    assert "fuse turn (acme): turned 1 head" in shown.get()
    assert "sdpa" in shown.get()


def test_v1_leaves_a_model_uncompiled_when_told_to_stay_eager(tiny_model):
    applied = []
    offers = Offers(*(ModelTransform(s, s, lambda m, s=s: applied.append(s)) for s in STAGE_NAMES))
    host = host_of(runner_v1=runnerctl_runner_v1, acme=offers)
    resolved = resolve(tiny_model, host=host, environ={}, runner="v1", enforce_eager=True)
    LLM.from_resolved(resolved).close()
    assert applied == ["fuse", "pack"]
    applied.clear()
    LLM.from_resolved(resolve(tiny_model, host=host, environ={}, runner="v1")).close()
    assert applied == ["fuse", "pack", "compile"]


STAGE_NAMES = ("compile", "pack", "fuse")
