"""One row of the tables of invented configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LM = {"architectures": ["NewForCausalLM"], "model_type": "new", "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
DENSE = {**LM, **HEADS}


@dataclass(frozen=True)
class Invented:
    """One config: the facts that are true, why, and whether a doubt has to be said aloud."""

    name: str
    config: dict[str, Any]
    true: tuple[str, ...]
    why: str
    doubt: bool = False


def dense(
    name: str, keys: dict[str, Any], true: tuple[str, ...], why: str, doubt: bool = False
) -> Invented:
    """A dense decoder with `keys` beside."""
    return Invented(name, {**DENSE, **keys}, true, why, doubt)


MOE = ("is_moe",)
HYBRID = ("is_hybrid",)
FREE = ("is_attention_free",)
NONE = ()
