"""Tiny random checkpoints of real architectures, and what transformers makes of them.

torch and transformers are imported by the functions, not here.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

VOCAB_SIZE = 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GATED = {**_COMMON, "intermediate_size": 128}
_GQA = {**_GATED, "num_key_value_heads": 2}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_GEMMA = {
    **_GQA,
    "num_hidden_layers": 4,
    "head_dim": 24,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "layer_types": _ALTERNATING,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

SERVED: dict[str, dict[str, Any]] = {
    "llama": _GQA,
    "mistral": {**_GQA, "sliding_window": 8},
    "qwen2": _GQA,
    "qwen3": {**_GQA, "head_dim": 24},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    "gemma3_text": _GEMMA,
    "phi3": _GQA,
    "opt": {**_COMMON, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "gpt2": {
        **{k: v for k, v in _COMMON.items() if k != "max_position_embeddings"},
        "n_positions": 512,
    },
    "gpt_neox": _GATED,
    "mixtral": {**_GQA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_GQA, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**_GQA, **_EXPERTS, "num_experts": 4, "head_dim": 24},
    "deepseek_v2": {
        **_GATED,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
    },
    "granitemoe": {**_GQA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {**_GQA, "num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {**_GQA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt_oss": {
        **_GQA,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": _ALTERNATING,
    },
}
"""Families whose attention goes through transformers' `AttentionInterface`."""

OF_CAPABILITY: dict[str, str] = {
    "generate": "llama",
    "moe": "qwen2_moe",
    "mla": "deepseek_v2",
    "hybrid": "lfm2",
    "attention_free": "mamba",
    "unpaged": "bloom",
}
"""The family that shows a capability served."""

_FOUR = {**_GQA, "num_hidden_layers": 4}
_MAMBA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "state_size": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MAMBA2_LAYERS = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_DELTA_NET = {
    **_FOUR,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}

RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": {**_GQA, "layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {
        **_FOUR,
        **_EXPERTS,
        "layer_types": ["conv", "full_attention"] * 2,
        "num_experts": 4,
        "num_dense_layers": 1,
    },
    "bamba": {**_FOUR, **_MAMBA2_LAYERS, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        **_FOUR,
        **_MAMBA2_LAYERS,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
    "falcon_h1": {**_FOUR, **_MAMBA2_LAYERS, "mamba_d_ssm": 128, "head_dim": 16},
    "jamba": {
        **_FOUR,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "qwen3_next": {
        **_DELTA_NET,
        **_EXPERTS,
        "head_dim": 16,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": {**_DELTA_NET, "head_dim": 16},
    "olmo_hybrid": {**_DELTA_NET, "linear_num_key_heads": 4},
    "nemotron_h": {
        **_FOUR,
        "hybrid_override_pattern": "M*M-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "head_dim": 16,
    },
    "zamba": {
        **_FOUR,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "n_mamba_heads": 2,
        "mamba_dt_rank": 4,
        "attention_head_dim": 32,
    },
    "zamba2": {
        **_FOUR,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
        "mamba_d_state": 16,
        "mamba_ngroups": 1,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": False,
        "adapter_rank": 8,
    },
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "mamba2": {
        **_MAMBA,
        "state_size": 16,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "chunk_size": 8,
    },
}
"""Families with state that is not attention's."""

BYPASSING: dict[str, dict[str, Any]] = {
    "bloom": _COMMON,
    "falcon": _COMMON,
    "mpt": {
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 512,
        "tie_word_embeddings": False,
    },
    "gpt_neo": {
        **{k: v for k, v in _COMMON.items() if k not in ("num_hidden_layers",)},
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
    },
    "llama4_text": {
        **_FOUR,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 1,
    },
    "rwkv": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "attention_hidden_size": 64,
        "intermediate_size": 128,
        "context_length": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
"""Families that cannot be paged: most never ask the attention interface, llama4 keeps its
chunks from it, rwkv has a cache of its own."""

SELF_KEEPING: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {
        **_FOUR,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "lru_width": 64,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
    },
}
"""Families that keep a request's past in the model itself, and cannot be served."""

OTHER: dict[str, dict[str, Any]] = {
    "bert": {**_GATED, "tie_word_embeddings": True},
}
"""Families that do not generate."""

FAMILIES = {**SERVED, **RECURRENT, **BYPASSING, **SELF_KEEPING, **OTHER}

# How far apart logits lie decides whether greedy decoding wanders or repeats one token.
_INIT_STD = 0.5


def make_tiny_model(family: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Save a random float32 checkpoint in `folder`, without a tokenizer.

    Args:
        family: a key of `FAMILIES`.
        folder: made if it is not there.
        seed: of the weights.
        overrides: go to the model's config.

    Returns:
        `folder`.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**FAMILIES[family], **overrides})
    factory = AutoModel if family in OTHER else AutoModelForCausalLM
    return save_random_model(factory, config, folder, seed=seed)


def save_random_model(
    factory: Any, config: Any, folder: Path, *, seed: int = 0, spread: float = _INIT_STD
) -> Path:
    """Save a checkpoint of random float32 weights in `folder`, without a tokenizer.

    Args:
        factory: `AutoModelForCausalLM` or another class with `from_config`.
        config: of transformers.
        folder: made if it is not there.
        seed: of the weights.
        spread: their standard deviation, in matrices of 64 columns.

    Returns:
        `folder`.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # for what is not drawn below
        model = factory.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                # Norm weights and biases: near what they were, none of them trivial.
                parameter.add_(0.1 * noise)
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(spread * noise * (64 / parameter.shape[-1]) ** 0.5)
    model.save_pretrained(folder)
    return folder


def reference_generate(
    folder: Path, prompt_token_ids: list[int], max_new_tokens: int
) -> tuple[list[int], list[float]]:
    """Greedy tokens by transformers in float32, and the gap between the two best logits of each.

    The end-of-sequence token is switched off by an id that never occurs; `min_new_tokens`
    would mask its logit and so change the other tokens.
    """
    import torch

    reference = reference_model(folder)
    prompt = torch.tensor([prompt_token_ids])
    with torch.inference_mode():
        out = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=-1,
            forced_eos_token_id=None,  # of checkpoints that end every answer with it
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    top2 = torch.cat(out.logits).float().topk(2, dim=-1).values
    tokens = out.sequences[0, len(prompt_token_ids) :].tolist()
    return tokens, (top2[:, 0] - top2[:, 1]).tolist()


@lru_cache(maxsize=64)
def reference_model(folder: Path) -> Any:
    """The checkpoint as transformers has it, in float32; kept for the next caller."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
