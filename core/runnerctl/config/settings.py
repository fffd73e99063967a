"""Settings from all their sources, by one precedence, each with its origin.

From the strongest: an argument or flag, the configuration file, `RUNNERCTL_*`, the
variable of another engine for people who migrate, the default. A user's mistake is
never an exception here but a `Problem`, so that all of them can be shown at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from runnerctl.config.engine_config import SETTINGS, Origin, Source, flag
from runnerctl.config.fields import setting_fields
from runnerctl.problems import Problem
from runnerctl.suggest import closest

ArgumentSource = Literal["command line", "python"]

PREFIX = "RUNNERCTL_"
# Not settings of an engine: read where they are used.
RESERVED_VARIABLES = frozenset({"RUNNERCTL_CACHE_DIR"})
# Variable of another engine -> the setting it makes, and the value each of its two values means.
MIGRATION_VARIABLES = {"VLLM_USE_V2_MODEL_RUNNER": ("runner", {True: "v2", False: "v1"})}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user said, from everywhere.

    Attributes:
        values: the valid settings by field name. Those nobody made are absent.
        origins: where each of them came from, by field name.
        plugin_options: per plugin (entry-point name, case-folded) the options by key,
            as the user wrote them; the plugin's own model validates them.
        option_origins: where each of those came from.
        problems: mistakes in any of the sources.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, Origin] = field(default_factory=dict)
    plugin_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    option_origins: Mapping[str, Mapping[str, Origin]] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


def resolve_settings(
    arguments: Mapping[str, Any],
    *,
    source: ArgumentSource,
    config_file: Path | None,
    environ: Mapping[str, str],
) -> Settings:
    """Merge the sources of every setting.

    Args:
        arguments: field name -> value; None means not given. `plugin_options` maps
            NAME -> {key: value}, or from the command line is a list of `NAME.key=value`.
        source: where the arguments come from.
        config_file: a YAML file of settings, flat, with hyphens or underscores.
        environ: the environment variables.

    Returns:
        The settings; mistakes are in `problems`, not raised.
    """
    problems: list[Problem] = []
    layers = [_from_arguments(arguments, source, problems)]
    if config_file is not None:
        layers.append(_from_file(config_file, source, problems))
    layers.append(_from_variables(environ, problems))
    layers.append(_from_migration(environ, layers, problems))

    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for name, setting in setting_fields().items():
        given = [layer.settings[name] for layer in layers if name in layer.settings]
        for rank, (raw, origin) in enumerate(given):
            try:
                value = setting.parse(raw)
            except ValueError:
                message = f"{origin.setting} is {raw!r}; it must be {setting.expected}"
                match = closest(str(raw), setting.choices)
                remedy = f"did you mean {match}?" if match else ""
                winner = given[0][1] if rank else None
                problems.append(_malformed(message, origin, winner, remedy))
                continue
            if rank == 0:
                values[name], origins[name] = value, origin

    options: dict[str, dict[str, Any]] = {}
    option_origins: dict[str, dict[str, Origin]] = {}
    for layer in reversed(layers):
        for (plugin, key), (raw, origin) in layer.options.items():
            options.setdefault(plugin, {})[key] = raw
            option_origins.setdefault(plugin, {})[key] = origin
    return Settings(values, origins, options, option_origins, tuple(problems))


def variable(name: str) -> str | None:
    """The environment variable of a setting, or None if it has none."""
    special = {"plugins": None, "allowed_plugins": PREFIX + "PLUGINS"}
    return special.get(name, PREFIX + name.upper())


@dataclass(frozen=True, slots=True)
class _Layer:
    """What one source says, not validated."""

    settings: dict[str, tuple[Any, Origin]] = field(default_factory=dict)
    options: dict[tuple[str, str], tuple[Any, Origin]] = field(default_factory=dict)

    def add_options(
        self,
        given: object,
        origin: Origin,
        spell: Callable[[str, str], str],
        problems: list[Problem],
    ) -> None:
        """Add `{NAME: {key: value}}`; `spell` says how an option was written there."""
        expected = "it must map a plugin's name to its options: {NAME: {key: value}}"
        if not isinstance(given, Mapping):
            problems.append(_error(origin, f"{origin.setting} is {given!r}; {expected}"))
            return
        for plugin, pairs in given.items():
            if not isinstance(plugin, str) or not isinstance(pairs, Mapping):
                message = f"{origin.setting} has {pairs!r} for {plugin!r}; {expected}"
                problems.append(_error(origin, message))
                continue
            for key, value in pairs.items():
                where = Origin(origin.source, spell(plugin, str(key)))
                self.options[plugin.strip().casefold(), _word(key)] = (value, where)


def _from_arguments(
    arguments: Mapping[str, Any], source: ArgumentSource, problems: list[Problem]
) -> _Layer:
    layer = _Layer()
    known = {name: _spell(name, source) for name in (*SETTINGS, "plugin_options")}
    for name, raw in arguments.items():
        if raw is None:
            continue
        origin = Origin(source, _spell_argument(name, raw, source))
        if name in SETTINGS:
            layer.settings[name] = (raw, origin)
        elif name != "plugin_options":
            problems.append(_unknown(origin, name, known))
        elif source == "python":
            layer.add_options(raw, origin, lambda *_: "plugin_options=", problems)
        else:
            for text in raw:
                _add_written_option(layer, text, origin, problems)
    return layer


def _add_written_option(layer: _Layer, text: str, origin: Origin, problems: list[Problem]) -> None:
    """Add `NAME.key=value`, the value in YAML: `3`, `true`, `text`, `[a, b]`."""
    import yaml

    path, equals, written = text.partition("=")
    plugin, dot, key = path.rpartition(".")  # a plugin's name may have dots, a key has none
    if not (equals and dot and plugin.strip() and key.strip()):
        message = f"{origin.setting} is {text!r}; it must have the form NAME.key=value"
        problems.append(_error(origin, message))
        return
    try:
        value = yaml.safe_load(written)
    except yaml.YAMLError as exc:
        message = f"{origin.setting} {path}: {written!r} is not a value: {_one_line(exc)}"
        remedy = "quote it, or write a list as [a, b]"
        problems.append(_error(origin, message, remedy))
        return
    spelled = f"{origin.setting} {path.strip()}"
    layer.add_options({plugin: {key: value}}, origin, lambda *_: spelled, problems)


def _from_file(path: Path, source: ArgumentSource, problems: list[Problem]) -> _Layer:
    layer = _Layer()
    file_setting = Origin("file", "--config" if source == "command line" else "config_file=")
    for key, raw in _read_yaml(path, file_setting, problems).items():
        origin = Origin("file", f"{key} in {path.name}")
        name = _word(key)
        if raw is None:
            continue
        if name == "plugin_options":
            layer.add_options(raw, origin, _option_speller(path.name), problems)
        elif name in SETTINGS:
            layer.settings[name] = (raw, origin)
        else:
            problems.append(_unknown(origin, name, {n: n for n in (*SETTINGS, "plugin_options")}))
    return layer


def _option_speller(file_name: str) -> Callable[[str, str], str]:
    return lambda plugin, key: f"plugin_options.{plugin}.{key} in {file_name}"


def _read_yaml(path: Path, at: Origin, problems: list[Problem]) -> Mapping[Any, Any]:
    """The mapping a file holds; empty after a problem."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        repeated = _repeated_keys(yaml.compose(text, yaml.SafeLoader))
        content = yaml.safe_load(text)
    except OSError as exc:
        reason = exc.strerror or exc
        problems.append(_error(at, f"{at.setting} {path} cannot be read: {reason}"))
        return {}
    except UnicodeDecodeError:
        problems.append(_error(at, f"{at.setting} {path} is not UTF-8 text"))
        return {}
    except yaml.YAMLError as exc:
        problems.append(_error(at, f"{path}, {_one_line(exc)}"))
        return {}
    for key, line in repeated:
        where = Origin("file", f"{key} in {path.name}")
        problems.append(_error(where, f"{where.setting} is given a second time in line {line}"))
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        message = f"{at.setting} {path} holds {_noun(content)}, not settings"
        problems.append(_error(at, message, "write one setting a line, such as block_size: 16"))
        return {}
    return content


