"""Machines and links as measured, and which of them takes which layers and micro-batches."""

from ranks import course  # noqa: F401  step 9 is on the path from here on
