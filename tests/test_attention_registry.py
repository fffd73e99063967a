"""Attention backends as plugins register them: whose, in which order, and why one is chosen."""

import json
from types import SimpleNamespace

import pytest
import torch

import runnerctl_runner_v1
from runnerctl import LLM, AttentionBackendSpec, SamplingParams, hookimpl
from runnerctl.decision import Decision
from runnerctl.errors import PluginError, UserError
from runnerctl.plugins import PluginHost
from runnerctl.resolve import resolve
from runnerctl.runner.attention.base import AttentionLayer
from runnerctl.runner.attention.registry import choose_backend, load_backend
from runnerctl.runner.attention.sdpa import SdpaBackend
from runnerctl.testing import decide_with, host_with

LAYER = AttentionLayer(0, 4, 2, 64, 64, 0.1)


class Provider:
    def __init__(self, *specs):
        self.specs = specs

    @hookimpl
    def register_attention_backends(self):
        return self.specs


class Fast(SdpaBackend):
    name = "fast"


class Narrow(SdpaBackend):
    """Takes nothing wider than 32, nor smaller blocks than 32."""

    name = "narrow"

    @classmethod
    def why_not(cls, layer, device, dtype, block_size):
        return None if layer.head_size <= 32 <= block_size else "only narrow heads in large blocks"


class Raises(SdpaBackend):
    name = "raises"

    @classmethod
    def why_not(cls, *arguments):
        raise LookupError("no such kernel")


class Native(SdpaBackend):
    name = "native"


class NoBackend:
    name = "odd"


def spec(name, attribute=None, **traits):
    return AttentionBackendSpec(name, f"{__name__}:{attribute or name.capitalize()}", **traits)


def backends_of(*specs, **others):
    return host_with({"acme": Provider(*specs), **others}).attention_backends


def choose(backends, name="auto", *, layers=(LAYER,), block_size=16, **options):
    return choose_backend(
        name,
        layers,
        backends=backends,
        device=torch.device("cpu"),
        dtype=torch.float32,
        block_size=block_size,
        setting="--attention-backend",
        **options,
    )


def test_auto_goes_by_priority_then_name_and_installed_ones_come_before_core_s():
    backends = backends_of(
        spec("slow", priority=-99), spec("fast"), spec("native", priority=5), spec("also", "Fast")
    )
    core = list(PluginHost().attention_backends)
    assert list(backends) == ["native", "also", "fast", *core, "slow"]
    assert {backends[name].plugin for name in core} == {""}
    assert backends["fast"].plugin == "acme"


def test_the_order_of_plugins_does_not_matter():
    one, two = Provider(spec("fast")), Provider(spec("native"))
    left = host_with({"a": one, "b": two}).attention_backends
    right = host_with({"b": two, "a": one}).attention_backends
    assert list(left) == list(right)
    assert left == right


def test_auto_takes_the_first_that_serves_every_layer():
    backends = backends_of(spec("narrow"), spec("fast", priority=-1))
    small = AttentionLayer(1, 4, 2, 32, 32, 0.1)
    assert choose(backends, layers=[small], block_size=32) is Narrow
    assert choose(backends, layers=[small, LAYER], block_size=32) is Fast
    assert choose(backends, layers=[small], block_size=16) is Fast


def test_auto_takes_one_that_compiles_only_where_that_is_allowed():
    backends = backends_of(spec("native", compiles=True), spec("fast"))
    assert choose(backends) is Fast
    assert choose(backends, allow_compiled=True) is Fast, "by name, at equal priority"
    backends = backends_of(spec("native", compiles=True, priority=1), spec("fast"))
    assert choose(backends) is Fast
    assert choose(backends, allow_compiled=True) is Native
    assert choose(backends, "native") is Native


def test_a_backend_asked_for_by_name_that_cannot_serve_says_why():
    with pytest.raises(UserError, match="narrow: only narrow heads in large blocks") as caught:
        choose(backends_of(spec("narrow"), spec("fast")), "narrow")
    assert caught.value.setting == "--attention-backend"
    assert "fast" not in str(caught.value)


def test_if_none_fits_every_reason_is_given(monkeypatch):
    refuse = classmethod(lambda *_: "the layer is too wide")
    monkeypatch.setattr(SdpaBackend, "why_not", refuse)
    backends = {
        name: backend
        for name, backend in backends_of(spec("narrow"), spec("native", compiles=True)).items()
        if name in ("narrow", "native", "sdpa")
    }
    with pytest.raises(UserError) as caught:
        choose(backends)
    for part in ("narrow: only", "native: it builds native code", "sdpa: the layer is too wide"):
        assert part in str(caught.value)


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(UserError) as caught:
        choose(backends_of(spec("fast")), "fasst")
    assert "did you mean 'fast'" in str(caught.value)
    assert "auto, fast, " in str(caught.value)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (AttentionBackendSpec("lost", "no_such_module:It"), "does not import"),
        (AttentionBackendSpec("lost", f"{__name__}:Missing"), "does not import"),
        (spec("odd", "NoBackend"), "is no subclass of AttentionBackend"),
        (spec("other", "Fast"), "calls itself 'fast'"),
        (spec("raises"), "its why_not raised LookupError: no such kernel"),
    ],
    ids=["module", "attribute", "class", "name", "why_not"],
)
def test_a_broken_backend_is_named_with_its_plugin_and_the_way_out(broken, why):
    with pytest.raises(PluginError) as caught:
        choose(backends_of(broken))
    said = str(caught.value)
    assert f"attention backend {broken.name!r} of plugin 'acme' cannot be used: " in said
    assert why in said
    assert "-p no:acme" in said
    assert "--attention-backend" in said


