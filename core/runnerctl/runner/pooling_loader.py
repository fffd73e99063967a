"""From a checkpoint to a model that embeds or classifies.

Which of the two it does is told by the architecture in its config, how it pools by its own
files. Where those say nothing, a causal model's last token is taken, the only one that has
seen all others, and the mean where every token sees all: both are guesses, and reported as
such. BERT's pooler is not used: it was trained for another task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runnerctl.errors import ModelError, UserError
from runnerctl.models.checkpoint import read_config, weight_files
from runnerctl.models.quiet import quiet_transformers
from runnerctl.models.sentence_transformers import EmbeddingFiles, read_embedding_files
from runnerctl.runner.model_loader import resolve_dtype
from runnerctl.runner.pooler import Pooler, load_dense
from runnerctl.runner.pooling_model import PoolingModel
from runnerctl.runner.protocol import LoadedModel, PoolingFacts, WorkerContext
from runnerctl.runner.transforms import AppliedTransform, Stage, apply_transforms

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CLASSIFIER = "ForSequenceClassification"
# Heads whose answers are neither a vector nor a number per label of a text.
_OTHER_HEADS = (
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
    "ForImageClassification",
    "ForAudioClassification",
)


@dataclass(frozen=True, slots=True)
class LoadedPoolingModel:
    """A model, what becomes of its output, and what the engine has to know of it.

    Attributes:
        model: tokens to vectors or scores.
        pooler: vectors to embeddings; None for a classifier.
        activation: `softmax`, `sigmoid` or `identity`; what turns a classifier's scores into
            the numbers it gives.
        facts: for the engine.
    """

    model: PoolingModel
    pooler: Pooler | None
    activation: str
    facts: LoadedModel


def load_pooling_model(context: WorkerContext, device: torch.device) -> LoadedPoolingModel:
    """Load, check, transform and try out a pooling model.

    Args:
        context: of the runner.
        device: where the model goes.

    Raises:
        ModelError: the checkpoint cannot be served; says why and what to do.
        UserError: a length is asked for that the model has no positions for.
        PluginError: a plugin's transformation is broken.
    """
    folder, config = context.model_path, context.config
    raw = read_config(folder)
    files = read_embedding_files(folder)
    classifies = _classifies(raw, files)
    if files.unknown and not classifies:
        raise ModelError(
            f"modules.json in {folder} has a module {files.unknown!r} that is not known here",
            remedy="served are Transformer, Pooling, Dense and Normalize, in this order",
        )
    dtype = resolve_dtype(config.model.dtype, raw, device)
    model = _load(
        folder,
        classifies=classifies,
        dtype=dtype,
        device=device,
        trust_remote_code=config.model.trust_remote_code,
    )
    longest, limited_by = _longest(context, model, files)

    def transform(*stages: Stage) -> tuple[AppliedTransform, ...]:
        return apply_transforms(model, config, context.decision, context.plugins, stages=stages)

    transforms = transform("fuse", "pack")
    tried = PoolingModel(model, classifies=classifies)
    # Only now: the trial would be the first thing that is compiled.
    if not config.runner.enforce_eager:
        transforms += transform("compile")
    if classifies:
        pooler, activation = None, _activation(model.config)
        method = f"{type(model).__name__}, {_NAMED_ACTIVATION[activation]}"
    else:
        pooler, activation = _pooler(files, tried, device), "identity"
        method = _method(files, tried)
    if tried.together != "padded":
        method += f"; texts run {_TOGETHER[tried.together]}, as padding would change the results"
    labels: tuple[str, ...] = ()
    if classifies:
        labels = tuple(str(model.config.id2label[i]) for i in range(model.config.num_labels))
    pooling = PoolingFacts(
        task="classify" if classifies else "embed",
        method=method,
        labels=labels,
        limited_by=limited_by,
        is_guess=not classifies and not files.pooling,
    )
    facts = LoadedModel(
        vocab_size=tried.vocab_size,
        max_model_len=longest,
        transforms=transforms,
        dtype=str(dtype).removeprefix("torch."),
        pooling=pooling,
    )
    return LoadedPoolingModel(tried, pooler, activation, facts)


_NAMED_ACTIVATION = {
    "softmax": "probabilities by softmax",
    "sigmoid": "a probability per label by sigmoid",
    "identity": "raw scores",
}
_TOGETHER = {"equal lengths": "beside others of their length only", "alone": "one by one"}


def _classifies(config: Mapping[str, Any], files: EmbeddingFiles) -> bool:
    """Whether the checkpoint is used for its classification head.

    Raises:
        ModelError: it has a head that is for something else.
    """
    if files.pooling:
        return False  # sentence-transformers takes the model without its head
    architectures = [str(name) for name in config.get("architectures") or ()]
    for name in architectures:
        if name.endswith(_CLASSIFIER):
            return True
        if name.endswith(_OTHER_HEADS) or "Reward" in name:
            raise ModelError(
                f"{name} neither embeds texts nor is it one of transformers' sequence classifiers",
                remedy=f"take an encoder or decoder model, or one with a {_CLASSIFIER} head",
            )
    return False


def _load(
    folder: Path,
    *,
    classifies: bool,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
) -> PreTrainedModel:
    config = read_config(folder)
    weight_files(folder)
    auto = "AutoModelForSequenceClassification" if classifies else "AutoModel"
    _check_architecture(config, auto, trust_remote_code=trust_remote_code)
    import transformers

    try:
        with quiet_transformers():
            model, report = getattr(transformers, auto).from_pretrained(
                folder,
                dtype=dtype,
                device_map=None if device.type == "cpu" else {"": device},
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                local_files_only=True,
                # Reported by name below instead of raised in the middle.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"transformers cannot load {folder}: {error}",
            remedy="check that the checkpoint is complete and its config.json belongs to it",
        ) from error
    _check_fit(folder, model, report, classifies=classifies)
    # A text is read once: nothing is kept for a next token.
    model.config.get_text_config().use_cache = False
    model.config.use_cache = False
    loaded: PreTrainedModel = model.eval()
    return loaded


def _check_architecture(config: Mapping[str, Any], auto: str, *, trust_remote_code: bool) -> None:
    import transformers
    from transformers.models.auto import modeling_auto

    classifies = auto != "AutoModel"
    known = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if not classifies:
        known = modeling_auto.MODEL_MAPPING_NAMES
    model_type = config.get("model_type")
    if model_type in known:
        return
    if auto in (config.get("auto_map") or {}):
        if trust_remote_code:
            return
        raise ModelError(
            f"transformers {transformers.__version__} does not have this {model_type!r} model; the "
            "checkpoint brings Python code of its own for it, which is not run unasked",
            remedy="read that code, and pass --trust-remote-code if you trust it",
            setting="--trust-remote-code",
        )
    kind = "sequence classifier" if classifies else "model"
    raise ModelError(
        f"transformers {transformers.__version__} has no {kind} of the type {model_type!r}",
        remedy="upgrade transformers, or take another model",
    )


def _check_fit(
    folder: Path, model: nn.Module, report: Mapping[str, Any], *, classifies: bool
) -> None:
    """Raise if loading left a weight that is used at random, or a part of the model unread.

    Heads that this use of the model does not have are no fault, nor is a pooler that is
    missing where it is not used.
    """
    missing = sorted(report["missing_keys"])
    if not classifies:
        missing = [name for name in missing if not name.startswith("pooler.")]
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    parts = {name for name, _ in model.named_children()}
    unexpected = sorted(
        name
        for name in report["unexpected_keys"]
        if name.removeprefix(prefix).partition(".")[0] in parts
    )
    mismatched = sorted(str(key[0]) for key in report["mismatched_keys"])
    faults = [("lacks", missing), ("has unknown", unexpected), ("has in another shape", mismatched)]
    found = [
        f"{verb} {len(names)} ({', '.join(names[:3])}{' ...' if len(names) > 3 else ''})"
        for verb, names in faults
        if names
    ]
    if found:
        raise ModelError(
            f"the weights in {folder} do not fit {type(model).__name__}: the checkpoint "
            + "; ".join(found),
            remedy="check that config.json belongs to these weights and that all files are there",
        )


def _longest(
    context: WorkerContext, model: PreTrainedModel, files: EmbeddingFiles
) -> tuple[int | None, str]:
    """The tokens a text may have, and what says so."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:  # XLNet has -1: as many as you like
        positions = None
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        is_table = isinstance(module, nn.Embedding) and name.endswith("position_embeddings")
        if is_table and padding is not None and positions is not None:
            # RoBERTa and its kin count positions from behind the padding token's id
            positions = min(positions, module.num_embeddings - padding - 1)
    setting = context.config.where("max_model_len")
    asked = context.config.model.max_model_len
    if asked is not None:
        if positions is not None and asked > positions:
            raise UserError(
                f"{setting} is {asked}, but the model has positions for {positions} tokens",
                remedy=f"lower it to {positions} or less, or leave it out",
                setting=setting,
            )
        return asked, setting
    if files.max_length is not None and (positions is None or files.max_length <= positions):
        return files.max_length, f"{files.length_file} of the model"
    return positions, "config.json of the model"


def _pooler(files: EmbeddingFiles, model: PoolingModel, device: torch.device) -> Pooler:
    modes = files.pooling or (("last",) if model.is_causal else ("mean",))
    return Pooler(modes, load_dense(files.dense, device), files.normalize)


def _method(files: EmbeddingFiles, model: PoolingModel) -> str:
    if files.pooling:
        text = f"{' and '.join(files.pooling)} pooling ({files.pooling_file} of the model)"
    elif model.is_causal:
        text = "last-token pooling (no file says; the model is causal)"
    else:
        text = "mean pooling (no file says; every token sees all others)"
    if files.dense:
        text += f", {len(files.dense)} dense"
    return text + (", normalized" if files.normalize else ", not normalized")


def _activation(config: Any) -> str:
    if config.problem_type == "multi_label_classification":
        return "sigmoid"
    if config.num_labels == 1 or config.problem_type == "regression":
        return "identity"
    return "softmax"
