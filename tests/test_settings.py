"""Settings: one precedence over all sources, origins, and messages for every mistake."""

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerctl.config.engine_config import SETTINGS, Origin
from runnerctl.config.fields import setting_fields
from runnerctl.config.settings import Settings, resolve_settings, variable


def resolve(
    arguments: dict | None = None,
    *,
    source: str = "python",
    file: Path | None = None,
    environ: dict[str, str] | None = None,
) -> Settings:
    return resolve_settings(arguments or {}, source=source, config_file=file, environ=environ or {})


@pytest.fixture
def run_yaml(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def only_problem(settings: Settings, severity: str = "error"):
    (problem,) = settings.problems
    assert problem.severity == severity
    return problem


# ---- precedence


@pytest.mark.parametrize("source", ["python", "command line"])
@pytest.mark.parametrize(
    ("argument", "file", "own", "foreign"), list(product([True, False], repeat=4))
)
def test_the_strongest_source_of_the_runner_wins(
    argument, file, own, foreign, source, run_yaml
) -> None:
    said = [
        (argument, "from-argument", "--runner" if source == "command line" else "runner="),
        (file, "from-file", "runner in run.yaml"),
        (own, "from-variable", "RUNNERCTL_RUNNER"),
        (foreign, "v2", "VLLM_USE_V2_MODEL_RUNNER"),
    ]
    settings = resolve(
        {"runner": "from-argument" if argument else None},
        source=source,
        file=run_yaml("runner: from-file\n" if file else "dtype: auto\n"),
        environ={
            **({"RUNNERCTL_RUNNER": "from-variable"} if own else {}),
            **({"VLLM_USE_V2_MODEL_RUNNER": "1"} if foreign else {}),
        },
    )
    strongest = next(((value, where) for given_, value, where in said if given_), None)
    assert settings.problems == ()
    if strongest is None:
        assert "runner" not in settings.values
        assert "runner" not in settings.origins
    else:
        assert settings.values["runner"] == strongest[0]
        assert settings.origins["runner"].setting == strongest[1]


@given(
    st.dictionaries(
        st.sampled_from(["max_num_seqs", "block_size", "max_model_len"]),
        st.lists(st.sampled_from(["argument", "variable"]), unique=True, min_size=1),
    )
)
def test_each_setting_is_resolved_on_its_own(where) -> None:
    number = {"argument": 7, "variable": 9}
    arguments = {n: 7 for n, sources in where.items() if "argument" in sources}
    environ = {variable(n): "9" for n, sources in where.items() if "variable" in sources}
    settings = resolve(arguments, environ=environ)
    assert settings.values == {
        n: number["argument" if "argument" in sources else "variable"]
        for n, sources in where.items()
    }


@pytest.mark.parametrize(("value", "runner"), [("1", "v2"), ("0", "v1")])
def test_the_migration_variable_names_a_runner(value, runner) -> None:
    settings = resolve(environ={"VLLM_USE_V2_MODEL_RUNNER": value})
    assert settings.values["runner"] == runner
    assert settings.origins["runner"] == Origin("environment", "VLLM_USE_V2_MODEL_RUNNER")


def test_other_variables_of_that_engine_are_none_of_our_business() -> None:
    assert resolve(environ={"VLLM_ATTENTION_BACKEND": "FLASHINFER"}) == Settings()


def test_auto_clears_what_a_weaker_source_said() -> None:
    settings = resolve({"runner": "auto"}, environ={"RUNNERCTL_RUNNER": "v1"})
    assert settings.values["runner"] == "auto"


def test_none_means_not_given(run_yaml) -> None:
    settings = resolve({"block_size": None}, file=run_yaml("block_size: 32\ndtype: null\n"))
    assert settings.values == {"block_size": 32}
    assert settings.origins["block_size"] == Origin("file", "block_size in run.yaml")


def test_a_weaker_malformed_value_is_only_a_warning() -> None:
    settings = resolve(
        {"block_size": 32, "runner": "v1"},
        environ={"RUNNERCTL_BLOCK_SIZE": "many", "VLLM_USE_V2_MODEL_RUNNER": "maybe"},
    )
    assert settings.values == {"block_size": 32, "runner": "v1"}
    assert {p.severity for p in settings.problems} == {"warning"}
    assert {p.setting for p in settings.problems} == {
        "RUNNERCTL_BLOCK_SIZE",
        "VLLM_USE_V2_MODEL_RUNNER",
    }


def test_a_stronger_malformed_value_does_not_fall_through_to_a_weaker_one() -> None:
    settings = resolve({"block_size": "many"}, environ={"RUNNERCTL_BLOCK_SIZE": "32"})
    assert "block_size" not in settings.values
    assert only_problem(settings).setting == "block_size="


# ---- spelling and values


def test_keys_of_a_file_take_hyphens_or_underscores(run_yaml) -> None:
    settings = resolve(file=run_yaml("max-num-seqs: 3\nmax_model_len: 5\n"))
    assert settings.values == {"max_num_seqs": 3, "max_model_len": 5}
    assert settings.origins["max_num_seqs"].setting == "max-num-seqs in run.yaml"


@pytest.mark.parametrize("text", ["1", "true", "Yes", "ON", " on "])
def test_words_for_true(text) -> None:
    assert resolve(environ={"RUNNERCTL_STRICT_PLUGINS": text}).values["strict_plugins"] is True


@pytest.mark.parametrize("text", ["0", "FALSE", "no", "Off"])
def test_words_for_false(text) -> None:
    settings = resolve(environ={"RUNNERCTL_ENABLE_PREFIX_CACHING": text})
    assert settings.values["enable_prefix_caching"] is False


@pytest.mark.parametrize("name", ["RUNNERCTL_ENFORCE_EAGER", "VLLM_USE_V2_MODEL_RUNNER"])
@pytest.mark.parametrize("text", ["2", "maybe", "tru", "-1", "1.0"])
def test_a_malformed_boolean_is_an_error_that_names_the_variable(name, text) -> None:
    problem = only_problem(resolve(environ={name: text}))
    assert problem.setting == name
    assert name in problem.message
    assert text in problem.message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("2GiB", 2 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("1.5gib", 3 * 2**29),
        ("3KB", 3000),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_in_bytes(text, value) -> None:
    settings = resolve({"kv_cache_memory_bytes": text}, source="command line")
    assert settings.values == {"kv_cache_memory_bytes": value}


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("block_size", "0"),
        ("block_size", "-16"),
        ("block_size", "16.5"),
        ("block_size", "x"),
        ("block_size", ""),
        ("block_size", True),
        ("block_size", [16]),
        ("max_num_seqs", float("inf")),
        ("kv_cache_memory_bytes", "2 giga"),
        ("kv_cache_memory_bytes", "0GiB"),
        ("kv_cache_memory_bytes", "٣"),
        ("dtype", "float23"),
        ("dtype", 16),
        ("runner", ""),
        ("runner", 2),
        ("enforce_eager", "perhaps"),
        ("enforce_eager", 3),
        ("plugins", 3),
        ("plugins", [1]),
        ("plugins", {"a": 1}),
    ],
)
@pytest.mark.parametrize("source", ["python", "command line"])
def test_a_malformed_argument_is_an_error_that_names_it(name, raw, source) -> None:
    settings = resolve({name: raw}, source=source)
    problem = only_problem(settings)
    spelled = {"plugins": "-p"}.get(name, "--" + name.replace("_", "-"))
    assert problem.setting == (spelled if source == "command line" else f"{name}=")
    assert repr(raw) in problem.message
    assert name not in settings.values


