"""--backend gloo: machines with and without a GPU train together. No GPU is here: see support/half_gpu.py."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lab.launch import ROOT, losses, modules_of, start_fork
from support.checkpoint_runs import SIZES, flags_of, write_corpus, write_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

with modules_of(9):
    import train_distributed
    from model import Llama
    from pipeline_template import PipelineTemplate
    from planning.machines import Setting
    from run import layout
    from run.compression import CompressedAllReduce
    from utils import UserError, load_config

SCRIPT = ROOT / "tests" / "support" / "half_gpu.py"
SHARES = ["--pipelines", "2,2;4", "--num_microbatches", "4,2"]
RUNS = {  # name -> the ranks with a GPU, further flags
    "cpu": ("", SHARES),
    "mixed": ("0,2", [*SHARES, "--eval_every", "2"]),
    "no flag": ("1", [*SHARES, "--backend", "auto"]),
    "no dtype": ("1", [*SHARES, "--dtype", "auto"]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """name -> the future of its run over three ranks; and the folder of what they leave."""
    folder, jobs = tmp_path_factory.mktemp("runs"), {}
    model, corpus = write_model(folder / "model", "llama", "float64", **SIZES), write_corpus(folder)
    for name, (gpus, flags) in RUNS.items():
        words = flags_of(folder, name, model, dataset_name=corpus, device="auto", max_steps=3, save_every=None)
        jobs[name] = start_fork(9, 3, gpus, *words, "--validation_split", "0.25", "--backend", "gloo", *flags,
                                script=SCRIPT, check=False)
    return jobs, folder / "runs"


def test_some_ranks_have_a_gpu(runs):
    """Also where they measure fewer steps than the others, who wait for a rank that never comes otherwise."""
    done = runs[0]["mixed"].result()
    assert done.returncode == 0, done.stderr
    assert "3 ranks over gloo, float64" in done.stdout
    assert runs[0]["cpu"].result().returncode == 0
    mine = losses(runs[1], "mixed")
    assert mine == pytest.approx(losses(runs[1], "cpu"), abs=1e-9)
    assert len(mine) == 3 and "milliseconds of a step" in done.stdout


@pytest.mark.parametrize("name, message", [
    ("no flag", "the backend of --device is gloo on rank 0, but nccl on rank 1: give all ranks the same, or all "
                "--backend gloo, and the same --dtype"),
    ("no dtype", "these differ, by rank: float32, bfloat16, float32: give all the same --dtype")])
def test_refused_without(runs, name, message):
    done = runs[0][name].result()
    assert done.returncode == 2 and message in done.stderr, done.stderr


TIMES = """
import os, torch
import process_group_manager as pgm
from run.times import StepTimes
pgm.init_process_group("gloo")
times = StepTimes(torch.device("cpu"))
if os.environ["RANK"] == "1":
    times.start(0)
    times.stop()
times.print()
"""


def test_a_gpu_that_measured_no_step_lets_the_others_print(run_code):
    """After a resume, as each tenth step is measured there."""
    lines = run_code("cluster", 2, TIMES).stdout.splitlines()
    assert lines[0].startswith("milliseconds") and [line.split()[0] for line in lines[1:]] == ["rank", "1"]


@pytest.fixture
def rank_0_of_four():
    """Messages of torch's backend "fake" go nowhere, so that one process forms the groups of four ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_tensor_parallel_ranks_are_alike(monkeypatch, rank_0_of_four):
    """A CPU's small sums take another way than a GPU's: two such ranks would wait for each other."""
    def form(*kinds: str):
        monkeypatch.setattr(layout, "gather", lambda kind: [*kinds])
        return two.form(args, whole.config)

    args = train_distributed.make_parser().parse_args(["--dtype", "float32", "--device", "cpu"])
    with torch.device("meta"):
        whole = Llama(load_config(str(ROOT / "assets" / "tiny_llama"), num_attention_heads=None))
    templates = [PipelineTemplate.from_layers_per_stage(whole, [whole.config.num_hidden_layers])] * 2
    two = layout.Layout(templates, [1, 1], 1, Setting(), tp_size=2)
    assert form("cuda", "cuda", "cpu", "cpu").dp_size == 2
    with pytest.raises(UserError, match="unlike devices, by rank: cuda, cpu, cpu, cuda: order the hosts"):
        form("cuda", "cpu", "cpu", "cuda")


class FromDevice(TorchDispatchMode):
    """Tensors on "meta" stand for those of a GPU: they can be copied to the host."""

    def __torch_dispatch__(self, operation, kinds, args=(), kwargs=None):
        if operation is torch.ops.aten._to_copy.default and args[0].is_meta and "device" in kwargs:
            return torch.zeros(args[0].shape, dtype=args[0].dtype, device=kwargs["device"])
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_compressed_gradients_of_a_gpu_pass_through_host_memory(monkeypatch, dtype):
    """gloo sums a GPU's tensors, but it exchanges only those in host memory."""
    def exchange(to, outgoing, **options):
        sent.append({each.device.type for each in (outgoing, *(to if isinstance(to, list) else [to]))})
        return mock.Mock()

    sent, buffer = [], torch.zeros(700, device="meta")
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "gloo")
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 3)
    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    monkeypatch.setattr(dist, "all_gather", exchange)
    with FromDevice():
        total = CompressedAllReduce(buffer, None, dtype)
        total.gather()
        total.wait()
    assert sent == [{"cpu"}, {"cpu"}] and total.buffer is buffer
