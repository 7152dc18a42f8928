"""What any room may ask: all ranks together, disks, files, memory, lost peers, signals."""

from ranks import course  # noqa: F401  step 9 is on the path from here on
