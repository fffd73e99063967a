"""Embedding and classifying: equal to a plain forward of transformers on each text alone."""

import json
import random
import shutil
from dataclasses import FrozenInstanceError

import pytest
import torch
from safetensors.torch import load_file, save_file

from runnerctl import LLM, PoolingParams, decide
from runnerctl.errors import ModelError, PromptError, UserError
from runnerctl.runner.pooling_model import PoolingModel
from runnerctl_runner_v1.pooling_runner import groups
from tiny_models import make_tiny_model
from tiny_pooling_models import (
    CLASSIFIERS,
    EMBEDDING,
    VOCAB_SIZE,
    WORDS,
    add_modules,
    add_tokenizer,
    make_pooling_model,
    reference_hidden,
    reference_scores,
    write_json,
)

LENGTHS = (3, 17, 8, 30, 1, 16, 9, 17)
CLASSIFIER = "AutoModelForSequenceClassification"


def make_prompts(lengths=LENGTHS, seed=0):
    numbers = random.Random(seed)
    # above every special token: they are another test's subject
    return [[numbers.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in lengths]


PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def make(model_type, **how):
        key = json.dumps([model_type, how], sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp(model_type)
            made[key] = make_pooling_model(model_type, folder, **how)
        return made[key]

    return make


@pytest.fixture
def bert(models, tmp_path):
    """A bert of one's own, to change."""
    return shutil.copytree(models("bert"), tmp_path / "bert")


def assert_close(said, expected):
    expected = torch.as_tensor(expected)
    assert expected.abs().max() > 1e-3  # or the comparison would prove nothing
    torch.testing.assert_close(torch.tensor(said), expected, rtol=1e-5, atol=1e-5)


def embeddings(llm, prompts=PROMPTS, params=None):
    return [output.embedding for output in llm.embed(prompts, params)]


def watch_forwards(llm):
    """The texts of each forward from here on."""
    model = llm._engine._executor._runner._loaded.model
    forwards, forward = [], model.forward

    def watched(texts, token_types=None):
        forwards.append([list(text) for text in texts])
        return forward(texts, token_types)

    model.forward = watched
    return forwards


# Equal to transformers, alone and in company


@pytest.mark.parametrize("model_type", EMBEDDING)
def test_embeddings_are_those_of_a_plain_forward(models, model_type):
    folder = models(model_type)
    causal = EMBEDDING[model_type][1]
    with LLM(folder) as llm:
        alone = [embeddings(llm, [prompt])[0] for prompt in PROMPTS]
        forwards = watch_forwards(llm)
        together = embeddings(llm)
        assert llm.decision.runner == "v1"
        assert ("last-token" if causal else "mean") in llm.stats().pooling
    assert len(forwards) < len(PROMPTS)
    assert max(len({len(text) for text in texts}) for texts in forwards) > 1  # something is padded
    for prompt, one, other in zip(PROMPTS, alone, together, strict=True):
        hidden = reference_hidden(folder, prompt)
        expected = hidden[-1] if causal else hidden.mean(0)
        assert_close(one, expected)
        assert_close(other, expected)


@pytest.mark.parametrize("model_type", CLASSIFIERS)
def test_classes_are_those_of_a_plain_forward(models, model_type):
    folder = models(model_type, auto=CLASSIFIER, num_labels=3)
    with LLM(folder) as llm:
        alone = [llm.classify([prompt])[0].probs for prompt in PROMPTS]
        forwards = watch_forwards(llm)
        together = llm.classify(PROMPTS)
    assert len(forwards) < len(PROMPTS)
    assert max(len({len(text) for text in texts}) for texts in forwards) > 1  # something is padded
    for prompt, one, output in zip(PROMPTS, alone, together, strict=True):
        expected = reference_scores(folder, prompt).softmax(-1)
        assert_close(one, expected)
        assert_close(output.probs, expected)
        assert output.label == f"LABEL_{int(expected.argmax())}"
        assert output.prompt_token_ids == tuple(prompt)
    assert len({round(output.probs[0], 2) for output in together}) > 2  # texts differ


def test_tokens_that_are_the_padding_token_are_read_as_transformers_reads_them(models):
    """RoBERTa counts positions over them, and a decoder's classifier looks before the last."""
    pad = EMBEDDING["roberta"][0]["pad_token_id"]
    prompts = [[*PROMPTS[1][:6], pad, *PROMPTS[1][6:]], [*PROMPTS[2], 0, 0], PROMPTS[3]]
    with LLM(models("roberta")) as llm:
        for prompt, said in zip(prompts, embeddings(llm, prompts), strict=True):
            assert_close(said, reference_hidden(models("roberta"), prompt).mean(0))
    folder = models("llama", auto=CLASSIFIER, num_labels=3)
    with LLM(folder) as llm:
        for prompt, output in zip(prompts, llm.classify(prompts), strict=True):
            assert_close(output.probs, reference_scores(folder, prompt).softmax(-1))


# Models that padding would disturb


@pytest.mark.parametrize(("model_type", "together"), [("llama", "alone"), ("gpt2", "alone")])
def test_a_decoder_without_a_padding_token_classifies_one_by_one(models, model_type, together):
    folder = models(model_type, auto=CLASSIFIER, num_labels=2, pad_token_id=None)
    with LLM(folder) as llm:
        assert llm._engine._executor._runner._loaded.model.together == together
        assert "one by one" in llm.stats().pooling
        for prompt, output in zip(PROMPTS, llm.classify(PROMPTS), strict=True):
            assert_close(output.probs, reference_scores(folder, prompt).softmax(-1))


def test_a_model_that_mixes_tokens_without_a_mask_reads_equal_lengths_together(tmp_path):
    """FNet takes Fourier transforms over the whole row, padding included."""
    from transformers import FNetConfig, FNetModel

    from tiny_pooling_models import _SIZES, randomise

    model = FNetModel(FNetConfig(**_SIZES))
    randomise(model)
    model.save_pretrained(tmp_path)
    with LLM(tmp_path) as llm:
        forwards = watch_forwards(llm)
        said = embeddings(llm)
        assert "beside others of their length only" in llm.stats().pooling
    assert sorted(map(len, forwards)) == [1, 1, 1, 1, 1, 1, 2]
    for prompt, one in zip(PROMPTS, said, strict=True):
        assert_close(one, reference_hidden(tmp_path, prompt).mean(0))


def test_a_classifier_that_looks_at_the_last_column_is_found(tmp_path):
    """XLNet's summary is the last column, which is padding in a row that is padded."""
    from transformers import XLNetConfig, XLNetForSequenceClassification

    from tiny_pooling_models import randomise

    sizes = {"vocab_size": VOCAB_SIZE, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
    model = XLNetForSequenceClassification(XLNetConfig(**sizes, num_labels=3))
    randomise(model)
    model.save_pretrained(tmp_path)
    with LLM(tmp_path) as llm:
        assert llm._engine._executor._runner._loaded.model.together == "equal lengths"
        for prompt, output in zip(PROMPTS, llm.classify(PROMPTS), strict=True):
            assert_close(output.probs, reference_scores(tmp_path, prompt).softmax(-1))


def test_the_trial_sees_a_mask_that_is_ignored(models, monkeypatch):
    from transformers import AutoModel

    model = AutoModel.from_pretrained(models("bert")).eval()
    assert PoolingModel(model, classifies=False).together == "padded"
    forward = type(model).forward

    def ignores_the_mask(self, input_ids, attention_mask=None, **more):
        return forward(self, input_ids, **more)

    monkeypatch.setattr(type(model), "forward", ignores_the_mask)
    assert PoolingModel(model, classifies=False).together == "equal lengths"


def test_groups_keep_similar_lengths_together_and_every_text_once():
    lengths = [100, 10, 99, 9, 50, 100, 1, 10, 48]
    made = groups(lengths, "padded")
    assert sorted(i for group in made for i in group) == list(range(9))
    assert [sorted(lengths[i] for i in group) for group in made] == [
        [50, 99, 100, 100],
        [48],
        [9, 10, 10],
        [1],
    ]
    for group in made:
        texts = [lengths[i] for i in group]
        assert sum(texts) >= 0.8 * max(texts) * len(texts)
    equal = groups(lengths, "equal lengths")
    assert all(len({lengths[i] for i in group}) == 1 for group in equal)
    assert sorted(map(len, equal)) == [1, 1, 1, 1, 1, 2, 2]
    assert [len(group) for group in groups(lengths, "alone")] == [1] * 9
    assert groups([], "padded") == []


def test_a_model_that_reads_no_tokens_is_refused(tmp_path):
    """CANINE reads characters, and has no table of tokens."""
    from transformers import CanineConfig, CanineModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    CanineModel(CanineConfig(**sizes, intermediate_size=64)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="CanineModel cannot be run on tokens alone"):
        LLM(tmp_path)


# How a model pools


def pooled_by_hand(hidden, mode):
    count = hidden.shape[0]
    weights = torch.arange(1, count + 1.0)
    return {
        "cls": lambda: hidden[0],
        "last": lambda: hidden[-1],
        "mean": lambda: hidden.mean(0),
        "max": lambda: hidden.max(0).values,
        "mean_sqrt_len": lambda: hidden.sum(0) / count**0.5,
        "weighted_mean": lambda: (hidden * weights[:, None]).sum(0) / weights.sum(),
    }[mode]()


MODES = {
    "cls_token": "cls",
    "lasttoken": "last",
    "mean_tokens": "mean",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": "weighted_mean",
}


@pytest.mark.parametrize(("name", "mode"), MODES.items())
def test_the_models_own_files_say_how_it_pools(bert, name, mode):
    add_modules(bert, [name])
    with LLM(bert) as llm:
        said = embeddings(llm)
        assert "1_Pooling/config.json of the model" in llm.stats().pooling
    for prompt, one in zip(PROMPTS, said, strict=True):
        assert_close(one, pooled_by_hand(reference_hidden(bert, prompt), mode))


@pytest.mark.parametrize("mode", MODES.values())
def test_a_request_may_ask_for_another_pooling(models, mode):
    folder = models("bert")
    with LLM(folder) as llm:
        said = embeddings(llm, params=PoolingParams(pooling=mode, normalize=True))
        plain = embeddings(llm, params=PoolingParams(pooling=mode))
    for prompt, one, other in zip(PROMPTS, said, plain, strict=True):
        expected = pooled_by_hand(reference_hidden(folder, prompt), mode)
        assert_close(other, expected)
        assert_close(one, expected / expected.norm())


def test_several_poolings_are_concatenated_in_the_library_s_order(bert):
    add_modules(bert, ["mean_tokens", "cls_token"])
    with LLM(bert) as llm:
        [said] = embeddings(llm, [PROMPTS[1]])
    hidden = reference_hidden(bert, PROMPTS[1])
    assert_close(said, torch.cat([hidden[0], hidden.mean(0)]))


def test_the_newer_spelling_of_the_pooling_file(bert):
    add_modules(bert, [], pooling={"pooling_mode": "lasttoken"})
    with LLM(bert) as llm:
        [said] = embeddings(llm, [PROMPTS[1]])
    assert_close(said, reference_hidden(bert, PROMPTS[1])[-1])


def add_dense(folder, name, size, activation, seed=0):
    weight = torch.randn(size, generator=torch.Generator().manual_seed(seed)) / 4
    bias = torch.linspace(-1, 1, size[0])
    config = {
        "in_features": size[1],
        "out_features": size[0],
        "bias": True,
        "activation_function": f"torch.nn.modules.activation.{activation}",
    }
    write_json(folder / name / "config.json", config)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / name / "model.safetensors")
    return weight, bias


def test_dense_layers_and_normalising(bert):
    others = [("Dense", "2_Dense"), ("Dense", "3_Dense"), ("Normalize", "4_Normalize")]
    add_modules(bert, ["mean_tokens"], *others)
    weight, bias = add_dense(bert, "2_Dense", (48, 32), "Tanh")
    last, shift = add_dense(bert, "3_Dense", (16, 48), "Identity", seed=1)
    with LLM(bert) as llm:
        said = embeddings(llm)
        short = embeddings(llm, params=PoolingParams(dimensions=8))
        raw = embeddings(llm, params=PoolingParams(normalize=False))
        assert (
            llm.stats().pooling
        ) == "mean pooling (1_Pooling/config.json of the model), 2 dense, normalized"
        with pytest.raises(UserError, match="dimensions is 17, but embeddings of this model have"):
            embeddings(llm, params=PoolingParams(dimensions=17))
        assert_close(embeddings(llm)[0], said[0])  # and it goes on
    for prompt, one, cut, plain in zip(PROMPTS, said, short, raw, strict=True):
        hidden = (weight @ reference_hidden(bert, prompt).mean(0) + bias).tanh()
        expected = last @ hidden + shift
        assert_close(plain, expected)
        assert_close(one, expected / expected.norm())
        assert_close(cut, expected[:8] / expected[:8].norm())


def test_a_dense_layer_is_never_unpickled(bert):
    add_modules(bert, ["mean_tokens"], ("Dense", "2_Dense"))
    add_dense(bert, "2_Dense", (16, 32), "Tanh")
    (bert / "2_Dense" / "model.safetensors").rename(bert / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights are not read"):
        LLM(bert)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "torch.nn.modules.activation.Evil"}, "activation 'Evil'"),
        ({"out_features": 17}, "does not fit its config.json"),
        ({"bias": False}, "does not fit its config.json"),
    ],
)
def test_a_dense_layer_that_is_not_what_its_config_says(bert, change, message):
    add_modules(bert, ["mean_tokens"], ("Dense", "2_Dense"))
    add_dense(bert, "2_Dense", (16, 32), "Tanh")
    file = bert / "2_Dense" / "config.json"
    write_json(file, json.loads(file.read_text()) | change)
    with pytest.raises(ModelError, match=message):
        LLM(bert)


