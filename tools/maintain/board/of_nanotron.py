"""nanotron: its Llama over tensor parallelism, as far as it can be imported on a CPU."""

from rows import Row, join, world

NEEDS, SHOWN = ("torch==2.13.0", "nanotron==0.4", "transformers==5.24.0", "numpy==2.4.6"), ("nanotron",)


def llama(row, folder):
    if world() > 1:
        join()
    from nanotron.models.llama import LlamaForTraining  # noqa: F401

    raise NotImplementedError("it can be imported: write the row")


ROWS = [Row("nanotron", "Llama", "tp 2", llama)]
