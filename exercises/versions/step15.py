"""Wrong and right answers to the exercises of step 15."""

from versions import Versions, Wrong

VERSIONS = {
    "merge": Versions(
        wrong=[
            Wrong("exponentials overflow", "torch.sigmoid(other_lse - lse)",
                  "(other_lse.exp() / (lse.exp() + other_lse.exp()))", "scores near 10,000: out"),
            Wrong("the mean of both", "torch.sigmoid(other_lse - lse)", "torch.full_like(lse, 0.5)", "scores near 0: "
                "out"),
            Wrong("the weights are swapped", "torch.sigmoid(other_lse - lse)", "torch.sigmoid(lse - other_lse)",
                  "scores near 0: out"),
            Wrong("the first sample only", "out -= torch.sigmoid(other_lse - lse).unsqueeze(-1) * (out - other_out)",
                  "out[:1] -= (torch.sigmoid(other_lse - lse).unsqueeze(-1) * (out - other_out))[:1]",
                  "scores near 0: out"),
            Wrong("the other set is changed", "    lse.copy_(", "    other_out.zero_()\n    lse.copy_(",
                  "it changes `other_out`"),
        ],
        right='''
def merge(out, lse, other_out, other_lse):
    largest = torch.maximum(lse, other_lse)
    mine, others = (lse - largest).exp(), (other_lse - largest).exp()
    total = mine + others
    out.copy_((out * mine[..., None] + other_out * others[..., None]) / total[..., None])
    lse.copy_(largest + total.log())
'''),
    "zigzag": Versions(
        wrong=[
            Wrong("two ranks hold the same chunk", "2 * size - 1 - rank)", "2 * size - 1)", "of all ranks together"),
            Wrong("the later chunk comes first", "[chunks[first], chunks[second]]", "[chunks[second], chunks[first]]",
                  "the positions"),
            Wrong("one chunk for each rank", "[chunks[first], chunks[second]]", "[chunks[first]]", "the positions"),
            Wrong("chunks of 3 tokens", "chunks = torch.arange(seq_len).tensor_split(2 * size)",
                  "chunks = torch.arange(6 * size).tensor_split(2 * size)", "the positions"),
        ],
        right='''
def local_positions(layout, seq_len):
    grid = pgm.process_group_manager
    length = seq_len // (2 * grid.cp_world_size)
    if layout == "contiguous":
        return torch.arange(2 * length) + 2 * length * grid.cp_rank
    one = torch.arange(length) + length * grid.cp_rank
    return torch.cat([one, one + length * grid.cp_world_size])  # right, but not even
'''),
    "ring_backward": Versions(
        wrong=[
            Wrong("only queries get a gradient by their own keys", "grad_q[:, :, queries] += part_q",
                  "grad_q[:, :, queries] = part_q", "the gradient of its queries"),
            Wrong("what arrives is dropped", "gradients = message.wait()", "message.wait()", "the gradient of its "
                "values"),
            Wrong("nothing is sent where nothing is visible", "        message = Message(",
                  "        message = message if block is None else Message(", "rank"),
            Wrong("the given gradient is cleared", "    return None, grad_q",
                  "    grad.zero_()\n    return None, grad_q", "backward changes `grad`"),
        ]),
}
