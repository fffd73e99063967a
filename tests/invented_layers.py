"""Invented configs about how layers mix tokens."""

from __future__ import annotations

from invented_case import FREE, HYBRID, LM, MOE, NONE, Invented, dense

LAYERS = [
    dense(
        "labels in other words",
        {"mixer_types": ["gated_delta_net", "softmax_attention"] * 2},
        HYBRID,
        "gated delta net is recurrent",
    ),
    dense(
        "linear by another name",
        {"layer_types": ["lightning_attn", "full_attention"] * 2},
        HYBRID,
        "lightning attention is linear attention",
    ),
    dense(
        "short convolution",
        {"layer_types": ["short_conv", "sliding_attention"] * 2},
        HYBRID,
        "short convolution and attention",
    ),
    dense(
        "linear recurrent unit",
        {"block_types": ["rg_lru", "rg_lru", "local_attention"]},
        HYBRID,
        "RG-LRU and attention with a window",
    ),
    dense(
        "labels in objects",
        {"layers": [{"type": "mamba2"}, {"type": "attention"}]},
        HYBRID,
        "the type of each layer",
    ),
    dense("both in a layer", {"layer_types": ["mamba_attention"] * 4}, HYBRID, "both"),
    dense(
        "zero recurrent layers",
        {
            "model_type": "granitemoehybrid",
            "mamba_d_state": 128,
            "num_local_experts": 0,
            "layer_types": ["attention"] * 4,
        },
        NONE,
        "a dense model of a hybrid family",
    ),
    dense(
        "no recurrent layer in the pattern",
        {"hybrid_override_pattern": "*-*-*-*-", "ssm_state_size": 128},
        NONE,
        "attention and feed-forward only",
    ),
    dense(
        "attention in each layer",
        {"mamba_d_conv": 4, "attn_layer_period": 1, "attn_layer_offset": 0},
        NONE,
        "every first layer is attention, so all are",
    ),
    dense("all indices", {"conv_L_cache": 3, "full_attn_idxs": [0, 1, 2, 3]}, NONE, "all four"),
    dense("some indices", {"conv_L_cache": 3, "full_attn_idxs": [1, 3]}, HYBRID, "two of four"),
    dense(
        "interval",
        {"full_attention_interval": 4, "linear_num_key_heads": 16},
        HYBRID,
        "three linear layers for one of attention",
    ),
    dense(
        "kinds in a nested list",
        {"linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 32}},
        HYBRID,
        "three layers of delta attention",
    ),
    dense(
        "an empty nested list",
        {
            "linear_attn_config": {
                "kda_layers": [],
                "full_attn_layers": [1, 2, 3, 4],
                "num_heads": 32,
            }
        },
        NONE,
        "linear attention is configured but no layer has it",
    ),
    dense("switched off", {"use_mamba": False, "mamba_d_state": 16}, NONE, "off"),
    dense("null parameters", {"mamba_d_state": None, "lru_width": 0}, NONE, "no sizes"),
    dense(
        "numbers for kinds",
        {"attn_type_list": [0, 0, 0, 1], "linear_attn_alpha_factor": 1.0},
        HYBRID,
        "three layers of the linear kind",
    ),
    dense(
        "one number for all kinds",
        {"attn_type_list": [1, 1, 1, 1], "linear_attn_alpha_factor": 1.0},
        NONE,
        "a factor for layers that do not exist",
    ),
    dense("side by side", {"mamba": {"d_state": 16}}, HYBRID, "heads and a state"),
    dense(
        "a window",
        {"sliding_window": 512, "sliding_window_pattern": "LLLG"},
        NONE,
        "local and global attention are attention",
    ),
    dense(
        "hybrid of windows",
        {"hybrid_layer_pattern": [0, 1, 1, 1], "sliding_window": 128},
        NONE,
        "a pattern of windows",
    ),
    dense(
        "chunked",
        {"layer_types": ["chunked_attention", "full_attention"] * 2},
        NONE,
        "chunked attention is attention",
    ),
    dense("global every third", {"global_attn_every_n_layers": 3}, NONE, "global against local"),
    dense("cross attention", {"cross_attention_layers": [1, 3]}, NONE, "where pictures come in"),
    dense(
        "repeated depth",
        {"n_recurrent_layers": 2, "n_recurrent_loops": 4},
        NONE,
        "layers applied again, not a recurrent state",
    ),
    dense(
        "hybrid is a word",
        {"layer_types": ["hybrid", "hybrid_sliding"] * 2},
        NONE,
        "nothing recurrent is described",
        True,
    ),
    dense(
        "hybrid with a state",
        {"layers_block_type": ["hybrid"] * 4, "mamba_headdim": 64},
        HYBRID,
        "here the word marks Mamba and attention",
    ),
    dense(
        "unknown labels",
        {"layer_types": ["wobble", "full_attention"] * 2, "ssm_state_size": 16},
        HYBRID,
        "the state has to be somewhere",
        True,
    ),
    dense(
        "unknown labels beside attention",
        {"layer_types": ["wobble", "full_attention"] * 2},
        NONE,
        "nothing says that a wobble keeps a state, and nothing that it does not",
        True,
    ),
    dense(
        "nothing but unknown labels",
        {"layer_types": ["wobble", "wiggle"] * 2},
        NONE,
        "heads are all that is known",
        True,
    ),
    dense(
        "unknown kinds in objects",
        {"layers": [{"kind": "wobble"}, {"kind": "wiggle"}]},
        NONE,
        "heads are all that is known",
        True,
    ),
    dense(
        "unknown labels beside both",
        {"layer_types": ["wobble", "mamba", "full_attention", "mamba"]},
        HYBRID,
        "whatever a wobble is, the model is a hybrid",
    ),
    dense(
        "names of layers that are no kinds",
        {"skipped_layers": ["embed", "head"], "lora_blocks": ["q_proj", "v_proj"]},
        NONE,
        "which layers something is done to, not what they are",
    ),
    dense(
        "period of nothing",
        {"attn_layer_period": 8},
        HYBRID,
        "seven layers of eight do not attend",
        True,
    ),
    dense(
        "lightning indexer",
        {"lightning_indexer": {"num_heads": 4, "top_k": 64}},
        NONE,
        "it selects keys for attention",
    ),
    dense("cache of something", {"lru_cache_size": 64}, NONE, "not an RG-LRU"),
    dense(
        "convolution for sound",
        {"audio_config": {"conv_kernel_size": 9, "mamba_d_state": 16}},
        ("is_multimodal",),
        "what the encoder does is not the decoder's",
    ),
    dense("one mixer for all", {"token_mixer": "mamba"}, HYBRID, "heads are set beside it", True),
    dense("labels by number", {"layer_types": {"0": "mamba", "1": "attention"}}, HYBRID, "both"),
    dense("labels in a string", {"layer_types": "mamba,attention"}, HYBRID, "a list all the same"),
    dense(
        "labels counted",
        {"layer_types": {"mamba": 6, "attention": 0}},
        HYBRID,
        "heads are set",
        True,
    ),
    dense(
        "experts within layers",
        {
            "block_configs": [
                {"block_type": "moe", "n_routed_experts": 8},
                {"block_type": "attention"},
            ]
        },
        MOE,
        "one layer has eight",
    ),
    dense("places of something else", {"attn_gate_layers": [1, 3]}, NONE, "gates are attention's"),
    dense(
        "convolved keys", {"layer_types": ["hybrid"] * 4, "cca_time0": 2}, HYBRID, "keeps a state"
    ),
    dense("one after another", {"layer_types": ["global", "local"] * 2}, NONE, "windows"),
]

RECURRENT = [
    Invented("state space", {**LM, "state_size": 16, "conv_kernel": 4}, FREE, "no attention heads"),
    Invented("heads of the state", {**LM, "state_size": 128, "num_heads": 64}, FREE, "Mamba-2's"),
    Invented("all Mamba", {**LM, "layer_types": ["mamba"] * 4}, FREE, "every layer"),
    Invented("only M", {**LM, "layers_pattern": "MMMM", "num_attention_heads": 0}, FREE, "no *"),
    dense(
        "heads but no attention layer",
        {"layer_types": ["mamba2"] * 4},
        HYBRID,
        "heads are set: the family interleaves",
        True,
    ),
    Invented(
        "RWKV with heads",
        {**LM, "model_type": "rwkv7", "num_attention_heads": 32, "head_dim": 64},
        FREE,
        "what RWKV calls attention keeps a state",
    ),
    Invented(
        "original Mamba",
        {"d_model": 768, "n_layer": 24, "ssm_cfg": {}, "vocab_size": 50277},
        FREE,
        "as its authors write it; nothing says what the class is",
        True,
    ),
    Invented(
        "original Mamba with attention",
        {
            "d_model": 768,
            "n_layer": 24,
            "ssm_cfg": {"layer": "Mamba2"},
            "attn_layer_idx": [9, 18],
            "attn_cfg": {"num_heads": 16},
        },
        HYBRID,
        "two of 24 layers attend",
        True,
    ),
    Invented(
        "gated delta net",
        {**LM, "model_type": "gated_deltanet", "num_heads": 6, "attn": None},
        FREE,
        "attn is null",
    ),
    Invented(
        "no keys, just a name",
        {"architectures": ["MambaLMHeadModel"], "d_model": 8},
        FREE,
        "no heads",
    ),
    Invented(
        "unknown labels beside recurrent ones",
        {**LM, "layer_types": ["mamba", "wobble"] * 2},
        FREE,
        "a wobble may be attention",
        True,
    ),
    Invented(
        "unknown architecture with zero recurrent layers",
        {
            "model_type": "brandnew_hybrid",
            "architectures": ["BrandNewHybridForCausalLM"],
            "num_attention_heads": 8,
            "mixer_kinds": ["attention"] * 6,
            "rwkv_head_size": 64,
            "gated_delta_rank": 16,
        },
        NONE,
        "sizes of recurrent layers that no layer is",
    ),
    Invented(
        "unknown architecture that counts its layers",
        {
            "model_type": "brandnew",
            "architectures": ["BrandNewForCausalLM"],
            "num_attention_heads": 8,
            "num_hidden_layers": 6,
            "num_mamba_layers": 0,
            "mamba_state": 64,
        },
        NONE,
        "no Mamba layer",
    ),
    Invented(
        "RWKV with attention",
        {**LM, "model_type": "rwkv7", "attn": {"layers": [1], "num_heads": 8}},
        HYBRID,
        "attn is attention",
    ),
]
