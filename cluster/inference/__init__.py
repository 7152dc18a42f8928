"""Text from a model, in one process or divided over the stages of a pipeline."""

from ranks import course  # noqa: F401  step 9 is on the path from here on
