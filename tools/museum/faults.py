"""The faults of steps 4 to 8 that break_it.py switches on. Those of steps 10 to 16, and all of them: faults_beyond.py.

Each has been made in a public project, too: `reported` says where.
"""

from typing import NamedTuple

from lab.program import Edit, Program


class Fault(NamedTuple):
    step: str
    sentence: str  # what is wrong, and what is to be seen
    edits: tuple[Edit, ...]
    flags: tuple[str, ...]
    check: str  # the one of find_faults.py that finds it
    reported: tuple[str, ...]  # owner/name#number of issues and pull requests on GitHub
    besides: tuple[Edit, ...] = ()  # what the run without the fault changes, too

    def program(self, *further: str, healthy: bool = False) -> Program:
        """The step with the fault, or without it, and with further flags."""
        return Program(self.step, (*self.flags, *further), self.besides + self.edits * (not healthy))


# 32 samples of 128 tokens a step, whatever the topology, and ten steps
DP2 = ("--dp_size", "2", "--gradient_accumulation_steps", "4", "--max_tokens", "40960")
PP2 = ("--pp_size", "2", "--gradient_accumulation_steps", "8", "--max_tokens", "40960")
TP2 = ("--tp_size", "2", "--gradient_accumulation_steps", "8", "--max_tokens", "40960")

