"""Which processes an elastic run has, and how it goes on in place when some of them are lost and others come:
[CHECKPOINTS.md](../CHECKPOINTS.md#a-run-that-loses-a-machine).
"""

import course  # noqa: F401  step 9 is on the path from here on
