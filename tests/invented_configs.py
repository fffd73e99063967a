"""Configs nobody has published, with the facts that follow from what their keys mean."""

from __future__ import annotations

from invented_case import HEADS, HYBRID, LM, MOE, NONE, Invented, dense
from invented_layers import LAYERS, RECURRENT

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
    dense(
        "one expert of the family",
        {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
        },
        NONE,
        "a name does not make a choice",
    ),
    dense(
        "no expert of the family",
        {
            "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"],
            "n_routed_experts": None,
            "num_experts_per_tok": None,
            "moe_layer_freq": 1,
        },
        NONE,
        "null",
    ),
    dense(
        "experts of an unknown architecture",
        {"model_type": "brandnew", "mixture": {"n_experts": 12, "picked": 3}},
        MOE,
        "twelve",
    ),
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
    dense("decoder", {"architectures": ["NewDecoder"]}, NONE, "decoders decode"),
    Invented(
        "bytes into patches and back",
        {
            "architectures": ["NewForCausalLM"],
            "encoder_config": {**HEADS},
            "decoder_config": {**HEADS},
            **HEADS,
        },
        NONE,
        "a causal language model in parts",
    ),
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
