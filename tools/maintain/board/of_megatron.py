"""megatron."""

NEEDS, SHOWN = ("torch==2.13.0", "megatron-core==0.16.1", "numpy==2.4.6"), ("megatron-core",)
ROWS = []
