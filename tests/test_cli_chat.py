"""`runnerctl chat` over a stand-in for the engine: history, commands, Ctrl-C, a full context."""

import os
import re
import signal
import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from typer.testing import CliRunner

from runnerctl.cli.app import app
from runnerctl.cli.chat_session import ChatSession, StopNow
from runnerctl.cli.chat_terminal import StandardStreams
from runnerctl.cli.chat_wrap import WordWrap
from runnerctl.engine.outputs import StreamDelta
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.engine.stats import EngineStats
from runnerctl.errors import PromptError, UserError


@dataclass
class FakeLLM:
    """Takes a token per word of the conversation; answers with `answer`, word by word."""

    answer: str = "so it is"
    max_model_len: int = 1000
    has_chat_template: bool = True
    refuses_system: bool = False
    ends: str = "stop"
    asked: list = field(default_factory=list)
    aborted: list = field(default_factory=list)
    on_word: object = None
    closed: bool = False
    running: bool = False
    _stats: EngineStats = field(default_factory=EngineStats)

    @classmethod
    def from_resolved(cls, resolved):
        made.append(cls())
        return made[-1]

    def chat_prompt(self, messages):
        if self.refuses_system and messages[0]["role"] == "system":
            raise PromptError("the chat template does not take these messages")
        if not self.has_chat_template:
            return None
        return [1] * sum(len(m["content"].split()) for m in messages)

    def stream(self, prompts, params):
        self.asked.append((len(prompts[0]["prompt_token_ids"]), params))
        return self._stream()

    def _stream(self):
        words = self.answer.split()
        for place, word in enumerate(words):
            if self.on_word:
                self.on_word(word)
            self.running = not self.aborted
            if self.aborted:
                yield StreamDelta("r", 0, "held back", (), "abort")
                return
            ends = self.ends if place == len(words) - 1 else None
            if ends:
                self.running = False
                self._stats.num_requests += 1
                self._stats.num_cached_tokens += 2
            self._stats.step_time_s += 0.5
            yield StreamDelta("r", 0, word + " " * (ends is None), (place,), ends)

    def abort(self, request_id):
        if self.running:  # one that has ended is ignored
            self.aborted.append(request_id)

    def stats(self):
        return EngineStats(
            num_requests=self._stats.num_requests,
            num_cached_tokens=self._stats.num_cached_tokens,
            step_time_s=self._stats.step_time_s,
        )

    def close(self):
        self.closed = True


made: list[FakeLLM] = []


class Script:
    """A terminal with somebody who types these lines, and stops an answer after a word."""

    def __init__(self, *lines, interactive=True, stop_after=None):
        self.lines, self.interactive, self.stop_after = list(lines), interactive, stop_after
        self.said, self.notes = "", []

    def read(self):
        return self.lines.pop(0) if self.lines else None

    def say(self, text):
        self.said += text

    def note(self, text):
        self.notes.append(text)

    @contextmanager
    def interruptible(self):
        yield lambda: self.stop_after is not None and self.stop_after in self.said


def talk(llm, *lines, params=None, system=None, stats=False, **script):
    terminal = Script(*lines, **script)
    session = ChatSession(
        llm, params or SamplingParams(max_tokens=10), terminal, system=system, stats=stats
    )
    session.run()
    return session, terminal


def contents(session):
    return [message["content"] for message in session.messages]


def test_each_answer_sees_what_was_said_before():
    llm = FakeLLM()
    session, terminal = talk(llm, "one two", "three")
    assert terminal.said == "so it is\nso it is\n"
    assert [count for count, _ in llm.asked] == [2, 2 + 3 + 1]
    assert contents(session) == ["one two", "so it is", "three", "so it is"]
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 2


def test_empty_lines_are_not_messages():
    llm = FakeLLM()
    session, terminal = talk(llm, "", "   ", "\t")
    assert llm.asked == []
    assert (terminal.said, terminal.notes, session.messages) == ("", [], [])


def test_the_system_message_can_be_given_changed_and_shown_and_outlives_clear():
    llm = FakeLLM()
    session, terminal = talk(llm, "hi", "/system  Be very brief. ", "/clear", "/system", "yes")
    assert session.messages[0] == {"role": "system", "content": "Be very brief."}
    assert contents(session)[1:] == ["yes", "so it is"]
    assert "Be very brief." in terminal.notes[-1]
    session, _ = talk(llm, "hi", system="Be brief.")
    assert contents(session)[0] == "Be brief."


