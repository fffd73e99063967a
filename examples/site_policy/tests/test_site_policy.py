"""The ballots are a policy's, whatever the options; and each option does what it says."""

import site_policy

from runnerctl.testing import PolicyConformance

OPTIONS = {"pins": ["LlamaForCausalLM=v1"], "unreleased": ["v2"], "max_num_seqs": 8}


class TestWithoutOptions(PolicyConformance):
    plugin = site_policy


class TestWithOptions(PolicyConformance):
    plugin = site_policy
    plugin_options = OPTIONS
