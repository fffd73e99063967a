"""A tiny config for any language model that transformers knows, from its default config.

Families of the conformance kit have theirs there. For others, sizes are shrunk by the meaning of
their keys; lists with an entry per layer keep every kind of entry, so that each type of layer
of a hybrid occurs. What that does not reach stands in `FIXES`.
"""

from __future__ import annotations

from typing import Any

NUM_LAYERS = 4
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "embed_dim": 64,
    "dim": 64,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 128,
    "ffn_dim": 128,
    "d_ff": 128,
    "n_inner": 128,
    "ffn_hidden_size": 128,
    "decoder_ffn_dim": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    **dict.fromkeys(LAYER_COUNTS, NUM_LAYERS),
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "max_seq_len": 512,
    "context_length": 512,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "ssm_state_size": 16,
    "state_size": 16,
    "mamba_d_state": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_d_ssm": 128,
    "mamba_expand": 2,
    "n_groups": 1,
    "chunk_size": 8,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "attention_hidden_size": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_BERT = {"is_decoder": True}

FIXES: dict[str, dict[str, Any]] = {
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "gemma4_text": {
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
    },
    "gemma3n_text": {
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
    },
    "longcat_flash": {"expert_ffn_hidden_size": 32, "ffn_hidden_size": 128, "num_layers": 2},
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "electra": _BERT,
    "camembert": _BERT,
    "ernie": _BERT,
    "data2vec-text": _BERT,
    "rembert": _BERT,
    "roformer": _BERT,
    "megatron-bert": _BERT,
    "bert-generation": _BERT,
    "roberta-prelayernorm": _BERT,
    "xlm-roberta-xl": _BERT,
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [32, 32],
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 64,
    },
    "kimi_linear": {"n_routed_experts": 4, "num_experts": 4, "num_experts_per_token": 2},
    "bailing_hybrid": {"partial_rotary_factor": 0.5},
    "xmod": {**_BERT, "default_language": "en_XX"},
    "big_bird": {**_BERT, "attention_type": "original_full"},
}


def tiny_config(model_type: str) -> Any:
    """A config of this type, small enough to run in moments.

    Raises:
        Exception: whatever the config class says to these sizes.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from runnerctl.testing.tiny_models import FAMILIES

    if model_type in FAMILIES:
        return CONFIG_MAPPING[model_type](**FAMILIES[model_type])
    return _shrunk(CONFIG_MAPPING[model_type]())


def _shrunk(default: Any) -> Any:
    """A small config of the same class, with small configs inside."""
    known = default.to_dict()
    settings = {key: value for key, value in SIZES.items() if known.get(key) is not None}
    for key in ("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"):
        settings[key] = SIZES[key]
    count = next((known[key] for key in LAYER_COUNTS if known.get(key)), 0)
    lists = {
        key: _sample(value)
        for key, value in known.items()
        if isinstance(value, list) and len(value) == count and count
    }
    layers = max([NUM_LAYERS, *map(len, lists.values())])
    settings |= {key: (value * layers)[:layers] for key, value in lists.items()}
    settings |= {key: layers for key in LAYER_COUNTS if key in settings}
    for name in getattr(default, "sub_configs", {}):
        inner = getattr(default, name, None)
        if inner is not None:
            settings[name] = _shrunk(inner)
    if known.get("kv_lora_rank"):  # latent attention: as many keys as queries, rope on a part
        settings |= {"num_key_value_heads": 4, "head_dim": SIZES["qk_rope_head_dim"]}
    if known.get("num_experts_per_tok") or known.get("n_routed_experts"):
        settings |= {key: 1 for key in ("n_group", "topk_group") if key in known}
    settings |= FIXES.get(default.model_type, {})
    return type(default)(**settings)


def _sample(entries: list[Any]) -> list[Any]:
    """Each different entry of a list, in order, repeated to the number of layers."""
    kinds = [entry for i, entry in enumerate(entries) if entry not in entries[:i]]
    length = max(NUM_LAYERS, len(kinds))
    return (kinds * length)[:length]
