"""`RunnerSpec`: everything the engine process may know of a runner. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

CAPABILITIES: dict[str, str] = {
    "generate": "text generation",
    "pooling": "embedding, classification and reward models",
    "moe": "mixture-of-experts layers",
    "mla": "multi-head latent attention",
    "hybrid": "recurrent layers next to attention",
    "attention_free": "models without attention",
    "unpaged": "attention that goes around the paged cache",
    "encoder_decoder": "an encoder with cross attention",
    "multimodal": "images, audio or video as input",
    "tp": "tensor parallelism (more than one rank)",
    "pcp": "prefill context parallelism",
}
"""Every capability the host itself asks for, with its meaning. A runner may claim
others; nothing needs them unless a plugin says so with `Require` or `Forbid`."""


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """What a plugin returns from `register_runners`.

    Attributes:
        name: the name people vote for and pass to `--runner`.
        factory: `module:attribute` of a callable `(WorkerContext) -> ModelRunner`.
            A string, so that registering a runner never imports torch.
        capabilities: what the runner can do *today* (`CAPABILITIES`). The host forbids
            the runner whenever a configuration needs more.
        fallback: this runner serves when no vote stands. At most one spec has it.
        resumes_as_new: a preempted request comes back as a *new* request with all its
            tokens as prefill (the runner dropped its state), instead of as a cached
            one with a mark and new blocks.
        concurrent_batches: how many steps may be in flight at once.

    Raises:
        ValueError: a field that no runner could have.
    """

    name: str
    factory: str
    capabilities: frozenset[str] = frozenset({"generate"})
    fallback: bool = False
    resumes_as_new: bool = False
    concurrent_batches: int = 1

    def __post_init__(self) -> None:
        if not self.name or self.name != self.name.strip() or self.name == "auto":
            raise ValueError(f"a runner cannot be named {self.name!r}")
        module, colon, attribute = self.factory.partition(":")
        if not (module and colon and attribute):
            raise ValueError(
                f"runner {self.name!r}: factory must be 'module:attribute', not {self.factory!r}"
            )
        if isinstance(self.capabilities, str) or not isinstance(self.capabilities, Iterable):
            raise ValueError(f"runner {self.name!r}: capabilities must be a set of names")
        object.__setattr__(self, "capabilities", frozenset(self.capabilities))
        if self.concurrent_batches < 1:
            raise ValueError(
                f"runner {self.name!r}: concurrent_batches must be at least 1, "
                f"not {self.concurrent_batches}"
            )
