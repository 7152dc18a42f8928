"""litgpt."""

NEEDS, SHOWN = ("torch==2.13.0", "litgpt==0.5.13"), ("litgpt",)
ROWS = []
