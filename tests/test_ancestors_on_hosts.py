"""What must not be lost, on three hosts: the ancestors' command lines as they are typed on each machine."""

import json
import pathlib
import re
import sys

import pytest
from lab.launch import ROOT, STEPS
from maintain.bed import DISKS, NETWORK, NODES, bed, on_disk, processes, start, testbed
from maintain.launcher import eventually
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = [pytest.mark.hosts, pytest.mark.usefixtures(bed.__name__)]
TORCHRUN = pathlib.Path(sys.executable).with_name("torchrun")
SECRET = "c0rrect-h0rse"


def typed(folder: pathlib.Path, words: str, *more, hosts: int = 3, meanwhile=lambda: None) -> list[str]:
    """What each host prints of `torchrun WORDS`, typed in `folder` on each, with N for its number; all exit with 0.

    `meanwhile()` is called while they run."""
    started = [start(node, "env", "OMP_NUM_THREADS=1", TORCHRUN, *words.replace("=N", f"={rank}").split(), *more,
                     cwd=folder) for rank, node in enumerate(NODES[:hosts])]
    printed = []
    try:
        meanwhile()
        for process in started:
            printed.append(process.communicate(timeout=240)[0])
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * hosts, "\n".join(printed)[-6000:]
    return printed


def test_raspberry_pis():
    """Over cables of 10 Mbit/s. The timeline has all three and is on each disk; the password is nowhere."""
    def titles() -> list[bytes]:
        found = [path.read_bytes() for pid in processes() if (path := pathlib.Path(f"/proc/{pid}/cmdline")).exists()]
        return [title for title in found if b"three_stages" in title and b"torchrun" not in title and b"-u" in title]

    def look() -> None:
        assert eventually(lambda: len(found := titles()) == 3 and SECRET.encode() not in b"".join(found), 120), titles()

    testbed("rate", "all", "10mbit")
    try:
        printed = typed(ROOT / "cluster", f"--nproc-per-node=1 --nnodes=3 --node-rank=N --master-addr={NETWORK}.10 "
                        "--master-port=29500 three_stages_simple_pp.py --train_steps 5 --batch_size 8 --microbatch_num 4 "
                        f"--sudo_pass {SECRET}", meanwhile=look)
    finally:
        testbed("rate", "all", "off")
    for node in NODES:
        trace = json.loads(on_disk(node, ROOT / "runs" / "three_stages" / "timeline_batch0_all.json").read_text())
        assert {event["pid"] for event in trace["traceEvents"] if event.get("cat") == "forward"} == {0, 1, 2}
    assert SECRET not in "".join(printed) and "".join(printed).count("warning: --sudo_pass is ignored") == 1
    written = [path for path in pathlib.Path(DISKS).rglob("*") if path.is_file()]
    assert len(written) > 9 and not [path for path in written if SECRET.encode() in path.read_bytes()]


def test_home_cluster():
    """Data on the first machine only. Curves, metrics and checkpoints in safetensors are there, too."""
    corpus = ROOT / "logs" / "corpus.txt"
    on_disk("node0", corpus).write_text("It was the best of times, it was the worst of times. " * 4000)
    typed(ROOT / "cluster", "--nnodes=3 --nproc_per_node=1 --rdzv_id=100 --rdzv_backend=c10d "
          f"--rdzv_endpoint={NETWORK}.10:29500 --node_rank=N train_distributed.py", "--max_steps", 6, "--seq_len", 32,
          "--eval_every", 3, "--eval_batches", 2, "--validation_split", 0.01, "--dataset_name", corpus)
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
