"""`runnerctl embed` and `classify`: what they read, what they write, what they refuse."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from runnerctl import LLM
from runnerctl.cli import embed as embed_module
from runnerctl.cli.app import app
from tiny_models import make_tiny_model
from tiny_pooling_models import (
    add_modules,
    add_tokenizer,
    make_pooling_model,
    reference_hidden,
    reference_scores,
    write_json,
)

TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10"]
IDS = [[1, 5, 6, 7, 2], [1, 8, 2], [1, 9, 10, 11, 12, 13, 14, 2]]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = make_pooling_model("bert", tmp_path_factory.mktemp("bert"))
    add_modules(folder, ["mean_tokens"], ("Normalize", "2_Normalize"))
    return add_tokenizer(folder)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    names = {0: "calm", 1: "angry", 2: "sad"}
    make_pooling_model("bert", folder, auto="AutoModelForSequenceClassification", id2label=names)
    return add_tokenizer(folder)


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    for name in ("RUNNERCTL_RUNNER", "VLLM_USE_V2_MODEL_RUNNER", "RUNNERCTL_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run():
    def call(*arguments, stdin=None, code=0):
        ran = CliRunner().invoke(app, [str(one) for one in arguments], input=stdin)
        assert ran.exit_code == code, ran.output
        return ran

    return call


def records(ran):
    return [json.loads(line) for line in ran.stdout.splitlines()]


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def expected(folder, ids):
    mean = reference_hidden(folder, ids).mean(0)
    return mean / mean.norm()


def assert_embeddings(folder, found, ids=IDS):
    assert [record["index"] for record in found] == list(range(len(ids)))
    for record, one in zip(found, ids, strict=True):
        said = torch.tensor(record["embedding"])
        torch.testing.assert_close(said, expected(folder, one), rtol=1e-5, atol=1e-5)


# What is read


def test_texts_as_arguments_as_lines_and_as_json(run, bert, tmp_path):
    arguments = run("embed", bert, *TEXTS)
    assert_embeddings(bert, records(arguments))
    assert all(set(record) == {"index", "embedding"} for record in records(arguments))
    assert "texts embedded" not in arguments.stderr
    lines = run("embed", bert, stdin="w1 w2 w3\n\nw4\r\n" + TEXTS[2])
    assert records(lines) == records(arguments)
    assert "3 of 3 texts embedded" in lines.stderr
    assert records(run("embed", bert, "-", stdin="\n".join(TEXTS))) == records(arguments)
    file = write(
        tmp_path / "in",
        {"prompt": TEXTS[0], "id": "a"},
        {"prompt_token_ids": IDS[1]},
        {"prompt": TEXTS[2], "id": 7},
    )
    found = records(run("embed", bert, "--input", file))
    assert [record.pop("id", None) for record in found] == ["a", None, 7]
    assert found == records(arguments)
    content = file.read_text()
    assert len(records(run("embed", bert, "--input", "-", stdin=content))) == 3


def test_numbers_are_whole_float32_numbers(run, bert):
    with LLM(bert) as llm:
        outputs = llm.embed(TEXTS)
    for record, output in zip(records(run("embed", bert, *TEXTS)), outputs, strict=True):
        assert torch.equal(torch.tensor(record["embedding"]), torch.tensor(output.embedding))


def test_flags_reach_the_model(run, bert):
    flags = ["--pooling", "max", "--no-normalize", "--dimensions", 5]
    found = records(run("embed", bert, *TEXTS, *flags))
    for record, ids in zip(found, IDS, strict=True):
        wanted = reference_hidden(bert, ids).max(0).values[:5]
        torch.testing.assert_close(torch.tensor(record["embedding"]), wanted)
    [cut] = records(run("embed", bert, TEXTS[2], "--truncate-prompt-tokens", 4))
    torch.testing.assert_close(
        torch.tensor(cut["embedding"]), expected(bert, [1, 9, 10, 2]), rtol=1e-5, atol=1e-5
    )


def test_a_prompt_of_the_model_is_asked_for_by_its_name(run, bert, tmp_path):
    folder = shutil.copytree(bert, tmp_path / "m")
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "w1 w2 "}})
    [found] = records(run("embed", folder, "w3", "--prompt-name", "query"))
    [plain] = records(run("embed", folder, TEXTS[0]))
    assert found == plain
    refused = run("embed", folder, "w3", "--prompt-name", "doc", code=2)
    assert "--prompt-name: the model has no prompt 'doc'" in refused.stderr


def test_many_texts_keep_their_order_across_chunks(run, bert, tmp_path):
    texts = [" ".join(["w1"] * (1 + 7 * i % 20)) for i in range(40)]
    found = records(run("embed", bert, "--max-num-seqs", 2, stdin="\n".join(texts)))
    assert_embeddings(bert, found, [[1, *[5] * len(text.split()), 2] for text in texts])


# Classifying


def test_classify_names_the_label_and_gives_a_number_for_each(run, classifier):
    found = records(run("classify", classifier, *TEXTS))
    raw = records(run("classify", classifier, *TEXTS, "--no-activation"))
    for record, plain, ids in zip(found, raw, IDS, strict=True):
        scores = reference_scores(classifier, ids)
        probs = torch.tensor(list(record["probs"].values()))
        torch.testing.assert_close(probs, scores.softmax(-1), rtol=1e-5, atol=1e-5)
        assert list(record["probs"]) == ["calm", "angry", "sad"]
        assert record["label"] == max(record["probs"], key=record["probs"].get)
        raws = torch.tensor(list(plain["probs"].values()))
        torch.testing.assert_close(raws, scores, rtol=1e-5, atol=1e-5)


def test_classify_reads_pairs(run, classifier, tmp_path):
    file = write(tmp_path / "in", {"prompt": "w1", "text_pair": "w2 w3"})
    [found] = records(run("classify", classifier, "--input", file))
    scores = reference_scores(classifier, [1, 5, 2, 6, 7, 2], [0, 0, 0, 1, 1, 1])
    probs = torch.tensor(list(found["probs"].values()))
    torch.testing.assert_close(probs, scores.softmax(-1), rtol=1e-5, atol=1e-5)


# The file of answers


def test_a_second_run_keeps_what_is_there_and_a_cut_line_is_computed_again(run, bert, tmp_path):
    file = write(tmp_path / "in", *({"prompt": text} for text in TEXTS))
    out = tmp_path / "out"
    first = run("embed", bert, "--input", file, "--output", out)
    assert first.stdout == ""
    whole = out.read_text()
    assert_embeddings(bert, [json.loads(line) for line in whole.splitlines()])
    again = run("embed", bert, "--input", file, "--output", out)
    assert "3 of 3 texts embedded, 3 of them by an earlier run" in again.stderr
    out.write_text(whole[:-30])
    resumed = run("embed", bert, "--input", file, "--output", out)
    assert "3 of 3 texts embedded, 2 of them by an earlier run" in resumed.stderr
    assert out.read_text() == whole
    other = run("embed", bert, "--input", file, "--output", out, "--pooling", "cls", code=2)
    assert "answers another prompt, or one with another model or other" in other.stderr
    assert out.read_text() == whole
    run("embed", bert, "--input", file, "--output", out, "--pooling", "cls", "--overwrite")
    assert out.read_text() != whole


def test_an_interrupt_leaves_whole_lines_and_says_how_to_go_on(run, bert, tmp_path, monkeypatch):
    file = write(tmp_path / "in", *({"prompt": text} for text in TEXTS * 8))
    out = tmp_path / "out"
    embed, calls = LLM.embed, []

    def interrupted(llm, *arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return embed(llm, *arguments)

    monkeypatch.setattr(embed_module, "_CHUNK", 5)
    monkeypatch.setattr(LLM, "embed", interrupted)
    command = ["embed", bert, "--input", file, "--output", out, "--max-num-seqs", 2]
    ran = run(*command, code=130)
    assert "interrupted: 10 of 24 texts embedded; the same command goes on" in ran.stderr
    assert len(out.read_text().splitlines()) == 10
    monkeypatch.setattr(LLM, "embed", embed)
    run(*command)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert_embeddings(bert, found, IDS * 8)


# What is refused


def test_all_wrong_lines_are_reported_and_nothing_is_computed(run, bert, tmp_path):
    file = write(
        tmp_path / "in",
        {"prompt": "w1"},
        {"promt": "w1"},
        {"prompt": "w1", "max_tokens": 3},
        {"prompt": "w1", "id": [1]},
    )
    ran = run("embed", bert, "--input", file, code=2)
    assert "3 lines cannot be read, and nothing was run" in ran.stderr
    assert "line 2: unknown key 'promt'; did you mean 'prompt'?" in ran.stderr
    assert "line 3: unknown key 'max_tokens'" in ran.stderr
    assert "line 4: 'id' is [1]" in ran.stderr
    assert "serves" not in ran.stderr  # before the model was looked at
    long = "w1 " * 70
    file = write(
        tmp_path / "in", {"prompt": "w1"}, {"prompt": long}, {"text_pair": "w1", "prompt": "w2"}
    )
    ran = run("embed", bert, "--input", file, code=2)
    assert "line 2: the prompt has 72 tokens, but the limit is 64" in ran.stderr
    assert "--truncate-prompt-tokens" in ran.stderr
    assert "line 3: the prompt is a pair of texts" in ran.stderr
    assert ran.stdout == ""
    twice = write(tmp_path / "in", {"prompt": "w1", "id": "a"}, {"prompt": "w2", "id": "a"})
    ran = run("embed", bert, "--input", twice, code=2)
    assert "line 2: the id 'a' is also that of line 1" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["w1", "--pooling", "median"], "--pooling: pooling is 'median'"),
        (["w1", "--dimensions", "0"], "--dimensions: dimensions is 0"),
        (["w1", "--dimensions", "99"], "dimensions is 99, but embeddings of this model have 32"),
        (["w1", "--truncate-prompt-tokens", "1"], "--truncate-prompt-tokens is 1, which leaves"),
        (["w1", "--input", "x"], "--input and a TEXT were both given"),
        (["w1", " "], "a TEXT is empty"),
        (["--input", "missing"], "missing cannot be read"),
        (["w1", "--overwrite"], "--overwrite goes with --output"),
        (["w1 " * 70], "the prompt has 72 tokens, but the limit is 64 (config.json of the model)"),
        ([], "stdin has no texts"),
    ],
)
def test_wrong_flags_and_texts(run, bert, arguments, message):
    ran = run("embed", bert, *arguments, stdin="", code=2)
    assert message in ran.stderr
    assert ran.stdout == ""


def test_the_wrong_kind_of_model_says_which_command(run, bert, classifier, tmp_path, monkeypatch):
    assert "use runnerctl embed" in run("classify", bert, "w1", code=2).stderr
    assert "use runnerctl classify" in run("embed", classifier, "w1", code=2).stderr
    for command in (["generate", "w1"], ["chat"]):
        ran = run(*command, "--model", bert, stdin="w1\n", code=2)
        assert "does not generate text: it is a pooling model" in ran.stderr
        assert f"runnerctl embed {bert} TEXT" in ran.stderr
    llama = make_tiny_model("llama", tmp_path / "llama")
    monkeypatch.setattr(LLM, "from_resolved", None)  # nothing is loaded for this
    ran = run("embed", llama, "w1", code=2)
    assert f"MODEL: {llama} generates text; it is no pooling model" in ran.stderr


def test_a_guess_is_told(run, tmp_path):
    folder = add_tokenizer(make_pooling_model("qwen3", tmp_path))
    ran = run("embed", folder, "w1")
    assert "note: last-token pooling (no file says; the model is causal)" in ran.stderr
    run_stats = run("embed", folder, "w1", "w2 w3", "--stats")
    assert "2, 7 tokens" in run_stats.stderr
    assert "last-token pooling" in " ".join(run_stats.stderr.split())


def test_explain_shows_who_serves_a_pooling_model_and_why(run, bert):
    ran = json.loads(run("explain", bert, "--format", "json").stdout)
    assert ran["runner"] == "v1"
    assert [need["capability"] for need in ran["needs"]] == ["pooling"]
    assert "modules.json" in ran["needs"][0]["reason"]
    refused = json.loads(run("explain", bert, "--runner", "v2", "--format", "json", code=2).stdout)
    assert refused["runner"] is None
    assert "lacks pooling" in json.dumps(refused["problems"])
