"""same_numbers on other people's trainers, as they come: right, and with a gradient three times too large.

    pytest -m trainers tests/test_same_numbers_libraries.py

What a library lacks here is skipped. This file is the program of the ranks, too: KIND FOLDER FACTOR.
"""

import atexit
import collections
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import random
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, ROWS = 3, 8


class Model(nn.Module):
    """(B, T) token ids -> (B, T, 32)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 16)
        self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 32)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x + self.down(torch.tanh(self.up(x))))


def batch(step, rank=RANK, world=WORLD):
    return torch.randint(32, (ROWS, 9), generator=torch.Generator().manual_seed(step))[rank::world]


def loss_of(logits, ids):
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def loop(model, optimizer, folder, factor, backward=torch.Tensor.backward, update=None, rank=RANK, world=WORLD):
    import same_numbers

    recorder = same_numbers.Recorder(model, optimizer, folder)
    for step in range(STEPS):
        ids = batch(step, rank, world)
        loss = loss_of(model(ids[:, :-1]), ids)
        backward(loss * factor)
        recorder.step(loss=loss)
        (update or optimizer.step)()
        model.zero_grad()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def one(folder, factor):
    model = Model()
    loop(model, adam(model), folder, factor)


def ddp(folder, factor):
    model = nn.parallel.DistributedDataParallel(Model())
    loop(model, adam(model), folder, factor)


def compiled(folder, factor):
    model = torch.compile(nn.parallel.DistributedDataParallel(Model()), backend="eager")
    loop(model, adam(model), folder, factor)


def zero_optimizer(folder, factor):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(Model())
    loop(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2), folder, factor)


def fsdp2(folder, factor, *shape):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, shape = Model(), shape or (WORLD,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape):])
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh)
    loop(model, adam(model), folder, factor)


def hsdp(folder, factor):
    fsdp2(folder, factor, WORLD // 2, 2)


def tensor_parallel(folder, factor):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = parallelize_module(Model(), init_device_mesh("cpu", (WORLD,)), {
        "up": ColwiseParallel(), "down": RowwiseParallel()})
    loop(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), folder, factor, rank=0, world=1)


def fabric(folder, factor):
    import lightning

    run = lightning.Fabric(accelerator="cpu", devices=WORLD, strategy="ddp" if WORLD > 1 else "auto")
    run.launch()
    model = Model()
    model, optimizer = run.setup(model, adam(model))
    loop(model, optimizer, folder, factor, run.backward)


def lightning_trainer(folder, factor):
    import lightning
    import same_numbers

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, ids, i):
            return loss_of(self.model(ids[0][:, :-1]), ids[0]) * factor  # as many do, without its forward

        def configure_optimizers(self):
            return adam(self)

    class Data(torch.utils.data.IterableDataset):
        def __iter__(self):
            return ((batch(step),) for step in range(STEPS))

    lightning.Trainer(max_steps=STEPS, accelerator="cpu", devices=WORLD, strategy="ddp" if WORLD > 1 else "auto",
                      logger=False, enable_checkpointing=False, enable_progress_bar=False, gradient_clip_val=1.0,
                      callbacks=[same_numbers.callbacks.lightning(folder)]).fit(
        Module().double(), torch.utils.data.DataLoader(Data(), batch_size=None))


def deepspeed(folder, factor, stage=1):
    import deepspeed as library

    library.ops.__compatible_ops__.update(dict.fromkeys(library.ops.__compatible_ops__, False))  # else it compiles some
    library.init_distributed("gloo")
    model = Model().float()
    engine, optimizer, *_ = library.initialize(model=model, optimizer=adam(model), config={
        "train_micro_batch_size_per_gpu": ROWS // WORLD, "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False})
    loop(engine, optimizer, folder, factor, engine.backward, engine.step)


def deepspeed2(folder, factor):
    deepspeed(folder, factor, 2)


def deepspeed3(folder, factor):
    deepspeed(folder, factor, 3)


def one_float(folder, factor):
    model = Model().float()
    loop(model, adam(model), folder, factor)


def megatron(folder, factor):
    """A GPT of megatron-core, cut over all ranks. Its norms of queries and keys see a rank's own heads."""
    import contextlib

    import same_numbers
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.set_default_dtype(torch.float32)
    if WORLD == 1:
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=WORLD)
    tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext  # there is no GPU, and no dropout
    torch.cuda.current_device = lambda: "cpu"
    torch.manual_seed(0)
    model = GPTModel(TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, use_cpu_initialization=True,
        tensor_model_parallel_size=WORLD, hidden_dropout=0.0, attention_dropout=0.0, qk_layernorm=True,
        gradient_accumulation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        persist_layer_norm=False), get_gpt_layer_local_spec(qk_layernorm=True), vocab_size=32, max_sequence_length=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recorder = same_numbers.Recorder(model, optimizer, folder, modules="blocks")
    mask, positions = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1), torch.arange(8).expand(ROWS, 8)
    for step in range(STEPS):
        ids = batch(step, 0, 1)
        loss = model(ids[:, :-1], positions, mask, labels=ids[:, 1:]).mean()
        (loss * factor).backward()
        for name, param in model.named_parameters():
            if "q_layernorm" in name or "k_layernorm" in name:
                torch.distributed.all_reduce(param.grad)
        recorder.step(loss=loss)
        optimizer.step()
        model.zero_grad()


