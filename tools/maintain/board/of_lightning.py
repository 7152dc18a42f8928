"""lightning."""

NEEDS, SHOWN = ("torch==2.13.0", "lightning==2.6.6", "numpy==2.4.6"), ("lightning",)
ROWS = []
