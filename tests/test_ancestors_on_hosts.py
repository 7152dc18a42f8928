"""What must not be lost, on three hosts: the ancestors' command lines as they are typed on each machine."""

import pathlib
import re
import sys

import pytest
from bed import NETWORK, NODES, bed, on_disk, start
from launch import ROOT, STEPS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = [pytest.mark.hosts, pytest.mark.usefixtures(bed.__name__)]
TORCHRUN = pathlib.Path(sys.executable).with_name("torchrun")


def typed(folder: pathlib.Path, words: str, *more, hosts: int = 3) -> list[str]:
    """What each host prints of `torchrun WORDS`, typed in `folder` on each, with N for its number; all exit with 0."""
    started = [start(node, "env", "OMP_NUM_THREADS=1", TORCHRUN, *words.replace("=N", f"={rank}").split(), *more,
                     cwd=folder) for rank, node in enumerate(NODES[:hosts])]
    printed = []
    try:
        for process in started:
            printed.append(process.communicate(timeout=240)[0])
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * hosts, "\n".join(printed)[-6000:]
    return printed


def test_home_cluster():
    """Curves, the metrics and checkpoints in safetensors are on the first machine, in logs/runs and checkpoints."""
    typed(ROOT / "cluster", "--nnodes=3 --nproc_per_node=1 --rdzv_id=100 --rdzv_backend=c10d "
          f"--rdzv_endpoint={NETWORK}.10:29500 --node_rank=N train_distributed.py", "--max_steps", 6, "--seq_len", 32,
          "--eval_every", 3, "--eval_batches", 2, "--validation_split", 0.01)
    name = "train_distributed"
    curves = EventAccumulator(str(on_disk("node0", ROOT / "logs" / "runs" / name))).Reload()
    assert len(curves.Scalars("loss")) == 6 and {f"wait_seconds/rank{rank}" for rank in range(3)} <= {
        *curves.Tags()["scalars"]}
    hosts = curves.Tensors("hosts/text_summary")[0].tensor_proto.string_val[0].decode()
    assert sorted(re.findall(r"node\d", hosts)) == NODES
    saved = [path.name for path in on_disk("node0", ROOT / "checkpoints" / name).rglob("*") if path.is_file()]
    assert any(each.endswith(".safetensors") for each in saved)
    assert not any(re.search(r"\.(pt|pth|bin|pkl)$", each) for each in saved)


def test_templates_on_two_nodes():
    printed = typed(STEPS["9"], f"--nnodes 2 --nproc-per-node 4 --node_rank=N --master_addr {NETWORK}.10 "
                    "--master_port 29500 run_gpt2.py", "--steps", 2, hosts=2)
    assert sum(text.count("step 2/2 | loss") for text in printed) == 1
