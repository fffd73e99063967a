"""`AttentionBackendSpec`: what the host knows of an attention backend. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runnerctl.config import EngineConfig


@dataclass(frozen=True, slots=True)
class AttentionBackendSpec:
    """What a plugin returns from `register_attention_backends`.

    Attributes:
        name: what people pass to `--attention-backend`; also the `name` of the class.
        factory: `module:class` of an `AttentionBackend`. A string, so that registering a
            backend never imports torch.
        priority: `auto` tries higher ones first, then goes by name. The built-in ones are
            below 0, so that a backend somebody installed comes before them.
        compiles: it builds native code at first use. `auto` takes such a backend only
            where the runner allows it; asking for it by name always does.
        precheck: says, without torch, why the backend cannot serve a configuration on this
            machine, or None if it may. For `explain` and for asking by name; when the model
            is loaded, the class's own `why_not` decides.

    Raises:
        ValueError: a field that no backend could have.
    """

    name: str
    factory: str
    priority: int = 0
    compiles: bool = False
    precheck: Callable[[EngineConfig], str | None] | None = None

    def __post_init__(self) -> None:
        if not self.name or self.name != self.name.strip() or self.name == "auto":
            raise ValueError(f"an attention backend cannot be named {self.name!r}")
        module, colon, attribute = self.factory.partition(":")
        if not (module and colon and attribute):
            raise ValueError(
                f"attention backend {self.name!r}: factory must be 'module:class', "
                f"not {self.factory!r}"
            )
        if self.precheck is not None and not callable(self.precheck):
            raise ValueError(f"attention backend {self.name!r}: precheck must be a function")


@dataclass(frozen=True, slots=True)
class RegisteredBackend:
    """A backend in the host's table.

    Attributes:
        spec: as it was registered.
        plugin: whose it is; "" for those that come with core.
    """

    spec: AttentionBackendSpec
    plugin: str = ""

    @property
    def owner(self) -> str:
        """As messages name it."""
        return f" of plugin {self.plugin!r}" if self.plugin else ""
