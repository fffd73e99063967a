"""The metadata of a GGUF file, and what a `config.json` would say of the same model.

Reads the head of the file only, with the standard library: explaining a model
needs neither its weights nor the packages that load them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from runnerctl.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# struct formats of the scalar types, by their number in the file
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
KEPT_ITEMS = 4096  # per-layer lists are kept, vocabularies only counted
LONGEST = 1 << 28  # bytes of one value; more than that is a corrupt file

# GGUF's name of an architecture -> `model_type` and class in a config.json.
CLASSES = {
    "bert": ("bert", "BertModel"),
    "bloom": ("bloom", "BloomForCausalLM"),
    "cohere2": ("cohere2", "Cohere2ForCausalLM"),
    "command-r": ("cohere", "CohereForCausalLM"),
    "dbrx": ("dbrx", "DbrxForCausalLM"),
    "deepseek2": ("deepseek_v2", "DeepseekV2ForCausalLM"),
    "falcon": ("falcon", "FalconForCausalLM"),
    "falcon-h1": ("falcon_h1", "FalconH1ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "gptneox": ("gpt_neox", "GPTNeoXForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "granitehybrid": ("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    "granitemoe": ("granitemoe", "GraniteMoeForCausalLM"),
    "jamba": ("jamba", "JambaForCausalLM"),
    "lfm2": ("lfm2", "Lfm2ForCausalLM"),
    "lfm2moe": ("lfm2_moe", "Lfm2MoeForCausalLM"),
    "llama": ("llama", "LlamaForCausalLM"),
    "mamba": ("mamba", "MambaForCausalLM"),
    "mamba2": ("mamba2", "Mamba2ForCausalLM"),
    "mistral3": ("mistral", "MistralForCausalLM"),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
    "phi2": ("phi", "PhiForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "stablelm": ("stablelm", "StableLmForCausalLM"),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM"),
    "t5": ("t5", "T5ForConditionalGeneration"),
}
KEYS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "decoder_block_count": "num_decoder_layers",
    "embedding_length": "hidden_size",
    "expert_count": "num_local_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_used_count": "num_experts_per_tok",
    "feed_forward_length": "intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
    "rope.freq_base": "rope_theta",
    "shortconv.l_cache": "conv_L_cache",
    "vocab_size": "vocab_size",
}
RECURRENT_SECTIONS = ("ssm.", "wkv.", "kda.", "shortconv.")


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """The key-value pairs at the head of a GGUF file.

    A list of more than 4096 values, as of a vocabulary, is given as its length.

    Raises:
        ModelError: it is no GGUF file, is cut off, or is of an unknown version.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ModelError(
                    f"{path} is not a GGUF file", remedy="give the file as it was published"
                )
            version = _scalar(file, "I")
            if version not in VERSIONS:
                raise ModelError(
                    f"{path} is a GGUF file of version {version}; known are 2 and 3",
                    remedy="convert it again with a current converter",
                )
            _scalar(file, "Q")  # number of tensors
            return {_string(file): _value(file) for _ in range(_scalar(file, "Q"))}
    except OSError as exc:
        raise ModelError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except (EOFError, ValueError, KeyError) as exc:
        raise ModelError(
            f"{path} is cut off or corrupt: {exc}", remedy="fetch the file again"
        ) from exc


def config_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a `config.json` would say, enough to read the facts of the model from it."""
    architecture = str(metadata.get("general.architecture", ""))
    prefix = f"{architecture}."
    own = {key[len(prefix) :]: v for key, v in metadata.items() if key.startswith(prefix)}
    config: dict[str, Any] = {"model_type": architecture}
    if architecture in CLASSES:
        model_type, name = CLASSES[architecture]
        config = {"model_type": model_type, "architectures": [name]}
    for key, value in own.items():
        if key in KEYS:
            config[KEYS[key]] = max(value, default=0) if isinstance(value, list) else value
        elif key.startswith(RECURRENT_SECTIONS) or key == "full_attention_interval":
            config[key.replace(".", "_")] = value
    if own.get("attention.causal") is False or own.get("pooling_type"):
        config["is_causal"] = False
    if "vocab_size" not in config and "tokenizer.ggml.tokens" in metadata:
        tokens = metadata["tokenizer.ggml.tokens"]
        config["vocab_size"] = tokens if isinstance(tokens, int) else len(tokens)
    _refine(config, own)
    return config


def _refine(config: dict[str, Any], own: Mapping[str, Any]) -> None:
    """What one key of GGUF does not tell alone."""
    key_value_heads = own.get("attention.head_count_kv")
    if isinstance(key_value_heads, list) and any(k.startswith(RECURRENT_SECTIONS) for k in own):
        # A layer without key-value heads is one of the recurrent layers.
        config["layer_types"] = [
            "full_attention" if heads else "linear_attention" for heads in key_value_heads
        ]
    if config["model_type"] == "llama" and config.get("num_local_experts", 0) > 1:
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    if config["model_type"] == "deepseek_v2" and own.get("expert_gating_func") == 2:
        # sigmoid gates came with the third version
        config |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    if config["model_type"] == "t5":
        config["is_encoder_decoder"] = True


def _read(file: BinaryIO, size: int) -> bytes:
    if size > LONGEST:
        raise ValueError(f"a value of {size} bytes")
    data = file.read(size)
    if len(data) < size:
        raise EOFError("it ends within the metadata")
    return data


def _scalar(file: BinaryIO, code: str) -> Any:
    return struct.unpack(f"<{code}", _read(file, struct.calcsize(f"<{code}")))[0]


def _string(file: BinaryIO) -> str:
    return _read(file, _scalar(file, "Q")).decode("utf-8", "replace")


def _value(file: BinaryIO) -> Any:
    kind = _scalar(file, "I")
    if kind == STRING:
        return _string(file)
    return _array(file) if kind == ARRAY else _scalar(file, SCALARS[kind])


def _array(file: BinaryIO) -> Any:
    kind, length = _scalar(file, "I"), _scalar(file, "Q")
    if kind == STRING:
        strings = []
        for index in range(length):
            text = _read(file, _scalar(file, "Q"))
            if index < KEPT_ITEMS:
                strings.append(text.decode("utf-8", "replace"))
        return strings if length <= KEPT_ITEMS else length
    if kind == ARRAY:
        raise ValueError("a list of lists")
    code = SCALARS[kind]
    data = _read(file, length * struct.calcsize(f"<{code}"))
    return list(struct.unpack(f"<{length}{code}", data)) if length <= KEPT_ITEMS else length
