"""--optimizer_shares of train_distributed.py: who divides the optimizer trains as one process does, which has it whole.

In float64, with clipping, weight decay and 8 micro-batches a step. CASES are runs of STEPS steps, and those of RESUMED
go on from what other runs have saved.
"""

import argparse
import types

import pytest
import torch
from checkpoint_runs import SCRIPT, checkpoint, flags_of, write_corpus, write_model
from clusters import made_up_cluster
from launch import fork, metrics, modules_of, start_fork

with modules_of(9):
    from planning.machines import Cluster, Pipeline, Setting
    from planning.simulate import peak_memory
    from training import layout, optimizer_shares, plan_file
    from utils import UserError

TOLERANCE, STEPS, SAVED, MAX_NORM = 1e-11, 8, 3, 0.1
KEEP = f"""
import os, runpy, sys, torch
import course
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin

configure, held = HeterogeneousParallelPlugin.configure, []

def keep(*args, **options):
    held.append(configure(*args, **options))
    return held[0]

HeterogeneousParallelPlugin.configure = keep
folder, sys.argv = sys.argv[1], [{str(SCRIPT)!r}, *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="imported")["main"]()
model, optimizer, _ = held[0]
averages = sum(state["exp_avg"].numel() + state["exp_avg_sq"].numel() for state in optimizer.state.values())
weights = {{name: param.detach().clone() for name, param in model.module.model.named_parameters()}}
os.makedirs(folder, exist_ok=True)
torch.save((weights, averages), f"{{folder}}/{{os.environ['RANK']}}.pt")
"""
CASES = {  # name -> ranks, model, flags
    "one": (1, "llama", ["--num_microbatches", "8"]),
    "one, tied": (1, "tied", ["--num_microbatches", "8"]),
    "one, adapters": (1, "weights", ["--num_microbatches", "8", "--lora_rank", "4"]),
    "a share of 0": (2, "llama", ["--num_microbatches", "5,3", "--optimizer_shares", "1,0"]),
    "unlike": (3, "llama", ["--num_microbatches", "5,3", "--pipelines", "3,1;4", "--optimizer_shares", "4,2,1"]),
    "tied": (4, "tied", ["--num_microbatches", "4,4", "--pipelines", "3,1;1,3", "--optimizer_shares", "1,0,2.5,4"]),
    "tensor parallel": (4, "tied", ["--num_microbatches", "3,5", "--tp_size", "2", "--optimizer_shares", "1,3,2,1"]),
    "adapters": (3, "weights", ["--num_microbatches", "5,3", "--pipelines", "2,2;4", "--lora_rank", "4",
                                "--optimizer_shares", "1,2,4"]),
}
RESUMED = {  # a run -> which it goes on from, after how many steps; ranks, flags
    "off": ("unlike", SAVED, 4, ["--num_microbatches", "3,2,2,1"]),
    "on again": ("off", 2 * SAVED, 3, ["--num_microbatches", "2,6", "--pipelines", "2,2;4", "--optimizer_shares",
                                       "0,1,5"]),
}
SLOW = ["a share of 0", "tensor parallel", "adapters"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, selected):
    folder = tmp_path_factory.mktemp("shares")
    write_model(folder / "llama")
    write_model(folder / "tied", tie_word_embeddings=True)
    write_model(folder / "weights", "llama", "float32", vocab_size=1024, hidden_size=32, intermediate_size=48,
                num_hidden_layers=4, num_attention_heads=4, initializer_range=0.1)
    write_corpus(folder)
    program = folder / "keep.py"
    program.write_text(f"import sys\nsys.path[0] = {str(SCRIPT.parent)!r}\n{KEEP}")

    def start(name: str, ranks: int, model: str, flags: list[str]):
        given = flags_of(folder, name, folder / model, max_steps=STEPS, save_every=SAVED, weight_decay=0.1,
                         max_grad_norm=MAX_NORM)
        return start_fork(9, ranks, folder / name, *given, *flags, script=program,
                          modules=["peft"] * ("adapters" in name))

    names = {"one", "unlike", *(name for case in selected("case") for name in (case, one_of(case)))}
    for job in [start(name, *CASES[name]) for name in CASES if name in names]:
        job.result()
    for name, (before, step, ranks, flags) in RESUMED.items():
        start(name, ranks, "llama", ["--resume", checkpoint(folder, before, step), *flags]).result()
    return folder


