"""Settings for the whole suite."""

import os

# transformers warns about every reference run that switches the end token off
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