def test_a_misspelt_choice_gets_a_suggestion() -> None:
    problem = only_problem(resolve({"dtype": "flaot32"}))
    assert "float32" in problem.remedy
    assert "bfloat16" in problem.message


def test_lists_are_split_and_stripped(run_yaml) -> None:
    settings = resolve(
        {"plugins": [" a ", "no:b"]}, environ={"RUNNERCTL_PLUGINS": " vendor , other,"}
    )
    assert settings.values["plugins"] == ("a", "no:b")
    assert settings.values["allowed_plugins"] == ("vendor", "other")
    assert settings.origins["allowed_plugins"].setting == "RUNNERCTL_PLUGINS"
    assert resolve(file=run_yaml("plugins: [a, b]\n")).values["plugins"] == ("a", "b")


def test_an_empty_variable_is_unset_but_an_empty_list_allows_nobody() -> None:
    settings = resolve(environ={"RUNNERCTL_BLOCK_SIZE": "", "RUNNERCTL_PLUGINS": ""})
    assert settings.values == {"allowed_plugins": ()}


def test_the_cache_directory_is_not_a_setting_and_no_mistake() -> None:
    assert resolve(environ={"RUNNERCTL_CACHE_DIR": "somewhere"}) == Settings()


def test_a_negated_flag_is_named_as_it_was_written() -> None:
    settings = resolve({"enable_prefix_caching": False}, source="command line")
    assert settings.origins["enable_prefix_caching"].setting == "--no-enable-prefix-caching"


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_setting_describes_itself_and_its_default_is_valid(name) -> None:
    setting = setting_fields()[name]
    assert setting.help
    if setting.default is not None:
        assert setting.parse(setting.default) == setting.default


# ---- what nobody knows


