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
}
"""Families whose attention goes through transformers' `AttentionInterface`."""

OF_CAPABILITY: dict[str, str] = {
    "generate": "llama",
    "moe": "qwen2_moe",
    "mla": "deepseek_v2",
    "hybrid": "lfm2",
    "attention_free": "mamba",
}
"""The family that shows a capability served."""

RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": {**_GQA, "layer_types": ["conv", "full_attention", "conv"]},
    "mamba": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "state_size": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
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
}
"""Families that never call the interface, and must be refused."""

OTHER: dict[str, dict[str, Any]] = {
    "bert": {**_GATED, "tie_word_embeddings": True},
}
"""Families that do not generate."""

FAMILIES = {**SERVED, **RECURRENT, **BYPASSING, **OTHER}

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
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**FAMILIES[family], **overrides})
    factory = AutoModel if family in OTHER else AutoModelForCausalLM
    generator = torch.Generator().manual_seed(seed)
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
                parameter.copy_(_INIT_STD * noise * (64 / parameter.shape[-1]) ** 0.5)
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