@pytest.mark.parametrize(
    ("modes", "others", "message"),
    [
        (["mean_tokens"], [("LSTM", "2_LSTM")], "a module 'LSTM' that is not known here"),
        (["mean_tokens"], [("Normalize", "n"), ("Dense", "d")], "a module 'Dense' that is not"),
        (["attention_tokens"], [], "names the pooling attention_tokens"),
        ([], [], "names no pooling"),
    ],
)
def test_modules_that_are_not_known_are_refused(bert, modes, others, message):
    add_modules(bert, modes, *others)
    with pytest.raises(ModelError, match=message):
        LLM(bert)


def test_a_generating_architecture_with_pooling_files_embeds(tmp_path):
    """As Qwen3-Embedding comes: its config says Qwen3ForCausalLM, its modules.json pools."""
    make_tiny_model("qwen3", tmp_path)
    add_modules(tmp_path, ["lasttoken"], ("Normalize", "2_Normalize"))
    decision = decide(tmp_path)
    assert decision.runner == "v1"
    assert [need.capability for need in decision.needs] == ["pooling"]
    with LLM(tmp_path) as llm:
        said = embeddings(llm)
    for prompt, one in zip(PROMPTS, said, strict=True):
        last = reference_hidden(tmp_path, prompt)[-1]
        assert_close(one, last / last.norm())


