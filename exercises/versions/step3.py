"""Wrong and right answers to the exercises of step 3."""

from versions import Versions, Wrong

VERSIONS = {
    "samples_of_a_step": Versions(
        wrong=[
            Wrong("the last sample has no last target", "(len(self.tokens) - 1) // seq_len",
                  "len(self.tokens) // seq_len", "samples_per_epoch in a corpus of the 12 tokens"),
            Wrong("samples share no token", "i % self.samples_per_epoch * self.seq_len",
                  "i % self.samples_per_epoch * (self.seq_len + 1)", "sample 1 in a corpus of the 13 tokens"),
            Wrong("the corpus is not repeated", "i % self.samples_per_epoch * self.seq_len", "i * self.seq_len",
                  "sample 3 in a corpus"),
            Wrong("all of the file is read", "self.tokens = tokens[part]", "self.tokens = tokens",
                  "sample 0 in a corpus"),
        ]),
    "accumulation": Versions(
        wrong=[
            Wrong("no division", " / num_microbatches", "", "(3 times as large)"),
            Wrong("only the logged loss is divided", "loss.backward()", "(loss * num_microbatches).backward()",
                  "(3 times as large)"),
            Wrong("earlier micro-batches are divided again", "loss.backward()",
                  "(loss * num_microbatches).backward(); model.weight.grad /= num_microbatches",
                  "the gradient of the mean loss with 3"),
            Wrong("a Python number", "return total_loss", "return float(total_loss)", "has to be a tensor"),
        ],
        right='''
def train_step(model, data_loader):
    losses = []
    for _ in range(data_loader.gradient_accumulation_steps):  # right, but all activations are kept
        batch = next(data_loader)
        losses.append(cross_entropy(model(batch["input_ids"]), batch["target_ids"]))
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.detach()
'''),
}
