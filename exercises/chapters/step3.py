"""Step 3: which samples an optimizer step reads, and gradient accumulation."""

import tempfile

import numpy as np
import torch
import torch.nn.functional as F

from catalogue import exercise


@exercise("3", "dataloader.TokenSamples", hints=(
    "A sample needs T + 1 tokens, because the last input has a target, too; but the next sample begins T tokens later.",
    "Of N tokens, the last one can only be a target. So N - 1 inputs are there, which make (N - 1) // T samples.",
    "In a new epoch, sample i is the sample i % samples_per_epoch of the first one."),
    blank=("self.samples_per_epoch", "first = ", "return torch.from_numpy"), wrong=[
    ("the last sample has no last target", "(len(self.tokens) - 1) // seq_len", "len(self.tokens) // seq_len",
     "samples_per_epoch in a corpus of the 12 tokens"),
    ("samples share no token", "i % self.samples_per_epoch * self.seq_len",
     "i % self.samples_per_epoch * (self.seq_len + 1)", "sample 1 in a corpus of the 13 tokens"),
    ("the corpus is not repeated", "i % self.samples_per_epoch * self.seq_len", "i * self.seq_len",
     "sample 3 in a corpus"),
    ("all of the file is read", "self.tokens = tokens[part]", "self.tokens = tokens", "sample 0 in a corpus")])
def samples_of_a_step(attempt):
    """Find the tokens of sample i, also where the corpus is shorter than the run.

    self.tokens is the corpus, one long array of N token ids. Sample i has T = self.seq_len inputs; the target of each
    token is the one after it. With T = 4:

        tokens        100 101 102 103 104 105 106 107 108 109 110 111     N = 12
        inputs        |   sample 0   |   sample 1   |                     and sample 2 is that of a new epoch,
        targets           |   sample 0   |   sample 1   |                 which begins at the first token again

    Write two things: self.samples_per_epoch, the number of samples that the corpus holds (what is left at its end, and
    is too short for a sample, is not used), and __getitem__, which returns a tensor of the T + 1 tokens of sample i, of
    the dtype int64: inputs and last target. i goes from 0 to num_samples - 1, over all epochs. You may call
    torch.from_numpy(array), and array.astype(np.int64).
    """
    for num_tokens, seq_len, per_epoch in ((13, 4, 3), (12, 4, 2), (9, 1, 8), (6, 5, 1)):
        with tempfile.NamedTemporaryFile() as file:
            np.arange(98, 100 + num_tokens, dtype=np.int32).tofile(file.name)
            modules = attempt.theirs.load()
            samples = modules.dataloader.TokenSamples(file.name, seq_len, 9, slice(2, None))  # a part of the file
            corpus = f"in a corpus of the {num_tokens} tokens 100 to {99 + num_tokens}, with T = {seq_len}"
            attempt.same(samples.samples_per_epoch, per_epoch, f"samples_per_epoch {corpus}")
            for i in range(9):
                first = 100 + i % per_epoch * seq_len
                got = samples[i]
                attempt.require(isinstance(got, torch.Tensor) and got.dtype == torch.int64, f"sample {i} has to be a "
                                "tensor of the dtype int64")
                attempt.same(str(got.tolist()), str([*range(first, first + seq_len + 1)]), f"sample {i} {corpus}")
            loader = modules.dataloader.MicroBatchDataLoader(samples, 3, 1, torch.device("cpu"))
            for k in range(3):
                firsts = [100 + i % per_epoch * seq_len for i in range(3 * k, 3 * k + 3)]
                attempt.same(str(next(loader)["target_ids"][:, 0].tolist()), str([each + 1 for each in firsts]),
                             f"the first targets of micro-batch {k} {corpus}")


class Batches:
    """Stands for the data loader: micro-batches of 2 samples of 3 tokens, from a vocabulary of 5."""

    def __init__(self, num_microbatches: int):
        self.gradient_accumulation_steps, self.read = num_microbatches, 0
        self.ids = torch.randint(5, (2, num_microbatches, 2, 3), generator=torch.Generator().manual_seed(1))

    def __next__(self) -> dict[str, torch.Tensor]:
        self.read += 1
        return dict(zip(("input_ids", "target_ids"), self.ids[:, (self.read - 1) % self.ids.size(1)].clone()))


class Watched(torch.nn.Embedding):
    """A model whose logits depend on one token each. It counts the micro-batches that wait for their backward."""

    waiting = most = 0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(input_ids)
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        logits.register_hook(self.count_backward)
        return logits

    def count_backward(self, grad: torch.Tensor) -> None:
        self.waiting -= 1


@exercise("3", "train.train_step", hints=(
    "For each micro-batch: forward, the loss, backward. Autograd adds each gradient to what is in param.grad already.",
    "The gradient of the mean loss is wanted, so the loss of each micro-batch is divided before its backward.",
    "loss = cross_entropy(model(batch['input_ids']), batch['target_ids']) / num_microbatches; loss.backward(); and add "
    "up loss.detach()."), wrong=[
    ("no division", " / num_microbatches", "", "(3 times as large)"),
    ("only the logged loss is divided", "loss.backward()", "(loss * num_microbatches).backward()",
     "(3 times as large)"),
    ("earlier micro-batches are divided again", "loss.backward()",
     "(loss * num_microbatches).backward(); model.weight.grad /= num_microbatches",
     "the gradient of the mean loss with 3"),
    ("a Python number", "return total_loss", "return float(total_loss)", "has to be a tensor")])
def accumulation(attempt):
    """Do the forward and backward of an optimizer step in several micro-batches.

    model.zero_grad() has been called before, and the optimizer steps afterwards. Between them, param.grad has to become
    the gradient of the mean loss over all tokens of the global batch, as if it had passed the model at once:

        micro-batch          0                1                 M - 1        all have equally many tokens
        param.grad     0 --------> g_0 ------------> ...  ------------> the gradient of the mean

    data_loader.gradient_accumulation_steps is M, and next(data_loader) the next micro-batch, a dictionary of two
    tensors (B, T), "input_ids" and "target_ids". model(input_ids) returns the logits (B, T, V), and
    cross_entropy(logits, target_ids) the mean loss over the tokens of this micro-batch. Return the mean loss over the
    global batch, a tensor with one number. A micro-batch's activations are kept from its forward to its backward: at
    any time only one should have them.
    """
    for num_microbatches in (1, 3, 5):
        torch.manual_seed(0)
        model, batches = Watched(5, 5, dtype=torch.float64), Batches(num_microbatches)
        loss = attempt.function()(model, batches)
        situation = f"with {num_microbatches} micro-batch" + "es" * (num_microbatches > 1)
        attempt.same(batches.read, num_microbatches, f"the number of micro-batches that are read {situation}")
        got, model.weight.grad = model.weight.grad, None
        expected = F.cross_entropy(F.embedding(batches.ids[0].flatten(), model.weight), batches.ids[1].flatten())
        expected.backward()
        attempt.require(got is not None, f"there is no gradient after the step {situation}")
        attempt.same(got, model.weight.grad, f"the gradient of the mean loss {situation}")
        attempt.same(loss, expected.detach(), f"the returned loss {situation}")
    attempt.score("micro-batches that wait for their backward at once, of 5", model.most, 1)
