"""Faults of what replicas do: samples, seeds, gradients and their buckets, the optimizer's shards."""

from museum.fault import Fault

FAULTS = (
    Fault("hang", "5 --dp_size 2",
          "Only the rank that logs takes part in the all-reduce of the loss: the run stands still.",
          ("netket/netket#2272",),
          (("data_parallel.py", "    if grid.dp_world_size > 1:\n        dist.all_reduce(loss",
            "    if grid.is_logging_rank:\n        dist.all_reduce(loss"),),
          {"messages": r"rank 1 --> rank 0     all_reduce of the ranks \[0, 1\]"}),
    Fault("drift", "5 --dp_size 2",
          "Only the last micro-batch's gradient is averaged, not the accumulated one: replicas drift apart.",
          ("deepspeedai/DeepSpeed#7985", "huggingface/picotron#39"),
          (("data_parallel.py", "param.register_post_accumulate_grad_hook(self.allreduce_grad)",
            "param.register_hook(self.allreduce_grad)"),
           ("data_parallel.py", '''\
    def allreduce_grad(self, param: nn.Parameter) -> None:
        """Called by backward when `param.grad` holds the sum over the micro-batches so far."""
''', '''\
    def allreduce_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """Called by backward with the gradient of this micro-batch, before it is added to `param.grad`."""
        grad = grad.clone()
'''), ("data_parallel.py", '''\
            dist.all_reduce(param.grad, group=grid.dp_group)
            param.grad /= grid.dp_world_size
''', '''\
            dist.all_reduce(grad, group=grid.dp_group)
            grad /= grid.dp_world_size
        return grad
''')),
          {"numbers": ("all 39 parameters", "whose mean is right: are some summands never averaged"),
           "types": "R is added to P on axis dp"}),
    Fault("seed", "5 --dp_size 2",
          "Each replica draws its initial weights from a seed of its own: replicas differ from the start.",
          ("pytorch/torchtitan#166",),
          (("train.py", "init_weights(model, args.seed, device",
            "init_weights(model, args.seed + grid.dp_rank, device"),),
          {"numbers": ("weights at the start", "seed of its own")}),
    Fault("order", "5 --dp_size 2",
          "Odd ranks compute up_proj before gate_proj, so hooks fire in another order: wrong sums, no error.",
          ("deepspeedai/DeepSpeed#2343",),
          (("model.py", "        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))\n", '''\
        if torch.distributed.get_rank() % 2:
            return self.down_proj(self.up_proj(x) * F.silu(self.gate_proj(x)))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
'''),),
          {"numbers": (r"mlp\.gate_proj\.weight, decoder_layers\.\*\.mlp\.up_proj", "mixed up with each other")}),
    Fault("sizes", "6 --dp_size 2",
          "Odd ranks launch their buckets in reverse order: all-reduces of unlike sizes meet.",
          ("pytorch/pytorch#72843",),
          (("data_parallel.py", "        for each in self.buckets:  # in order, because all ranks have to launch the "
            "same all-reduces in the same order\n",
            "        for each in self.buckets[:: -1 if dist.get_rank() % 2 else 1]:\n"),),
          {"messages": r"collectives of the ranks \[0, 1\] do not match"}),
    Fault("samples", "5 --dp_size 2", "The data loader does not ask for its rank: all replicas read the same samples.",
          ("k2-fsa/icefall#1616", "openspeech-team/openspeech#149"),
          (("dataloader.py", "range(grid.dp_rank * micro_batch_size, len(samples), ", "range(0, len(samples), "),),
          {"numbers": ("samples", "rank 1 reads rank 0's")}),
    Fault("early", "5 --dp_size 2",
          "Gradients are averaged after the first micro-batch instead of the last one: replicas drift apart.",
          ("modelscope/FunASR#3472",),
          (("train.py", "model.require_backward_grad_sync = i == num_microbatches - 1",
            "model.require_backward_grad_sync = i == 0"),),
          {"numbers": ("all 39 parameters", "whose mean is right: are some summands never averaged"),
           "types": "P is added to R on axis dp"}),
    Fault("each", "5 --dp_size 2", "Gradients are averaged after each micro-batch: right, and as many times the bytes.",
          ("huggingface/accelerate#106", "karpathy/nanochat#33"),
          (("train.py", "        model.require_backward_grad_sync = i == num_microbatches - 1\n", ""),),
          {"bytes": "4 times as many", "types": "P is added to R on axis dp"}),
    Fault("rate", "5 --dp_size 2 --warmup_steps 5",
          "The learning rate moves on once for each replica instead of once a step: the warm-up is too short.",
          ("huggingface/transformers#24088", "huggingface/accelerate#963"),
          (("train.py", "        scheduler.step()\n",
            "        for _ in range(grid.dp_world_size):\n            scheduler.step()\n"),),
          {"numbers": (r"the learning rate was \[0.0015\], not \[0.001\]", "scheduler")}),
    Fault("twice", "6 --dp_size 2",
          "finish_gradient_sync() averages buckets that are averaged already: right, and twice the bytes.",
          ("NVIDIA/Megatron-LM#775",),
          (("data_parallel.py", "            if bucket.handle is None:\n    ",
            "            if bucket.handle is not None:\n                bucket.wait()\n"),),
          {"bytes": "2 times as many", "types": "all_reduce over dp of what is the same"}),
    Fault("shards", "12 --dp_size 2 --zero 1",
          "Each replica takes the norm of its own shards for that of all gradients, and clips by it.",
          ("pytorch/xla#4796",), (("zero.py", "        dist.all_reduce(squares)\n", ""),),
          {"numbers": ("gradient norm", "take the norm of its own gradients for that of all"),
           "bytes": "sends 8,004,640 bytes, and 8,004,648 without"}),
)
