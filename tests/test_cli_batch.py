"""`generate --prompts-file`: what is read, what is written, and what a second run keeps."""

import io
import json
import sys
import types

import pytest
from typer.testing import CliRunner

from runnerctl import LLM, SamplingParams
from runnerctl.cli import batch
from runnerctl.cli.app import app
from runnerctl.cli.batch_input import read_prompts
from runnerctl.cli.batch_output import finished
from runnerctl.errors import PromptError, UserError
from tiny_models import make_tiny_model, reference_generate

FLAGS = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    for name in ("RUNNERCTL_RUNNER", "VLLM_USE_V2_MODEL_RUNNER", "RUNNERCTL_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def bad(path):
    with pytest.raises(UserError) as caught:
        read_prompts(str(path), FLAGS, raw=False)
    return str(caught.value)


# what a file may hold


def test_the_fields_of_a_line_beat_the_flags(tmp_path):
    path = write(
        tmp_path / "in",
        {"prompt": "a", "max_tokens": 3, "stop": "x", "logit_bias": {"5": -1}, "seed": None},
        {"prompt_token_ids": [1, 2], "id": "b"},
        {"messages": [{"role": "user", "content": "hi"}], "id": 7, "bad_words_token_ids": [[1, 2]]},
    )
    first, second, third = read_prompts(str(path), FLAGS, raw=False)
    assert first.params == SamplingParams(
        temperature=0, max_tokens=3, stop="x", logit_bias={5: -1.0}
    )
    assert (first.form, first.content, first.id) == ("prompt", "a", None)
    assert second.params == FLAGS
    assert (second.content, second.id, second.index) == ([1, 2], "b", 1)
    assert (third.form, third.id) == ("messages", 7)
    assert third.params.bad_words_token_ids == ((1, 2),)


def test_blank_lines_and_a_byte_order_mark_are_skipped_but_counted_as_lines(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \n{"prompt": "b"}')
    assert [(one.line, one.index) for one in read_prompts(str(path), FLAGS, raw=False)] == [
        (1, 0),
        (4, 1),
    ]


def test_an_id_that_is_a_number_is_not_taken_for_an_index(tmp_path):
    path = write(tmp_path / "in", {"prompt": "a"}, {"prompt": "b", "id": 0}, {"prompt": "c"})
    assert len({one.key for one in read_prompts(str(path), FLAGS, raw=False)}) == 3


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"promt": "x"}', "unknown key 'promt'; did you mean 'prompt'?"),
        ('{"prompt": "x", "max_token": 3}', "did you mean 'max_tokens'?"),
        ("nope", "not JSON"),
        ('{"prompt": "x"', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('["x"]', "not an object"),
        ("{}", "none of them"),
        ('{"prompt": "x", "prompt_token_ids": [1]}', "'prompt' and 'prompt_token_ids'"),
        ('{"prompt": 3}', "must be text"),
        ('{"prompt": " "}', "is empty"),
        ('{"prompt": "\\ud800"}', "surrogate"),
        ('{"prompt_token_ids": []}', "at least one integer"),
        ('{"prompt_token_ids": [1.5]}', "at least one integer"),
        ('{"prompt_token_ids": [true]}', "at least one integer"),
        ('{"messages": []}', "list of objects"),
        ('{"messages": [{"role": "user"}]}', "list of objects"),
        ('{"messages": [{"role": "user", "content": 3}]}', "list of objects"),
        ('{"prompt": "x", "id": true}', "'id'"),
        ('{"prompt": "x", "id": 1.5}', "'id'"),
        ('{"prompt": "x", "temperature": -1}', "temperature is -1"),
        ('{"prompt": "x", "temperature": NaN}', "temperature"),
        ('{"prompt": "x", "temperature": "hot"}', "temperature"),
        ('{"prompt": "x", "max_tokens": 2.5}', "max_tokens"),
        ('{"prompt": "x", "max_tokens": true}', "max_tokens"),
        ('{"prompt": "x", "max_tokens": null}', "max_tokens"),
        ('{"prompt": "x", "min_tokens": 21}', "min_tokens"),
        ('{"prompt": "x", "ignore_eos": "no"}', "ignore_eos"),
        ('{"prompt": "x", "stop": 5}', "stop"),
        ('{"prompt": "x", "stop_token_ids": 5}', "stop_token_ids"),
        ('{"prompt": "x", "logit_bias": [5]}', "logit_bias"),
        ('{"prompt": "x", "logit_bias": {"a": 5}}', "logit_bias"),
        ('{"prompt": "x", "bad_words_token_ids": [5]}', "bad_words_token_ids"),
    ],
)
def test_a_line_that_is_wrong_is_named_by_its_number(line, says, tmp_path):
    path = tmp_path / "in"
    path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n', encoding="utf-8")
    message = bad(path)
    assert "line 3: " in message
    assert says in message


