"""Faults of what replicas do: samples, the division of the loss, gradients and their buckets."""

from museum.fault import Fault

FAULTS = (
    Fault("samples", "5 --dp_size 2", "The data loader does not ask for its rank: all replicas read the same samples.",
          ("k2-fsa/icefall#1616", "openspeech-team/openspeech#149"),
          (("dataloader.py", "range(grid.dp_rank * micro_batch_size, len(samples), ", "range(0, len(samples), "),),
          {"numbers": ("samples", "rank 1 reads rank 0's")}),
    Fault("each", "5 --dp_size 2", "Gradients are averaged after each micro-batch: right, and as many times the bytes.",
          ("huggingface/accelerate#106", "karpathy/nanochat#33"),
          (("train.py", "        model.require_backward_grad_sync = i == num_microbatches - 1\n", ""),),
          {"bytes": "4 times as many", "types": "P is added to R on axis dp"}),
)
