"""The scripts of cluster/ over three hosts of the test bed, over ssh and by hand, train what one process trains.

The hosts share no disk. The rows of the first one are compared.

ALL_WAYS=1 starts each script in each way; without it each script and each way is there. In float64.
"""

import os
import sys

import pytest

from bed import NODES, bed, on_disk, start
from elastic_bed import Training
from launch import ROOT, environment, fork, losses

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.usefixtures(bed.__name__)]
TOLERANCE = 1e-9
DATA = ["--seq_len", 16, "--dtype", "fp64", "--device", "cpu"]
SCRIPTS = {  # flags on three hosts, and those of one process that takes the same samples in a step
    "three_stages_simple_pp": (["--train_steps", 6], ["--train_steps", 6]),
    "train_distributed": (["--epochs", 1, "--max_steps_per_epoch", 6, "--batch_size", 2, "--gradient_accumulation", 3,
                           "--num_microbatches", "5,3,1"],
                          ["--epochs", 1, "--max_steps_per_epoch", 6, "--batch_size", 2, "--gradient_accumulation", 9]),
    "train_single_test": (["--steps", 3, "--max_batch_size", 2], None),
}
FORMS = {
    "master-addr": ["--master-addr=node0", "--master-port=29500"],
    "rdzv": ["--rdzv_id=1", "--rdzv_backend=c10d", "--rdzv_endpoint=node0:29500"],
}
PAIRS = [("three_stages_simple_pp", "master-addr"), ("train_distributed", "ssh"), ("train_single_test", "rdzv")]
if os.environ.get("ALL_WAYS"):
    PAIRS = [(script, way) for script in SCRIPTS for way in ("ssh", *FORMS)]


def over_ssh(folder, script, words) -> str:
    code, printed = Training(folder, script, *words, launcher=()).run.end(300)
    assert code == 0, printed[-4000:]
    return printed


def by_hand(form, script, words) -> str:
    processes = [start(node, sys.executable, "-m", "torch.distributed.run", "--nnodes=3", "--nproc-per-node=1",
                       f"--node-rank={rank}", *FORMS[form], script, *words, env=environment(), cwd=ROOT)
                 for rank, node in enumerate(NODES)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(text[-3000:] for text in outputs)
    return "\n".join(outputs)


@pytest.mark.parametrize("name, way", PAIRS)
def test_three_hosts_equal_one_process(tmp_path, name, way):
    script, (flags, alone) = f"cluster/{name}.py", SCRIPTS[name]  # both ways start in the root of the repository
    places = ["--run_name", f"{name}-{way}", "--log_dir", "runs"] if alone else []
    words = list(map(str, [*DATA, *flags, *places]))
    printed = over_ssh(tmp_path, script, words) if way == "ssh" else by_hand(way, script, words)
    assert all(node in printed for node in NODES), printed
    if alone is None:  # it trains alike on all hosts, and compares
        assert "error" not in printed
        return
    fork(9, 1, *DATA, *alone, "--run_name", "one", "--log_dir", tmp_path, "--checkpoint_dir", tmp_path,
         script=ROOT / script)
    expected, found = losses(tmp_path, "one"), losses(on_disk("node0", ROOT / "runs"), f"{name}-{way}")
    assert len(found) == 6 and max(abs(a - b) for a, b in zip(expected, found)) <= TOLERANCE
