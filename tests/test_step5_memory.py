"""What is logged is the slowest and the largest rank, which need not be the one that logs."""

from launch import metrics


def test_memory_and_seconds_are_the_largest_of_all_ranks(run_code, tmp_path):
    run_code(5, 2, """
import types
import torch
import process_group_manager as pgm
from metrics import RunLogger

pgm.init_process_group("gloo")
pgm.setup_process_group_manager(2, 1, 1)
grid = pgm.process_group_manager
if not grid.is_logging_rank:
    used = torch.ones(200_000_000)  # 0.8 GB
logger = RunLogger(types.SimpleNamespace(run_name="run", log_dir=sys.argv[1], use_wandb=False), grid, 1, 1)
logger.log(1, 1.0, 1.0, 1.0, 1.0 if grid.is_logging_rank else 2.0)  # a rank that has more to do ends later
logger.close()
""", tmp_path)
    [row] = metrics(tmp_path, "run")
    assert 0.8 < row["memory_gb"] < 2 and row["step_seconds"] == 2 and row["tokens_per_second"] == 0.5
