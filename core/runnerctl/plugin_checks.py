"""What makes an imported object a plugin this host can work with, and what is wrong if not."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pluggy
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import BaseModel

from runnerctl import __version__
from runnerctl.hookspecs import PROJECT
from runnerctl.runner.attention.spec import AttentionBackendSpec
from runnerctl.runner.batch_transform import BatchTransformSpec
from runnerctl.runner.spec import RunnerSpec
from runnerctl.suggest import did_you_mean

# A plugin that calls sys.exit() must not take the whole command down. Ctrl-C may.
GUARDED = (Exception, SystemExit)


class PluginFaultError(Exception):
    """Why a plugin cannot take part. The message does not repeat the plugin's name."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One function of a plugin that implements a hook, and the arguments it asks for."""

    function: Callable[..., Any]
    argnames: tuple[str, ...]

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """Call it with those of `arguments` that it names."""
        return self.function(*[arguments[name] for name in self.argnames])


def check_host_version(plugin: object) -> None:
    """Compare the plugin's `requires_runnerctl` with this host.

    Raises:
        PluginFaultError: the specifier is malformed, or this version is not in it.
    """
    # static: a property of that name is not ours to run
    wanted = inspect.getattr_static(plugin, "requires_runnerctl", None)
    if wanted is None:
        return
    try:
        if not isinstance(wanted, str):
            raise InvalidSpecifier
        fits = SpecifierSet(wanted).contains(__version__, prereleases=True)
    except InvalidSpecifier:
        raise PluginFaultError(
            f"requires_runnerctl must be a version specifier such as '>=0.1,<2', not {wanted!r}"
        ) from None
    if not fits:
        raise PluginFaultError(f"it needs runnerctl {wanted}, and this is runnerctl {__version__}")


def implementations(
    manager: pluggy.PluginManager, plugin: object, name: str
) -> dict[str, list[Implementation]]:
    """Register `plugin` with `manager` and return what it implements, by hook.

    Raises:
        PluginFaultError: a signature that does not fit, an unknown hook, a wrapper, a
            defaulted argument, or no hook at all. The plugin is unregistered again.
    """
    if plugin is None or inspect.isclass(plugin):
        raise PluginFaultError(
            "the entry point must name a module or an object, not a class or None"
        )
    try:
        manager.register(plugin, name)
        return _checked(manager, plugin)
    except pluggy.PluginValidationError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise PluginFaultError(f"wrong signature: {'; '.join(lines)}") from error
    except ValueError as error:
        raise PluginFaultError(" ".join(str(error).split())) from error
    finally:
        # registered only to be checked: the host keeps its own record of what to call
        if manager.get_name(plugin) == name:
            manager.unregister(plugin, name)


def _checked(manager: pluggy.PluginManager, plugin: object) -> dict[str, list[Implementation]]:
    found: dict[str, list[Implementation]] = {}
    known = hook_names(manager)
    for caller in manager.get_hookcallers(plugin) or []:
        for impl in caller.get_hookimpls():
            if impl.plugin is not plugin:
                continue
            if caller.name not in known:
                if impl.optionalhook:
                    continue
                raise PluginFaultError(
                    f"there is no hook {caller.name!r}{did_you_mean(caller.name, known)}"
                )
            if impl.wrapper or impl.hookwrapper:
                raise PluginFaultError(f"hook {caller.name!r}: wrappers are not allowed here")
            if impl.kwargnames:
                raise PluginFaultError(
                    f"hook {caller.name!r}: argument {impl.kwargnames[0]!r} has a default and "
                    "would never get its value; remove the default"
                )
            found.setdefault(caller.name, []).append(
                Implementation(impl.function, tuple(impl.argnames))
            )
    if not found:
        raise PluginFaultError(
            f"it implements no hook; mark its functions ({', '.join(sorted(known))}) "
            "with @runnerctl.hookimpl"
        )
    return found


def hook_names(manager: pluggy.PluginManager) -> frozenset[str]:
    """The hooks that have a specification."""
    callers = vars(manager.hook).items()
    return frozenset(n for n, c in callers if isinstance(c, pluggy.HookCaller) and c.has_spec())


