"""accelerate."""

NEEDS, SHOWN = ("torch==2.13.0", "accelerate==1.15.0", "numpy==2.4.6"), ("accelerate",)
ROWS = []