def test_all_wrong_lines_are_reported_at_once(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b'{"prompt": "x", "id": 1}\nnope\n\xff\n{"prompt": "y", "id": 1}\n')
    message = bad(path)
    assert "3 lines" in message
    assert "line 2: not JSON" in message
    assert "line 3: not UTF-8" in message
    assert "line 4: the id 1 is also that of line 1" in message
    path.write_text("nope\n" * 150, encoding="utf-8")
    assert bad(path).endswith("and 50 more")


def test_conversations_need_the_template_that_raw_leaves_out(tmp_path):
    path = write(tmp_path / "in", {"messages": [{"role": "user", "content": "hi"}]})
    with pytest.raises(PromptError, match="--raw"):
        read_prompts(str(path), FLAGS, raw=True)


def test_a_file_that_is_not_there_or_has_nothing(tmp_path):
    assert "nothere" in bad(tmp_path / "nothere")
    assert "--prompts-file" in bad(tmp_path)
    (tmp_path / "in").write_text("\n")
    assert "no prompts" in bad(tmp_path / "in")


def test_the_digest_tells_everything_that_changes_an_answer_apart(tmp_path):
    [line] = read_prompts(str(write(tmp_path / "a", {"prompt": "a"})), FLAGS, raw=False)
    [other] = read_prompts(str(write(tmp_path / "b", {"prompt": "b"})), FLAGS, raw=False)
    [hot] = read_prompts(
        str(write(tmp_path / "c", {"prompt": "a", "temperature": 1})), FLAGS, raw=False
    )
    [named] = read_prompts(str(write(tmp_path / "d", {"prompt": "a", "id": 1})), FLAGS, raw=False)
    digests = {one.digest("model", False, None) for one in (line, other, hot)}
    digests |= {line.digest("other", False, None), line.digest("model", True, None)}
    digests |= {line.digest("model", False, "Be brief.")}
    assert len(digests) == 6
    assert named.digest("m") == line.digest("m")


# what a file of answers still tells


def test_an_output_file_is_read_up_to_a_line_that_was_cut_off(tmp_path):
    digests = {0: "a", 1: "b", 'id "x"': "c"}
    path = tmp_path / "out"
    whole = b'{"index": 1, "digest": "b", "text": "t"}\n{"index": 2, "id": "x", "digest": "c"}\n'
    assert finished(path, digests) == (set(), 0)
    for cut in (b"", b"{", b'{"index": ', b'{"index": 0, "digest": "a"}'):
        path.write_bytes(whole + cut)
        assert finished(path, digests) == ({1, 'id "x"'}, len(whole))


