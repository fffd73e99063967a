"""Changes to a step's batch that plugins make: each rank runs a part of it. No torch here.

A runner that takes batch transforms asks for the one that the configuration needs, and lets
it split every batch: real steps, warm-up and captured ones alike. What a split means is the
transform's business alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from runnerctl.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from runnerctl.runner.attention.base import AttentionBatch
    from runnerctl.runner.protocol import WorkerContext


class BatchShare(Protocol):
    """What this rank runs of one step.

    Attributes:
        token_rows: [num_local_tokens], int64; which tokens of the step, at least one. All
            ranks have as many. A token may be there only to fill the number up.
        attention: of these tokens. Its `slot_mapping` is not used: keys and values are
            written as `exchange_kv` returns them, for all tokens of the step.
    """

    token_rows: torch.Tensor
    attention: AttentionBatch

    def exchange_kv(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of all tokens of the step, in its order, for the cache.

        Called in every attention layer before the cache is written, on every rank.

        Args:
            key, value: [num_local_tokens, num_kv_heads, head_size (_v)], of this rank's.

        Returns:
            the same of all, [num_tokens, num_kv_heads, head_size (_v)].
        """
        ...

    def restore(self, hidden_states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The hidden states of some tokens of the step, whoever ran them.

        Args:
            hidden_states: [num_local_tokens, hidden_size], the last ones, of this rank's.
            rows: [num_rows], int64; which tokens of the step. The same on every rank.

        Returns:
            [num_rows, hidden_size]; the same on every rank.
        """
        ...


class BatchTransform(Protocol):
    """Made once per rank, after the ranks have met."""

    def split(self, batch: AttentionBatch) -> BatchShare | None:
        """This rank's share of a step, or None if every rank runs all of it.

        Called for every step, on every rank with the same batch. For a batch of one token
        per request it must not read from the device or wait for it: graphs capture that.

        Args:
            batch: of the whole step.
        """
        ...


@dataclass(frozen=True, slots=True)
class BatchTransformSpec:
    """What a plugin returns from `register_batch_transforms`.

    Attributes:
        name: for messages.
        feature: the capability that it gives to a runner: "pcp".
        runners: names of the runners that it fits. They get the capability.
        factory: `module:attribute` of a callable `(WorkerContext) -> BatchTransform`.
            A string, so that registering never imports torch.

    Raises:
        ValueError: a field that no transform could have.
    """

    name: str
    feature: str
    runners: frozenset[str]
    factory: str

    def __post_init__(self) -> None:
        if not self.name or not self.feature:
            raise ValueError("a batch transform needs a name and a feature")
        module, colon, attribute = self.factory.partition(":")
        if not (module and colon and attribute):
            raise ValueError(
                f"batch transform {self.name!r}: factory must be 'module:attribute', "
                f"not {self.factory!r}"
            )
        if isinstance(self.runners, str) or not self.runners:
            raise ValueError(f"batch transform {self.name!r}: runners must be a set of names")
        object.__setattr__(self, "runners", frozenset(self.runners))


@dataclass(frozen=True, slots=True)
class RegisteredTransform:
    """A batch transform in the host's table, and the plugin that it came from."""

    spec: BatchTransformSpec
    plugin: str


def features(runner: str, transforms: Iterable[RegisteredTransform]) -> frozenset[str]:
    """The capabilities that a runner gets from batch transforms."""
    return frozenset(one.spec.feature for one in transforms if runner in one.spec.runners)


def make_batch_transform(context: WorkerContext) -> BatchTransform | None:
    """The transform that this configuration needs of its runner, or None.

    For runners that take batch transforms, after their groups are there.

    Raises:
        PluginError: a factory does not import, or two transforms would be needed at once.
    """
    needed = {need.capability for need in context.decision.needs}
    chosen = [
        one
        for one in context.plugins.batch_transforms
        if context.decision.runner in one.spec.runners and one.spec.feature in needed
    ]
    if not chosen:
        return None
    if len(chosen) > 1:
        named = " and ".join(f"{one.spec.name} of plugin {one.plugin!r}" for one in chosen)
        raise PluginError(
            f"one step cannot be split by two batch transforms: {named}",
            remedy="turn off the setting that one of them is for",
        )
    spec = chosen[0].spec
    module, _, attribute = spec.factory.partition(":")
    try:
        factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"batch transform {spec.name!r} of plugin {chosen[0].plugin!r} cannot be made: "
            f"{spec.factory} does not import ({error})",
            remedy="install what it needs, or turn off the setting that it is for",
        ) from error
    transform: BatchTransform = factory(context)
    return transform


def feature_clash(specs: Iterable[BatchTransformSpec], taken: Mapping[tuple[str, str], str]) -> str:
    """Which feature of which runner somebody else gives already; empty if none.

    Args:
        specs: of one plugin.
        taken: by runner and feature, who gives it.
    """
    for spec in specs:
        for runner in sorted(spec.runners):
            if owner := taken.get((runner, spec.feature)):
                return f"feature {spec.feature!r} of runner {runner!r} is given by {owner} too"
    return ""
