"""Models on disk: named models, the cache, conversion, tokenizers."""