@pytest.mark.parametrize(
    "content",
    [
        b'{"index": 0, "digest": "other"}\n',
        b'{"index": 9, "digest": "a"}\n',
        b'{"index": 9, "digest": null}\n',
        b'{"index": 0, "id": "y", "digest": "a"}\n',
        b'{"index": [], "digest": "a"}\n',
        b'{"text": "hello"}\n',
        b"precious\n",
        b"precious",
        b"[]\n",
        b"\n",
        b'{"index": 0, "dig\n{"index": 1, "digest": "b"}\n',
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(content, tmp_path):
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(UserError, match="line 1") as caught:
        finished(path, {0: "a", 1: "b"})
    assert "--overwrite" in str(caught.value)
    assert path.read_bytes() == content


# the command, on a real model of toy size


@pytest.fixture
def run(folder, tmp_path):
    def call(*arguments, code=0, stdin=None):
        command = ["generate", "--model", str(folder), "--dtype", "float32", *arguments]
        result = CliRunner().invoke(app, [*command, "--max-tokens", "6"], input=stdin)
        assert result.exit_code == code, result.output
        return result

    return call


PROMPTS = [{"prompt_token_ids": [5, 6, 7 + i], "ignore_eos": True} for i in range(5)]


def test_every_prompt_gets_its_line(run, tmp_path, folder):
    prompts = [dict(one) for one in PROMPTS]
    prompts[1] |= {"id": "two", "max_tokens": 2}
    prompts[2] |= {"n": 2, "temperature": 1.0, "seed": 3}
    prompts[3] |= {"logprobs": 1, "prompt_logprobs": 0}
    result = run("--prompts-file", str(write(tmp_path / "in", *prompts)), "--output", "out")
    assert result.stdout == ""
    assert "5 of 5 prompts answered" in result.stderr
    records = {record["index"]: record for record in read(tmp_path / "out")}
    assert sorted(records) == [0, 1, 2, 3, 4]
    assert records[0]["token_ids"] == reference_generate(folder, [5, 6, 7], 6)[0]
    assert records[0]["finish_reason"] == "length"
    assert records[0]["num_cached_tokens"] == 0
    assert (records[1]["id"], len(records[1]["token_ids"])) == ("two", 2)
    assert [len(one["token_ids"]) for one in records[2]["outputs"]] == [6, 6]
    assert len(records[3]["logprobs"]) == 6
    assert len(records[3]["prompt_logprobs"]) == 3
    assert records[3]["logprobs"][0][0]["token_id"] == records[3]["token_ids"][0]


def test_without_an_output_file_the_lines_go_to_stdout(run):
    result = run("--prompts-file", "-", stdin='{"prompt_token_ids": [5]}\n')
    [line] = result.stdout.splitlines()
    assert json.loads(line)["index"] == 0


def test_a_second_run_computes_only_what_is_missing(run, tmp_path, monkeypatch):
    source = str(write(tmp_path / "in", *PROMPTS))
    out = tmp_path / "out"
    run("--prompts-file", source, "--output", "out")
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[0] + lines[1] + lines[2][:40])
    asked = []
    real = LLM.generate_each

    def counting(llm, prompts, *, window):
        prompts = list(prompts)
        asked.extend(line.index for line, _, _ in prompts)
        return real(llm, prompts, window=window)

    monkeypatch.setattr(LLM, "generate_each", counting)
    result = run("--prompts-file", source, "--output", "out")
    kept = [json.loads(line)["index"] for line in lines[:2]]
    assert sorted(asked + kept) == [0, 1, 2, 3, 4]
    assert "5 of 5 prompts answered, 2 of them by an earlier run" in result.stderr
    assert out.read_bytes().startswith(lines[0] + lines[1])
    assert sorted(lines) == sorted(out.read_bytes().splitlines(keepends=True))
    # prompts may be added at the end
    asked.clear()
    write(tmp_path / "in", *PROMPTS, {"prompt_token_ids": [9]})
    run("--prompts-file", source, "--output", "out")
    assert asked == [5]


def test_a_run_with_nothing_to_do_loads_no_model(run, tmp_path, monkeypatch):
    source = str(write(tmp_path / "in", *PROMPTS))
    run("--prompts-file", source, "--output", "out")
    before = (tmp_path / "out").read_bytes()
    monkeypatch.setattr(batch, "load", lambda resolved: pytest.fail("loaded"))
    run("--prompts-file", source, "--output", "out")
    assert (tmp_path / "out").read_bytes() == before


def test_answers_to_other_prompts_are_refused_unless_overwritten(run, tmp_path):
    source = str(write(tmp_path / "in", *PROMPTS))
    run("--prompts-file", source, "--output", "out")
    before = (tmp_path / "out").read_bytes()
    result = run("--prompts-file", source, "--output", "out", "--temperature", "1", code=2)
    assert "--output" in result.stderr
    assert (tmp_path / "out").read_bytes() == before
    run("--prompts-file", source, "--output", "out", "--top-k", "1", "--overwrite")
    assert len(read(tmp_path / "out")) == 5


def test_a_prompt_that_only_the_model_can_refuse_stops_everything(run, tmp_path):
    bad = [{"prompt_token_ids": [9999]}, {"prompt": "text"}, {"prompt_token_ids": [1] * 64}]
    source = str(write(tmp_path / "in", PROMPTS[0], *bad))
    result = run("--prompts-file", source, "--output", "out", "--max-model-len", "64", code=2)
    assert "3 lines" in result.stderr
    assert "line 2: the prompt has the token id 9999" in result.stderr
    assert "line 3: the prompt is text" in result.stderr
    assert "line 4: the prompt has 64 tokens" in result.stderr
    assert not (tmp_path / "out").exists()


def test_wrong_lines_stop_everything_before_a_model_is_loaded(run, tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "load", lambda resolved: pytest.fail("loaded"))
    (tmp_path / "in").write_text('{"promt": 1}\n')
    assert "line 1" in run("--prompts-file", "in", code=2).stderr


@pytest.mark.parametrize("with_file", [True, False])
def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(run, tmp_path, monkeypatch, with_file):
    source = str(write(tmp_path / "in", *PROMPTS))
    real = LLM.generate_each

    def interrupted(llm, prompts, *, window):
        for count, one in enumerate(real(llm, prompts, window=window)):
            if count == 2:
                raise KeyboardInterrupt
            yield one

    monkeypatch.setattr(LLM, "generate_each", interrupted)
    output = ["--output", "out"] if with_file else []
    result = run("--prompts-file", source, *output, code=130)
    assert "2 of 5 prompts answered" in result.stderr
    assert ("--output" in result.stderr) is not with_file
    if with_file:
        assert len(read(tmp_path / "out")) == 2
        monkeypatch.setattr(LLM, "generate_each", real)
        run("--prompts-file", source, *output)
        assert sorted(one["index"] for one in read(tmp_path / "out")) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a prompt", "--prompts-file", "in"], "PROMPT"),
        (["--prompts-file", "in", "--format", "text"], "--format"),
        (["--prompts-file", "in", "--output", "in"], "is the file of prompts"),
        (["--prompts-file", "in", "--output", "."], "is a folder"),
        (["--prompts-file", "in", "--output", "no/where"], "does not exist"),
        (["--prompts-file", "in", "--overwrite"], "--output"),
        (["a prompt", "--output", "out"], "--prompts-file"),
        (["a prompt", "--overwrite"], "--prompts-file"),
    ],
)
def test_flags_that_do_not_go_together(run, tmp_path, arguments, says):
    write(tmp_path / "in", *PROMPTS)
    assert says in run(*arguments, code=2).stderr
    assert read(tmp_path / "in") == PROMPTS