# Classifiers


@pytest.mark.parametrize(
    ("how", "activate"),
    [
        ({"num_labels": 1}, lambda scores: scores),
        ({"num_labels": 2}, lambda scores: scores.softmax(-1)),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"num_labels": 3, "problem_type": "regression"}, lambda scores: scores),
    ],
)
@pytest.mark.parametrize("model_type", ["bert", "llama"])
def test_what_becomes_of_scores(models, model_type, how, activate):
    folder = models(model_type, auto=CLASSIFIER, **how)
    with LLM(folder) as llm:
        said = llm.classify(PROMPTS)
        raw = llm.classify(PROMPTS, PoolingParams(activation=False))
    for prompt, output, plain in zip(PROMPTS, said, raw, strict=True):
        scores = reference_scores(folder, prompt)
        assert_close(output.probs, activate(scores))
        assert_close(plain.probs, scores)


def test_labels_are_those_of_the_config(models, tmp_path):
    names = {0: "anger", 1: "joy", 2: "fear"}
    folder = make_pooling_model("bert", tmp_path, auto=CLASSIFIER, id2label=names)
    with LLM(folder) as llm:
        outputs = llm.classify(PROMPTS)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.label == names[int(reference_scores(folder, prompt).argmax())]
        assert output.labels == ("anger", "joy", "fear")
    with pytest.raises(FrozenInstanceError):
        outputs[0].label = "joy"


