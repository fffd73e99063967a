"""Each rule of the count by example, and what its errors tell the user."""

import pytest

from runnerctl import Discourage, Forbid, Require, RunnerSpec, Vote
from runnerctl.ballots import stamp
from runnerctl.decision import ExplicitChoice, PluginRecord
from runnerctl.selection import count

V1 = RunnerSpec("v1", "m:V1", fallback=True)
V2 = RunnerSpec("v2", "m:V2")
V3 = RunnerSpec("v3", "m:V3")
BOTH = {"v1": V1, "v2": V2}
ALL = {**BOTH, "v3": V3}
FLAG = ExplicitChoice("v1", "command line", "--runner")


def cast(*ballots, runners=BOTH, **options):
    """Count `(plugin, ballot)` pairs."""
    return count([stamp(b, plugin) for plugin, b in ballots], runners, **options)


def statuses(outcome):
    return {(b.plugin, b.kind, b.runner): (b.status, b.overridden_by) for b in outcome.ballots}


def errors(outcome):
    return [p for p in outcome.problems if p.severity == "error"]


def only_error(outcome):
    (error,) = errors(outcome)
    assert outcome.runner is None
    return error


# rule 0


@pytest.mark.parametrize("kind", [Vote, Discourage, Forbid])
def test_a_ballot_for_a_runner_nobody_provides_has_no_effect_and_a_note_says_so(kind):
    outcome = cast(("a", kind("fastrunner", "why")), runners={**BOTH, "fast_runner": V3})
    assert outcome.runner == "v1"
    (ballot,) = outcome.ballots
    assert ballot.status == "moot"
    assert "did you mean 'fast_runner'?" in ballot.note
    (note,) = outcome.problems
    assert note.severity == "note"
    assert "'fastrunner'" in note.message
    assert "a" in note.message


def test_one_note_per_missing_runner_names_all_who_spoke_of_it():
    outcome = cast(
        ("a", Vote("x9", "r")), ("b", Discourage("x9", "r")), ("c", Vote("y9", "r")), runners=BOTH
    )
    assert [p.message.count("a, b") for p in outcome.problems] == [1, 0]


def test_a_distant_name_gets_no_suggestion():
    outcome = cast(("a", Vote("tpu", "r")))
    assert "did you mean" not in outcome.ballots[0].note


def test_requiring_a_runner_nobody_provides_says_what_to_install_or_unblock():
    blocked = PluginRecord("runner_v2", "runnerctl", "1", "blocked", error="-p no:runner_v2")
    outcome = cast(
        ("pcp", Require("v2", "PCP is on", "set --pcp to 1")),
        ("v2fan", Vote("v2", "fast")),
        runners={"v1": V1},
        unavailable=[blocked],
    )
    error = only_error(outcome)
    assert "pcp requires v2 (PCP is on)" in error.message
    assert "install" in error.remedy
    assert "runner_v2 (blocked: -p no:runner_v2)" in error.remedy
    assert "set --pcp to 1" in error.remedy
    assert statuses(outcome)["pcp", "require", "v2"] == ("decisive", None)
    assert statuses(outcome)["v2fan", "vote", "v2"] == ("moot", None)


# rule 1


def test_two_different_requires_are_an_error_with_both_reasons_and_remedies():
    outcome = cast(
        ("a", Require("v1", "old kernels", "drop --old")),
        ("b", Require("v2", "new kernels")),
    )
    error = only_error(outcome)
    for words in ("a requires v1 (old kernels)", "b requires v2 (new kernels)"):
        assert words in error.message
    assert "drop --old" in error.remedy
    assert "-p no:b" in error.remedy
    assert {s for s, _ in statuses(outcome).values()} == {"decisive"}


def test_one_plugin_can_contradict_itself():
    outcome = cast(("a", Require("v2", "yes")), ("a", Forbid("v2", "no")))
    assert "a requires v2 (yes), but a forbids v2 (no)" in only_error(outcome).message


def test_a_require_of_what_is_forbidden_is_an_error_and_other_ballots_are_moot():
    outcome = cast(
        ("pcp", Require("v2", "PCP")),
        ("host", Forbid("v2", "lacks hybrid")),
        ("x", Vote("v1", "r")),
    )
    only_error(outcome)
    assert statuses(outcome)["x", "vote", "v1"] == ("moot", None)
    assert statuses(outcome)["host", "forbid", "v2"] == ("decisive", None)


