"""The order of the ranks in the grid, against a table written out by hand; who makes its groups, and their timeouts."""

import json
import re

import pytest

#       rank: (dp, pp, tp), dp group, pp group, tp group, of 2 x 2 x 2
TABLE = {0: [[0, 0, 0], [0, 4], [0, 2], [0, 1]],
         1: [[0, 0, 1], [1, 5], [1, 3], [0, 1]],
         2: [[0, 1, 0], [2, 6], [0, 2], [2, 3]],
         3: [[0, 1, 1], [3, 7], [1, 3], [2, 3]],
         4: [[1, 0, 0], [0, 4], [4, 6], [4, 5]],
         5: [[1, 0, 1], [1, 5], [5, 7], [4, 5]],
         6: [[1, 1, 0], [2, 6], [4, 6], [6, 7]],
         7: [[1, 1, 1], [3, 7], [5, 7], [6, 7]]}
NEIGHBOURS = {0: [None, 2], 1: [None, 3], 2: [0, None], 3: [1, None],  # rank: the stages before and after
              4: [None, 6], 5: [None, 7], 6: [4, None], 7: [5, None]}
SCRIPT = """
import json
import torch
import torch.distributed as dist
import process_group_manager as pgm
pgm.init_process_group("gloo", 7.5)
make, made = dist.new_group, []
dist.new_group = dist.distributed_c10d.new_group = lambda *args, **more: made.append(args[0]) or make(*args, **more)
pgm.setup_process_group_manager(*json.loads(sys.argv[1]))
grid = pgm.process_group_manager
groups = {name: group for name, group in vars(grid).items() if name.endswith("_group")}
assert len(made) == len(set(groups.values())) == len(groups) and all(dist.get_rank() in ranks for ranks in made), made
if "dp_group" not in groups:  # step 9: the owners of what is on this stage in both pipelines
    groups["dp_group"] = next(group for stage in (0, 1) if (group := grid.group_of([(0, stage), (1, stage)])))
for name, group in {**groups, "default": dist.group.WORLD}.items():
    seconds = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    assert seconds == 7.5, (name, seconds)
groups = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
place = [grid.dp_rank, grid.pp_rank, grid.tp_rank]
neighbours = [getattr(grid, "pp_prev_rank", None), getattr(grid, "pp_next_rank", None)]
with open(sys.argv[2] + str(grid.global_rank), "w") as file:
    json.dump([place, groups, neighbours, grid.is_logging_rank], file)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("step, sizes", [(2, "[2, 2, 2]"), (8, "[2, 2, 2]"), (9, "[[2, 2], 2]")])
def test_eight_ranks(run_code, tmp_path, step, sizes):
    run_code(step, 8, SCRIPT, sizes, f"{tmp_path}/", timeout=60)
    logging = []
    for rank, (place, *expected) in TABLE.items():
        found_place, groups, neighbours, is_logging_rank = json.loads((tmp_path / str(rank)).read_text())
        assert found_place == place, rank
        assert [groups[f"{axis}_group"] for axis in ("dp", "pp", "tp")] == expected, rank
        for other in {"pp_backward_group", "pp_ends_group"} & groups.keys():
            assert groups[other] == expected[1], (rank, other)
        if step > 2:
            assert neighbours == NEIGHBOURS[rank], rank
        logging += [rank] * is_logging_rank
    assert logging == [2]  # on the last stage


SLEEPER = """
import os, time
import dataloader

if os.environ["RANK"] == "1":
    dataloader.MicroBatchDataLoader.__next__ = lambda self: time.sleep(1000)
"""


@pytest.mark.parametrize("flags", [["--dp_size", 2], pytest.param(["--pp_size", 2], marks=pytest.mark.slow)])
def test_a_rank_that_sleeps_is_not_waited_for(run_code, tmp_path, flags):
    """The other one has its own gradients soon, and waits 2 s for the sleeper's, or for what it was to receive."""
    done = run_code(8, 2, SLEEPER, *flags, "--timeout", 2, "--num_hidden_layers", 2, "--seq_len", 16,
                    "--micro_batch_size", 1, "--gradient_accumulation_steps", 2, "--max_tokens", 256,
                    "--log_dir", tmp_path, then="train.py", check=False, timeout=60)
    assert done.returncode == 1 and re.search("Timed out waiting 2000ms|Application timeout", done.stderr), done.stderr