def _noun(value: object) -> str:
    return "a list" if isinstance(value, list) else f"only {value!r}"


def _repeated_keys(node: Any) -> list[tuple[str, int]]:
    """Settings given twice in a YAML file, with the line; YAML itself would take the last."""
    seen: set[str] = set()
    repeated = []
    for key, _ in node.value if node is not None and node.id == "mapping" else ():
        if _word(key.value) in seen:
            repeated.append((str(key.value), key.start_mark.line + 1))
        seen.add(_word(key.value))
    return repeated


def _from_variables(environ: Mapping[str, str], problems: list[Problem]) -> _Layer:
    layer = _Layer()
    names = {var: name for name in SETTINGS if (var := variable(name))}
    for var, raw in sorted(environ.items()):
        if not var.startswith(PREFIX) or var in RESERVED_VARIABLES:
            continue
        origin = Origin("environment", var)
        if var not in names:
            problems.append(_unknown(origin, var, {v: v for v in names}))
        elif raw.strip() or setting_fields()[names[var]].kind == "names":
            # An empty variable is an unset one, except that an empty list says: none.
            layer.settings[names[var]] = (raw, origin)
    return layer


def _from_migration(
    environ: Mapping[str, str], stronger: list[_Layer], problems: list[Problem]
) -> _Layer:
    layer = _Layer()
    switch = setting_fields()["enforce_eager"]
    for var, (name, meaning) in MIGRATION_VARIABLES.items():
        raw = environ.get(var, "").strip()
        if not raw:
            continue
        origin = Origin("environment", var)
        try:
            layer.settings[name] = (meaning[switch.parse(raw)], origin)
        except ValueError:
            winner = next((x.settings[name][1] for x in stronger if name in x.settings), None)
            problems.append(_malformed(f"{var} is {raw!r}; it must be 0 or 1", origin, winner))
    return layer


