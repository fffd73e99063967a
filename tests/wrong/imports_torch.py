"""A policy that imports torch at the top."""

import torch

from runnerctl import Vote, hookimpl


@hookimpl
def select_runner():
    return Vote("v2", f"torch is there: {torch is not None}")
