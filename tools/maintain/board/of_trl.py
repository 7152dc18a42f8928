"""trl."""

NEEDS, SHOWN = ("torch==2.13.0", "trl==1.16.0", "transformers==5.24.0", "accelerate==1.15.0", "peft==0.21.2", "datasets==5.2.0", "numpy==2.4.6"), ("trl", "transformers")
ROWS = []
