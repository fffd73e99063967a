"""Acme accelerators: runner V1, except for the models that Acme has tested on V2."""

import os

from runnerctl import Vote, hookimpl

requires_runnerctl = ">=0.1,<2"

TESTED_ON_V2 = {"LlamaForCausalLM", "MixtralForCausalLM"}


def on_acme_hardware():
    return bool(os.environ.get("ACME_VISIBLE_DEVICES"))


@hookimpl
def select_runner(config):
    if not on_acme_hardware():
        return None
    tested = TESTED_ON_V2.intersection(config.facts.architectures)
    if tested:
        return Vote("v2", f"{min(tested)} is tested with v2 on Acme accelerators")
    return Vote("v1", "Acme accelerators are served by v1")
