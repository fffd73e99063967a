"""A Decision as a value: what it writes reads back equal, whatever is in it."""

import json

from hypothesis import given
from hypothesis import strategies as st

from runnerctl import Decision, ModelFacts, Problem
from runnerctl.decision import CountedBallot, ExplicitChoice, Need, PluginRecord

text = st.text(max_size=8)
texts = st.lists(text, max_size=3).map(tuple)
perhaps = st.none() | text
problems = st.builds(
    Problem,
    st.sampled_from(["error", "warning", "note"]),
    st.text(min_size=1, max_size=8).filter(str.strip),
    remedy=text,
    setting=perhaps,
    plugin=perhaps,
)
facts = st.builds(
    ModelFacts,
    model_type=text,
    architectures=texts,
    runner_type=st.sampled_from(["generate", "pooling"]),
    num_hidden_layers=st.none() | st.integers(),
    max_position_embeddings=st.none() | st.integers(),
    evidence=st.dictionaries(text, text, max_size=3),
    supplied_by=st.dictionaries(text, text, max_size=3),
    uncertain=texts,
    is_moe=st.booleans(),
    is_hybrid=st.booleans(),
)
decisions = st.builds(
    Decision,
    runner=perhaps,
    explicit=st.none() | st.builds(ExplicitChoice, text, text, text),
    ballots=st.lists(
        st.builds(
            CountedBallot,
            plugin=text,
            distribution=text,
            version=text,
            kind=st.sampled_from(["vote", "discourage", "require", "forbid"]),
            runner=text,
            reason=text,
            priority=st.none() | st.integers(),
            remedy=text,
            status=st.sampled_from(["decisive", "overridden", "moot"]),
            overridden_by=perhaps,
            note=text,
            by_host=st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
    problems=st.lists(problems, max_size=3).map(tuple),
    facts=st.none() | facts,
    needs=st.lists(st.builds(Need, text, text, perhaps), max_size=3).map(tuple),
    capabilities=st.dictionaries(text, texts, max_size=3),
    plugins=st.lists(
        st.builds(
            PluginRecord,
            text,
            text,
            text,
            st.sampled_from(["active", "blocked", "failed"]),
            texts,
            text,
        ),
        max_size=3,
    ).map(tuple),
)


@given(decisions, st.sampled_from([None, 2]))
def test_a_decision_reads_back_equal(decision, indent) -> None:
    written = decision.to_json(indent=indent)
    assert Decision.from_json(written) == decision
    assert Decision.from_json(written.encode()) == decision


@given(decisions)
def test_the_json_has_the_documented_keys(decision) -> None:
    plain = json.loads(decision.to_json())
    assert set(plain) == {
        "runner",
        "explicit",
        "ballots",
        "problems",
        "facts",
        "needs",
        "capabilities",
        "plugins",
        "attention",
        "parallel",
    }
    for ballot in plain["ballots"]:
        assert ballot.keys() >= {
            "plugin",
            "distribution",
            "version",
            "kind",
            "runner",
            "reason",
            "priority",
            "status",
            "overridden_by",
        }
    for problem in plain["problems"]:
        assert problem.keys() == {"severity", "message", "remedy", "setting", "plugin"}


def test_a_file_name_that_is_not_unicode_can_still_be_shown() -> None:
    decision = Decision(None, problems=(Problem("error", "caf\udce9 is no model"),))
    read = Decision.from_json(decision.to_json())
    assert read.problems[0].message == "caf? is no model"