def _malformed(message: str, origin: Origin, winner: Origin | None, remedy: str = "") -> Problem:
    """An error, or only a warning where `winner` overrides the malformed value anyway."""
    if winner is None:
        return _error(origin, message, remedy)
    note = f"it has no effect here, because {winner.setting} overrides it"
    return Problem("warning", message, note, origin.setting)


def _unknown(origin: Origin, name: str, known: Mapping[str, str]) -> Problem:
    """`known` gives for each name how it is spelled in this source."""
    match = closest(name, known)
    remedy = f"did you mean {known[match]}?" if match else f"known are {', '.join(known.values())}"
    return _error(origin, f"{origin.setting} is not a setting", remedy)


def _error(origin: Origin, message: str, remedy: str = "") -> Problem:
    return Problem("error", message, remedy, origin.setting)


def _spell_argument(name: str, raw: object, source: Source) -> str:
    if name == "plugin_options":
        return "--plugin-option" if source == "command line" else "plugin_options="
    if raw is False and source == "command line":
        return "--no-" + flag(name).removeprefix("--")
    return _spell(name, source)


def _spell(name: str, source: Source) -> str:
    return flag(name) if source == "command line" else f"{name}="


def _word(key: object) -> str:
    return str(key).strip().replace("-", "_")


def _one_line(exc: Any) -> str:
    """A YAML error with its place, on one line."""
    mark = getattr(exc, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return where + (getattr(exc, "problem", None) or str(exc).splitlines()[0])
