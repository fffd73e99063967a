"""From the vectors of a text's tokens to one vector. All of it in float32.

The order is that of sentence-transformers, whose files say what to do: pool, dense layers,
normalise. (Sentence-BERT, EMNLP 2019, compared mean, max and CLS pooling.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from runnerctl.engine.pooling_params import PoolingMode, PoolingParams
from runnerctl.errors import ModelError, UserError
from runnerctl.models.sentence_transformers import DenseLayer

_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")


class Pooler:
    """How one model's embeddings are made, unless a request asks for something else.

    Args:
        modes: their vectors are concatenated.
        dense: after pooling, in this order.
        normalize: whether the embedding has length 1.
    """

    def __init__(
        self, modes: Sequence[PoolingMode], dense: Sequence[nn.Module], normalize: bool
    ) -> None:
        self._modes = tuple(modes)
        self._dense = tuple(dense)
        self._normalize = normalize

    @torch.inference_mode()
    def embed(
        self, hidden: torch.Tensor, lengths: torch.Tensor, params: PoolingParams
    ) -> torch.Tensor:
        """The embeddings of a batch.

        Args:
            hidden: [texts, longest, hidden_size]; what stands behind a text's end is ignored.
            lengths: [texts], int64.
            params: of all these texts.

        Returns:
            [texts, dimensions], float32.

        Raises:
            UserError: the embedding has fewer dimensions than are asked for, or the dense
                layers take another vector than the pooling asked for gives.
        """
        modes = self._modes if params.pooling is None else (params.pooling,)
        pooled = torch.cat([pool(hidden, lengths, mode) for mode in modes], dim=-1)
        for layer in self._dense:
            taken = getattr(layer, "in_features", pooled.shape[-1])
            if taken != pooled.shape[-1]:
                raise UserError(
                    f"pooling {params.pooling} gives {pooled.shape[-1]} numbers, but the model's "
                    f"dense layer takes {taken}",
                    remedy="leave the pooling to the model",
                    setting="pooling",
                )
            pooled = layer(pooled)
        if params.dimensions is not None:
            if params.dimensions > pooled.shape[-1]:
                raise UserError(
                    f"dimensions is {params.dimensions}, but embeddings of this model have "
                    f"{pooled.shape[-1]}",
                    remedy="lower it, or leave it out",
                    setting="dimensions",
                )
            pooled = pooled[:, : params.dimensions]
        normalize = self._normalize if params.normalize is None else params.normalize
        return functional.normalize(pooled, dim=-1) if normalize else pooled


def pool(hidden: torch.Tensor, lengths: torch.Tensor, mode: PoolingMode) -> torch.Tensor:
    """One vector per text.

    Args:
        hidden: [texts, longest, hidden_size], texts to the left.
        lengths: [texts], int64.
        mode: see `PoolingParams.pooling`.

    Returns:
        [texts, hidden_size], float32.
    """
    if mode == "cls":
        return hidden[:, 0].float()
    if mode == "last":
        return hidden[torch.arange(len(lengths), device=hidden.device), lengths - 1].float()
    steps = torch.arange(hidden.shape[1], device=hidden.device)
    behind = (steps >= lengths[:, None])[..., None]
    if mode == "max":
        return hidden.float().masked_fill(behind, -torch.inf).amax(dim=1)
    # not a product with 0: what a model leaves behind a text's end may be NaN
    kept = hidden.float().masked_fill(behind, 0)
    if mode == "weighted_mean":
        weights = (steps + 1).float()
        total = (lengths * (lengths + 1) / 2).float()
        return (kept * weights[:, None]).sum(dim=1) / total[:, None]
    count = lengths.float()[:, None]
    return kept.sum(dim=1) / (count if mode == "mean" else count.sqrt())


def load_dense(layers: Sequence[DenseLayer], device: torch.device) -> list[nn.Module]:
    """The dense layers of a checkpoint, each with its activation, in order.

    Raises:
        ModelError: weights that are missing, pickled or of another shape, or an activation
            that is not known here.
    """
    modules: list[nn.Module] = []
    for layer in layers:
        linear = nn.Linear(layer.in_features, layer.out_features, layer.bias)
        linear.load_state_dict(_dense_weights(layer, set(linear.state_dict())))
        modules.append(linear.to(device).eval().requires_grad_(False))
        if layer.activation not in _ACTIVATIONS:
            raise ModelError(
                f"{layer.folder} asks for the activation {layer.activation!r}",
                remedy=f"known here are {', '.join(_ACTIVATIONS)}",
            )
        modules.append(getattr(nn, layer.activation)())
    return modules


def _dense_weights(layer: DenseLayer, names: set[str]) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = layer.folder / "model.safetensors"
    if not path.is_file():
        raise ModelError(
            f"the dense layer in {layer.folder} has no {path.name}; pickled weights are not read",
            remedy="save it with safetensors (save_pretrained of sentence-transformers does)",
        )
    try:
        stored = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}", remedy="fetch it again") from error
    weights = {name.removeprefix("linear."): tensor.float() for name, tensor in stored.items()}
    shape = (layer.out_features, layer.in_features)
    if set(weights) != names or weights["weight"].shape != shape:
        raise ModelError(
            f"{path} does not fit its config.json, which describes a layer of {shape}",
            remedy="fetch the checkpoint again",
        )
    return weights
