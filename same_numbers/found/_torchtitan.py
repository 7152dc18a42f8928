"""torchtitan on a CPU: what its Trainer needs in place of a GPU. Shared by the scripts beside this module.

Replaced: the device's module; FlexAttention by dense attention with the same mask; experts' grouped products, which are
in bfloat16, by a loop in the model's dtype; a sum that is scaled before it is sent (NCCL alone has it) by a sum; the
tokenizer and the data set by token ids drawn here.
"""
import collections
import importlib.metadata
import os
import tempfile
import types

import torch

torch._utils._get_available_device_type = lambda: "cpu"
torch.set_num_threads(1)


class Device(types.ModuleType):
    """The functions of torch.cuda that torchtitan calls."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return {"get_device_name": lambda *a: "cpu", "current_device": lambda: 0, "device_count": lambda: 1,
                "get_device_properties": lambda *a: types.SimpleNamespace(total_memory=1 << 34, name="cpu"),
                "memory_stats": lambda *a: collections.defaultdict(int)}.get(name, lambda *a, **k: None)


class Nothing(types.SimpleNamespace):
    """Stands for a part's configuration; what it builds does nothing and answers every call with None."""
    enable, interval, load_step = False, 1, -1

    def build(self, **kwargs):
        return Nothing()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *a, **k: None


def dense_attention(q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux, kernel_options):
    """(B, N, L, H), with what the mask's function allows."""
    if enable_gqa:
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    allowed = torch.stack(
        [block_mask.mask_mod(torch.tensor(b), torch.tensor(0), rows, columns) for b in range(q.shape[0])]
    )
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~allowed[:, None], -torch.inf)
    return scores.softmax(-1) @ v, types.SimpleNamespace(lse=scores.logsumexp(-1))


def expert_products(self, *, A, B_t, offs):
    """Of each expert's rows, which end at `offs`; there may be padding behind the last one."""
    ends = [0, *offs.tolist()]
    parts = [A[ends[i]:ends[i + 1]] @ B_t[i] for i in range(len(B_t))]
    return torch.cat([*parts, A.new_zeros(len(A) - ends[-1], B_t.shape[-1])])


def unrounded(forward):
    """The same function, in which bfloat16() changes nothing."""
    rounded = torch.Tensor.bfloat16

    def called(*args, **kwargs):
        torch.Tensor.bfloat16 = lambda tensor: tensor
        try:
            return forward(*args, **kwargs)
        finally:
            torch.Tensor.bfloat16 = rounded
    return called


def prepare():
    """Call it once in each process, before a Trainer is made. Raises ImportError where torchtitan is not installed."""
    from torchtitan.tools import utils
    utils.device_type, utils.device_module = "cpu", Device("cpu")
    utils.get_local_device = lambda: torch.device("cpu")
    import torchtitan.config
    import torchtitan.distributed.utils
    from torchtitan import trainer  # noqa: F401
    from torchtitan.models.common import attention
    torchtitan.config.TORCH_DTYPE_MAP["float64"] = torch.float64
    attention.FlexAttention.compiled_flex_attn = staticmethod(dense_attention)
    attention._compiled_create_block_mask = attention.create_block_mask
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
    GroupedExperts._grouped_mm = expert_products
    for kind in (GroupedExperts, GptOssGroupedExperts):
        kind.forward = unrounded(kind.forward)
    torchtitan.distributed.utils.set_pg_timeouts = lambda *a, **k: None
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
    factors = collectives._get_gradient_divide_factors

    def plain_sums(*args, **kwargs):
        before, after, *ops = factors(*args, **kwargs)
        return before, after, *(torch.distributed.ReduceOp.SUM for _ in ops)
    collectives._get_gradient_divide_factors = plain_sums


def batches(step, samples=4, length=16, vocabulary=64):
    """[(what the Trainer's data loader yields: ids and positions, targets)], the same in each process."""
    ids = torch.randint(vocabulary, (samples, length + 1), generator=torch.Generator().manual_seed(step))
    return {"input": ids[:, :-1], "positions": torch.arange(length).repeat(samples, 1)}, ids[:, 1:]


def gradients(trainer):
    """name -> the whole gradient, of all parts of the model on this rank."""
    return {name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
            for part in trainer.model_parts for name, p in part.named_parameters() if p.grad is not None}


def make(spec, folder, *, batch=4, samples=-1, loss=None, dtype="float64", length=16, **parallelism):
    """A Trainer of torchtitan's, of `spec`, over as many ranks as RANK and WORLD_SIZE say."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.trainer import Trainer
    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
    config = Trainer.Config(
        loss=loss or CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        model_spec=spec,
        dump_folder=str(folder),
        optimizer=default_adamw(lr=1e-3),
        activation_checkpoint=None,
        checkpoint=Nothing(create_seed_checkpoint=False),
        tokenizer=Nothing(),
        dataloader=Nothing(),
        validator=Nothing(),
        parallelism=ParallelismConfig(**parallelism),
        training=TrainingConfig(
            local_batch_size=batch,
            global_batch_size=samples,
            seq_len=length,
            steps=3,
            dtype=dtype,
            max_norm=1e9,
            mixed_precision_param=dtype,
            mixed_precision_reduce=dtype,
            disable_cuda_graphs=True,
        ),
    )
    return Trainer(config)


def weights_by_name(trainer):
    """The same weights in one process and on ranks: drawn by the parameter's name, each rank takes its part."""
    import zlib

    from torch.distributed.tensor import distribute_tensor
    for part in trainer.model_parts:
        for name, param in part.named_parameters():
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.randn(param.shape, dtype=torch.float64, generator=draw) * 0.05 + ("norm" in name)
            with torch.no_grad():
                if hasattr(param, "placements"):
                    whole = distribute_tensor(
                        whole.to(param.dtype), param.device_mesh, param.placements, src_data_rank=None
                    )
                param.copy_(whole)


def step(trainer, number, batch):
    """One step of the Trainer's own, on these batches."""
    trainer.step = number
    trainer.train_step(trainer.batch_generator(batch if isinstance(batch, list) else [batch]))


def version():
    return importlib.metadata.version("torchtitan")


def one_step(rank, ranks, folder, spec, **more):
    """In a rank: a step over tp without sequence parallelism; leaves its loss and whole gradients in `folder`."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(29600 + os.getppid() % 300 + ranks))
    spec.model.layers, losses = spec.model.layers[:2], []
    trainer = make(spec, folder, tensor_parallel_degree=ranks, enable_sequence_parallel=False, **more)
    weights_by_name(trainer)
    run = trainer.fwd_bwd_fn
    trainer.fwd_bwd_fn = lambda *args: losses.append(run(*args)) or losses[-1]
    step(trainer, 1, batches(0))
    torch.save((float(losses[0].detach()), gradients(trainer)), f"{folder}/{ranks}_{rank}")


def compared(go):
    """(loss, loss over two ranks, [(name, gradient, gradient over two ranks)])."""
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2):
            torch.multiprocessing.spawn(go, (ranks, folder), nprocs=ranks)
        (loss, one), (other, many) = (torch.load(f"{folder}/{ranks}_0") for ranks in (1, 2))
    return loss, other, [(name, each, many[name]) for name, each in one.items()]
