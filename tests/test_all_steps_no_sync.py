"""In no step does the host wait for the GPU before it logs, or the GPU would idle while the host issues the next work.

Each train.py runs two steps on a GPU that is not there, see support/fake_gpu.py, as one rank of a grid. The line with
loss.item() at the end of a step is the one deliberate synchronisation: all work of the step has been issued by then.
Over gloo, messages between stages pass through host memory by design (StageCommunication); here the backend is NCCL.
"""

import concurrent.futures
import pathlib
import re

import pytest
from lab.launch import ROOT, STEPS, start_fork

GRID = ("--dp_size", 2, "--pp_size", 2, "--tp_size", 2)
UNLIKE = ("--pipelines", "2;1,1", "--num_microbatches", "2,1")
IMPORTS = ("torch.distributed._tools.fake_collectives", "torch._subclasses.fake_tensor",  # seconds
           "torch.testing._internal.distributed.fake_pg", "torch.utils.backend_registration")
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
    "step10": (10, 7, 8, *GRID), "step10-first-stage": (10, 0, 8, *GRID),
    "step12-shares": (12, 3, 4, "--dp_size", 2, "--pp_size", 2, "--zero", 1, "--zero_shares", "2,1")}
SLOW = {"step2", "step5", "step10", "step10-first-stage", "step12-shares"}
FAULTS = {  # in step 4: what it says -> what breaks it, and the complaint
    "item": ("total_loss += loss.detach()", "total_loss += loss.item()", "reads the value of a tensor"),
    "blocking": (", non_blocking=True", "", "without non_blocking=True"),
}


def copy_for_fake_gpu(folder: pathlib.Path, target: pathlib.Path, old: str = "", new: str = "") -> None:
    """Copies the modules under `folder` to the new folder `target`; "cuda" becomes "gpu", and `old` becomes `new`."""
    found = False
    for path in folder.rglob("*.py"):
        text, copy = path.read_text(), target / path.relative_to(folder)
        found = found or old in text
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(re.sub(r'"cuda"|\.is_cuda', lambda word: word[0].replace("cuda", "gpu"),
                               text.replace(old, new) if old else text))
    assert found, f"no module in {folder} has {old!r}"


def start(tmp_path: pathlib.Path, case: tuple, *fault: str) -> concurrent.futures.Future:
    """Starts two steps of a case, in a copy of the step in which the first word of `fault` becomes the second."""
    step, rank, world_size, *flags = case
    folder = tmp_path / STEPS[str(step)].name
    copy_for_fake_gpu(STEPS[str(step)], folder, *fault)
    samples = 2 * (1 if step < 3 else 4 if "--dp_size" in flags else 3 if "--pipelines" in flags else 2)  # of a step
    arguments = ["--num_hidden_layers", 1 if step < 7 else 2, "--seq_len", 8, "--micro_batch_size", 2,
                 "--max_tokens", 2 * 8 * samples, "--model_name", ROOT / "assets" / "tiny_llama"]
    if step > 1:
        arguments += ["--log_dir", tmp_path / "runs"]
    if step > 2:
        (tmp_path / "corpus.txt").write_text("We hold these truths to be self-evident. " * 20)
        arguments += ["--dataset_name", tmp_path / "corpus.txt"]
    if 2 < step and "--num_microbatches" not in flags:
        arguments += ["--gradient_accumulation_steps", 2]
    return start_fork(step, 1, rank, world_size, folder / "train.py", *arguments, *flags, check=not fault,
                      script=ROOT / "tests" / "support" / "fake_gpu.py", modules=IMPORTS)


@pytest.fixture(scope="module")
def runs(selected, tmp_path_factory):
    """name -> the future of its run. All of them start together."""
    started = {name: start(tmp_path_factory.mktemp(name), CASES[name]) for name in selected("name")}
    return started | {fault: start(tmp_path_factory.mktemp(fault), CASES["step4"], *FAULTS[fault][:2])
                      for fault in selected("fault")}


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
    assert done.returncode == 1 and FAULTS[fault][2] in done.stderr, done.stderr[-3000:]
