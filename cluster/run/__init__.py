"""One training, from its flags to its last step."""

from ranks import course  # noqa: F401  step 9 is on the path from here on
