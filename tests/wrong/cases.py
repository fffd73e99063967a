"""A conformance class for each wrong implementation; `test_conformance_rejects.py` runs them."""

import inspect

import depends_on_hashing
import imports_torch
import wrong_backends
import wrong_policies
import wrong_runners

from runnerctl import RunnerSpec
from runnerctl.testing import AttentionBackendConformance, PolicyConformance, RunnerConformance

TRAITS = {
    "TakesOneStepAtATime": {"concurrent_batches": 2},
    "OwesNothingToFinishedRequests": {"concurrent_batches": 2},
    "OwesNothingToPreemptedRequests": {"concurrent_batches": 2},
    "ForgetsWhatItGenerated": {"resumes_as_new": True},
    "PoolsPaddingToo": {"capabilities": {"pooling"}},
}
PLUGINS = {"IsServedWithAPlugin": (wrong_runners.TURNS_THE_HEAD,)}


def classes_of(module):
    return [
        (name, member)
        for name, member in vars(module).items()
        if inspect.isclass(member) and member.__module__ == module.__name__
    ]


def add(name, base, **attributes):
    globals()[f"Test{name}"] = type(f"Test{name}", (base,), attributes)


for name, backend in classes_of(wrong_backends):
    add(name, AttentionBackendConformance, backend=backend)
for name, policy in classes_of(wrong_policies):
    add(name, PolicyConformance, plugin=policy())
for module in (imports_torch, depends_on_hashing):
    add(module.__name__, PolicyConformance, plugin=module)
for name, _ in classes_of(wrong_runners):
    spec = RunnerSpec(
        "wrong",
        f"wrong_runners:{name}",
        **{"capabilities": {"generate", "moe"}} | TRAITS.get(name, {}),
    )
    add(name, RunnerConformance, spec=spec, plugins=PLUGINS.get(name, ()))
