"""The logged memory is that of the rank that needs most, which need not be the one that logs."""

from launch import STEPS, fork, metrics


def test_memory_is_the_largest_of_all_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys, types
sys.path.insert(0, {str(STEPS['7'])!r})
import torch
import process_group_manager as pgm
from metrics import RunLogger

pgm.init_process_group("gloo")
pgm.setup_process_group_manager(1, 2, 1)
grid = pgm.process_group_manager
if not grid.is_logging_rank:
    used = torch.ones(200_000_000)  # 0.8 GB
logger = RunLogger(types.SimpleNamespace(run_name="run", log_dir={str(tmp_path)!r}, use_wandb=False), grid, 1, 1)
logger.log(1, 1.0, 1.0)
logger.close()
""")
    fork(7, 2, script=script)
    assert 0.8 < metrics(tmp_path, "run")[0]["memory_gb"] < 2