def test_a_system_message_that_the_template_refuses_changes_nothing():
    llm = FakeLLM(refuses_system=True)
    session, terminal = talk(llm, "/system Be brief.", "hi")
    assert "does not take" in terminal.notes[0]
    assert contents(session) == ["hi", "so it is"]
    with pytest.raises(PromptError):
        talk(llm, system="Be brief.")


def test_exit_ends_help_helps_and_an_unknown_command_is_not_sent():
    llm = FakeLLM()
    _, terminal = talk(llm, "/help", "/claer", "/", "/exit", "never read")
    assert llm.asked == []
    assert "/system TEXT" in terminal.notes[0]
    assert "did you mean '/clear'" in terminal.notes[1]
    assert terminal.lines == ["never read"]


def test_a_blank_in_front_sends_what_looks_like_a_command():
    session, _ = talk(FakeLLM(), " /etc is a folder")
    assert contents(session)[0] == "/etc is a folder"


def test_where_nobody_reads_the_errors_the_first_one_ends_it():
    with pytest.raises(UserError, match="/nope"):
        talk(FakeLLM(), "/nope", "hi", interactive=False)


def test_a_stopped_answer_is_aborted_and_stays_as_far_as_it_was_shown():
    llm = FakeLLM(answer="one two three four")
    session, terminal = talk(llm, "count", stop_after="two")
    assert llm.aborted == ["r"]
    assert terminal.said == "one two \n"
    assert terminal.notes == ["(stopped)"]
    assert contents(session) == ["count", "one two "]


def test_a_second_press_stops_an_answer_that_does_not_come():
    def press(word):
        if word == "two":
            raise StopNow

    llm = FakeLLM(answer="one two three", on_word=press)
    session, terminal = talk(llm, "count", "again")
    assert contents(session) == ["count", "one ", "again", "one "]
    assert terminal.notes == ["(stopped)"] * 2


def test_a_message_without_an_answer_is_forgotten():
    session, terminal = talk(FakeLLM(answer="one"), "count", stop_after="")
    assert session.messages == []
    assert "forgotten" in terminal.notes[-1]


@pytest.mark.parametrize("error", [PromptError("too long"), RuntimeError("shapes"), OSError()])
def test_an_error_leaves_the_conversation_as_it_was(error):
    def fail(word):
        raise error

    llm = FakeLLM()
    terminal = Script()
    session = ChatSession(llm, SamplingParams(), terminal)
    session.take("one")
    llm.on_word = fail
    with pytest.raises(type(error)):
        session.take("two")
    assert contents(session) == ["one", "so it is"]


def test_the_oldest_exchanges_make_room_and_it_is_said():
    llm = FakeLLM(max_model_len=20)
    session, terminal = talk(llm, "a b c d e f", "g h i", "j k l m n", system="S")
    # 1 + 9 + 3 leave the 5 that are kept for an answer; with 3 + 5 more they do not
    assert [count for count, _ in llm.asked] == [7, 13, 1 + 6 + 5]
    assert contents(session) == ["S", "g h i", "so it is", "j k l m n", "so it is"]
    assert terminal.notes == ["(the context is full: the oldest exchange was forgotten)"]


def test_a_message_that_cannot_fit_is_refused_and_the_history_kept():
    llm = FakeLLM(max_model_len=20)
    session, terminal = talk(llm, "a b", "w " * 20, "c")
    assert "message is too long" in terminal.notes[0]
    assert "20" in terminal.notes[0]
    assert contents(session) == ["a b", "so it is", "c", "so it is"]
    # one that leaves less room than usual is taken
    assert talk(llm, "w " * 18)[0].messages


@pytest.mark.parametrize(("tokens", "says"), [(3, "--max-tokens is 3"), (9, "context of 1000")])
def test_an_answer_that_is_cut_off_says_by_what(tokens, says):
    _, terminal = talk(FakeLLM(ends="length"), "hi", params=SamplingParams(max_tokens=tokens))
    assert says in terminal.notes[0]


