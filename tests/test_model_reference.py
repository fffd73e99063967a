"""What a user may call a model, and what each wrong name is answered with."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from runnerctl.config import hub
from runnerctl.config.gguf_metadata import config_from_gguf, read_gguf_metadata
from runnerctl.config.model_reference import named_models, read_model_config
from runnerctl.config.read_facts import facts_from_config
from runnerctl.errors import ModelError

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 4}


def folder_with(path: Path, **texts: str) -> Path:
    path.mkdir(exist_ok=True)
    for name, text in texts.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def write_gguf(path: Path, values: dict[str, Any]) -> Path:
    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    def typed(value: Any) -> bytes:
        match value:
            case bool():
                return struct.pack("<I?", 7, value)
            case int():
                return struct.pack("<II", 4, value)
            case float():
                return struct.pack("<If", 6, value)
            case str():
                return struct.pack("<I", 8) + string(value)
            case [str(), *_]:
                items = b"".join(string(item) for item in value)
                return struct.pack("<IIQ", 9, 8, len(value)) + items
            case _:
                items = b"".join(struct.pack("<i", item) for item in value)
                return struct.pack("<IIQ", 9, 5, len(value)) + items

    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values))
    path.write_bytes(head + b"".join(string(k) + typed(v) for k, v in values.items()))
    return path


def error_of(reference: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read_model_config(reference)
    assert caught.value.setting == "MODEL"
    assert caught.value.remedy
    return caught.value


def test_a_folder_its_config_and_the_config_itself_are_one_model(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", config__json=json.dumps(CONFIG))
    references = [read_model_config(str(folder)), read_model_config(folder / "config.json")]
    references.append(read_model_config(CONFIG))
    assert [reference.kind for reference in references] == ["folder", "file", "mapping"]
    assert references[0].name == str(folder)
    assert all(reference.config == CONFIG for reference in references)
    assert all(reference.facts() == facts_from_config(CONFIG) for reference in references)


def test_a_folder_with_pickled_weights_has_facts(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path / "m", config__json=json.dumps(CONFIG), pytorch_model__bin="pickle"
    )
    assert read_model_config(folder).facts().model_type == "llama"


def test_a_sentence_transformers_folder_is_an_embedding_model(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", config__json=json.dumps(CONFIG), modules__json="[]")
    facts = read_model_config(folder).facts()
    assert facts.runner_type == "pooling"
    assert "modules.json" in facts.evidence["runner_type"]


def test_a_byte_order_mark_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8-sig")
    assert read_model_config(path).config == CONFIG


def test_every_named_model_ships_its_config_and_says_where_its_weights_are() -> None:
    assert "smollm2-135m" in named_models()
    for name, manifest in named_models().items():
        reference = read_model_config(name)
        assert reference.kind == "named"
        assert reference.manifest == manifest
        assert reference.config["architectures"]
        assert len(manifest.sha256) == 64
        assert manifest.size > 0
        assert manifest.member.endswith(".gguf") or manifest.is_checkpoint


def test_a_path_is_never_taken_for_a_name(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    error_of(Path("smollm2-135m"))


def test_a_folder_goes_before_a_named_model_only_if_it_holds_one(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = folder_with(tmp_path / "smollm2-135m")
    assert read_model_config("smollm2-135m").kind == "named"
    folder_with(folder, config__json=json.dumps(CONFIG))
    assert read_model_config("smollm2-135m").kind == "folder"


@pytest.mark.parametrize("name", ["smolm2-135m", "smollm2-135", "SmolLM2-135M"])
def test_a_misspelt_name_is_answered_with_the_right_one(name: str) -> None:
    assert "smollm2-135m" in error_of(name).remedy


def test_a_misspelt_path_is_answered_with_its_neighbour(tmp_path: Path) -> None:
    folder_with(tmp_path / "my-llama", config__json="{}")
    assert str(tmp_path / "my-llama") in error_of(str(tmp_path / "my-lama")).remedy


@pytest.mark.parametrize(
    "name", ["", " ", "gpt2", "no/such/path", "~nobody-here/x", "a\0b", "x" * 9999]
)
def test_names_of_nothing_are_errors_of_the_user(name: str) -> None:
    error_of(name)


def test_a_folder_without_config_says_what_is_in_it(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", weights__bin="", readme__md="")
    assert "weights.bin" in error_of(folder).message
    assert "empty" in error_of(folder_with(tmp_path / "e")).message


def test_broken_json_is_located(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", config__json='{"a": 1,\n  "b" 2}')
    message = error_of(folder).message
    assert "line 2, column 7" in message
    assert str(folder / "config.json") in message


@pytest.mark.parametrize("text", ["[1]", "3", "null", '"x"', "true"])
def test_json_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    assert "not an object" in error_of(folder_with(tmp_path / "m", config__json=text)).message


def test_text_that_no_reader_could_take_is_refused(tmp_path: Path) -> None:
    error_of(folder_with(tmp_path / "m", config__json="[" * 100_000))
    (tmp_path / "m" / "config.json").write_bytes(b"\xff\xfe\x00")
    error_of(tmp_path / "m")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    error_of(folder_with(tmp_path / "m", weights__bin="x") / "weights.bin")


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    values = {"general.architecture": "llama", "llama.attention.head_count": 4}
    file = write_gguf(folder_with(tmp_path / "m") / "a.gguf", values)
    reference = read_model_config(tmp_path / "m")
    assert (reference.kind, reference.path) == ("gguf", file)
    write_gguf(tmp_path / "m" / "b.gguf", values)
    assert "a.gguf" in error_of(tmp_path / "m").remedy


def test_gguf_metadata_becomes_a_config(tmp_path: Path) -> None:
    values = {
        "general.architecture": "qwen2moe",
        "qwen2moe.block_count": 24,
        "qwen2moe.context_length": 4096,
        "qwen2moe.attention.head_count": 16,
        "qwen2moe.expert_count": 60,
        "qwen2moe.rope.freq_base": 500000.0,
        "tokenizer.ggml.tokens": ["a"] * 5000,
    }
    reference = read_model_config(write_gguf(tmp_path / "x.gguf", values))
    facts = reference.facts()
    assert facts.architectures == ("Qwen2MoeForCausalLM",)
    assert facts.is_moe
    assert (facts.num_hidden_layers, facts.max_position_embeddings) == (24, 4096)
    assert reference.config["vocab_size"] == 5000
    assert reference.config["rope_theta"] == 500000.0


@pytest.mark.parametrize(
    ("values", "true"),
    [
        ({"ssm.state_size": 16, "attention.head_count": 0}, "is_attention_free"),
        ({"ssm.state_size": 16, "attention.head_count": 8}, "is_hybrid"),
        ({"shortconv.l_cache": 3, "attention.head_count": 8}, "is_hybrid"),
        (
            {"ssm.state_size": 16, "attention.head_count": 8, "attention.head_count_kv": [0, 2]},
            "is_hybrid",
        ),
        ({"attention.kv_lora_rank": 512, "attention.head_count": 8}, "is_mla"),
        ({"expert_count": 8, "attention.head_count": 8}, "is_moe"),
        ({"ssm.state_size": 1, "attention.head_count": 8, "attention.head_count_kv": [2, 2]}, ""),
    ],
)
def test_gguf_sections_mean_the_same_as_keys_of_a_config(
    tmp_path: Path, values: dict[str, Any], true: str
) -> None:
    named = {f"new.{key}": value for key, value in values.items()}
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "new", **named})
    facts = read_model_config(path).facts()
    names = ("is_attention_free", "is_hybrid", "is_mla", "is_moe")
    assert [name for name in names if getattr(facts, name)] == [true][: len(true)]


def test_an_embedding_gguf_pools() -> None:
    metadata = {"general.architecture": "new", "new.attention.causal": False}
    assert facts_from_config(config_from_gguf(metadata)).runner_type == "pooling"


@pytest.mark.parametrize("length", [0, 3, 4, 10, 23, 40, 60])
def test_a_gguf_file_that_is_cut_off_is_refused(tmp_path: Path, length: int) -> None:
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "llama", "llama.x": [1, 2]})
    path.write_bytes(path.read_bytes()[:length])
    error_of(path)


def test_a_gguf_file_with_absurd_sizes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60))
    error_of(path)


def test_our_gguf_reader_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(0.5)
    writer.add_head_count_kv([1, 2])
    writer.add_causal_attention(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_gguf_metadata(tmp_path / "x.gguf")
    assert metadata["llama.block_count"] == 2
    assert metadata["llama.attention.layer_norm_rms_epsilon"] == 0.5
    assert metadata["llama.attention.head_count_kv"] == [1, 2]
    assert metadata["llama.attention.causal"] is True


class TestHub:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        constants = pytest.importorskip("huggingface_hub.constants")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(hub, "getproxies", dict)
        for name in hub.OFFLINE_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        return tmp_path / "cache"

    def test_the_local_cache_is_enough(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        model = cache / "models--org--name"
        (model / "refs").mkdir(parents=True)
        (model / "refs" / "main").write_text("abc")
        snapshot = model / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(CONFIG))
        reference = read_model_config("org/name")
        assert (reference.kind, reference.config) == ("hub", CONFIG)

    def test_what_marks_an_embedding_model_is_fetched_with_its_config(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Qwen3-Embedding's config says that it generates; only its modules.json tells."""
        import huggingface_hub

        snapshot = cache / "models--org--name" / "snapshots" / "abc"
        asked = []

        def download(model: str, file: str, **_: Any) -> str:
            asked.append(file)
            if file not in there:
                raise OSError("not there")
            snapshot.mkdir(parents=True, exist_ok=True)
            (snapshot / file).write_text(json.dumps(CONFIG if file == "config.json" else []))
            (cache / "models--org--name" / "refs").mkdir(exist_ok=True)
            (cache / "models--org--name" / "refs" / "main").write_text("abc")
            return str(snapshot / file)

        monkeypatch.setattr(hub, "_answers", lambda _: True)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        there = {"config.json"}
        assert read_model_config("org/name").facts().runner_type == "generate"
        assert asked == ["config.json", "modules.json"]
        assert read_model_config("org/name").facts().runner_type == "generate"
        assert len(asked) == 2  # not asked again: the network may be gone
        shutil.rmtree(snapshot)
        there.add("modules.json")
        assert read_model_config("org/name").facts().runner_type == "pooling"
        assert read_model_config("org/name").facts().runner_type == "pooling"
        assert len(asked) == 4

    def test_offline_means_that_nothing_is_connected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr(hub.socket, "create_connection", lambda *_, **__: pytest.fail("tried"))
        assert "HF_HUB_OFFLINE" in error_of("org/name").message

    def test_without_a_network_it_says_what_was_tried(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any, **__: Any) -> Any:
            raise OSError("no route")

        monkeypatch.setattr(hub.socket, "create_connection", refuse)
        error = error_of("org/name")
        assert "cache" in error.message
        assert "cannot be reached" in error.message
        assert "smollm2-135m" in error.remedy

    def test_a_network_that_never_answers_does_not_hang(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        never = threading.Event()

        def wait(*_: Any, **__: Any) -> Any:
            never.wait()
            raise OSError("timed out at last")

        monkeypatch.setattr(hub, "CONNECT_SECONDS", 0.05)
        monkeypatch.setattr(hub.socket, "create_connection", wait)
        try:
            assert "cannot be reached" in error_of("org/name").message
        finally:
            never.set()

    def test_what_the_hub_refuses_is_passed_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub

        def refuse(*_: Any, **__: Any) -> str:
            raise OSError("the disk is full\nand more")

        monkeypatch.setattr(hub, "_answers", lambda _: True)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
        assert error_of("org/name").message.endswith("the hub said: the disk is full")

    def test_without_the_hub_library_the_extra_is_named(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        assert "runnerctl[engine]" in error_of("org/name").remedy


def test_reading_a_model_imports_nothing_heavy() -> None:
    code = (
        "import sys; from runnerctl.config.model_reference import read_model_config; "
        "read_model_config('smollm2-135m').facts(); "
        "print([m for m in ('torch', 'transformers', 'numpy', 'gguf', 'huggingface_hub') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