def test_hard_errors_of_all_kinds_are_reported_together():
    outcome = cast(
        ("a", Require("v1", "r1")),
        ("b", Forbid("v1", "r2")),
        ("c", Require("gone", "r3")),
        explicit=ExplicitChoice("nope", "environment", "RUNNERCTL_RUNNER"),
    )
    text = "\n".join(str(e) for e in errors(outcome))
    for words in (
        "a requires v1 (r1), but b forbids v1 (r2)",
        "nobody provides runner 'gone'",
        "plugins require different runners",
        "RUNNERCTL_RUNNER: nobody provides runner 'nope'",
    ):
        assert words in text


# rule 2


def test_an_unknown_choice_lists_the_known_runners_and_names_the_setting():
    error = only_error(
        cast(explicit=ExplicitChoice("V3", "file", "runner (run.yaml)"), runners=ALL)
    )
    assert "did you mean 'v3'" in error.message
    assert "v1, v2, v3" in error.message
    assert error.setting == "runner (run.yaml)"


def test_an_explicit_choice_beats_all_soft_ballots():
    outcome = cast(
        ("a", Vote("v2", "r", 99)),
        ("b", Discourage("v1", "r", 99)),
        ("c", Vote("v1", "r")),
        ("d", Discourage("v2", "r")),
        explicit=FLAG,
    )
    assert outcome.runner == "v1"
    by = "explicit choice (--runner)"
    assert statuses(outcome) == {
        ("a", "vote", "v2"): ("overridden", by),
        ("b", "discourage", "v1"): ("overridden", by),
        ("c", "vote", "v1"): ("moot", None),
        ("d", "discourage", "v2"): ("moot", None),
    }
    assert outcome.problems == ()


@pytest.mark.parametrize(
    "hard", [Require("v2", "PCP is on", "set --pcp to 1"), Forbid("v1", "no PCP", "set --pcp to 1")]
)
def test_an_explicit_choice_never_beats_a_hard_ballot(hard):
    outcome = cast(("pcp", hard), explicit=FLAG)
    error = only_error(outcome)
    assert error.setting == "--runner"
    assert hard.reason in error.message
    assert error.remedy == "remove --runner, or set --pcp to 1"
    assert outcome.ballots[0].status == "decisive"


def test_a_require_that_agrees_with_the_explicit_choice_is_decisive_too():
    outcome = cast(("a", Require("v1", "r")), ("b", Forbid("v2", "r")), explicit=FLAG)
    assert outcome.runner == "v1"
    assert statuses(outcome)["a", "require", "v1"] == ("decisive", None)
    assert statuses(outcome)["b", "forbid", "v2"] == ("moot", None)


# rule 3


def test_a_required_runner_beats_votes_of_any_priority():
    outcome = cast(
        ("a", Require("v1", "r")), ("z", Require("v1", "r")), ("b", Vote("v2", "r", 1000))
    )
    assert outcome.runner == "v1"
    assert statuses(outcome)["b", "vote", "v2"] == ("overridden", "a, z")


# rule 4


def test_the_highest_priority_wins_over_any_number_of_plugins():
    outcome = cast(
        ("a", Vote("v2", "r", -10)),
        ("b", Vote("v2", "r", -10)),
        ("c", Vote("v3", "r")),
        runners=ALL,
    )
    assert outcome.runner == "v3"
    assert statuses(outcome)["a", "vote", "v2"] == ("overridden", "c")


def test_at_one_priority_plugins_are_counted_and_each_only_once():
    outcome = cast(
        ("a", Vote("v2", "one")),
        ("a", Vote("v2", "two")),
        ("a", Vote("v2", "three")),
        ("b", Vote("v3", "r")),
        ("c", Vote("v3", "r")),
        runners=ALL,
    )
    assert outcome.runner == "v3"


def test_a_tie_goes_to_the_fallback_if_it_is_in_it_with_a_warning():
    fallback_last = {"a1": V2, "b1": RunnerSpec("b1", "m:B", fallback=True)}
    outcome = cast(("x", Vote("a1", "r1")), ("y", Vote("b1", "r2")), runners=fallback_last)
    assert outcome.runner == "b1"
    (warning,) = outcome.problems
    assert warning.severity == "warning"
    assert "x votes for a1 (r1); y votes for b1 (r2)" in warning.message
    assert "--runner a1|b1" in warning.remedy


def test_a_tie_without_the_fallback_goes_to_the_first_runner_by_name_not_by_plugin():
    outcome = cast(("a", Vote("v3", "r")), ("z", Vote("v2", "r")), runners=ALL)
    assert outcome.runner == "v2"


def test_a_tie_is_an_error_in_strict_mode_and_the_tied_votes_are_decisive():
    outcome = cast(
        ("a", Vote("v3", "r")),
        ("b", Vote("v2", "r")),
        ("c", Vote("v1", "r", -1)),
        runners=ALL,
        strict=True,
    )
    assert "tied" in only_error(outcome).message
    assert statuses(outcome) == {
        ("a", "vote", "v3"): ("decisive", None),
        ("b", "vote", "v2"): ("decisive", None),
        ("c", "vote", "v1"): ("overridden", "a, b"),
    }


