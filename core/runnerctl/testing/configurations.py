"""Representative configurations: one of each kind of model, and the settings that matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runnerctl.config import EngineConfig
    from runnerctl.plugins import PluginHost

_HEADS = {"num_attention_heads": 8, "num_hidden_layers": 8, "hidden_size": 512}
DENSE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 4096,
    **_HEADS,
}
MOE: dict[str, Any] = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    **_HEADS,
}


@dataclass(frozen=True, slots=True)
class Configuration:
    """A model and settings to ask a policy about.

    Attributes:
        model: the content of its `config.json`.
        settings: as for `decide`: `runner`, `prefill_context_parallel_size` ...
    """

    model: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def resolved(
        self, host: PluginHost, plugin: str = "", options: Mapping[str, Any] | None = None
    ) -> EngineConfig:
        """The configuration that hooks are called with; none was called to make it.

        Args:
            host: whose plugins' options are filled in.
            plugin, options: a plugin's name in `host`, and values for its options.

        Raises:
            ValueError: a setting or an option is not valid.
        """
        from runnerctl.plugins import PluginHost
        from runnerctl.resolve import resolve

        given, problems = host.validated_options({plugin: options} if options else {})
        resolved = resolve(self.model, host=PluginHost(), environ={}, **self.settings)
        if resolved.config is None:
            problems = (*problems, *resolved.decision.errors)
        if resolved.config is None or problems:
            raise ValueError("; ".join(problem.message for problem in problems))
        return resolved.config.model_copy(update={"plugin_options": given})


CONFIGURATIONS: dict[str, Configuration] = {
    "dense": Configuration(DENSE),
    "mixture of experts": Configuration(MOE),
    "multi-head latent attention": Configuration(
        {
            "model_type": "deepseek_v2",
            "architectures": ["DeepseekV2ForCausalLM"],
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            **_HEADS,
        }
    ),
    "hybrid": Configuration(
        {
            "model_type": "jamba",
            "architectures": ["JambaForCausalLM"],
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "num_experts": 16,
            **_HEADS,
        }
    ),
    "attention-free": Configuration(
        {
            "model_type": "mamba",
            "architectures": ["MambaForCausalLM"],
            "num_hidden_layers": 8,
            "state_size": 16,
        }
    ),
    "pooling": Configuration({"model_type": "bert", "architectures": ["BertModel"], **_HEADS}),
    "encoder-decoder": Configuration(
        {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "is_encoder_decoder": True,
            "num_layers": 8,
            "num_decoder_layers": 8,
            "num_heads": 8,
        }
    ),
    "multimodal": Configuration(
        {
            "model_type": "llava",
            "architectures": ["LlavaForConditionalGeneration"],
            "text_config": DENSE,
            "vision_config": {"model_type": "clip_vision_model"},
        }
    ),
    "unknown model type": Configuration(
        {"model_type": "nova", "architectures": ["NovaForCausalLM"], **_HEADS}
    ),
    "a config that says nothing": Configuration({}),
    "prefill context parallel": Configuration(DENSE, {"prefill_context_parallel_size": 2}),
    "tensor parallel": Configuration(MOE, {"tensor_parallel_size": 4}),
    "explicit v1": Configuration(DENSE, {"runner": "v1"}),
    "explicit v2": Configuration(MOE, {"runner": "v2"}),
    "explicit unknown runner": Configuration(DENSE, {"runner": "v9"}),
    "small steps": Configuration(
        DENSE,
        {"max_num_batched_tokens": 1, "max_num_seqs": 1, "prefill_context_parallel_size": 8},
    ),
    "strict": Configuration(DENSE, {"strict_plugins": True, "enforce_eager": True}),
}
"""By name. A policy's own table of configurations may add to it."""
