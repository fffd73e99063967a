"""`ModelFacts`: what a model is, read from the meaning of its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

RunnerType = Literal["generate", "pooling"]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What plugins and the host may know about a model before anything is loaded.

    Attributes:
        model_type: as in `config.json`; "" if it has none.
        architectures: class names as in `config.json`.
        runner_type: `generate`, or `pooling` for embedding, classification and reward models.
        is_moe: more than one expert to route to.
        is_hybrid: recurrent layers (mamba, linear attention, gated delta net, short
            convolution, RWKV-like) *and* attention.
        is_attention_free: recurrent layers only.
        is_mla: multi-head latent attention (compressed keys and values).
        is_encoder_decoder: a separate encoder feeds cross attention.
        is_multimodal: takes images, audio or video beside text.
        num_hidden_layers: of the decoder, or None if the config does not say.
        num_attention_heads: query heads of an attention layer, or None if unknown.
        num_key_value_heads: heads of its keys and values, or None if unknown.
        max_position_embeddings: the context length in tokens, or None if unbounded or unknown.
        evidence: for each fact that is true, the key and value it was read from; for each
            that plugins supplied, what they say.
        supplied_by: for each fact that plugins supplied against the host's own reading,
            their names, with commas.
        uncertain: sentences about what could not be told for sure; shown to the user.
    """

    model_type: str = ""
    architectures: tuple[str, ...] = ()
    runner_type: RunnerType = "generate"
    is_moe: bool = False
    is_hybrid: bool = False
    is_attention_free: bool = False
    is_mla: bool = False
    is_encoder_decoder: bool = False
    is_multimodal: bool = False
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    max_position_embeddings: int | None = None
    evidence: Mapping[str, str] = field(default_factory=dict)
    supplied_by: Mapping[str, str] = field(default_factory=dict)
    uncertain: tuple[str, ...] = ()