def test_a_discouragement_cancels_votes_of_equal_priority():
    outcome = cast(("a", Vote("v2", "r", 3)), ("b", Discourage("v2", "r", 3)))
    assert outcome.runner == "v1"
    assert statuses(outcome) == {
        ("a", "vote", "v2"): ("overridden", "b"),
        ("b", "discourage", "v2"): ("decisive", None),
    }


def test_a_vote_of_higher_priority_outlives_a_discouragement():
    outcome = cast(("a", Vote("v2", "r", 4)), ("b", Discourage("v2", "r", 3)))
    assert outcome.runner == "v2"
    assert statuses(outcome) == {
        ("a", "vote", "v2"): ("decisive", None),
        ("b", "discourage", "v2"): ("overridden", "a"),
    }


def test_a_veto_of_a_runner_that_would_have_lost_is_moot():
    outcome = cast(
        ("a", Vote("v2", "r", 1)), ("b", Vote("v3", "r")), ("c", Discourage("v3", "r")), runners=ALL
    )
    assert statuses(outcome)["c", "discourage", "v3"] == ("moot", None)
    assert statuses(outcome)["b", "vote", "v3"] == ("overridden", "a")


def test_a_lower_vote_for_the_winner_is_moot():
    outcome = cast(("a", Vote("v2", "r", 1)), ("b", Vote("v2", "r", 0)))
    assert statuses(outcome)["b", "vote", "v2"] == ("moot", None)


# rules 5 and 6


def test_the_fallback_serves_when_nobody_votes():
    assert cast(runners=ALL).runner == "v1"


def test_a_discouraged_fallback_still_serves_when_no_vote_stands():
    outcome = cast(("a", Vote("v1", "r")), ("b", Discourage("v1", "r")))
    assert outcome.runner == "v1"
    assert statuses(outcome)["b", "discourage", "v1"] == ("overridden", "the fallback")


def test_when_nothing_is_left_every_reason_is_listed_with_the_ways_out():
    outcome = cast(
        ("host1", Forbid("v1", "lacks hybrid", "another model")),
        ("host2", Forbid("v2", "lacks pcp", "set --pcp to 1")),
        ("a", Vote("v2", "r")),
    )
    error = only_error(outcome)
    for words in ("lacks hybrid", "lacks pcp"):
        assert words in error.message
    assert error.remedy == "another model, or set --pcp to 1"
    assert statuses(outcome)["a", "vote", "v2"] == ("overridden", "host2")


def test_when_only_a_discouraged_runner_is_left_the_error_says_to_ask_for_it():
    outcome = cast(
        ("host", Forbid("v1", "lacks moe", "another model")),
        ("a", Vote("v2", "r", -10)),
        ("b", Discourage("v2", "unlisted", -10)),
    )
    error = only_error(outcome)
    assert "b discourages v2 (unlisted)" in error.message
    assert "choose it yourself with --runner v2" in error.remedy
    assert statuses(outcome)["b", "discourage", "v2"] == ("decisive", None)


def test_without_any_runner_the_error_says_that_no_plugin_provides_one():
    assert "no plugin provides a runner" in only_error(cast(runners={})).message


def test_origin_and_priority_are_kept_with_the_ballot():
    outcome = count([stamp(Vote("v2", "why", 7), "a", "acme", "1.2")], BOTH)
    (b,) = outcome.ballots
    assert (b.plugin, b.distribution, b.version, b.priority, b.reason) == (
        "a",
        "acme",
        "1.2",
        7,
        "why",
    )


# the host's own veto


def test_the_hosts_veto_reads_as_the_hosts_and_keeps_its_stamp():
    vote = stamp(Vote("v2", "faster"), "p2")
    veto = stamp(Forbid("v2", "it lacks moe (experts)", "use v1"), "p2")._replace(by_host=True)
    outcome = count([vote, veto], BOTH)
    (counted,) = [b for b in outcome.ballots if b.kind == "forbid"]
    assert (counted.by_host, counted.plugin) == (True, "p2")
    (beaten,) = [b for b in outcome.ballots if b.kind == "vote"]
    assert (beaten.by_host, beaten.overridden_by) == (False, "the host")

    wish = ExplicitChoice("v2", "command line", "--runner")
    message = only_error(count([vote, veto], BOTH, wish)).message
    assert "the host forbids v2: it lacks moe (experts) (v2 comes from p2)" in message
    assert "p2 forbids" not in message
