"""In no step does the host wait for the GPU before it logs, or the GPU would idle while the host issues the next work.

Each train.py runs two steps on a GPU that is not there, see lab/watch/waits.py, as one rank of a grid. The line with
loss.item() at the end of a step is the one deliberate synchronisation: all work of the step has been issued by then.
Over gloo, messages between stages pass through host memory by design (StageCommunication); here the backend is NCCL.
"""

import concurrent.futures
import re

import pytest
from lab.program import Edit, Program
from lab.watch.waits import start

GRID = ("--dp_size", 2, "--pp_size", 2, "--tp_size", 2)
UNLIKE = ("--pipelines", "2;1,1", "--num_microbatches", "2,1")
CASES = {  # step, rank, world size, flags; the last rank of a grid computes the loss
    "step1": (1, 0, 1), "step2": (2, 0, 1), "step3": (3, 0, 1), "step4": (4, 1, 2, "--tp_size", 2),
    "step5": (5, 3, 4, "--dp_size", 2, "--tp_size", 2), "step6": (6, 3, 4, "--dp_size", 2, "--tp_size", 2),
    "step7": (7, 7, 8, *GRID), "step8": (8, 7, 8, *GRID, "--recompute"), "step9": (9, 2, 3, *UNLIKE),
    "step12": (12, 3, 4, "--dp_size", 2, "--tp_size", 2, "--zero", 2),
    "step13": (13, 3, 4, "--dp_size", 2, "--tp_size", 2, "--zero", 3),
    "step14": (14, 7, 8, *GRID, "--sequence_parallel"),
    "step15": (15, 15, 16, *GRID, "--cp_size", 2, "--sequence_parallel"),
    "step16": (16, 3, 4, "--dp_size", 2, "--tp_size", 2),  # with experts the host has to know their numbers of rows
    "step18": (18, 3, 4, "--dp_size", 2, "--tp_size", 2, "--optimizer", "muon"),
    "step19": (19, 7, 8, *GRID),
    "step10": (10, 7, 8, *GRID), "step10-first-stage": (10, 0, 8, *GRID),
    "step12-shares": (12, 3, 4, "--dp_size", 2, "--pp_size", 2, "--zero", 1, "--zero_shares", "2,1")}
SLOW = {"step2", "step5", "step10", "step10-first-stage", "step12-shares"}
FAULTS = {  # in step 4: what breaks it, and the complaint
    "item": (Edit("train.py", "total_loss += loss.detach()", "total_loss += loss.item()"),
             "reads the value of a tensor"),
    "blocking": (Edit("dataloader.py", ", non_blocking=True", ""), "without non_blocking=True"),
}


def started(case: tuple, *edits: Edit, **options) -> concurrent.futures.Future:
    """Two steps of a case."""
    step, rank, size, *flags = case
    samples = 2 * (1 if step < 3 else 4 if "--dp_size" in flags else 3 if "--pipelines" in flags else 2)  # of a step
    small = ["--num_hidden_layers", 1 if step < 7 else 2, "--seq_len", 8, "--micro_batch_size", 2,
             "--max_tokens", 2 * 8 * samples]
    if 2 < step and "--num_microbatches" not in flags:
        small += ["--gradient_accumulation_steps", 2]
    return start(Program(step, [*small, *flags], edits), rank, size, **options)


@pytest.fixture(scope="module")
def runs(selected):
    """name -> the future of its run. All of them start together."""
    return ({name: started(CASES[name]) for name in selected("name")}
            | {fault: started(CASES["step4"], FAULTS[fault][0], check=False) for fault in selected("fault")})


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in CASES])
def test_the_host_waits_only_where_it_logs_and_casts_each_weight_once_a_step(name, runs):
    """Step 13: the embedding and the projection, for each of two micro-batches. Layers arrive in bfloat16."""
    found = re.search(r"^read (\d+), copied (\d+), cast \[(\d+)\]\n", runs[name].result().stdout, re.MULTILINE)
    read, copied, cast = map(int, found.groups())
    assert read >= (2 if name in ("step1", "step2") else 4), "the loss and the gradient norm of two steps"
    assert copied >= (0 if name in ("step1", "step2") else 4), "inputs and targets, of at least a micro-batch a step"
    assert cast == (4 if name == "step13" else 2), "in two steps twice, whatever the micro-batches"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_hidden_synchronisation_is_found(fault, runs):
    done = runs[fault].result()
    assert done.returncode == 1 and FAULTS[fault][1] in done.stderr, done.stderr[-3000:]
