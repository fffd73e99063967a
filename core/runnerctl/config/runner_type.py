"""Whether a model generates text or pools its hidden states, read from its config."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from runnerctl.config.config_keys import as_flag
from runnerctl.config.facts import RunnerType

# What a class name says it is for. The first that fits counts.
GENERATES = re.compile(
    r"LMHead|CausalLM|ForConditionalGeneration|ChatModel$|DoubleHeads|MTModel$|EncoderDecoderModel$"
    r"|ForSeq2SeqLM|ImageTextToText|Vision2Seq|SpeechSeq2Seq|TextToWaveform|ForGeneration"
    r"|Decoder$"
)
POOLS = re.compile(
    r"Classification|Classifier|Reward|Embedding|Rerank|Retriev|Ranking|Ranker|Scoring|Pooling"
    r"|ForTextEncoding|QuestionAnswering|MultipleChoice|MaskedLM|ForPreTraining"
    r"|NextSentencePrediction|Regression|CrossEncoder|ColBERT|Encoder$|Model$"
)
ENCODER_NAME = re.compile(
    r"bert|electra|mpnet|encoder|embed|rerank|reward|classif|retriev|e5(?:_|$)", re.IGNORECASE
)


def read_runner_type(
    config: Mapping[str, Any], architectures: Sequence[str], model_type: str
) -> tuple[RunnerType, str, str]:
    """Reads the runner type: with its evidence for `pooling`, and a doubt, each may be ""."""
    for name in architectures:
        if GENERATES.search(name):
            return "generate", "", ""
        if POOLS.search(name):
            if _class_generates(config, name):
                return "generate", "", ""
            return "pooling", f"architectures = {name!r}", ""
    for name in architectures:
        if ENCODER_NAME.search(name):
            return "pooling", f"architectures = {name!r}", _doubt(name, "pooling")
    if architectures:
        return "generate", "", _doubt(architectures[0], "generate")
    return _by_conventions(config, model_type)


def _class_generates(config: Mapping[str, Any], name: str) -> bool:
    """Whether a bare `...Model` is registered by its own checkpoint as a language model."""
    auto_map = config.get("auto_map")
    if not name.endswith("Model") or not isinstance(auto_map, Mapping):
        return False
    return any(
        isinstance(key, str) and isinstance(target, str) and GENERATES.search(key)
        for key, target in auto_map.items()
    )


def _by_conventions(config: Mapping[str, Any], model_type: str) -> tuple[RunnerType, str, str]:
    said = ""
    if ENCODER_NAME.search(model_type):
        said = f"model_type = {model_type!r}"
    elif as_flag(config.get("is_causal")) is False:
        said = "is_causal = False"
    elif isinstance(config.get("type_vocab_size"), int) and not as_flag(config.get("is_decoder")):
        # Segment embeddings are what BERT and its descendants have, and no decoder.
        said = f"type_vocab_size = {config['type_vocab_size']}"
    if said:
        doubt = f"no architectures in the config; {said} suggests a pooling model"
        return "pooling", said, doubt
    return (
        "generate",
        "",
        "no architectures in the config; it is taken for a model that generates text",
    )


def _doubt(name: str, taken: str) -> str:
    return f"the architecture {name!r} does not say what it is for; it is taken for {taken}"