# Limits: the budget, the number of texts, the length of a text


def watch_steps(llm):
    plans, execute = [], llm._engine._executor.execute

    def watched(plan):
        plans.append(plan)
        return execute(plan)

    llm._engine._executor.execute = watched
    return plans


@pytest.mark.parametrize(
    "settings", [{"max_num_batched_tokens": 40}, {"max_num_seqs": 3}, {"max_num_seqs": 1}]
)
def test_steps_keep_to_the_settings_and_texts_are_computed_whole(models, settings):
    folder = models("bert")
    with LLM(folder) as llm:
        expected = embeddings(llm)
    with LLM(folder, **settings) as llm:
        plans = watch_steps(llm)
        said = embeddings(llm)
        stats = llm.stats()
    for one, other in zip(said, expected, strict=True):
        assert_close(one, other)
    sizes = [len(plan.num_scheduled_tokens) for plan in plans]
    assert sum(sizes) == len(PROMPTS)
    assert max(sizes) == settings.get("max_num_seqs", max(sizes))
    budget = settings.get("max_num_batched_tokens", 2048)
    assert all(plan.total_num_scheduled_tokens <= budget for plan in plans)
    assert all(not plan.cached_requests for plan in plans)
    assert all(new.block_ids == () for plan in plans for new in plan.new_requests)
    assert (stats.num_steps, stats.num_requests) == (len(plans), len(PROMPTS))
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (sum(LENGTHS), 0)
    assert stats.num_aborted == 0


