"""What the checks of exercises that count measure of the steps beyond: shards, blocks that go around, experts."""

import functools
import types
from unittest import mock

import torch

from counting_ranks import DP_TP, on_grid, small_llama
from counting_runs import llama
from lab.program import Program
from lab.thread_ranks import World

IDS = torch.zeros(1, 4, dtype=torch.long)


@functools.cache
def zero_run(replicas: int, layers: int) -> float:
    """Bytes of weights, gradients and moments that a rank has after an optimizer step, the mean over ranks."""
    def program(modules, model):
        optimizer = torch.optim.AdamW(model.named_parameters())
        model(IDS).sum().backward()
        model.finish_gradient_sync()
        optimizer.step()
        model.gather_weights()
        kept = [*model.module.parameters(), *(param.grad for param in model.parameters())]
        kept += [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    kept, _ = on_grid("12", (replicas, 1, 1), lambda modules: modules.zero.Zero(
        small_llama(modules, layers=layers), 2), program)
    return sum(kept) / replicas


@functools.cache
def fsdp_run(layers: int, replicas: int, microbatches: int, hidden: int, width: int) -> float:
    """Bytes that a rank sends in an optimizer step, the mean over ranks."""
    def program(modules, model):
        for i in range(microbatches):
            model.require_backward_grad_sync = i == microbatches - 1
            model(IDS, 0).sum().backward()
        model.finish_gradient_sync()

    _, world = on_grid("13", (replicas, 1, 1), lambda modules: modules.fsdp.FullyShardedDataParallel(small_llama(
        modules, modules.pipeline_parallel.PipelineParallel, hidden=hidden, width=width, layers=layers)), program)
    return world.num_bytes() / replicas


@functools.cache
def norms_run(layers: int, hidden: int, ranks: int) -> int:
    """Bytes that a rank sends to sum the gradients of the norms."""
    def make(modules):
        halves = modules.sequence_parallel.Gather, modules.sequence_parallel.Scatter
        return small_llama(modules, lambda model: modules.tensor_parallel.apply_tensor_parallel(model, *halves),
                           hidden=hidden, layers=layers)

    def program(modules, model):
        grid = modules.process_group_manager.process_group_manager
        modules.sequence_parallel.all_reduce = lambda tensor: torch.distributed.all_reduce(tensor, group=grid.tp_group)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        modules.sequence_parallel.sum_norm_gradients(modules.data_parallel.DataParallelBucket(model))

    return on_grid("14", (1, 1, ranks), make, program)[1].num_bytes(0)


@functools.cache
def ring_run(tokens: int, kv_heads: int, head_dim: int, ranks: int) -> int:
    """Bytes that a rank sends in forward and backward of ring attention."""
    def make(modules):
        return [torch.randn((1, kv_heads, tokens // ranks, head_dim), requires_grad=True) for _ in range(3)]

    def program(modules, parts):
        modules.context_parallel.RingAttention.apply("zigzag", *parts).sum().backward()

    return on_grid("15", (1, 1, 1, ranks), make, program)[1].num_bytes(0)


@functools.cache
def active_run(hidden: int, width: int, layers: int, experts: int, per_token: int) -> int:
    """Parameters of the layers' matrices that have something to multiply when one token passes."""
    modules, shape = Program("16").load(), {**DP_TP, "hidden": hidden, "width": width, "head_dim": hidden // 4}
    config = types.SimpleNamespace(**{**vars(llama(**shape, layers=layers).config),
                                      "num_experts": experts, "experts_per_token": per_token})
    model, used = modules.model.Llama(config), []
    for module in model.decoder_layers.modules():
        matrices = [param for param in module.parameters(recurse=False) if param.dim() > 1]
        module.register_forward_pre_hook(  # an expert that the token has not chosen gets no rows
            lambda module, args, matrices=matrices: used.extend(matrices if args[0].numel() else []))
    model(torch.zeros(1, 1, dtype=torch.long), torch.arange(1))
    return sum(param.numel() for param in used)


@functools.cache
def busy_share(microbatches: int, generators: int, generation: float, training: float, lag: int) -> float:
    """The share of the last step's time in which a trainer computes, by clocks that messages carry along."""
    world, source, now = World(1 + generators), Program("19"), torch.zeros(1 + generators, dtype=torch.float64)
    args = mock.Mock(generators=generators, lag=lag, gradient_accumulation_steps=microbatches, micro_batch_size=1,
                     group_size=2, seq_len=4)

    def main(rank: int) -> float:
        modules = source.load()
        modules.process_group_manager.setup_process_group_manager(1, 1, 1, generators)
        rollouts, weight = modules.rollouts, torch.zeros(1)

        def generate(*args):
            now[rank] += generation
            return weight, weight

        def receive(shape, dtype, sender, *args):
            torch.distributed.recv(clock := torch.zeros_like(now[0]), sender)
            now[rank] = max(now[rank], clock)
            return torch.zeros(shape, dtype=dtype)

        rollouts.generate, rollouts.receive, rollouts.LetterTask = generate, receive, mock.Mock()
        rollouts.send = lambda tensor, receiver: torch.distributed.send(now[rank].clone(), receiver)
        rollouts.plan_transfers = lambda config: [
            rollouts.Transfer("weight", 0, 0, 0, to, 0, 1, 1) for to in range(1, 1 + generators)]
        stage = mock.Mock(dtype=weight.dtype, named_parameters={"weight": weight}.items)
        if rank:
            return rollouts.run_generator(args, stage, 3)
        trainer = rollouts.Rollouts(args, stage, 3, torch.device("cpu"))
        for step in (1, 2, 3):
            before = now[0].item()
            trainer.begin(step)
            now[0] += training
            trainer.end(step)
        return training / (now[0].item() - before)

    return world.run(main)[0]
