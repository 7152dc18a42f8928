"""plan.py --measure: what it writes of machines and links, in the time that it is given, and one module at a time."""

import json
import re
import weakref

import pytest
import torch
from lab.launch import modules_of

with modules_of(9):
    import plan
    from model import Llama
    from planning import measure, module_memory, profiler
    from planning.machines import load_cluster
    from planning.measure import describe_machines, measure_with
    from planning.search import find_plans
    from utils import TINY_LLAMA, load_config


CLONES = """
import os, socket
import hosts.host_facts
socket.gethostname = lambda: "raspberrypi"
hosts.host_facts.interface_towards = lambda peer: ("eth0", "192.168.1.1" + os.environ["RANK"])
"""


def test_what_measuring_writes(run_code, tmp_path):
    """The planner reads it, layers are alike, times are positive, the parameters and sizes are those of the model. The
    machines are clones, which have the same name."""
    path, out = tmp_path / "cluster.json", tmp_path / "plan.json"
    done = run_code("cluster", 2, CLONES, "--measure", path, "--measure_seconds", 1, "--num_hidden_layers", 10,
                    "--num_attention_heads", 4, "--seq_len", 32, "--micro_batch_size", "1,2", "--global_batch", 8,
                    "--out", out, then="plan.py")
    assert re.search("^measuring 2 ranks: .*1, 2 samples, about 1 s, then 2 links, about 0 s$", done.stdout, re.M)
    assert "rank 1 on" in done.stdout and "Mbit/s" in done.stdout
    cluster, data, written = load_cluster(path), json.loads(path.read_text()), json.loads(out.read_text())
    assert cluster.num_layers == 10 and cluster.sizes in ([1], [1, 2])  # as the time suffices
    assert sum(module["parameters"] for module in data["modules"]) == 10 * 200_960 + 2 * 1024 * 128 + 128
    assert cluster.hidden_bytes == 32 * 128 * 4
    for machine in data["machines"]:
        for kind in ("forward", "backward"):
            assert all(0 < seconds < 1 for size in cluster.sizes for seconds in machine[kind][str(size)])
        assert machine["free_memory"] > 1e7 and 0 < machine["optimizer_seconds"] < 1e-4
    assert all((link is None) == (i == j) for i, row in enumerate(data["links"]) for j, link in enumerate(row))
    assert data["model"] == written["model"] == {
        "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 10, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 1024, "tie_word_embeddings": False}
    assert data["hosts"] == written["hosts"] == cluster.hosts == ["192.168.1.10", "192.168.1.11"]
    assert "--nnodes 2 --nproc_per_node 1 --node_rank K --master_addr 192.168.1.10 " in done.stdout
    assert data["dtype"] == written["dtype"] == "float32" and written["schedule"].startswith("1f1b")
    assert "--num_hidden_layers 10 --num_attention_heads 4" in done.stdout
    assert find_plans(cluster, 8, plan.Setting()).best


def profiler_of(layers: int = 8, dtype: torch.dtype = torch.float32) -> profiler.LayerProfiler:
    with torch.device("meta"):
        whole = Llama(load_config(TINY_LLAMA, num_attention_heads=None, num_hidden_layers=layers), dtype)
    return profiler.LayerProfiler(whole, 16, dtype, torch.device("cpu"))


def test_one_layer_at_a_time(world_of_one, monkeypatch):
    """No machine has to hold the model: of 40 layers one is in memory at most, freed before the next part. Free
    memory is read before all of this, and after it."""
    alive, largest, when_read = [], [], []
    built, free_memory, deep = profiler.LayerProfiler.build, profiler.free_memory, profiler_of(layers=40)

    def living() -> int:
        return sum(param.numel() for module in alive if module() is not None for param in module().parameters())

    def build(self, part):
        module, call = built(self, part)
        alive.append(weakref.ref(module))
        largest.append(living())
        return module, call

    def read(device):
        when_read.append(living())
        return free_memory(device)

    monkeypatch.setattr(profiler.LayerProfiler, "build", build)
    monkeypatch.setattr(profiler, "free_memory", read)
    cluster = measure_with(deep, "tiny", (1,), seconds=0.1)
    assert set(when_read) == {0} and max(largest) == 184_576
    assert len(cluster["modules"]) == len(cluster["machines"][0]["forward"]["1"]) == 42
    assert list(deep.parts) == ["first", "layer 0", "last"]


class Clock:
    """In the place of the module time: seconds pass in sleep(), and a little at each look, whatever else runs here."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        for module in measure, module_memory, profiler:
            monkeypatch.setattr(module, "time", self)

    def perf_counter(self) -> float:
        self.now += 5e-5
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_slow_machines_keep_to_the_time(world_of_one, monkeypatch):
    """Each module takes 30 ms a sample forward, four of them and backward: larger sizes find no time left."""
    time = Clock(monkeypatch)
    built = profiler.LayerProfiler.build

    def slow(self, part):
        module, call = built(self, part)
        return module, lambda x: time.sleep(0.03 * len(x) * max(1, len(self.parts[part]))) or call(x)

    monkeypatch.setattr(profiler.LayerProfiler, "build", slow)
    start = time.perf_counter()
    cluster = measure_with(profiler_of(layers=2), "tiny", (1, 2, 4, 64), seconds=8.0)
    assert time.perf_counter() - start < 11.0  # what has begun is finished
    machine = cluster["machines"][0]
    assert {"1", "2"} <= machine["forward"].keys() and "64" not in machine["forward"]
    assert machine["forward"].keys() == machine["backward"].keys()
    assert machine["forward"]["1"][1] == pytest.approx(0.03, rel=0.1)
    assert "no time or memory for micro-batches of" in describe_machines(cluster, (1, 2, 4, 64))


@pytest.mark.parametrize("pause, asynchronous", [(0.0, True), (0.3, False), (0.8, False)])
def test_a_link(monkeypatch, pause, asynchronous):
    """A first message that is held up, or a receiver that is busy with other links for a while, changes nothing, and
    does not end the search for a message that is large enough to time. NCCL's send and recv return at once: what they
    have started ends when one waits for the device."""
    time, pauses, sizes, busy = Clock(monkeypatch), iter([pause]), [], [0.0]

    def transfer(tensor, peer):
        sizes.append(tensor.numel())
        busy[0] += next(pauses, 0.0) + 1e-3 + 4 * tensor.numel() / 1e8
        if not asynchronous:
            now(None)

    def now(device):
        time.sleep(busy[0])
        busy[0] = 0.0
        return time.perf_counter()

    monkeypatch.setattr(measure.dist, "send", transfer)
    monkeypatch.setattr(measure.dist, "recv", transfer)
    monkeypatch.setattr(measure, "now", now)
    link = measure.time_link(1, torch.device("cpu"), seconds=1.0)
    assert link["bandwidth"] == pytest.approx(1e8, rel=0.1) and link["latency"] == pytest.approx(1e-3, rel=0.5)
    assert max(sizes) > measure.SMALLEST_MESSAGE


def test_the_copies_of_weights_are_not_counted_as_activations(world_of_one):
    """In bfloat16 each weight has a copy, which the micro-batches share: a sample leaves about half of float32's."""
    saved = {}
    for dtype in torch.float32, torch.bfloat16:
        cluster = measure_with(profiler_of(2, dtype), "tiny", (1,), seconds=0.1)
        saved[dtype] = {module["name"]: module["saved_bytes"] for module in cluster["modules"]}
    layer, head = "decoder_layers.0", "final_norm+final_proj"
    assert 0.4 < saved[torch.bfloat16][layer] / saved[torch.float32][layer] < 0.7
    assert saved[torch.bfloat16][head] <= saved[torch.float32][head]