def test_a_text_beyond_a_budget_that_was_set_is_refused_and_names_it(models):
    with LLM(models("bert"), max_num_batched_tokens=16) as llm:
        embeddings(llm, [PROMPTS[5]])
        with pytest.raises(PromptError, match=r"prompt 1 has 17 tokens, but the limit is 16") as e:
            embeddings(llm, [PROMPTS[5], PROMPTS[1]])
    assert "max_num_batched_tokens" in str(e.value)


def test_a_text_beyond_the_default_budget_has_a_step_to_itself(tmp_path):
    folder = make_pooling_model("modernbert", tmp_path, max_position_embeddings=4096)
    long = make_prompts([2100], seed=3)[0]
    with LLM(folder) as llm:
        plans = watch_steps(llm)
        said = embeddings(llm, [PROMPTS[0], long, PROMPTS[1]])
    assert [len(plan.new_requests) for plan in plans] == [1, 2]
    assert_close(said[1], reference_hidden(folder, long).mean(0))


def test_lengths_are_those_the_model_has_positions_for(models):
    with LLM(models("roberta")) as llm:
        assert llm.max_model_len == 64  # of 66 rows, two are before the first position
        [longest] = make_prompts([64])
        assert_close(
            embeddings(llm, [longest])[0], reference_hidden(models("roberta"), longest).mean(0)
        )
        with pytest.raises(PromptError, match=r"65 tokens, but the limit is 64 .config.json"):
            embeddings(llm, make_prompts([65]))
    with pytest.raises(UserError, match="65, but the model has positions for 64"):
        LLM(models("roberta"), max_model_len=65)
    with LLM(models("roberta"), max_model_len=10) as llm, pytest.raises(PromptError) as caught:
        embeddings(llm, make_prompts([11]))
    assert "the limit is 10 (max_model_len=)" in str(caught.value)


def test_the_length_a_model_was_trained_for_may_be_raised_to_its_positions(bert):
    add_modules(bert, ["mean_tokens"])
    write_json(bert / "sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": False})
    [long] = make_prompts([64])
    with LLM(bert) as llm:
        with pytest.raises(PromptError, match=r"the limit is 20 .sentence_bert_config.json"):
            embeddings(llm, [long])
        cut = embeddings(llm, [long], PoolingParams(truncate_prompt_tokens=-1))
        assert_close(cut[0], reference_hidden(bert, long[:20]).mean(0))
        cut = llm.embed([long], PoolingParams(truncate_prompt_tokens=7))
        assert cut[0].prompt_token_ids == tuple(long[:7])
    with LLM(bert, max_model_len=64) as llm:
        assert_close(embeddings(llm, [long])[0], reference_hidden(bert, long).mean(0))


# Text: special tokens, cutting, pairs, instructions


def ids_of(*words):
    return [1, *[4 + WORDS.index(word) for word in words], 2]


