"""What holds of the count whatever the ballots are."""

from hypothesis import given, settings
from hypothesis import strategies as st

from runnerctl import Discourage, Forbid, Require, RunnerSpec, Vote
from runnerctl.ballots import stamp
from runnerctl.decision import ExplicitChoice
from runnerctl.selection import count

NAMES = ("v1", "v2", "v3")
names = st.sampled_from((*NAMES, "absent"))
reasons = st.sampled_from(("r", "s"))
priorities = st.integers(-2, 2)
soft = st.builds(Vote, names, reasons, priorities) | st.builds(
    Discourage, names, reasons, priorities
)
hard = st.builds(Require, names, reasons, st.sampled_from(("", "do it"))) | st.builds(
    Forbid, names, reasons
)


def stamped(kinds):
    return st.builds(stamp, kinds, st.sampled_from("abcd"))


# mostly soft: with many hard ballots nearly every case would be a contradiction
boxes = st.tuples(st.lists(stamped(soft), max_size=8), st.lists(stamped(hard), max_size=2)).map(
    lambda parts: parts[0] + parts[1]
)


@st.composite
def elections(draw):
    provided = draw(st.sets(st.sampled_from(NAMES)))
    fallback = draw(st.sampled_from((*NAMES, None)))
    runners = {name: RunnerSpec(name, "m:f", fallback=name == fallback) for name in provided}
    explicit = draw(st.none() | st.none() | names)
    return {
        "ballots": draw(boxes),
        "runners": runners,
        "explicit": explicit and ExplicitChoice(explicit, "command line", "--runner"),
        "strict": draw(st.booleans()),
    }


def hold(election, **changed):
    return count(**{**election, **changed})


def what_counts(outcome):
    return outcome.runner, [p for p in outcome.problems if p.severity != "note"]


many = settings(max_examples=200, deadline=None)


@many
@given(elections(), st.randoms(use_true_random=False))
def test_the_outcome_does_not_depend_on_order(election, random):
    shuffled = list(election["ballots"])
    random.shuffle(shuffled)
    runners = list(election["runners"].items())
    random.shuffle(runners)
    assert hold(election, ballots=shuffled, runners=dict(runners)) == hold(election)


@many
@given(elections())
def test_the_same_ballots_give_the_same_outcome(election):
    again = [b._replace() for b in election["ballots"]]
    assert hold(election, ballots=again) == hold(election)


@many
@given(elections())
def test_every_ballot_comes_back_with_a_status(election):
    outcome = hold(election)
    assert len(outcome.ballots) == len(election["ballots"])
    for b in outcome.ballots:
        assert b.status in ("decisive", "overridden", "moot")
        assert (b.status == "overridden") == bool(b.overridden_by)


@many
@given(elections())
def test_removing_all_moot_ballots_changes_nothing(election):
    outcome = hold(election)
    kept = zip(sorted(election["ballots"]), outcome.ballots, strict=True)
    rest = [ballot for ballot, counted in kept if counted.status != "moot"]
    assert what_counts(hold(election, ballots=rest)) == what_counts(outcome)


@many
@given(elections())
def test_a_winner_is_provided_and_never_against_a_hard_ballot(election):
    winner = hold(election).runner
    if winner is not None:
        assert winner in election["runners"]
        for b in election["ballots"]:
            assert not (b.kind == "forbid" and b.runner == winner)
            assert not (b.kind == "require" and b.runner != winner)


@many
@given(elections())
def test_no_winner_always_comes_with_an_error(election):
    outcome = hold(election)
    failed = any(p.severity == "error" for p in outcome.problems)
    assert failed == (outcome.runner is None)


@many
@given(
    elections(),
    stamped(st.builds(Discourage, names, reasons, priorities) | st.builds(Forbid, names, reasons)),
)
def test_adding_a_veto_never_makes_its_runner_win(election, veto):
    before = hold(election).runner
    after = hold(election, ballots=[*election["ballots"], veto]).runner
    assert after != veto.runner or before == veto.runner


@many
@given(elections(), stamped(st.builds(Vote, names, reasons, priorities)))
def test_adding_a_vote_never_makes_its_runner_lose(election, vote):
    before = hold(election).runner
    after = hold(election, ballots=[*election["ballots"], vote]).runner
    assert before != vote.runner or after == vote.runner
