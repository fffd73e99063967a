"""The tiny models of the conformance kit, under the name this suite knows them by."""

from runnerctl.testing.tiny_models import (
    BYPASSING,
    FAMILIES,
    OTHER,
    RECURRENT,
    SERVED,
    VOCAB_SIZE,
    make_tiny_model,
    reference_generate,
)

__all__ = [
    "BYPASSING",
    "FAMILIES",
    "OTHER",
    "RECURRENT",
    "SERVED",
    "VOCAB_SIZE",
    "make_tiny_model",
    "reference_generate",
]