def test_text_has_its_special_tokens_also_when_it_is_cut(bert):
    add_tokenizer(bert)
    texts = ["w1 w2 w3", "w7 " * 9, "w5", "nothing of that"]
    ids = [ids_of("w1", "w2", "w3"), ids_of(*["w7"] * 9), ids_of("w5"), [1, 3, 3, 3, 2]]
    with LLM(bert) as llm:
        outputs = llm.embed(texts)
        mixed = llm.embed(["w5", {"prompt_token_ids": ids[0]}, {"prompt": "w7 " * 9}])
        cut = llm.embed(["w7 " * 9, "w5"], PoolingParams(truncate_prompt_tokens=5))
        with pytest.raises(UserError, match="truncate_prompt_tokens is 1, which leaves no room"):
            llm.embed("w5", PoolingParams(truncate_prompt_tokens=1))
    assert [list(output.prompt_token_ids) for output in outputs] == ids
    assert [list(output.prompt_token_ids) for output in mixed] == [ids[2], ids[0], ids[1]]
    assert [list(o.prompt_token_ids) for o in cut] == [ids_of(*["w7"] * 3), ids[2]]
    for one, output in zip(ids, outputs, strict=True):
        assert_close(output.embedding, reference_hidden(bert, one).mean(0))


def test_a_tokenizer_that_pads_and_cuts_by_itself_is_told_not_to(bert):
    """Some checkpoints were saved with the settings of their last use."""
    add_tokenizer(bert)
    content = json.loads((bert / "tokenizer.json").read_text())
    padding = {"strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": None}
    content["padding"] = padding | {"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
    content["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["truncation"]["direction"] = "Right"
    write_json(bert / "tokenizer.json", content)
    with LLM(bert) as llm:
        outputs = llm.embed(["w1 w2 w3", "w5"])
    assert [list(o.prompt_token_ids) for o in outputs] == [ids_of("w1", "w2", "w3"), ids_of("w5")]


def test_a_pair_of_texts_has_its_token_types(models, tmp_path):
    folder = shutil.copytree(models("bert", auto=CLASSIFIER, num_labels=1), tmp_path / "m")
    add_tokenizer(folder)
    pairs = [("w1 w2", "w3"), ("w9", "w8 w7 w6 w5"), ("w1 w2", "w4")]
    with LLM(folder) as llm:
        outputs = llm.classify(
            [*({"prompt": first, "text_pair": second} for first, second in pairs), "w1 w2"]
        )
    for (first, second), output in zip(pairs, outputs[:3], strict=True):
        head, tail = ids_of(*first.split()), ids_of(*second.split())[1:]
        assert list(output.prompt_token_ids) == head + tail
        types = [0] * len(head) + [1] * len(tail)
        assert_close(output.probs, reference_scores(folder, head + tail, types))
    plain = reference_scores(folder, list(outputs[0].prompt_token_ids))
    assert abs(float(plain) - outputs[0].probs[0]) > 1e-3  # the types matter
    assert_close(outputs[3].probs, reference_scores(folder, ids_of("w1", "w2")))


def test_a_model_without_token_types_reads_pairs_too(models, tmp_path):
    folder = shutil.copytree(models("distilbert", auto=CLASSIFIER, num_labels=2), tmp_path / "m")
    add_tokenizer(folder)
    with LLM(folder) as llm:
        [output] = llm.classify([{"prompt": "w1 w2", "text_pair": "w3"}])
    assert list(output.prompt_token_ids) == [*ids_of("w1", "w2"), *ids_of("w3")[1:]]
    expected = reference_scores(folder, list(output.prompt_token_ids)).softmax(-1)
    assert_close(output.probs, expected)


def test_instructions_of_the_model_and_its_case(bert):
    add_tokenizer(bert)
    add_modules(bert, ["mean_tokens"])
    write_json(bert / "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": True})
    prompts = {"query": "w10 w11 ", "document": ""}
    instructions = {"prompts": prompts, "default_prompt_name": None}
    write_json(bert / "config_sentence_transformers.json", instructions)

    def said(name, text="W1 w2"):
        [output] = llm.embed(text, PoolingParams(prompt_name=name))
        return list(output.prompt_token_ids)

    with LLM(bert) as llm:
        assert said(None) == said("document") == said("") == ids_of("w1", "w2")
        assert said("query") == ids_of("w10", "w11", "w1", "w2")
        with pytest.raises(UserError, match=r"no prompt 'passage' .*has: query, document"):
            said("passage")
    write_json(
        bert / "config_sentence_transformers.json", instructions | {"default_prompt_name": "query"}
    )
    with LLM(bert) as llm:
        assert said(None) == ids_of("w10", "w11", "w1", "w2")
        assert said("") == ids_of("w1", "w2")
    add_modules(bert, ["mean_tokens"], pooling={"include_prompt": False})
    with LLM(bert) as llm:
        assert said("") == ids_of("w1", "w2")
        with pytest.raises(UserError, match=r"leaves the tokens of the prompt 'query' out"):
            said(None)


def test_the_tokenizer_s_length_counts_where_nothing_else_says_one(bert):
    add_tokenizer(bert, longest=30)
    add_modules(bert, ["mean_tokens"])
    with LLM(bert) as llm, pytest.raises(PromptError, match=r"limit is 30 .tokenizer_config.json"):
        llm.embed(make_prompts([31]))


# What a decision says


def test_settings_of_the_cache_and_its_attention_have_no_part_and_a_note_says_so(models):
    decision = decide(models("bert"), attention_backend="sdpa", num_gpu_blocks_override=1)
    assert decision.runner == "v1"
    assert decision.attention == ()
    notes = {note.setting for note in decision.problems if "no part in pooling" in note.message}
    assert notes == {"attention_backend=", "num_gpu_blocks_override="}
    with LLM(models("bert"), num_gpu_blocks_override=1) as llm:
        assert len(llm.embed(PROMPTS)) == len(PROMPTS)
    assert not [note for note in decide(models("bert")).problems if "part" in note.message]
    assert decide({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}).attention


# Wrong calls


def test_calls_of_the_wrong_kind_say_what_to_call(models, tmp_path):
    with LLM(models("bert")) as llm:
        chat = [{"role": "user", "content": "hi"}]
        calls = (llm.generate, llm.check, lambda p: next(llm.stream(p)), lambda _: llm.chat(chat))
        for wrong in calls:
            with pytest.raises(UserError, match=r"does not generate text[^$]*call LLM.embed"):
                wrong([PROMPTS[0]])
        with pytest.raises(UserError, match=r"no labels\n  call LLM.embed"):
            llm.classify([PROMPTS[0]])
    with LLM(models("bert", auto=CLASSIFIER, num_labels=3)) as llm:
        with pytest.raises(UserError, match=r"does not generate text[^$]*call LLM.classify"):
            llm.generate([PROMPTS[0]])
        with pytest.raises(UserError, match=r"gives no embeddings\n  call LLM.classify"):
            llm.embed([PROMPTS[0]])
    llama = make_tiny_model("llama", tmp_path)
    with LLM(llama) as llm, pytest.raises(UserError, match=r"does not do\n  call LLM.generate"):
        llm.embed([PROMPTS[0]])
    with pytest.raises(UserError, match="this LLM was closed"):
        llm.embed([PROMPTS[0]])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[5, 6], []], "prompt 1 is empty"),
        ([[5, VOCAB_SIZE]], "the token id 200, but this model knows 0 to 199"),
        (["text"], "the prompt is text, but this model has no tokenizer"),
        ([{"prompt": "a", "text_pair": "b"}], "a pair of texts, which only classifiers read"),
        ([{"prompt": "a", "text_pair": 3}], "a pair, but not of two texts"),
        ([3.5], "neither text nor a list of token ids"),
    ],
)
def test_wrong_prompts_are_named_and_nothing_is_computed(models, prompts, message):
    with LLM(models("bert")) as llm:
        with pytest.raises(PromptError, match=message):
            llm.embed(prompts)
        assert llm.stats().num_steps == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"pooling": "median"},
        {"normalize": "yes"},
        {"dimensions": 0},
        {"dimensions": True},
        {"activation": 1},
        {"truncate_prompt_tokens": -2},
        {"prompt_name": 3},
    ],
)
def test_wrong_parameters_are_named(wrong):
    with pytest.raises(UserError, match=rf"^{next(iter(wrong))} is "):
        PoolingParams(**wrong)