def new_manager() -> pluggy.PluginManager:
    """A manager with the hooks of `hookspecs.py` and no plugin."""
    from runnerctl import hookspecs

    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def runner_specs(implementations: Iterable[Implementation]) -> tuple[RunnerSpec, ...]:
    """Ask a plugin for its runners.

    Raises:
        PluginFaultError: it raised, returned something else, or gave one name twice.
    """
    specs: list[RunnerSpec] = []
    for implementation in implementations:
        with _blaming("register_runners"):
            collect(implementation({}), (RunnerSpec,), specs, none_is_empty=False)
            for spec in specs:
                if odd := [c for c in spec.capabilities if not isinstance(c, str)]:
                    raise PluginFaultError(
                        f"a capability of {spec.name!r} must be text, not {short(odd[0])}"
                    )
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise PluginFaultError(f"register_runners names a runner twice: {', '.join(names)}")
    return tuple(specs)


def backend_specs(
    implementations: Iterable[Implementation],
) -> tuple[AttentionBackendSpec, ...]:
    """Ask a plugin for its attention backends.

    Raises:
        PluginFaultError: it raised, returned something else, or gave one name twice.
    """
    hook = "register_attention_backends"
    specs: list[AttentionBackendSpec] = []
    for implementation in implementations:
        with _blaming(hook):
            collect(implementation({}), (AttentionBackendSpec,), specs, none_is_empty=False)
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise PluginFaultError(f"{hook} names a backend twice: {', '.join(names)}")
    return tuple(specs)


def transform_specs(
    implementations: Iterable[Implementation],
) -> tuple[BatchTransformSpec, ...]:
    """Ask a plugin for its batch transforms.

    Raises:
        PluginFaultError: it raised, returned something else, or gave a feature twice.
    """
    hook = "register_batch_transforms"
    specs: list[BatchTransformSpec] = []
    for implementation in implementations:
        with _blaming(hook):
            collect(implementation({}), (BatchTransformSpec,), specs, none_is_empty=False)
    given = [(runner, spec.feature) for spec in specs for runner in spec.runners]
    if len(set(given)) < len(given):
        raise PluginFaultError(f"{hook} gives one feature to one runner twice")
    return tuple(specs)


def options_model(implementations: Iterable[Implementation]) -> type[BaseModel] | None:
    """Ask a plugin for its options model.

    Raises:
        PluginFaultError: it raised, returned something else, or a field has no default.
    """
    model = None
    for implementation in implementations:
        with _blaming("register_options"):
            model = implementation({})
            if not (inspect.isclass(model) and issubclass(model, BaseModel)):
                raise PluginFaultError(f"must return a pydantic model class, not {short(model)}")
            bare = [name for name, f in model.model_fields.items() if f.is_required()]
            if bare:
                raise PluginFaultError(f"every option needs a default; {bare[0]!r} has none")
    return model


class _blaming:  # noqa: N801 - reads as a statement
    """Turn whatever a hook raises into a PluginFaultError that names the hook."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, GUARDED):
            raise PluginFaultError(f"hook {self.hook!r}: {explain(error)}") from error


def collect(
    answer: object, kinds: tuple[type, ...], into: list[Any], *, none_is_empty: bool = True
) -> None:
    """Append one answer or an iterable of answers to `into`, as far as they are of `kinds`.

    What an iterable gave before it went wrong stays in `into`.

    Raises:
        PluginFaultError: an answer of another type.
    """
    if answer is None and none_is_empty:
        return
    if isinstance(answer, kinds):
        into.append(answer)
        return
    expected = " or ".join(kind.__name__ for kind in kinds)
    if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
        raise PluginFaultError(f"must return {expected}, not {short(answer)}")
    for item in answer:
        if not isinstance(item, kinds):
            raise PluginFaultError(f"must give {expected}, not {short(item)}")
        into.append(item)


def explain(error: BaseException) -> str:
    """One line about an exception: its type, its message, and where in the plugin it came from."""
    if isinstance(error, PluginFaultError):
        return str(error)
    text = _printed(error, str)
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line + _place(error)


def _place(error: BaseException) -> str:
    ours = str(Path(__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not (frame.filename.startswith(("<frozen", ours)) or "importlib" in frame.filename):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def short(value: object) -> str:
    """A value for a message: its type and the start of its repr."""
    return f"{type(value).__name__} {_printed(value, repr)[:60]}"


def _printed(value: object, how: Callable[[object], str]) -> str:
    """On one line; a plugin's object may raise even here."""
    try:
        return " ".join(how(value).split())
    except GUARDED:
        return "(which cannot be printed)"
