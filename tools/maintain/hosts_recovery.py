"""How long does a run stand still that loses a host? What launch_cluster.sh starts on the hosts of the test bed.

A round takes a host away, waits until the others have made some steps, gives it back, and waits until it takes part
again. The figure is the time from the loss to the next finished step, less the mean step after it, by this machine's
clock. Which host it is changes from round to round, so the first is among them.
"""

import tools_path  # noqa: F401  before launch

import pathlib
import statistics
import time

import launch  # noqa: F401  which knows where the test bed's modules are
from bed import NODES, testbed
from elastic_bed import Training, kill_all, switch_on
from turns import table

FLAGS = ["--seq_len", "16", "--dtype", "float64", "--batch_size", "1", "--num_hidden_layers", "4", "--device", "cpu",
         "--equal_shares", "--save_every", "10", "--max_steps", "4000", "--num_microbatches", "6"]
LOSSES = {  # name -> (how a host is lost, flags)
    "killed, copies live": (kill_all, []),
    "killed, a checkpoint is read": (kill_all, ["--pipelines", "2,1,1|2,2"]),
    "cable cut, copies live": (lambda node: testbed("cut", node), []),
}


def recover(case: tuple, rounds: int, folder: pathlib.Path) -> dict:
    (lose, words), since, seconds = case, 0, []
    run = Training(folder, "cluster/train_distributed.py", *FLAGS, *words, "--log_dir", folder, "--checkpoint_dir",
                   folder / "checkpoints")
    for number in range(rounds):
        run.went_on(3, since)
        run.reaches(run.steps()[-1] + 12)
        node, since, lost_at = NODES[number % 3], run.mark(), time.perf_counter()
        lose(node)
        run.went_on(2, since)
        went_on_at, step = time.perf_counter(), run.steps()[-1]
        run.reaches(step + 20)
        a_step = (time.perf_counter() - went_on_at) / (run.steps()[-1] - step)
        seconds.append(went_on_at - lost_at - a_step)
        since = run.mark()
        switch_on(node)
    run.went_on(3, since)
    run.stop()
    return {"seconds": {"standing still": seconds}}


def table_of_recovery(results: dict) -> str:
    return table(["a host is lost", "median s", "smallest - largest", "rounds"], [
        [name, f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f} - {max(seconds):.2f}", len(seconds)]
        for name, seconds in ((name, found["seconds"]["standing still"]) for name, found in results.items())])