def test_stats_are_those_of_each_answer():
    _, terminal = talk(FakeLLM(), "one two", "three", stats=True)
    first, second = terminal.notes
    assert first.startswith("(2 prompt tokens, 2 of them cached, 3 generated")
    assert second.startswith("(6 prompt tokens, 2 of them cached, 3 generated")
    assert first.endswith("2.0 tokens/s)")


def test_a_model_without_a_chat_template_is_refused_at_the_start():
    with pytest.raises(PromptError, match="no chat template"):
        ChatSession(FakeLLM(has_chat_template=False), SamplingParams(), Script())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one two three", "one two \nthree"),
        ("exactly10c and", "exactly10c\nand"),
        ("a\n    b c d e f", "a\n    b c d \ne f"),
        ("你好你好你好", "你好你好你\n好"),
        ("ab 🌊🌊🌊🌊", "ab 🌊🌊🌊\n🌊"),
        ("longer than ten", "longer \nthan ten"),
        ("abcdefghijklm no", "abcdefghijklm no"),
        ("abcdefghijklm nopqrstuv", "abcdefghijklm \nnopqrstuv"),
        ("e\u0301" * 10 + " x", "e\u0301" * 10 + "\nx"),
    ],
)
def test_a_narrow_window_gets_whole_words(text, shown):
    for size in (1, 3, len(text)):
        wrap = WordWrap(lambda: 10)
        pieces = [wrap.add(text[i : i + size]) for i in range(0, len(text), size)]
        assert "".join(pieces) + wrap.flush() == shown


def test_the_first_ctrl_c_is_remembered_and_the_second_raises(monkeypatch):
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
    before = signal.getsignal(signal.SIGINT)
    with StandardStreams().interruptible() as stopped:
        assert not stopped()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped()
        with pytest.raises(StopNow):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_without_a_terminal_ctrl_c_ends_the_program():
    assert not StandardStreams().interactive
    with StandardStreams().interruptible() as stopped, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert not stopped()


@pytest.fixture
def command(monkeypatch, tmp_path):
    module = types.ModuleType("runnerctl.engine.llm")
    module.LLM = FakeLLM
    monkeypatch.setitem(sys.modules, "runnerctl.engine.llm", module)
    for name in ("RUNNERCTL_RUNNER", "VLLM_USE_V2_MODEL_RUNNER", "RUNNERCTL_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], '
        '"num_attention_heads": 4, "num_hidden_layers": 2}'
    )
    made.clear()

    def run(*arguments, stdin, code=0):
        result = CliRunner().invoke(app, ["chat", "--model", ".", *arguments], input=stdin)
        assert result.exit_code == code, result.output
        return result

    return run


def test_each_piped_line_is_a_turn_and_stdout_holds_the_answers_only(command):
    result = command("--stats", "--temperature", "0.5", stdin="one two\n\nthree")
    assert result.stdout == "so it is\nso it is\n"
    assert "v2 serves ." in result.stderr
    assert "cached" in result.stderr
    (llm,) = made
    assert [count for count, _ in llm.asked] == [2, 6]
    assert llm.asked[0][1].temperature == 0.5
    assert llm.closed


def test_the_command_gives_the_system_message_on(command):
    command("--system", "Be brief.", stdin="one two\n")
    assert made[0].asked[0][0] == 4
    assert "--system" in command("--system", "caf\udce9", stdin="", code=2).stderr


def test_a_wrong_line_in_a_pipe_exits_with_2(command):
    result = command(stdin="hi\n/nope\nhi\n", code=2)
    assert result.stdout == "so it is\n"
    assert "/nope" in result.stderr
    assert made[0].closed


def test_flags_for_several_answers_and_for_numbers_are_not_there(command):
    for flag in ("-n", "--logprobs", "--prompt-logprobs"):
        assert flag in command(flag, "2", stdin="", code=2).stderr


def test_a_real_conversation_in_a_pipe_takes_its_history_from_the_cache(smollm2):
    arguments = ["--stats", "--max-tokens", "20", "--max-model-len", "512"]
    result = CliRunner().invoke(app, ["chat", *arguments], input="Hello, who are you?\nAnd you?\n")
    assert result.exit_code == 0, result.output
    cached = re.findall(r"(\d+) of\s+them\s+cached", result.stderr)
    assert cached[0] == "0"
    assert int(cached[1]) >= 32
    assert len(result.stdout.splitlines()) >= 2