@pytest.mark.parametrize(
    ("arguments", "file", "environ", "setting", "suggestion"),
    [
        ({"blok_size": 3}, "", {}, "blok_size=", "block_size="),
        ({}, "blok-size: 3\n", {}, "blok-size in run.yaml", "block_size"),
        ({}, "", {"RUNNERCTL_BLOK_SIZE": "3"}, "RUNNERCTL_BLOK_SIZE", "RUNNERCTL_BLOCK_SIZE"),
        ({}, "", {"RUNNERCTL_PLUGIN": "a"}, "RUNNERCTL_PLUGIN", "RUNNERCTL_PLUGINS"),
    ],
)
def test_an_unknown_name_is_an_error_with_a_suggestion(
    arguments, file, environ, setting, suggestion, run_yaml
) -> None:
    problem = only_problem(resolve(arguments, file=run_yaml(file), environ=environ))
    assert problem.setting == setting
    assert problem.remedy == f"did you mean {suggestion}?"


def test_all_mistakes_are_reported_together(run_yaml) -> None:
    settings = resolve(
        {"dtype": "x"},
        file=run_yaml("max_num_seqs: 0\n"),
        environ={"RUNNERCTL_NONSENSE": "1", "VLLM_USE_V2_MODEL_RUNNER": "x"},
    )
    assert {p.setting for p in settings.problems} == {
        "dtype=",
        "max_num_seqs in run.yaml",
        "RUNNERCTL_NONSENSE",
        "VLLM_USE_V2_MODEL_RUNNER",
    }


# ---- the file


def test_a_syntax_error_gives_file_line_and_column(run_yaml) -> None:
    problem = only_problem(
        resolve(source="command line", file=run_yaml("dtype: auto\nrunner: [v1\nx: 1\n"))
    )
    assert problem.setting == "--config"
    assert "run.yaml, line 3, column 2: " in problem.message


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n"])
def test_a_file_that_holds_no_settings(text, run_yaml) -> None:
    problem = only_problem(resolve(file=run_yaml(text)))
    assert problem.setting == "config_file="
    assert "not settings" in problem.message


def test_an_empty_file_says_nothing(run_yaml) -> None:
    assert resolve(file=run_yaml("# later\n")) == Settings()


def test_a_missing_file_and_one_that_is_not_text(tmp_path) -> None:
    missing = only_problem(resolve(source="command line", file=tmp_path / "no.yaml"))
    assert "no.yaml" in missing.message
    assert missing.setting == "--config"
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in only_problem(resolve(file=tmp_path / "binary.yaml")).message


def test_a_key_given_twice_is_an_error(run_yaml) -> None:
    problem = only_problem(resolve(file=run_yaml("block-size: 16\n\nblock_size: 32\n")))
    assert problem.setting == "block_size in run.yaml"
    assert "line 3" in problem.message


# ---- options of plugins


def test_plugin_options_merge_key_by_key(run_yaml) -> None:
    settings = resolve(
        {"plugin_options": ["vendor.level=3", "Vendor.names=[a, b]"]},
        source="command line",
        file=run_yaml("plugin_options: {vendor: {level: 1, quiet: true}, other: {x: y}}\n"),
    )
    assert settings.problems == ()
    assert settings.plugin_options == {
        "vendor": {"level": 3, "names": ["a", "b"], "quiet": True},
        "other": {"x": "y"},
    }
    where = settings.option_origins["vendor"]
    assert where["level"] == Origin("command line", "--plugin-option vendor.level")
    assert where["quiet"] == Origin("file", "plugin_options.vendor.quiet in run.yaml")


def test_a_plugin_name_may_have_dots_and_spaces() -> None:
    settings = resolve({"plugin_options": ["My Org.policy.level=3"]}, source="command line")
    assert settings.plugin_options == {"my org.policy": {"level": 3}}


def test_plugin_options_from_python() -> None:
    settings = resolve({"plugin_options": {"vendor": {"level": 3}}})
    assert settings.plugin_options == {"vendor": {"level": 3}}
    assert settings.option_origins["vendor"]["level"].setting == "plugin_options="


@pytest.mark.parametrize("text", ["", "vendor", "vendor=3", "vendor.=3", ".level=3", "a.b=[1"])
def test_a_malformed_plugin_option_on_the_command_line(text) -> None:
    problem = only_problem(resolve({"plugin_options": [text]}, source="command line"))
    assert problem.setting == "--plugin-option"


@pytest.mark.parametrize("value", [{"vendor": 3}, {3: {"a": 1}}, 3])
def test_malformed_plugin_options_from_python(value) -> None:
    problem = only_problem(resolve({"plugin_options": value}))
    assert problem.setting == "plugin_options="