# Ends: errors, interrupts, nothing to do


def test_a_step_that_fails_ends_all_texts_and_leaves_nothing_behind(models):
    with LLM(models("bert"), max_num_seqs=1) as llm:
        expected = embeddings(llm)
        model = llm._engine._executor._runner._loaded.model
        forward, calls = model.forward, []

        def fails_once(*arguments):
            calls.append(arguments)
            if len(calls) == 2:
                raise calls_for
            return forward(*arguments)

        for calls_for in (RuntimeError("boom"), KeyboardInterrupt()):
            calls.clear()
            model.forward = fails_once
            with pytest.raises(type(calls_for)):
                embeddings(llm)
            model.forward = forward
            assert not llm._engine.has_unfinished_requests
            stats = llm.stats()
        assert stats.num_aborted == 2 * (len(PROMPTS) - 1)
        assert stats.num_requests == 3 * len(PROMPTS)
        for one, other in zip(embeddings(llm), expected, strict=True):
            assert_close(one, other)
        assert llm.embed([]) == []


def test_an_interrupt_between_steps_leaves_nothing_behind(models):
    with LLM(models("bert"), max_num_seqs=1) as llm:
        count_end, calls = llm._pooling._count_end, []

        def interrupted(*arguments):
            calls.append(arguments)
            count_end(*arguments)
            if len(calls) == 2:
                raise KeyboardInterrupt

        llm._pooling._count_end = interrupted
        with pytest.raises(KeyboardInterrupt):
            embeddings(llm)
        assert not llm._engine.has_unfinished_requests
        plans = watch_steps(llm)
        assert len(embeddings(llm, PROMPTS[:1])) == 1
        assert [len(plan.new_requests) for plan in plans] == [1]
        assert llm.stats().num_aborted == len(PROMPTS) - 2


