"""What is logged: the memory of the largest rank, which need not be the one that logs, and the time of that one."""

from lab.launch import metrics


def test_memory_is_the_largest_of_all_ranks_and_seconds_are_the_logging_ranks_own_in_each_step(run_code, tmp_path):
    run_code(5, 2, """
import torch
import process_group_manager as pgm
import train

pgm.init_process_group("gloo")
pgm.setup_process_group_manager(2, 1, 1)
grid = pgm.process_group_manager
if not grid.is_logging_rank:
    used = torch.ones(200_000_000)  # 0.8 GB
logger = train.RunLogger(train.parse_args(), grid, 1, 1)
for step in range(1, 5):  # the memory is that of all ranks in the first two of these only
    logger.log(step, 1.0, 1.0, 1.0, 1.0 if grid.is_logging_rank else 2.0)  # a rank that has more to do ends later
logger.close()
""", "--run_name", "run", "--log_dir", tmp_path)
    rows = metrics(tmp_path, "run")
    assert [row["step_seconds"] for row in rows] == [1.0] * 4 and rows[0]["tokens_per_second"] == 1.0
    assert all(0.8 < row["memory_gb"] < 2 for row in rows)
