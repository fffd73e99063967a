"""Tiny random checkpoints of pooling models, and what transformers makes of them.

The reference is a plain forward of one text alone, unpadded, with the pooling written out.
"""

import json
from functools import lru_cache

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

VOCAB_SIZE = 200
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_DISTILBERT = {
    "vocab_size": VOCAB_SIZE,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_ROBERTA = {**_SIZES, "pad_token_id": 1, "max_position_embeddings": 66}
_LLAMA = {**_SIZES, "num_key_value_heads": 2}
_MODERNBERT = {
    **_SIZES,
    "global_attn_every_n_layers": 2,
    "local_attention": 8,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
_GEMMA = {
    **_LLAMA,
    "head_dim": 8,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_bidirectional_attention": True,
}

# model type -> config, and whether no token sees those after it
EMBEDDING = {
    "bert": (_SIZES, False),
    "roberta": (_ROBERTA, False),
    "xlm-roberta": (_ROBERTA, False),
    "distilbert": (_DISTILBERT, False),
    "mpnet": (_ROBERTA, False),
    "modernbert": (_MODERNBERT, False),
    "electra": ({**_SIZES, "embedding_size": 32}, False),
    "deberta-v2": ({**_SIZES, "relative_attention": True, "position_buckets": 8}, False),
    "nomic_bert": (_SIZES, False),
    "gemma3_text": (_GEMMA, False),
    "qwen3": ({**_LLAMA, "head_dim": 8}, True),
    "mistral": ({**_LLAMA, "sliding_window": 8}, True),
    "llama": (_LLAMA, True),
    "lfm2": ({**_LLAMA, "layer_types": ["conv", "full_attention"]}, True),
    "qwen3_moe": (
        {
            **_LLAMA,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        True,
    ),
}
EMBEDDING = {name: of for name, of in EMBEDDING.items() if name in CONFIG_MAPPING_NAMES}
CLASSIFIERS = {
    "bert": _SIZES,
    "roberta": _ROBERTA,
    "distilbert": _DISTILBERT,
    "modernbert": _MODERNBERT,
    "llama": _LLAMA,
    "qwen3": {**_LLAMA, "head_dim": 8},
    "gpt2": {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "pad_token_id": 0,
    },
}


def make_pooling_model(model_type, folder, *, auto="AutoModel", seed=0, **overrides):
    """Save a random float32 checkpoint in `folder`, without a tokenizer."""
    sizes = CLASSIFIERS[model_type] if "Class" in auto else EMBEDDING[model_type][0]
    config = transformers.AutoConfig.for_model(model_type, **{**sizes, **overrides})
    model = getattr(transformers, auto).from_config(config, dtype=torch.float32)
    randomise(model, seed)
    model.save_pretrained(folder)
    return folder


def randomise(model, seed=0):
    """Weights of which every one matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_(0.1 * noise)
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(0.5 * noise * (32 / parameter.shape[-1]) ** 0.5)


def add_modules(folder, modes, *others, pooling=None):
    """The files of sentence-transformers; `others` are pairs of type and folder."""
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), *others]
    write_json(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(modules)
        ],
    )
    config = {f"pooling_mode_{mode}": True for mode in modes} | (pooling or {})
    write_json(folder / "1_Pooling" / "config.json", config)
    return folder


WORDS = [f"w{i}" for i in range(100)]


def add_tokenizer(folder, *, words=WORDS, longest=10**30):
    """A tokenizer of whole words, with a token before and after a text or a pair of texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *words]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    config["model_max_length"] = longest
    config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    write_json(folder / "tokenizer_config.json", config | special)
    return folder


def write_json(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


@lru_cache(maxsize=32)
def reference_model(folder, auto="AutoModel"):
    return getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def reference_hidden(folder, token_ids):
    """[tokens, hidden_size] of one text alone."""
    model = reference_model(folder)
    return model(input_ids=torch.tensor([token_ids])).last_hidden_state[0]


@torch.inference_mode()
def reference_scores(folder, token_ids, token_types=None):
    """[labels] of one text alone."""
    model = reference_model(folder, "AutoModelForSequenceClassification")
    more = {} if token_types is None else {"token_type_ids": torch.tensor([token_types])}
    return model(input_ids=torch.tensor([token_ids]), **more).logits[0]
