"""Whether a model's layers can be shared by so many ranks, found without importing transformers.

transformers' configs carry a plan: which layers are split, and how. It is read from their
source, where it is written down as a dictionary.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from functools import lru_cache

from runnerctl.config.facts import ModelFacts
from runnerctl.config.transformers_source import source_of

PLAN = "base_model_tp_plan"
_ROOTS = frozenset({"PreTrainedConfig", "PretrainedConfig"})
_HEADS = frozenset({"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "qkv_proj"})
_SPLIT = "colwise"


@lru_cache(maxsize=256)
def tensor_parallel_plan(model_type: str) -> Mapping[str, str] | None:
    """What transformers splits in a model of this type: style by the name of the layer.

    Returns:
        the plan; empty if there is none; None if nothing is known.
    """
    source = source_of("configuration", model_type)
    if not source:
        return None
    classes = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)}
    named = [c for c in classes.values() if _assigned(c, "model_type") == model_type]
    return _plan_of(named[0], classes) if len(named) == 1 else None


def why_not_tensor_parallel(facts: ModelFacts, size: int) -> tuple[str, str]:
    """Why a model cannot be shared by `size` ranks, and what to do; two empty texts if it can.

    A model of which too little is known passes; loading it will tell.
    """
    if facts.runner_type != "generate":
        return "pooling models are not shared among ranks", ""
    if facts.is_hybrid or facts.is_attention_free:
        return "models with recurrent layers are not shared among ranks", ""
    plan = tensor_parallel_plan(facts.model_type)
    if plan is None:
        return "", ""
    if not plan:
        return f"transformers has no tensor parallel plan for {facts.model_type} models", ""
    splits_heads = any(
        how == _SPLIT and name.rpartition(".")[2] in _HEADS for name, how in plan.items()
    )
    return _uneven_heads(facts, size) if splits_heads else ("", "")


def _uneven_heads(facts: ModelFacts, size: int) -> tuple[str, str]:
    """As `why_not_tensor_parallel`, for a plan that gives each rank a part of the heads."""
    query, kv = facts.num_attention_heads, facts.num_key_value_heads
    if query is None:
        return "", ""
    counts, common = f"{query} query heads", query
    # compressed keys are expanded to one head per query head
    if kv is not None and not facts.is_mla:
        counts, common = f"{counts} and {kv} KV heads", math.gcd(query, kv)
    if common % size == 0:
        return "", ""
    fitting = [n for n in range(2, common + 1) if common % n == 0]
    ways = f"{' or '.join(map(str, fitting))} ranks would do" if fitting else ""
    return f"it has {counts}, which {size} ranks cannot share evenly", ways


def _plan_of(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Mapping[str, str] | None:
    own = _assigned(node, PLAN)
    if isinstance(own, dict):
        return own
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    for base in bases:
        if base in classes:
            return _plan_of(classes[base], classes)
    names_one = any(PLAN in ast.dump(statement) for statement in node.body)
    return {} if _ROOTS & set(bases) and not names_one else None


def _assigned(node: ast.ClassDef, name: str) -> object:
    """The literal that a class assigns to a name, or None."""
    for statement in node.body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            try:
                return ast.literal_eval(statement.value)  # type: ignore[attr-defined]
            except ValueError:
                return None
    return None
