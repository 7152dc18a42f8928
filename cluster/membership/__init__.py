"""Which processes an elastic run has: they find each other, authenticate and notice a loss."""

from ranks import course  # noqa: F401  step 9 is on the path from here on
