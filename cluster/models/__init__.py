"""Causal language models: ours and those of transformers, their published weights, LoRA, four bits, losses."""

from ranks import course  # noqa: F401  step 9 is on the path from here on
