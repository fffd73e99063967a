"""Each conformance class rejects implementations that are wrong, by the test meant for that.

`wrong/` has the implementations; all of them run in one process of their own.
"""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

CASES = Path(__file__).parent / "wrong" / "cases.py"
MIXED = "test_a_ragged_batch_equals_the_reference[{}-gqa-mixed]"
NOT_CLOSE = "Tensor-likes are not close"

# wrong implementation -> the test that has to reject it, and words of the reason it has to give
BACKENDS = {
    "IgnoresTheWindow": (MIXED.format("window"), NOT_CLOSE),
    "WindowIsOneTooLong": ("test_windows_around_the_block_size[1]", NOT_CLOSE),
    "IgnoresSoftcap": (MIXED.format("softcap"), NOT_CLOSE),
    "IgnoresTheScale": ("test_the_scale_is_the_layers[0.02]", NOT_CLOSE),
    "ReadsPastTheEnd": (
        "test_a_ragged_batch_equals_the_reference[plain-mha-decode]",
        "Tensor-likes are not close",
    ),
    "ForgetsThePrefix": (MIXED.format("plain"), NOT_CLOSE),
    "TakesBlocksInOrder": (MIXED.format("plain"), NOT_CLOSE),
    "LooksAheadInChunks": (
        "test_a_ragged_batch_equals_the_reference[plain-mqa-chunks]",
        NOT_CLOSE,
    ),
    "MixesUpHeads": (MIXED.format("plain"), NOT_CLOSE),
    "WritesToTheCache": ("test_the_cache_is_read_and_not_written", "wrote to the cache"),
    "PreparesForOneLayer": ("test_one_preparation_serves_all_layers", NOT_CLOSE),
    "AnswersInFloat32": (
        "test_reduced_precision_stays_within_its_own_rounding",
        "the query was torch.bfloat16",
    ),
    "RoundsToHalf": ("test_head_sizes[128]", NOT_CLOSE),
    "ClaimsToBeCapturable": (MIXED.format("plain"), "capturable and reads a host array"),
    "DeclinesWithoutAReason": ("test_it_says_what_it_declines_in_a_sentence", "not ''"),
}
FACTS_TEST = "test_the_facts_it_supplies_depend_on_the_config_alone"
POLICIES = {
    "VotesByRegistrationOrder": (
        "test_the_order_of_plugins_does_not_matter",
        "registered as bystander_a, plugin_under_test",
    ),
    "TossesACoin": ("test_ballots_are_deterministic", "the coin says so"),
    "CountsHowOftenItIsAsked": ("test_ballots_are_deterministic", "every other time"),
    "GivesNoReason": ("test_ballots_have_reasons_that_a_user_can_read", "the vote for 'v2' is ''"),
    "GivesAReasonOverTwoLines": (
        "test_ballots_have_reasons_that_a_user_can_read",
        "the reason of the vote",
    ),
    "GivesNoRemedy": (
        "test_ballots_have_reasons_that_a_user_can_read",
        "the remedy of the require for 'v2' is ''",
    ),
    "ForbidsWithoutARemedy": (
        "test_ballots_have_reasons_that_a_user_can_read",
        "hybrid: the remedy of the forbid",
    ),
    "ImportsTorchInAHook": ("test_it_imports_nothing_heavy", "import torch"),
    "WritesToTheFacts": ("test_it_leaves_the_configuration_alone", "select_runner changed"),
    "WritesWhileValidating": ("test_it_leaves_the_configuration_alone", "changed the Decision"),
    "RaisesOnAnUnknownModel": ("test_it_raises_nothing", "KeyError"),
    "TakesLayersForGranted": (FACTS_TEST, "KeyError: 'num_hidden_layers'"),
    "GuessesFacts": (FACTS_TEST, "and then"),
    "KnowsFactsForNoReason": (FACTS_TEST, "'because'; it must be a line of words"),
    "RaisesWhileValidating": ("test_it_raises_nothing", "validate_config raises for runner 'v2'"),
    "SaysWhatIsWrongAndNotWhatToDo": ("test_problems_are_well_formed", "its remedy is ''"),
    "InventsASeverity": ("test_problems_are_well_formed", "is 'fatal'"),
    "CannotBeWrittenDown": ("test_what_it_says_can_be_written_down", "written down"),
    "MisspeltHook": ("test_it_loads", "did you mean 'select_runner'"),
    "imports_torch": (
        "test_a_fresh_process_gives_the_same_ballots_without_torch",
        "it imports torch",
    ),
    "depends_on_hashing": (
        "test_a_fresh_process_gives_the_same_ballots_without_torch",
        "in another process",
    ),
}
LEFT = "left running by"
RUNNERS = {
    "DropsAToken": ("test_a_batch", "gave tokens to"),
    "SamplesForUnfinishedPrefills": ("test_a_prefill_in_chunks", "gave tokens to"),
    "GivesProbabilities": ("test_log_probabilities_for_those_who_ask", "token "),
    "ForgetsLogprobs": ("test_log_probabilities_for_those_who_ask", "those that asked"),
    "CountsStepsItself": ("test_an_empty_plan_is_a_step_too", "says it is that of"),
    "PadsIntoBlockZero": ("test_a_request_alone", "the reference has"),
    "KeepsFinishedRequests": (
        "test_it_keeps_nothing_of_finished_requests",
        "are still in the runner",
    ),
    "KeepsBlocksOfFinishedRequests": (
        "test_it_keeps_nothing_of_finished_requests",
        "more objects in the runner",
    ),
    "IgnoresResumed": ("test_preempted_and_resumed", ""),
    "ForgetsWhatItGenerated": ("test_preempted_and_resumed", "gave tokens to"),
    "ForgetsWhoIsLeftOut": ("test_a_request_left_out_of_some_steps_goes_on", "KeyError"),
    "DrawsFromASharedStream": (
        "test_seeded_text_does_not_depend_on_the_batch",
        "it is another text",
    ),
    "HasANoiseOfItsOwn": (
        "test_the_seed_means_what_it_means_on_every_runner",
        "the reference has",
    ),
    "SwallowsErrors": (
        "test_an_error_of_a_step_is_raised_by_its_handle",
        "a request that never arrived gave",
    ),
    "RaisesFromExecute": (
        "test_an_error_of_a_step_is_raised_by_its_handle",
        "the handle should have",
    ),
    "BreaksDownAfterAnError": ("test_an_error_of_a_step_is_raised_by_its_handle", "nobody"),
    "GivesResultsAgain": ("test_a_result_is_taken_once", "DID NOT RAISE"),
    "TakesOneStepAtATime": ("test_steps_in_flight", "a step is under way"),
    "OwesNothingToFinishedRequests": (
        "test_finished_while_its_step_is_in_flight",
        "gave tokens to",
    ),
    "OwesNothingToPreemptedRequests": (
        "test_preempted_while_its_step_is_in_flight",
        "gave tokens to",
    ),
    "IsServedWithAPlugin": ("test_a_request_alone", "the reference has"),
    "CannotLoadExperts": ("test_what_it_claims_is_served[moe]", "experts are not served"),
    "PoolsPaddingToo": (
        "test_what_it_embeds_does_not_depend_on_the_batch",
        "from the reference's embedding",
    ),
    "KeepsItsMemory": ("test_shutdown_frees_memory", "are left after shutdown"),
    "IsKeptBySomebody": ("test_shutdown_frees_memory", "still refers to the runner"),
    "LeavesAThread": ("test_shutdown_ends_threads_and_processes", LEFT),
    "CannotShutDownWhatDidNotStart": (
        "test_a_failed_load_says_why_and_can_be_shut_down",
        "AttributeError",
    ),
    "HidesWhyALoadFailed": (
        "test_a_failed_load_says_why_and_can_be_shut_down",
        "RuntimeError",
    ),
}
WRONG = {**BACKENDS, **POLICIES, **RUNNERS}


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """What each test said that had to reject something; no entry if it did not fail."""
    report = tmp_path_factory.mktemp("rejects") / "report.xml"
    tests = [f"{CASES}::Test{name}::{test}" for name, (test, _) in WRONG.items()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, f"--junitxml={report}", *tests],
        cwd=CASES.parent,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("classname").rpartition(".")[2].removeprefix("Test")
        assert case.find("error") is None, case.find("error").text
        failure = case.find("failure")
        if failure is not None:
            found[name, case.get("name")] = failure.get("message") + "\n" + failure.text
    return found


@pytest.mark.parametrize("name", WRONG)
def test_it_is_rejected(failures, name):
    test, words = WRONG[name]
    assert (name, test) in failures, f"{test} accepts it"
    assert words in failures[name, test]


def test_every_wrong_implementation_is_named_here():
    named = set()
    for module in ("wrong_backends", "wrong_policies", "wrong_runners"):
        text = (CASES.parent / f"{module}.py").read_text(encoding="utf-8")
        named |= {
            line.split("(")[0].split(":")[0][6:]
            for line in text.splitlines()
            if line.startswith("class ")
        }
    helpers = {"ChangesLayers", "ChangesRequests", "ChangesPlans", "ChangesResults"}
    helpers |= {"OwesNothingTo"}
    assert named - helpers == set(WRONG) - {"imports_torch", "depends_on_hashing"}