def one_of(case: str) -> str:
    """The run of one process with the same model."""
    return {"llama": "one", "tied": "one, tied", "weights": "one, adapters"}[CASES[case][1]]


def held(folder, name: str, rank: int) -> tuple[dict[str, torch.Tensor], int]:
    return torch.load(folder / name / f"{rank}.pt")


def read_all(path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in path.glob("*-of-*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else [])
                                  for name in CASES if "one" not in name])
def test_a_training_in_shares_is_that_of_one_process(runs, case):
    """Losses and norms; the weights and the averages that are saved; and weights of replicas, in every bit."""
    expected, found = (metrics(runs / "runs", name) for name in (one_of(case), case))
    assert len(found) == STEPS and all(row["grad_norm"] > MAX_NORM for row in expected), "nothing is clipped"
    for key in "loss", "grad_norm":
        assert [row[key] for row in found] == pytest.approx([row[key] for row in expected], rel=0, abs=TOLERANCE), key
    for step in SAVED, STEPS:
        saved, wanted = (read_all(checkpoint(runs, name, step)) for name in (case, one_of(case)))
        assert saved.keys() == wanted.keys() and any(name.endswith("exp_avg_sq") for name in saved)
        for name, value in wanted.items():
            assert saved[name].shape == value.shape and (saved[name] - value).abs().max() <= TOLERANCE, name
    copies = {}
    for rank in range(CASES[case][0]):
        tp_rank = rank % 2 if case == "tensor parallel" else 0
        for name, value in held(runs, case, rank)[0].items():
            if CASES[case][1] == "tied":
                name = name.replace("final_proj", "embedding")
            copies.setdefault((name, tp_rank), []).append(value)
    assert any(len(each) > 1 for each in copies.values())
    assert all(torch.equal(each[0], other) for each in copies.values() for other in each[1:])


def test_each_rank_keeps_its_part_of_the_averages(runs):
    """Ranks 0 and 2 divide three layers and the embedding, 4 to 1; ranks 1 and 2 a layer and the head, 2 to 1."""
    sizes = [sum(value.numel() for value in held(runs, "unlike", rank)[0].values()) for rank in range(3)]
    averages = [held(runs, "unlike", rank)[1] for rank in range(3)]
    assert sizes[0] + sizes[1] == sizes[2] and sum(averages) == 2 * sizes[2] == held(runs, "one", 0)[1]
    assert averages == pytest.approx([2 * 4 / 5 * sizes[0], 2 * 2 / 3 * sizes[1], 2 * (sizes[0] / 5 + sizes[1] / 3)],
                                     abs=40), "a bucket rounds"


