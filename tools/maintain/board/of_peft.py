"""peft."""

NEEDS, SHOWN = ("torch==2.13.0", "peft==0.21.2", "transformers==5.24.0", "accelerate==1.15.0", "numpy==2.4.6"), ("peft", "transformers")
ROWS = []