def test_the_engine_holds_a_window_of_prompts_and_is_refilled_as_they_finish(folder):
    with LLM(folder, dtype="float32", max_model_len=64, max_num_seqs=2) as llm:
        taken, held = [], []

        def prompts():
            for i in range(10):
                taken.append(i)
                length = 20 if i == 0 else 2
                params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
                yield i, {"prompt_token_ids": [5, i]}, params

        order = []
        for i, output in llm.generate_each(prompts(), window=3):
            order.append(i)
            held.append(len(taken) - len(order))
            assert list(output.outputs[0].token_ids)
        # the long one is not waited for
        assert order[-1] == 0 or order.index(0) > 5
        assert sorted(order) == list(range(10))
        assert max(held) <= 3
        assert llm._live == {}


def test_leaving_early_leaves_nothing_in_the_engine(folder):
    with LLM(folder, dtype="float32", max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=9, n=2)
        answers = llm.generate_each([(i, [5, i], params) for i in range(4)], window=4)
        next(answers)
        answers.close()
        assert llm._live == {}
        assert not llm._engine.has_unfinished_requests
        llm.check([5], params)
        assert llm.stats().num_requests == 8


def test_text_goes_through_the_chat_template_and_the_system_message_in_front():
    class Chats:
        has_template = True

        def chat_prompt(self, messages):
            self.messages = [(m["role"], m["content"]) for m in messages]
            return [1] if self.has_template else None

    def asked(llm, form, content, **settings):
        line = types.SimpleNamespace(form=form, content=content)
        settings = {"raw": False, "system": None} | settings
        return batch.as_prompt(llm, types.SimpleNamespace(**settings), line)

    llm = Chats()
    assert asked(llm, "prompt", "hi", system="S") == {"prompt_token_ids": [1]}
    assert llm.messages == [("system", "S"), ("user", "hi")]
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "hi"}]
    asked(llm, "messages", own, system="S")
    assert llm.messages == [("system", "mine"), ("user", "hi")]
    assert asked(llm, "prompt", "hi", raw=True) == {"prompt": "hi"}
    llm.has_template = False
    assert asked(llm, "prompt", "hi") == "hi"
    for form, content, settings in (("messages", own, {}), ("prompt", "hi", {"system": "S"})):
        with pytest.raises(PromptError, match="chat template"):
            asked(llm, form, content, **settings)


def test_a_bar_is_drawn_on_a_terminal_that_shows_no_answers(monkeypatch, tmp_path):
    class Screen(io.StringIO):
        def isatty(self):
            return True

    def drawn(path):
        screen = Screen()
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setattr(sys, "stdout", Screen())
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "30")
        with batch.progress(path, 4, 1) as advance:
            advance()
        return screen.getvalue()

    assert "2/4" in drawn(tmp_path / "out")
    assert drawn(None) == ""