def test_a_run_goes_on_without_shares_and_with_others(runs):
    expected = metrics(runs / "runs", "one")
    for name in RESUMED:
        found = metrics(runs / "runs", name)
        assert [row["step"] for row in found] == list(range(1, STEPS + 1))
        for key in "loss", "grad_norm":
            assert [row[key] for row in found] == pytest.approx([row[key] for row in expected], rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("text, says", [
    ("", "must be speed or memory, or numbers"), ("fast", "must be speed or memory"), ("4,,1", "got '4,,1'"),
    ("0,0", "not all zero"), ("1,-1", "must be 0 or more, got -1"), ("1,nan", "must be 0 or more, got nan"),
])
def test_what_are_no_shares(text, says):
    with pytest.raises(argparse.ArgumentTypeError, match=says):
        optimizer_shares.as_shares(text)


def test_shares_sum_to_one(monkeypatch):
    monkeypatch.setattr(optimizer_shares, "dist", types.SimpleNamespace(get_world_size=lambda: 3))
    for wanted, expected in {"4,2,1": [4 / 7, 2 / 7, 1 / 7], "1e308,0,1e308": [0.5, 0, 0.5],
                             "1e-320,0,0": [1, 0, 0]}.items():
        args = argparse.Namespace(optimizer_shares=optimizer_shares.as_shares(wanted))
        assert optimizer_shares.choose_optimizer_shares(args, None) == pytest.approx(expected)


@pytest.mark.parametrize("wanted, found", [("memory", [0, 6e9, 2e9]), ("speed", [1e-8, 2e-9, 4e-9])])
def test_shares_by_what_each_rank_has(monkeypatch, wanted, found):
    """By free memory, where a rank that has none still gets something; by the speed of AdamW."""
    mine = iter(found)
    monkeypatch.setattr(optimizer_shares, "dist", types.SimpleNamespace(get_world_size=lambda: 3))
    monkeypatch.setattr(optimizer_shares, "free_memory", lambda device: next(mine))
    monkeypatch.setattr(optimizer_shares, "time_optimizer", lambda *_: next(mine))
    monkeypatch.setattr(optimizer_shares, "gather", lambda value: [value, *(
        next(mine) if wanted == "memory" else 1 / next(mine) for _ in range(2))])
    args = argparse.Namespace(optimizer_shares=wanted, equal_shares=False)
    shares = optimizer_shares.choose_optimizer_shares(args, "cpu")
    assert shares == pytest.approx([0, 0.75, 0.25] if wanted == "memory" else [2 / 17, 10 / 17, 5 / 17], abs=1e-9)


@pytest.mark.parametrize("flags, says", [
    (["--optimizer_shares", "1,2"], "--optimizer_shares has 2 numbers, and 3 ranks train: write one for each, or "),
    (["--optimizer_shares", "0,0,1", "--pipelines", "4;2,2", "--num_microbatches", "4,4"],
     r"--optimizer_shares gives nothing to ranks 0, 1, who alone hold embedding: give one of them a share"),
    (["--optimizer_shares", "speed", "--gradient_wire_dtype", "int8"], "--optimizer_shares with --gradient_wire_dtype"),
    (["--optimizer_shares", "speed", "--local_steps", "2"], "--optimizer_shares with --local_steps"),
])
def test_what_can_not_be_had(tmp_path, flags, says):
    """One line, on the first rank, before a step."""
    write_model(tmp_path / "llama")
    write_corpus(tmp_path)
    words = flags_of(tmp_path, "bad", tmp_path / "llama", max_steps=None, save_every=None)
    done = fork(9, 3, *words, *flags, script=SCRIPT, check=False)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1 and says in done.stderr, done.stderr
    assert "step 1/" not in done.stdout and "Traceback" not in done.stderr


def test_numbers_are_no_shares_of_ranks_that_come_and_go(monkeypatch):
    monkeypatch.setattr(layout, "is_elastic", lambda: True)
    args = argparse.Namespace(optimizer_shares=[4.0, 2.0, 1.0], gradient_wire_dtype=None, plan=None)
    with pytest.raises(UserError, match="--optimizer_shares 4,2,1 in an elastic run, whose ranks come and go: use "):
        layout.check_layout_flags(args)


def test_a_plan_with_small_gradients(monkeypatch):
    plugin = types.SimpleNamespace(set_pipelines=lambda *_: None, deal=lambda _: None)
    monkeypatch.setattr(layout, "SharedOptimizerPlugin", lambda *_: plugin)
    monkeypatch.setattr(layout, "say", print)
    made = layout.Layout([], [1], 1, Setting(gradient_wire_dtype="int8"), optimizer_shares=[1.0])
    with pytest.raises(UserError, match="or with a plan that has one"):
        made.form(argparse.Namespace(dtype="float32", device="cpu"), None)


def test_machines_that_divide_the_optimizer_need_less_memory():
    """8000 numbers of 4 bytes: a weight, a gradient and two averages, and little besides."""
    args = argparse.Namespace(num_microbatches=None, gradient_accumulation=4, pp_engine="1f1b", wire_dtype=None,
                              gradient_wire_dtype=None, recompute=False, batch_size=1)
    data = made_up_cluster([4, 2, 1], parameters=1000, saved_bytes=1.0, hidden_bytes=1.0, sizes=(1,), memory=1e6)
    whole = peak_memory(Cluster(data), Pipeline((0,), (8,), 4), 1, Setting())[0]
    averages = 2 * 4 * Cluster(data).parameters_of((0, len(Cluster(data).names)))
    for machine, share in zip(data["machines"], [0.5, 0.3, 0.2]):
        machine["free_memory"] = (whole - (1 - share) * averages) / plan_file.FRACTION + 1
    assert plan_file.choose(args, data, [0.5, 0.3, 0.2]) is None
    assert plan_file.choose(args, data, [0.49, 0.3, 0.21])["pipelines"]
    assert plan_file.choose(args, data)["pipelines"]
