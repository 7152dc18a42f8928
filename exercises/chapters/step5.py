"""Step 5: data parallelism, one all-reduce for each parameter."""

import torch

from catalogue import exercise


@exercise("5", "dataloader.MicroBatchDataLoader.__init__", hints=(
    "Micro-batch k of all begins at sample k * micro_batch_size. Which k has dp rank 0, which has rank 1?",
    "The first one of this rank is number grid.dp_rank, and the next ones follow at a distance of grid.dp_world_size.",
    "range(first, end, distance), all three in samples: multiply the numbers of micro-batches by micro_batch_size."),
    blank=("first_samples = ",), wrong=[
    ("a replica's first sample is its number", "range(grid.dp_rank * micro_batch_size,", "range(grid.dp_rank,",
     "as dp rank 1 with dp 2 x tp 1"),
    ("samples", "as dp rank 1 with dp 2 x tp 1"),
    ("each replica reads one piece of the corpus",
     "range(grid.dp_rank * micro_batch_size, len(samples), grid.dp_world_size * micro_batch_size)",
     "range(grid.dp_rank * len(samples) // grid.dp_world_size, (grid.dp_rank + 1) * len(samples) // "
     "grid.dp_world_size, micro_batch_size)", "as dp rank 0 with dp 2 x tp 1"),
    ("one optimizer step's only", "len(samples), grid.dp_world_size * micro_batch_size)",
     "gradient_accumulation_steps * grid.dp_world_size * micro_batch_size,\n"
     "                          grid.dp_world_size * micro_batch_size)", "as dp rank 0 with dp 1")])
def samples_of_a_replica(attempt):
    """Choose the samples that this replica reads.

    The samples 0 to len(samples) - 1 form micro-batches of `micro_batch_size` consecutive samples. The dp ranks take
    turns. With dp 2 and micro-batches of 3 samples:

        samples          0  1  2 | 3  4  5 | 6  7  8 | 9 10 11 | ...
        read by dp rank     0    |    1    |    0    |    1    | ...

    Set first_samples, a list or range of numbers: the first sample of each micro-batch of this rank, in the order of
    reading. The lines behind it make the micro-batches out of that. len(samples) is a whole number of turns. grid is
    the ProcessGroupManager: grid.dp_rank is this rank's number in its dp group and grid.dp_world_size their number.
    There can be tp ranks as well: those of one dp_rank read the same samples.
    """
    for dp, tp, size, turns in ((1, 1, 2, 3), (2, 1, 3, 2), (3, 1, 1, 4), (2, 2, 2, 2)):
        samples = [torch.tensor([i, i + 1]) for i in range(dp * size * turns)]  # sample i has the token i

        def program(modules, rank):
            grid = attempt.grid(modules, dp=dp, tp=tp)
            loader = modules.dataloader.MicroBatchDataLoader([*samples], size, 1, torch.device("cpu"))
            return grid.dp_rank, [batch["input_ids"].flatten().tolist() for batch in loader.batches]

        for rank, (dp_rank, got) in enumerate(attempt.run(dp * tp, program)[0]):
            firsts = [(turn * dp + dp_rank) * size for turn in range(turns)]
            attempt.same(str(got), str([[*range(first, first + size)] for first in firsts]),
                         f"the samples of its micro-batches, as dp rank {dp_rank} with dp {dp} x tp {tp}, "
                         f"micro_batch_size {size} and {len(samples)} samples", rank)


@exercise("5", "data_parallel.DataParallelNaive", hints=(
    "Which of the two hooks is called when param.grad holds the sum over all micro-batches so far?",
    "param.register_post_accumulate_grad_hook(self.allreduce_grad), for each parameter in module.parameters().",
    "In allreduce_grad: only if self.require_backward_grad_sync, dist.all_reduce(param.grad, group=grid.dp_group), and "
    "divide param.grad by grid.dp_world_size in place."), blank=("if pgm.", "if self.require"), wrong=[
    ("the sum is not divided", "            param.grad /= grid.dp_world_size\n", "", "(2 times as large)"),
    ("drift", "the gradients of optimizer step 1, with 2 replicas and 3 micro-batches"),
    ("the accumulated sum is divided after each micro-batch", "        if self.require_backward_grad_sync:\n",
     "        param.grad /= 2\n        if self.require_backward_grad_sync:\n", "with 2 replicas and 3")])
def average_at_the_right_time(attempt):
    """Average the gradients over the replicas, once for each optimizer step.

    Each dp rank adds up the gradients of its micro-batches. After the last one, param.grad has to be the mean of the
    ranks' sums. Before each backward, train_step sets self.require_backward_grad_sync: True for the last micro-batch.

        micro-batch     0         1         2
        rank 0         g_0  +    g_1  +    g_2  --+
                                                  +-->  the mean of the two sums, on both ranks
        rank 1         h_0  +    h_1  +    h_2  --+

    Write two things: in __init__, register the hook that averages, on each parameter of `module`; and the hook itself.
    With a single dp rank there is nothing to average. PyTorch has two kinds of hooks:

        param.register_hook(hook)   backward calls hook(grad) with this micro-batch's own gradient, before it is added
                                    to param.grad, and adds what the hook returns
        param.register_post_accumulate_grad_hook(hook)      backward calls hook(param) after it has been added

    You may call dist.all_reduce(tensor, group=grid.dp_group), which sums in place. Begin the hook with
    grid = pgm.process_group_manager; grid.dp_world_size is the number of replicas.
    """
    flags = "--num_hidden_layers 1 --max_grad_norm 0 --gradient_accumulation_steps"
    for dp, tp, num_microbatches in ((2, 1, 3), (2, 2, 2), (3, 1, 1)):
        all_flags = (f"{flags} {num_microbatches} --dp_size {dp} --tp_size {tp} "
                     f"--max_tokens {2 * 16 * dp * num_microbatches}")
        got, ours = attempt.train(dp * tp, all_flags), attempt.train(dp * tp, all_flags, ours=True)
        whole = attempt.train(1, f"{flags} {num_microbatches * dp} --max_tokens {2 * 16 * dp * num_microbatches}",
                              ours=True)
        for step in range(2):
            for rank in range(dp * tp):
                right = whole.gradients[0][step] if tp == 1 else ours.gradients[rank][step]
                attempt.same(got.gradients[rank][step], right, f"the gradients of optimizer step {step + 1}, with {dp} "
                             f"replicas {'of 2 tp ranks ' * (tp > 1)}and {num_microbatches} micro-batches each", rank)
        if num_microbatches == 3:  # (n - 1)/n of the bytes have to arrive and leave for a sum (Patarasuk and Yuan 2009)
            attempt.score(f"MB that a rank sends in two steps of {num_microbatches} micro-batches",
                          max(map(got.world.num_bytes, range(dp))) / 1e6, ours.world.num_bytes(0) / 1e6)
