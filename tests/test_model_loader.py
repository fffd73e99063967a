"""Loading checkpoints: the right parameters, and an error that helps for each bad one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from runnerctl.errors import ModelError  # noqa: E402
from runnerctl.models.checkpoint import has_safetensors, weight_files  # noqa: E402
from runnerctl.runner.model_loader import choose_dtype, load_model  # noqa: E402
from tiny_models import BYPASSING, SERVED, make_tiny_model, reference_generate  # noqa: E402

CPU = torch.device("cpu")


def load(folder: Path, **changes):
    arguments = {
        "dtype": torch.float32,
        "device": CPU,
        "trust_remote_code": False,
        "attn_implementation": "eager",
        **changes,
    }
    return load_model(folder, **arguments)


@pytest.fixture
def llama(tmp_path):
    return make_tiny_model("llama", tmp_path / "llama")


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("family", [*SERVED, *BYPASSING])
def test_every_parameter_and_buffer_is_the_one_in_the_checkpoint(family, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(family, tmp_path)
    model = load(folder)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    theirs = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
        assert ours[name].device.type == "cpu", name
    assert not model.training
    stored = load_file(folder / "model.safetensors")
    assert sum(p.numel() for p in model.parameters()) == sum(t.numel() for t in stored.values())
    for name in stored.keys() & ours.keys():
        assert torch.equal(ours[name], stored[name]), name


@pytest.mark.parametrize("family", SERVED)
def test_tiny_models_do_not_just_repeat_one_token(family, tmp_path):
    folder = make_tiny_model(family, tmp_path)
    tokens, gaps = reference_generate(folder, list(range(10, 22)), 24)
    assert len(set(tokens)) >= 10
    assert len(gaps) == len(tokens) == 24


def test_tied_weights_stay_one_tensor(tmp_path):
    folder = make_tiny_model("llama", tmp_path, tie_word_embeddings=True)
    model = load(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_loading_writes_nothing_and_leaves_the_log_settings_alone(llama, capfd):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    capfd.readouterr()
    load(llama)
    assert capfd.readouterr() == ("", "")
    assert before == (logging.get_verbosity(), logging.is_progress_bar_enabled())


def test_a_sharded_checkpoint_gives_the_same_weights(llama, tmp_path):
    from transformers import AutoModelForCausalLM

    whole = load(llama)
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(
        tmp_path / "sharded", max_shard_size="200KB"
    )
    assert len(weight_files(tmp_path / "sharded")) > 1
    sharded = load(tmp_path / "sharded")
    for (name, a), (_, b) in zip(whole.named_parameters(), sharded.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_weights_are_cast_to_the_type_asked_for(llama):
    assert {p.dtype for p in load(llama, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


def test_a_missing_shard_is_named(llama, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(folder, max_shard_size="200KB")
    gone = weight_files(folder)[1]
    gone.unlink()
    with pytest.raises(ModelError, match=gone.name):
        load(folder)


def test_missing_unknown_and_misshapen_weights_are_reported_together(llama):
    path = llama / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(3)
    tensors["model.norm.weight"] = torch.zeros(7)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        load(llama)
    for name in ("layers.1.mlp.up_proj", "layers.0.mlp.extra", "model.norm.weight"):
        assert name in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize("keep", [0, 5, 2000, -4])
def test_a_truncated_file_is_an_error_before_anything_is_built(llama, keep):
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="truncated or not a safetensors file"):
        load(llama)


def test_garbage_and_git_lfs_pointers_are_told_apart(llama):
    path = llama / "model.safetensors"
    path.write_bytes(b"\xff" * 4096)
    with pytest.raises(ModelError, match="not a safetensors file"):
        load(llama)
    path.write_bytes(b"version https://git-lfs.example/spec/v1\noid sha256:00\nsize 3\n")
    with pytest.raises(ModelError, match="git-lfs pointer"):
        load(llama)


def test_pickled_weights_are_never_opened(llama):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (llama / "ran",))

    torch.save(Bomb(), llama / "pytorch_model.bin")
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"pickle files \(pytorch_model.bin\)"):
        load(llama)
    assert not has_safetensors(llama)
    assert not (llama / "ran").exists()


@pytest.mark.parametrize("content", [None, "{not json", "[1]", '{"hidden_size": 3}'])
def test_a_missing_or_broken_config_is_an_error(llama, content):
    if content is None:
        (llama / "config.json").unlink()
    else:
        (llama / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load(llama)


def test_an_unknown_model_type_is_named(llama):
    edit_config(llama, model_type="nobody_knows_this")
    with pytest.raises(ModelError, match="nobody_knows_this"):
        load(llama)


def test_a_model_that_cannot_generate_is_refused(llama):
    edit_config(llama, model_type="vit", architectures=["ViTModel"])
    with pytest.raises(ModelError, match="do not generate text"):
        load(llama)


def remote_code(folder: Path) -> None:
    edit_config(
        folder,
        model_type="own_model",
        auto_map={
            "AutoConfig": "own_code.OwnConfig",
            "AutoModelForCausalLM": "own_code.OwnForCausalLM",
        },
    )
    (folder / "own_code.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(folder / 'ran')!r}).touch()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_model'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )


def test_code_in_a_checkpoint_runs_only_when_asked_for(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    remote_code(llama)
    with pytest.raises(ModelError, match="not run unasked") as caught:
        load(llama)
    assert caught.value.setting == "--trust-remote-code"
    assert not (llama / "ran").exists()
    assert type(load(llama, trust_remote_code=True)).__name__ == "OwnForCausalLM"
    assert (llama / "ran").exists()


def test_a_known_architecture_is_served_without_the_code_beside_it(llama):
    remote_code(llama)
    edit_config(llama, model_type="llama")
    assert type(load(llama)).__name__ == "LlamaForCausalLM"
    assert not (llama / "ran").exists()


@pytest.mark.parametrize(
    ("stored", "features", "expected"),
    [
        ("float32", {}, torch.float32),
        ("bfloat16", {}, torch.float32),
        ("bfloat16", {"avx512_bf16": True}, torch.bfloat16),
        ("bfloat16", {"amx_bf16": True}, torch.bfloat16),
        ("float16", {"avx512_bf16": True, "avx512_fp16": True}, torch.float32),
        ("float8_e4m3fn", {"avx512_bf16": True}, torch.float32),
        (None, {"avx512_bf16": True}, torch.float32),
    ],
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_auto_on_a_cpu_follows_what_it_computes_in(stored, features, expected, key, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    for config in ({key: stored}, {"text_config": {key: stored}}):
        dtype, reason = choose_dtype("auto", config, CPU)
        assert dtype is expected
        if stored and dtype is torch.float32 and stored != "float32":
            assert stored in reason


@pytest.mark.parametrize(
    ("stored", "capability", "expected"),
    [
        ("bfloat16", (8, 0), torch.bfloat16),
        ("bfloat16", (9, 0), torch.bfloat16),
        ("bfloat16", (7, 5), torch.float32),
        ("float16", (7, 5), torch.float16),
        ("float32", (9, 0), torch.float32),
    ],
)
def test_auto_on_a_gpu_follows_its_compute_capability(stored, capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    dtype, _ = choose_dtype("auto", {"dtype": stored}, torch.device("cuda", 0))
    assert dtype is expected


def test_a_type_that_was_asked_for_is_taken_as_it_is():
    assert choose_dtype("bfloat16", {"dtype": "float32"}, CPU)[0] is torch.bfloat16


def test_the_config_object_of_transformers_is_understood_too(llama):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(llama)
    assert choose_dtype("auto", config, CPU)[0] is torch.float32
    assert choose_dtype("auto", {**config.to_dict()}, CPU)[0] is torch.float32


def test_an_attention_that_is_not_registered_is_an_error_not_a_traceback(llama, tmp_path):
    copy = shutil.copytree(llama, tmp_path / "copy")
    with pytest.raises(ModelError, match="no_such_attention"):
        load(copy, attn_implementation="no_such_attention")
