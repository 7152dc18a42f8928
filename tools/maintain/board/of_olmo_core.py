"""olmo_core."""

NEEDS, SHOWN = ("torch==2.13.0", "ai2-olmo-core==3.0.0"), ("ai2-olmo-core",)
ROWS = []