def test_core_s_own_are_not_blamed_on_a_plugin(monkeypatch):
    backends = PluginHost().attention_backends
    monkeypatch.setattr(SdpaBackend, "name", "renamed")
    with pytest.raises(PluginError) as caught:
        load_backend(backends["sdpa"])
    assert "plugin" not in str(caught.value)


@pytest.mark.parametrize("other", ["sdpa", "fast"])
def test_a_name_that_somebody_has_is_an_error_that_names_both(other):
    host = host_with({"acme": Provider(spec("fast")), "zeta": Provider(spec(other, "Fast"))})
    [record] = [r for r in host.records if r.status == "failed"]
    owner = "runnerctl itself" if other == "sdpa" else "plugin 'acme'"
    assert record.name == "zeta"
    assert record.error == f"attention backend {other!r} is provided by {owner} too"
    [problem] = host.problems
    assert problem.severity == "error"
    assert "-p no:zeta" in problem.remedy
    assert host.attention_backends["fast"].plugin == "acme"
    assert host.attention_backends["sdpa"].plugin == ""


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "must return AttentionBackendSpec, not NoneType"),
        (["fast"], "must give AttentionBackendSpec, not str 'fast'"),
        ([spec("fast"), spec("fast")], "names a backend twice: fast, fast"),
    ],
)
def test_a_wrong_answer_leaves_the_plugin_out_and_says_so(answer, why):
    host = host_with(
        {"acme": SimpleNamespace(register_attention_backends=hookimpl(lambda: answer))}
    )
    [record] = [r for r in host.records if r.name == "acme"]
    assert record.status == "failed"
    assert "register_attention_backends" in record.error
    assert why in record.error


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("", "a:B"), "cannot be named ''"),
        (("auto", "a:B"), "cannot be named 'auto'"),
        ((" fast", "a:B"), "cannot be named ' fast'"),
        (("fast", "a.B"), "must be 'module:class', not 'a.B'"),
        (("fast", "a:B", 0, False, "why"), "precheck must be a function"),
    ],
)
def test_a_spec_that_cannot_be_is_refused_where_it_is_made(arguments, why):
    with pytest.raises(ValueError, match=why):
        AttentionBackendSpec(*arguments)


def never(config):
    return f"not with blocks of {config.cache.block_size}"


def test_the_decision_says_which_will_be_tried_and_why_the_others_will_not():
    provider = Provider(spec("fast"), spec("narrow", precheck=never), spec("native", compiles=True))
    decision = decide_with(provider, block_size=48)
    said = {one.name: (one.plugin, one.passed_over) for one in decision.attention}
    assert list(said)[:3] == ["fast", "narrow", "native"]
    assert said["fast"] == ("provider", "")
    assert said["narrow"] == ("provider", "not with blocks of 48")
    assert said["sdpa"] == ("", "")
    [native] = [one for one in decision.attention if one.name == "native"]
    assert "only for runners that allow it" in native.note
    assert Decision.from_json(decision.to_json()) == decision
    assert json.loads(decision.to_json())["attention"][1]["name"] == "narrow"


def test_the_others_are_passed_over_for_the_one_asked_for():
    decision = decide_with(Provider(spec("native", compiles=True)), attention_backend="native")
    assert decision.ok
    [chosen] = [one for one in decision.attention if not one.passed_over]
    assert (chosen.name, chosen.note) == ("native", "builds native code at first use")
    assert {one.passed_over for one in decision.attention if one is not chosen} == {
        "attention_backend= asks for native"
    }


def test_asking_for_one_that_cannot_serve_here_is_an_error_before_anything_is_loaded():
    decision = decide_with(Provider(spec("narrow", precheck=never)), attention_backend="narrow")
    [error] = decision.errors
    assert "'narrow' cannot be used here: not with blocks of 16" in error.message
    assert error.setting == "attention_backend="


def test_a_precheck_that_raises_passes_its_backend_over():
    def broken(config):
        raise KeyError("driver")

    decision = decide_with(Provider(spec("fast", precheck=broken)))
    assert decision.ok
    assert "its precheck failed: KeyError" in decision.attention[0].passed_over


def test_a_model_without_attention_needs_no_backend():
    mamba = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "num_hidden_layers": 2}
    assert decide_with(model=mamba).attention == ()


def test_a_blocked_plugin_s_backend_cannot_be_asked_for():
    assert (
        decide_with(attention_backend="fast")
        .errors[0]
        .message.startswith("no attention backend is called 'fast'")
    )


class Counting(SdpaBackend):
    name = "counting"
    calls = 0

    def forward(self, *arguments):
        Counting.calls += 1
        return super().forward(*arguments)


def test_a_third_party_s_backend_serves_a_model(tiny_model):
    host = host_with({"runner_v1": runnerctl_runner_v1, "acme": Provider(spec("counting"))})
    Counting.calls = 0
    with LLM.from_resolved(resolve(tiny_model, host=host, environ={}, runner="v1")) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert Counting.calls > 0