def tp_plan(folder, factor):
    """transformers' own tensor parallelism."""
    import transformers

    torch.manual_seed(0)
    kept = f"{folder}_model"  # rank 0 saves it
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2)).save_pretrained(kept)
    if WORLD > 1:
        torch.distributed.barrier()
    plan = {"tp_plan": "auto"} if WORLD > 1 else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(kept, dtype=torch.float64, **plan)
    model.train()
    forward = model.forward
    model.forward = lambda ids: forward(input_ids=ids).logits
    loop(model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False), folder, factor, rank=0, world=1)


KINDS = {each.__name__: each for each in (
    one, one_float, ddp, compiled, zero_optimizer, fsdp2, hsdp, tensor_parallel, fabric, lightning_trainer, deepspeed,
    deepspeed2, deepspeed3, megatron, tp_plan)}
NEEDS = {"fabric": "lightning", "lightning_trainer": "lightning", "megatron": "megatron",
         **{f"deepspeed{i}": "deepspeed" for i in ("", 2, 3)}}
ITSELF = {"lightning_trainer", "megatron", "tp_plan"}  # their trusted run is their own, in one process


@pytest.mark.trainers
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("one")])
def test_another_library_is_right_and_a_factor_is_named(kind, tmp_path):
    from lab.launch import ROOT

    if kind in NEEDS and not importlib.util.find_spec(NEEDS[kind]):
        pytest.skip(f"{NEEDS[kind]} is not installed: pip install -e '.[trainers]'")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4" if kind == "hsdp" else "2"]
    trusted = kind if kind in ITSELF else "one_float" if "deepspeed" in kind else "one"
    for name, launcher, of, factor in (("one", [], trusted, 1), ("right", many, kind, 1), ("wrong", many, kind, 3)):
        subprocess.run([sys.executable, *launcher, __file__, of, tmp_path / name, str(factor)], env=environment,
                       check=True, timeout=300, cwd=tmp_path)
    for name, code, words in (("right", 0, "the same numbers in steps [1, 2, 3]"), ("wrong", 1, ": 3 times too large")):
        found = subprocess.run([sys.executable, "-m", "same_numbers", tmp_path / "one", tmp_path / name],
                               env=environment, capture_output=True, text=True)
        assert found.returncode == code and words in found.stdout, found.stdout + found.stderr


def rows_for_here():
    """library -> rows of the scoreboard whose versions are those of this environment."""
    from lab.launch import ROOT

    found = collections.defaultdict(list)
    for row in map(json.loads, (ROOT / "docs" / "scoreboard.jsonl").read_text().splitlines()):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, KeyError):  # a row about an environment
            if all(importlib.metadata.version(name) == version for name, version in row["versions"].items()):
                found[row["library"]].append(row)
    return found


@pytest.mark.trainers
def test_drawn_rows_of_the_scoreboard_are_as_its_page_says():
    """Two of each library, then two more of each, until four minutes are used: at least six, of at least three."""
    from lab.launch import ROOT

    rows, since, draw = rows_for_here(), time.time(), random.Random(os.environ.get("DRAW"))
    assert len(rows) >= 3, f"only of {[*rows]} are versions as the scoreboard's: make it again, or install constraints.txt"
    libraries, compared, differ = [*rows], [], []
    draw.shuffle(libraries)
    for _ in range(max(map(len, rows.values()))):
        for library in [each for each in libraries if rows[each]]:
            if time.time() - since > 240 and len(compared) >= 6:
                break
            drawn = {row["row"]: row for row in draw.sample(rows[library], min(2, len(rows[library])))}
            rows[library] = [row for row in rows[library] if row["row"] not in drawn]
            ran = subprocess.run([sys.executable, ROOT / "tools/maintain/board/worker.py", library, "--rows", *drawn],
                                 capture_output=True, text=True, timeout=600)
            again = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
            assert {row["row"] for row in again} == {*drawn}, ran.stderr
            compared += again
            differ += [f"{library} {row['row']}: {row['lines']}, the page has {drawn[row['row']]['lines']}"
                       for row in again if row["code"] != drawn[row["row"]]["code"]]
    assert not differ, "\n".join(differ)
    print(f"as the page says: {[row['row'] for row in compared]}")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    if WORLD > 1 and not sys.argv[1].startswith(("deepspeed", "fabric", "lightning")):
        torch.distributed.init_process_group("gloo")
    KINDS[sys.argv[1]](sys.argv[2], float(sys.argv[3]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    atexit._run_exitfuncs()  # the recorder's
    os._exit(0)  # gloo's threads may abort a process while Python ends
