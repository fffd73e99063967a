"""Configs nobody has published, with the facts that follow from what their keys mean."""

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

EXPERTS = [
    dense("camel case", {"numExperts": 16}, MOE, "16 experts in another spelling"),
    dense("upper case", {"NUM_EXPERTS": 4}, MOE, "the case of a key means nothing"),
    dense("count last", {"experts_count": 8}, MOE, "a count of experts"),
    dense("one word", {"nexperts": 8}, MOE, "n experts without a separator"),
    dense("singular", {"n_expert": 8, "n_expert_used": 2}, MOE, "as in GGUF files"),
    dense("dotted key", {"moe.num_experts": 32}, MOE, "nesting written flat"),
    dense("routed", {"num_routed_experts": 6}, MOE, "six experts to route to"),
    dense("plain word", {"experts": 12}, MOE, "a number under `experts` counts them"),
    dense("nested count", {"moe": {"count": 8, "top_k": 2}}, MOE, "count within moe is experts"),
    dense(
        "deep nesting",
        {"decoder": {"ffn": {"router": {"moeNumExperts": 8}}}},
        MOE,
        "how deep a key is nested does not change its meaning",
    ),
    dense("number in quotes", {"num_experts": "64"}, MOE, "JSON written by a script"),
    dense("per-layer list", {"num_experts": [0, 8, 0, 8]}, MOE, "two layers have eight"),
    dense("per-layer ones", {"num_experts": [1, 1, 0, 1]}, NONE, "nobody can choose"),
    dense("list of experts", {"experts": [{"dim": 8}, {"dim": 16}]}, MOE, "two, described"),
    dense("null", {"num_experts": None, "num_experts_per_tok": 2}, NONE, "none at all"),
    dense("zero", {"num_local_experts": 0, "top_k": 2}, NONE, "dense in a MoE family"),
    dense("one", {"model_type": "foo_moe", "num_experts": 1}, NONE, "no choice"),
    dense("shared only", {"n_shared_experts": 2}, NONE, "no routing to shared experts"),
    dense("zero experts", {"n_routed_experts": 1, "zero_expert_num": 64}, NONE, "pass-through"),
    dense("sizes only", {"expert_capacity": 64}, NONE, "a capacity is not a count"),
    dense(
        "no expert layer",
        {"num_experts": 8, "mlp_layer_types": ["dense"] * 4},
        NONE,
        "every layer is dense, whatever the count says",
    ),
    dense(
        "all layers dense first",
        {"n_routed_experts": 64, "first_k_dense_replace": 4},
        NONE,
        "the experts would begin after the last layer",
    ),
    dense("dense by list", {"num_experts": 8, "mlp_only_layers": [0, 1, 2, 3]}, NONE, "all four"),
    dense("switched off", {"use_moe": False, "num_experts": 8}, NONE, "the switch is off"),
    Invented(
        "pattern without experts",
        {**LM, **HEADS, "hybrid_override_pattern": "M-M-*-", "n_routed_experts": 8},
        HYBRID,
        "the pattern has M and * but no E",
    ),
    dense(
        "top two of unknown",
        {"num_experts_per_tok": 2},
        MOE,
        "whoever takes two has at least two",
        True,
    ),
    dense("name only", {"model_type": "new_moe"}, NONE, "a name is not a count", True),
    dense(
        "experts in pictures only",
        {"vision_config": {"num_experts": 8, "hidden_size": 4}},
        ("is_multimodal",),
        "the language decoder is dense",
    ),
    dense("experts in the draft", {"mtp_num_experts": 8}, NONE, "extra heads are not the model"),
]

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
]

SHAPES = [
    Invented(
        "pictures and experts",
        {
            "architectures": ["NewForConditionalGeneration"],
            "text_config": {**HEADS, "model_type": "new_text", "num_local_experts": 8},
            "vision_config": {"num_attention_heads": 16, "depth": 2},
        },
        ("is_moe", "is_multimodal"),
        "the experts are the text side's",
    ),
    Invented(
        "sound and linear attention",
        {
            "architectures": ["NewForConditionalGeneration"],
            "thinker_config": {
                "audio_config": {"d_model": 8},
                "text_config": {**HEADS, "layer_types": ["linear_attention", "full_attention"]},
            },
        },
        ("is_hybrid", "is_multimodal"),
        "two levels down",
    ),
    Invented(
        "encoder and decoder",
        {"architectures": ["NewForConditionalGeneration"], "is_encoder_decoder": True, **HEADS},
        ("is_encoder_decoder",),
        "it says so",
    ),
    Invented(
        "two configurations",
        {"architectures": ["NewEncoderDecoderModel"], "encoder": {**HEADS}, "decoder": {**HEADS}},
        ("is_encoder_decoder",),
        "one for each side",
    ),
    dense("latent attention", {"kv_lora_rank": 512}, ("is_mla",), "compressed keys"),
    dense("no latent", {"kv_lora_rank": None, "q_lora_rank": 64}, NONE, "null"),
    dense("latent off", {"use_mla": False, "kv_lora_rank": 512}, NONE, "switched off"),
    dense(
        "classifier",
        {"architectures": ["NewForSequenceClassification"]},
        ("pooling",),
        "one label for a text",
    ),
    dense("bare decoder", {"architectures": ["NewModel"]}, ("pooling",), "no LM head"),
    dense("LM head model", {"architectures": ["NewLMHeadModel"]}, NONE, "it has one"),
    dense("chat model", {"architectures": ["NewChatModel"]}, NONE, "chats are text"),
    dense(
        "own code",
        {
            "architectures": ["NewModel"],
            "auto_map": {"AutoModelForCausalLM": "modeling_new.NewModel"},
        },
        NONE,
        "its own code registers it as a language model",
    ),
    dense("reward", {"architectures": ["NewForRewardModel"]}, ("pooling",), "a score"),
    Invented(
        "encoder without a class",
        {"model_type": "neobert", **HEADS},
        ("pooling",),
        "BERT-like by its type",
        True,
    ),
    Invented(
        "segments",
        {"model_type": "new", "type_vocab_size": 2, **HEADS},
        ("pooling",),
        "segment embeddings are an encoder's",
        True,
    ),
    Invented("no class", {"model_type": "new", **HEADS}, NONE, "probably a decoder", True),
    dense("odd class", {"architectures": ["Wobbler"]}, NONE, "says nothing", True),
    Invented("nothing", {}, NONE, "nothing is said", True),
]

INVENTED = [
    Invented(f"{group}: {case.name}", case.config, case.true, case.why, case.doubt)
    for group, cases in (
        ("experts", EXPERTS),
        ("layers", LAYERS),
        ("recurrent", RECURRENT),
        ("shapes", SHAPES),
    )
    for case in cases
]
