"""deepspeed."""

NEEDS, SHOWN = ("torch==2.13.0", "deepspeed==0.19.8", "numpy==2.4.6"), ("deepspeed",)
ROWS = []
