"""Write the default rows of `runnerctl matrix`: well-known families, from transformers.

    python docs/families.py      (needs transformers; `make support` does not run it)

Of each default config those keys are kept that its facts rest on, and a few sizes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from runnerctl.config.config_keys import word_set
from runnerctl.config.read_facts import facts_from_config

TARGET = Path(__file__).parent.parent / "core/runnerctl/config/families.json"
DECODERS = """
llama mistral qwen2 qwen3 gemma2 gemma3_text gemma4_text phi3 olmo2 granite cohere2 glm4 smollm3
stablelm starcoder2 gpt2 gpt_neo gpt_neox opt bloom mpt falcon
mixtral qwen2_moe qwen3_moe granitemoe olmoe phimoe gpt_oss glm4_moe llama4_text deepseek_v2
deepseek_v3
qwen3_next qwen3_5_text jamba bamba granitemoehybrid falcon_h1 nemotron_h zamba2 lfm2 olmo_hybrid
kimi_linear minimax recurrent_gemma
mamba mamba2 falcon_mamba rwkv xlstm
"""
OTHERS = {
    "bert": "BertModel",
    "modernbert": "ModernBertModel",
    "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
}
# Defaults that leave all layers of one kind, set as the published models of the family are.
SET: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {
        "num_hidden_layers": 40,
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    },
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
}
KEPT = word_set(
    "model_type architectures num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_size vocab_size max_position_embeddings state_size"
)
# Kept rather than another key that says the same, since `--why` shows where a fact was read.
TELLING = word_set(
    "layer_types layers_block_type attn_layer_period attn_layer_indices full_attn_idxs "
    "full_attention_interval mamba_d_state num_experts n_routed_experts"
)


def main() -> None:
    """Write the file, a family a line."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    named = {name: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] for name in DECODERS.split()} | OTHERS
    lines = []
    for model_type, architecture in named.items():
        config = transformers.CONFIG_MAPPING[model_type](**SET.get(model_type, {}))
        whole = json.loads(config.to_json_string(use_diff=False))
        whole |= {"architectures": [architecture]} | SET.get(model_type, {})
        lines.append(json.dumps(trimmed(whole)))
    TARGET.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def trimmed(config: dict[str, Any]) -> dict[str, Any]:
    """What is left when every key is taken away that changes no fact, and what is KEPT."""
    facts = facts_from_config(config)
    left = dict(config)
    for key in sorted(config, key=TELLING.__contains__):
        without = {name: value for name, value in left.items() if name != key}
        if config[key] is None or (key not in KEPT and _same(facts_from_config(without), facts)):
            left = without
    for key, value in left.items():
        if isinstance(value, dict):
            left[key] = {
                name: item for name, item in value.items() if name in KEPT and item is not None
            }
            if not _same(facts_from_config(left), facts):
                left[key] = value
    first = ["model_type", "architectures"]
    return {key: left[key] for key in [*first, *sorted(left.keys() - set(first))]}


def _same(one: Any, other: Any) -> bool:
    """Where a fact was read does not matter."""
    return bool(replace(one, evidence={}) == replace(other, evidence={}))


if __name__ == "__main__":
    main()
