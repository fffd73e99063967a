"""What batch transforms add to runners: capabilities, clashes, faults, and the making."""

from types import SimpleNamespace

import pytest

from runnerctl import BatchTransformSpec, PluginError, PluginHost, RunnerSpec, hookimpl
from runnerctl.decision import Decision, Need
from runnerctl.runner.batch_transform import make_batch_transform

SPEC = RunnerSpec("swift", "m:R", fallback=True)


def spec(name="split", feature="pcp", runners=("swift",), factory="test_batch_transforms:Made"):
    return BatchTransformSpec(name, feature, frozenset(runners), factory)


class Made:
    def __init__(self, context):
        self.context = context


def plugin(*transforms):
    return SimpleNamespace(register_batch_transforms=hookimpl(lambda: list(transforms)))


def host_of(**plugins):
    host = PluginHost()
    host.register(SimpleNamespace(register_runners=hookimpl(lambda: [SPEC])), name="runners")
    for name, one in plugins.items():
        host.register(one, name=name)
    return host


def context_of(host, *needs, runner="swift"):
    decision = Decision(runner, needs=tuple(Need(need, "asked for") for need in needs))
    return SimpleNamespace(decision=decision, plugins=host)


def test_a_feature_is_a_capability_of_the_runners_that_are_named():
    host = host_of(one=plugin(spec(), spec(feature="tides", runners=["other"])))
    assert host.problems == ()
    assert host.runners["swift"].capabilities == {"generate", "pcp"}
    assert SPEC.capabilities == {"generate"}


def test_without_the_plugin_there_is_no_capability():
    host = PluginHost.discover(plugins=["no:pcp"], allowed=())
    assert "pcp" not in host.runners["v2"].capabilities
    assert "pcp" in PluginHost.discover(allowed=()).runners["v2"].capabilities


def test_two_plugins_with_one_feature_for_one_runner_are_an_error_that_names_both():
    host = host_of(one=plugin(spec()), two=plugin(spec("another")))
    (problem,) = host.problems
    assert problem.severity == "error"
    assert "'pcp' of runner 'swift'" in problem.message
    assert "'one'" in problem.message
    assert "'two'" in problem.message
    assert [one.plugin for one in host.batch_transforms] == ["one"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: [spec(), spec("again")], "one feature to one runner twice"),
        (lambda: ["pcp"], "BatchTransformSpec"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: None, "None"),
    ],
)
def test_what_is_no_answer_leaves_the_plugin_out(answer, said):
    host = host_of(one=SimpleNamespace(register_batch_transforms=hookimpl(answer)))
    (problem,) = host.problems
    assert "register_batch_transforms" in problem.message
    assert said in problem.message
    assert "pcp" not in host.runners["swift"].capabilities


@pytest.mark.parametrize(
    "wrong",
    [{"name": ""}, {"feature": ""}, {"factory": "no_colon"}, {"runners": ()}],
)
def test_a_spec_says_what_is_wrong_with_it(wrong):
    with pytest.raises(ValueError, match="batch transform"):
        spec(**wrong)


def test_runners_are_names_not_letters():
    with pytest.raises(ValueError, match="set of names"):
        BatchTransformSpec("split", "pcp", "swift", "m:T")


def test_the_one_that_is_needed_is_made():
    host = host_of(one=plugin(spec()), two=plugin(spec("tidal", "tides")))
    context = context_of(host, "generate", "pcp")
    assert make_batch_transform(context).context is context
    assert make_batch_transform(context_of(host, "generate")) is None
    assert make_batch_transform(context_of(host, "pcp", runner="other")) is None


def test_two_that_are_needed_at_once_are_an_error_that_names_both():
    host = host_of(one=plugin(spec()), two=plugin(spec("tidal", "tides")))
    with pytest.raises(PluginError, match="split of plugin 'one' and tidal of plugin 'two'"):
        make_batch_transform(context_of(host, "pcp", "tides"))


def test_a_factory_that_does_not_import_names_its_plugin():
    host = host_of(one=plugin(spec(factory="no_such_module_anywhere:Split")))
    with pytest.raises(PluginError, match="of plugin 'one' cannot be made: no_such_module"):
        make_batch_transform(context_of(host, "pcp"))
