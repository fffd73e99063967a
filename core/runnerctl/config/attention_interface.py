"""Whether transformers' code for a model asks its attention interface, found without importing it.

A runner reaches into a model's attention through that interface. Some architectures were
written before it and compute attention by themselves; their source never names it.
"""

from __future__ import annotations

import re
from functools import lru_cache

from runnerctl.config.transformers_source import source_of

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_POSITIONS = "position_ids"


@lru_cache(maxsize=256)
def why_not_paged(model_type: str, architecture: str) -> str:
    """Why an architecture cannot be given paged attention, or "" if it can or nothing is known.

    Args:
        model_type, architecture: as in `config.json`; "" where it does not say.
    """
    source = source_of("modeling", model_type)
    if not source:
        return ""
    if _INTERFACE not in source:
        return f"transformers' code for {model_type} does not use its attention interface"
    if not architecture:
        return ""
    # from its head to the next class
    own = re.search(rf"^class {re.escape(architecture)}\b.*?(?=^class |\Z)", source, re.M | re.S)
    if own and _POSITIONS not in own.group():
        return f"{architecture} takes no {_POSITIONS}"
    return ""
