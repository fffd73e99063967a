"""The sums are right, and what is no journal is said to be none."""

import json

import pytest
import runnerctl_journal

from runnerctl import UserError

REQUEST = {
    "event": "request",
    "num_prompt_tokens": 4,
    "num_generated_tokens": 3,
    "finish_reason": "stop",
    "time_to_first_token_s": 0.5,
}
LINES = [
    {"event": "decision", "runner": "v1"},
    {"event": "decision", "runner": None},
    {"event": "an event of a later version"},
    REQUEST,
    {**REQUEST, "finish_reason": "abort", "time_to_first_token_s": None},
]


def written(path, lines, end="\n"):
    path.write_text("\n".join(map(json.dumps, lines)) + end)
    return path


def test_the_sums(tmp_path):
    assert runnerctl_journal.summary(runnerctl_journal.read(written(tmp_path / "log", LINES))) == {
        "decisions": "1 none, 1 v1",
        "requests": "2: 1 abort, 1 stop",
        "prompt tokens": 8,
        "generated tokens": 6,
        "first token after": "0.500 s (median), 0.500 s at most",
    }
    assert runnerctl_journal.summary([])["requests"] == "0"


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    log = written(tmp_path / "log", LINES, end='\n{"event": "requ')
    assert len(runnerctl_journal.read(log)) == 4


@pytest.mark.parametrize("text", ["words\n", "[]\n", "{}\n", "3\n"])
def test_what_is_no_journal(tmp_path, text):
    (tmp_path / "log").write_text(text)
    with pytest.raises(UserError, match="is not a journal"):
        runnerctl_journal.read(tmp_path / "log")


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        runnerctl_journal.read(tmp_path / "nowhere")