FAULTS = {
    "hang": Fault(
        "5", "Only the rank that logs takes part in the all-reduce of the loss: the run stands still.",
        (Edit("data_parallel.py", "    if grid.dp_world_size > 1:\n        dist.all_reduce(loss",
              "    if grid.is_logging_rank:\n        dist.all_reduce(loss"),),
        DP2, "replay", ("netket/netket#2272",)),
    "drift": Fault(
        "5", "Only the last micro-batch's gradient is averaged, not the accumulated one: replicas drift apart.",
        (Edit("data_parallel.py", "param.register_post_accumulate_grad_hook(self.allreduce_grad)",
              "param.register_hook(self.allreduce_grad)"),
         Edit("data_parallel.py", '''\
    def allreduce_grad(self, param: nn.Parameter) -> None:
        """Called by backward when `param.grad` holds the sum over the micro-batches so far."""
''', '''\
    def allreduce_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """Called by backward with the gradient of this micro-batch, before it is added to `param.grad`."""
        grad = grad.clone()
'''),
         Edit("data_parallel.py", '''\
            dist.all_reduce(param.grad, group=grid.dp_group)
            param.grad /= grid.dp_world_size
''', '''\
            dist.all_reduce(grad, group=grid.dp_group)
            grad /= grid.dp_world_size
        return grad
''')),
        DP2, "same", ("deepspeedai/DeepSpeed#7985",)),
    "seed": Fault(
        "5", "Each replica draws its initial weights from a seed of its own: replicas differ from the start.",
        (Edit("train.py", "init_weights(model, args.seed, device",
              "init_weights(model, args.seed + grid.dp_rank, device"),),
        DP2, "same", ("pytorch/torchtitan#166",)),
    "scale": Fault(
        "8", "The loss is not divided by the number of micro-batches before backward: gradients are too large.",
        (Edit("pipeline_parallel.py", " / data_loader.gradient_accumulation_steps\n", "\n"),
         Edit("pipeline_parallel.py", "total_loss + out.detach()", "total_loss + out.detach() / num_microbatches")),
        (*PP2, "--max_grad_norm", "0"), "same", ("pytorch/torchtitan#2972",)),  # clipping hides it as well
    "deadlock": Fault(
        "8", "1F1B's warm-up counts the stages before this one, not those after it: two stages wait for each other.",
        (Edit("pipeline_parallel.py", "warm_up = min(num_stages - stage - 1, num_microbatches)",
              "warm_up = min(stage, num_microbatches)"),),
        PP2, "simulation", ("pytorch/pytorch#126419",)),
    "order": Fault(
        "5", "Odd ranks compute up_proj before gate_proj, so hooks fire in another order: wrong sums, no error.",
        (Edit("model.py", '''\
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
''', '''\
        if torch.distributed.get_rank() % 2:
            return self.down_proj(self.up_proj(x) * F.silu(self.gate_proj(x)))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
'''),),
        DP2, "same", ("deepspeedai/DeepSpeed#2343",)),
    "sizes": Fault(
        "6", "Odd ranks launch their buckets in reverse order: all-reduces of unlike sizes meet.",
        (Edit("data_parallel.py",
              "        for each in self.buckets:  # in order, because all ranks have to launch the same all-reduces in "
              "the same order\n",
              "        for each in self.buckets[:: -1 if dist.get_rank() % 2 else 1]:\n"),),
        DP2, "replay", ("pytorch/pytorch#72843",)),
    "frozen": Fault(
        "4", "AdamW is made before init_weights replaces the parameters, so it never updates those of the model.",
        (Edit("train.py", "    init_weights(model, args.seed, device, split_over_tp)\n", ""),
         Edit("train.py", "    print_parameters(model, device,",
              "    init_weights(model, args.seed, device, split_over_tp)\n    print_parameters(model, device,")),
        TP2, "same", ("huggingface/accelerate#3256",)),
    "partial": Fault(
        "4", "f does nothing in backward: each tp rank goes on with its own part of the gradient.",
        (Edit("tensor_parallel.py", "        all_reduce(grad)\n", ""),),
        TP2, "same", ("pytorch/torchtitan#1805",)),
    "double": Fault(
        "4", "g sums in backward as well, where each rank has the whole gradient already: tp times too much at each.",
        (Edit("tensor_parallel.py", '''\
        all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
''', '''\
        all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        all_reduce(grad)
'''),),
        (*TP2, "--max_grad_norm", "0"), "same", ("tenstorrent/tt-metal#31748",)),
    "counted": Fault(
        "4", "The gradient norm counts what each tp rank holds whole, the norms' weights, once for each of them.",
        (Edit("tensor_parallel.py", " for param in params if is_first or param in split]", " for param in params]"),),
        TP2, "same", ("NVIDIA-NeMo/RL#3788", "ROCm/TransformerEngine#715")),
    "crossed": Fault(
        "4", "Partners both send first and then receive: each waits until the other one receives.",
        (Edit("tensor_parallel.py", "        sending = dist.isend(tensor, group", "        dist.send(tensor, group"),
         Edit("tensor_parallel.py", "        sending.wait()\n", "")),
        TP2, "replay", ("NVIDIA/nccl#479",)),
    "samples": Fault(
        "5", "The data loader does not ask for its rank: all replicas read the same samples.",
        (Edit("dataloader.py", "range(grid.dp_rank * micro_batch_size, len(samples), ",
              "range(0, len(samples), "),),
        DP2, "same", ("k2-fsa/icefall#1616", "openspeech-team/openspeech#149")),
    "early": Fault(
        "5", "Gradients are averaged after the first micro-batch instead of the last one: replicas drift apart.",
        (Edit("train.py", "model.require_backward_grad_sync = i == num_microbatches - 1",
              "model.require_backward_grad_sync = i == 0"),),
        DP2, "same", ("modelscope/FunASR#3472",)),
    "each": Fault(
        "5", "Gradients are averaged after each micro-batch: right, and as many times the bytes.",
        (Edit("train.py", "        model.require_backward_grad_sync = i == num_microbatches - 1\n", ""),),
        DP2, "bytes", ("huggingface/accelerate#106", "karpathy/nanochat#33")),
    "rate": Fault(
        "5", "The learning rate moves on once for each replica instead of once a step: the warm-up is too short.",
        (Edit("train.py", "        scheduler.step()\n",
              "        for _ in range(grid.dp_world_size):\n            scheduler.step()\n"),),
        (*DP2, "--warmup_steps", "5"), "same", ("huggingface/transformers#24088", "huggingface/accelerate#963")),
    "twice": Fault(
        "6", "finish_gradient_sync() averages buckets that are averaged already: right, and twice the bytes.",
        (Edit("data_parallel.py", '''\
            if bucket.handle is None:
                bucket.sync_gradient()
''', '''\
            if bucket.handle is not None:
                bucket.wait()
            bucket.sync_gradient()
'''),),
        DP2, "bytes", ("NVIDIA/Megatron-LM#775",)),
    "clip": Fault(
        "8", "Each stage clips by the norm of its own gradients, not by that of the whole model.",
        (Edit("tensor_parallel.py", "    dist.all_reduce(squares)\n",
              "    dist.all_reduce(squares, group=grid.tp_group)\n"),),
        PP2, "same", ("pytorch/torchtitan#596",)),
    "tied": Fault(
        "8", "The gradients of a tied embedding are not summed between first and last stage: it becomes two weights.",
        (Edit("pipeline_parallel.py", "        sum_tied_gradients(model.module)\n", ""),),
        PP2, "same", ("uw-syfi/piper#13", "NVIDIA/Megatron-LM#844"),
        (Edit("train.py", '    with torch.device("meta"):',
              '    config.tie_word_embeddings = True\n    with torch.device("meta"):'),)),
    "buffer": Fault(
        "8", "All sends share one buffer, which the next result overwrites while the last one is still being sent.",
        (Edit("pipeline_parallel.py", "        self.sending: deque[tuple] = deque()\n",
              "        self.sending: deque[tuple] = deque()\n"
              "        self.outgoing = torch.empty(tensor_shape, dtype=dtype, device=self.wire_device)\n"),
         Edit("pipeline_parallel.py", "        tensor = tensor.detach().to(self.wire_device).contiguous()\n",
              "        tensor = self.outgoing.copy_(tensor.detach())\n")),
        PP2, "replay", ("NVIDIA/Megatron-LM#4047",)),
    "few": Fault(
        "8", "1F1B's warm-up may be longer than the step has micro-batches: wrong with fewer of these than stages.",
        (Edit("pipeline_parallel.py", "warm_up = min(num_stages - stage - 1, num_microbatches)",
              "warm_up = num_stages - stage - 1"),),
        ("--pp_size", "4", "--gradient_accumulation_steps", "2", "--max_tokens", "10240"),
        "simulation", ("pytorch/torchtitan#775",)),
}

# What --sgd of break_it.py changes besides, with or without a fault
SGD = (
    Edit("train.py", "torch.optim.AdamW(model.named_parameters(), lr=args.learning_rate, fused=True)",
         "torch.optim.SGD(model.named_parameters(), lr=args.learning_rate)"),
)
