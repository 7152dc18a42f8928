"""What the training scripts share."""

import course  # noqa: F401  step 9 is on the path from here on
