"""nanotron."""

NEEDS, SHOWN = ("torch==2.13.0", "nanotron==0.4"), ("nanotron",)
ROWS = []