def test_the_journal_has_a_line_for_each_text(models, tmp_path):
    log = tmp_path / "log.jsonl"
    with LLM(models("bert"), log_json=log) as llm:
        embeddings(llm)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    requests = [line for line in lines if line["event"] == "request"]
    assert sorted(line["num_prompt_tokens"] for line in requests) == sorted(LENGTHS)
    assert {line["finish_reason"] for line in requests} == {"stop"}


# Checkpoints that do not fit


def test_heads_and_poolers_that_are_not_used_may_be_there_or_not(bert):
    weights = load_file(bert / "model.safetensors")
    expected = reference_hidden(bert, PROMPTS[1]).mean(0)
    changed = {name: t for name, t in weights.items() if not name.startswith("pooler.")}
    changed["cls.predictions.bias"] = torch.zeros(VOCAB_SIZE)
    save_file(changed, bert / "model.safetensors", metadata={"format": "pt"})
    with LLM(bert) as llm:
        assert_close(embeddings(llm, [PROMPTS[1]])[0], expected)


@pytest.mark.parametrize(
    ("remove", "add", "message"),
    [
        ("encoder.layer.1.output.dense.weight", "", "lacks 1 .encoder.layer.1.output.dense.weight"),
        ("", "encoder.layer.2.output.dense.weight", "has unknown 1 .encoder.layer.2.output"),
    ],
)
def test_weights_that_do_not_fit_are_an_error(bert, remove, add, message):
    weights = load_file(bert / "model.safetensors")
    weights.pop(remove, None)
    if add:
        weights[add] = torch.zeros(32, 64)
    save_file(weights, bert / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        LLM(bert)


def test_a_classifier_needs_its_head(models, tmp_path):
    folder = shutil.copytree(models("bert", auto=CLASSIFIER, num_labels=3), tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    kept = {name: t for name, t in weights.items() if "pooler" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 2 .bert.pooler.dense.bias"):
        LLM(folder)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("BertForTokenClassification", "neither embeds texts nor is it one of transformers'"),
        ("BertForQuestionAnswering", "neither embeds texts"),
        ("AcmeForRewardModel", "neither embeds texts"),
    ],
)
def test_heads_that_are_for_something_else_are_refused(bert, architecture, message):
    config = json.loads((bert / "config.json").read_text())
    write_json(bert / "config.json", config | {"architectures": [architecture]})
    with pytest.raises(ModelError, match=message):
        LLM(bert)


def test_code_of_a_checkpoint_is_not_run_unasked(bert):
    config = json.loads((bert / "config.json").read_text())
    own = {"model_type": "acme_bert", "auto_map": {"AutoModel": "modeling_acme.AcmeModel"}}
    write_json(bert / "config.json", config | own)
    with pytest.raises(ModelError, match="which is not run unasked"):
        LLM(bert)
    write_json(bert / "config.json", config | {"model_type": "acme_bert"})
    with pytest.raises(ModelError, match="has no model of the type 'acme_bert'"):
        LLM(bert)
