"""The faults that break_it.py switches on: the step of each, the lines of source it changes, and how it is run."""

from typing import NamedTuple


class Edit(NamedTuple):
    """Replaces the text `old`, which `file` contains exactly once, by `new`."""

    file: str
    old: str
    new: str


class Fault(NamedTuple):
    step: str
    sentence: str  # what is wrong, and what is to be seen
    edits: tuple[Edit, ...]
    num_processes: int
    flags: tuple[str, ...]


# 32 samples of 128 tokens a step, whatever the topology, and ten steps
DP2 = ("--dp_size", "2", "--gradient_accumulation_steps", "4", "--max_tokens", "40960")
PP2 = ("--pp_size", "2", "--gradient_accumulation_steps", "8", "--max_tokens", "40960")

FAULTS = {
    "hang": Fault(
        "5", "Only the rank that logs takes part in the all-reduce of the loss: the run stands still.",
        (Edit("data_parallel.py", "    if grid.dp_world_size > 1:\n        dist.all_reduce(loss",
              "    if grid.is_logging_rank:\n        dist.all_reduce(loss"),),
        2, DP2),
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
        2, DP2),
    "seed": Fault(
        "5", "Each replica draws its initial weights from a seed of its own: replicas differ from the start.",
        (Edit("train.py", "init_weights(model, args.seed, device",
              "init_weights(model, args.seed + grid.dp_rank, device"),),
        2, DP2),
    "scale": Fault(
        "8", "The loss is not divided by the number of micro-batches before backward: gradients are too large.",
        (Edit("pipeline_parallel.py", '''\
                    out = cross_entropy(out, batch["target_ids"], stage.config.vocab_size) / num_microbatches
                    total_loss = total_loss + out.detach()
''', '''\
                    out = cross_entropy(out, batch["target_ids"], stage.config.vocab_size)
                    total_loss = total_loss + out.detach() / num_microbatches
'''),),
        2, (*PP2, "--max_grad_norm", "0")),  # clipping hides it as well
    "deadlock": Fault(
        "8", "1F1B's warm-up counts the stages before this one, not those after it: two stages wait for each other.",
        (Edit("pipeline_parallel.py", "warm_up = min(num_stages - stage - 1, num_microbatches)",
              "warm_up = min(stage, num_microbatches)"),),
        2, PP2),
    "order": Fault(
        "5", "Odd ranks compute up_proj before gate_proj, so hooks fire in another order: wrong sums, no error.",
        (Edit("model.py", '''\
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
''', '''\
        if torch.distributed.get_rank() % 2:
            return self.down_proj(self.up_proj(x) * F.silu(self.gate_proj(x)))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
'''),),
        2, DP2),
    "sizes": Fault(
        "6", "Odd ranks launch their buckets in reverse order: all-reduces of unlike sizes meet.",
        (Edit("data_parallel.py",
              "        for each in self.buckets:  # in order, because all ranks have to launch the same all-reduces in "
              "the same order\n",
              "        for each in self.buckets[:: -1 if dist.get_rank() % 2 else 1]:\n"),),
        2, DP2),
}

# What the flags --checksums and --sgd of break_it.py change besides, with or without a fault
CHECKSUMS = (
    Edit("train.py", "import process_group_manager as pgm\n",
         "import process_group_manager as pgm\nimport same_weights\n"),
    Edit("train.py", "    for step in range(1, num_steps + 1):\n",
         "    same_weights.report(0, model, grid.dp_group)\n    for step in range(1, num_steps + 1):\n"),
    Edit("train.py", "        logger.log(step, ",
         "        same_weights.report(step, model, grid.dp_group)\n        logger.log(step, "),
)
SGD = (
    Edit("train.py", "torch.optim.AdamW(model.named_parameters(), lr=args.learning_rate, fused=True)",
         "torch.optim.SGD(model.named_parameters(), lr=args.learning_rate)"),
)