TWICE = """
import json
import process_group_manager as pgm
import torch
from torch import distributed as dist
pgm.init_process_group("gloo", 20)
sizes = json.loads(sys.argv.pop(1))
for _ in range(2):
    pgm.setup_process_group_manager(**sizes)
    {more}
    for value in vars(pgm.process_group_manager).values():
        for group in value if isinstance(value, tuple) else [value]:
            if isinstance(group, dist.ProcessGroup):
                dist.all_reduce(count := torch.ones(1), group=group)
                assert count == group.size()
dist.destroy_process_group()
"""
PLUGIN = """
import json
import torch
import process_group_manager as pgm
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from model import Llama
from pipeline_template import PipelineTemplate
from utils import TINY_LLAMA, load_config
config = load_config(TINY_LLAMA, num_hidden_layers=6, num_attention_heads=None, num_key_value_heads=None)
config.tie_word_embeddings = {tied}
for _ in range(2):
    model = Llama(config, torch.float32)
    plugin = HeterogeneousParallelPlugin(tp_size=json.loads(sys.argv[1]), timeout=20, device="cpu")
    templates = [PipelineTemplate.from_layers_per_stage(model, sizes) for sizes in json.loads(sys.argv[2])]
    plugin.set_pipelines(templates, [2] * len(templates))
    plugin.configure(model, lambda params: torch.optim.SGD([param for _, param in params]))
pgm.dist.destroy_process_group()
"""
LOCAL_STEPS = """import train
    train.LocalSteps(torch.nn.Linear(1, 1), train.parse_args())"""


@pytest.mark.parametrize("step, ranks, sizes, more", [
    (2, 4, {"dp_size": 2, "pp_size": 2, "tp_size": 1}, ""), (7, 6, {"dp_size": 2, "pp_size": 3, "tp_size": 1}, ""),
    (8, 3, {"dp_size": 1, "pp_size": 3, "tp_size": 1}, ""), (13, 3, {"dp_size": 1, "pp_size": 3, "tp_size": 1}, ""),
    (16, 6, {"dp_size": 2, "pp_size": 3, "tp_size": 1, "ep_size": 2}, ""),
    (17, 4, {"dp_size": 2, "pp_size": 2, "tp_size": 1}, LOCAL_STEPS)])
def test_a_process_can_make_a_second_grid(run_code, step, ranks, sizes, more):
    """All ranks have to be in equally many groups, or the names of later ones differ."""
    flags = ["--local_steps", 2] if more else []
    run_code(step, ranks, TWICE.format(more=more or "pass"), json.dumps(sizes), *flags, timeout=60)


@pytest.mark.parametrize("ranks, tp, pipelines, tied", [
    (5, 1, [[2, 2, 2], [3, 3]], False), (6, 2, [[2, 4], [6]], True), (4, 1, [[2, 2, 2], [6]], True)])
def test_a_process_can_make_a_second_grid_of_unlike_pipelines(run_code, ranks, tp, pipelines, tied):
    """The owners of a module and the two stages of a tied embedding are a group, of which others are no members."""
    run_code(9, ranks, PLUGIN.format(tied=tied), tp, json.dumps(pipelines), timeout=60)


@pytest.mark.parametrize("step, sizes", [(2, "3, 1, 1"), (9, "[2, 1], 1"), (16, "1, 3, 1")])
def test_ranks_in_unlike_numbers_of_groups_hear_of_it_at_once(run_code, step, sizes):
    """Before the next grid, whose groups would wait for members that know them by other names. And after a grid."""
    done = run_code(step, 3, f"""
import time
import process_group_manager as pgm
from torch import distributed as dist
pgm.init_process_group("gloo", 40)
start, make = time.monotonic(), pgm.ProcessGroupManager
def make_grid_and_more(*sizes):
    make(*sizes)
    if dist.get_rank() == 1:
        dist.new_group([1], use_local_synchronization=True)
for pgm.ProcessGroupManager in make_grid_and_more, make:
    try:
        pgm.setup_process_group_manager({sizes})
    except pgm.UserError as error:
        print(error)
assert time.monotonic() - start < 30
""", timeout=60)
    found = re.findall(r"some ranks are in (\d+) process groups, others in (\d+): ", done.stdout)
    assert len(found) == 6 and {int(most) - int(fewest) for fewest, most in found} == {1}, done.stdout
