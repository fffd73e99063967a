"""Tokens of one request into text, deltas and a reason to end."""

from runnerctl.engine.detokenizer import IncrementalDetokenizer
from runnerctl.engine.live_request import LiveRequest
from runnerctl.engine.request import Request
from runnerctl.engine.sampling_params import SamplingParams


class Letters:
    """Token i is the i-th letter."""

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(chr(ord("a") + token) for token in token_ids)

    def is_byte_fallback(self, token_id):
        return False

    def stream(self, *, skip_special_tokens, stop):
        return IncrementalDetokenizer(self, skip_special_tokens, stop)


def letters(text):
    return [ord(letter) - ord("a") for letter in text]


def make(**params):
    params = SamplingParams(temperature=0, seed=0, **params)
    request = Request("r", [0], params, max_total_tokens=100)
    return LiveRequest(0, 0, request, Letters())


def feed(live, text):
    """The deltas while the model says `text`, as long as the request lives."""
    deltas = []
    for token in letters(text):
        if live.finished:
            break
        live.request.append(token)
        live.take_token()
        deltas += live.take_deltas()
    return deltas


def text_of(deltas):
    return "".join(delta.text for delta in deltas)


def test_each_delta_is_delivered_once_however_late_it_is_fetched():
    live = make(max_tokens=4)
    for token in letters("wxyz"):
        live.request.append(token)
        live.take_token()
    deltas = list(live.take_deltas())
    assert text_of(deltas) == "wxyz"
    assert [delta.finish_reason for delta in deltas] == [None, None, None, "length"]
    assert list(live.take_deltas()) == []


def test_a_stop_token_is_no_part_of_the_text():
    live = make(max_tokens=9, stop_token_ids=letters("d"))
    deltas = feed(live, "abcdef")
    assert text_of(deltas) == live.completion().text == "abc"
    assert deltas[-1].token_ids == tuple(letters("d"))
    assert deltas[-1].finish_reason == "stop"


def test_a_stop_string_wins_over_a_length_reached_by_the_same_token():
    live = make(max_tokens=4, stop="cd")
    deltas = feed(live, "abcdef")
    completion = live.completion()
    assert text_of(deltas) == completion.text == "ab"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "cd")
    assert deltas[-1].finish_reason == "stop"


def test_what_might_have_become_a_stop_string_is_delivered_at_the_end():
    for params, reason in (({"max_tokens": 3}, "length"), ({"stop_token_ids": [25]}, "stop")):
        live = make(stop="cd", **params)
        deltas = feed(live, "abcz")
        assert [delta.text for delta in deltas[:3]] == ["a", "b", "" if len(deltas) > 3 else "c"]
        assert text_of(deltas) == "abc"
        assert live.completion().finish_reason == reason


def test_an_aborted_request_ends_with_a_delta_that_says_so():
    live = make(max_tokens=9, stop="cd")
    assert text_of(feed(live, "abc")) == "ab"
    live.request.finish_reason = "abort"
    live.take_abort()
    live.take_abort()
    (last,) = live.take_deltas()
    assert (last.text, last.token_ids, last.finish_reason) == ("c", (), "abort")
    assert list(live.take_deltas()) == []
