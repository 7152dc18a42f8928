"""Wrong and right answers to the exercises of step 5."""

from versions import Versions, Wrong, museum

VERSIONS = {
    "samples_of_a_replica": Versions(
        wrong=[
            Wrong("a replica's first sample is its number", "range(grid.dp_rank * micro_batch_size,",
                  "range(grid.dp_rank,", "as dp rank 1 with dp 2 x tp 1"),
            museum("samples", "as dp rank 1 with dp 2 x tp 1"),
            Wrong("each replica reads one piece of the corpus",
                  "range(grid.dp_rank * micro_batch_size, len(samples), grid.dp_world_size * micro_batch_size)",
                  "range(grid.dp_rank * len(samples) // grid.dp_world_size, (grid.dp_rank + 1) * len(samples) // "
                  "grid.dp_world_size, micro_batch_size)", "as dp rank 0 with dp 2 x tp 1"),
            Wrong("one optimizer step's only", "len(samples), grid.dp_world_size * micro_batch_size)",
                  "gradient_accumulation_steps * grid.dp_world_size * micro_batch_size,\n                          "
                  "grid.dp_world_size * micro_batch_size)", "as dp rank 0 with dp 1"),
        ],
        right='''
def __init__(self, samples, micro_batch_size, gradient_accumulation_steps, device, num_workers=0):
    self.gradient_accumulation_steps, self.device = gradient_accumulation_steps, device
    grid = pgm.process_group_manager
    first_samples = [i for i in range(len(samples)) if i % micro_batch_size == 0
                     and i // micro_batch_size % grid.dp_world_size == grid.dp_rank]
    DataLoader.__init__(self, samples, num_workers=num_workers, collate_fn=collate_batch,
                        batch_sampler=[range(first, first + micro_batch_size) for first in first_samples])
    self.batches = iter(self)
'''),
    "average_at_the_right_time": Versions(
        wrong=[
            Wrong("the sum is not divided", "            param.grad /= grid.dp_world_size\n", "", "(2 times as large)"),
            museum("drift", "the gradients of optimizer step 1, with 2 replicas and 3 micro-batches"),
            Wrong("the accumulated sum is divided after each micro-batch",
                  "        if self.require_backward_grad_sync:\n",
                  "        param.grad /= 2\n        if self.require_backward_grad_sync:\n", "with 2 replicas and 3"),
        ]),
}
