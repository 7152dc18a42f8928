"""Exercises that count: the bytes that ranks send, by the log of their messages."""

import torch

import references
from counting_attempt import counts
from counting_ranks import DP_TP, dp_run, pipeline_run, rank_run, tp_run
from counting_runs import count_of, llama
from lab.thread_ranks import World


@counts("2", "bytes", hints=(
    "In a ring each rank sends to the next one only, a part of num_bytes / ranks at a time.",
    "A part's sum is complete after it has come around once: ranks - 1 messages of each rank.",
    "Then the sums go around once more, ranks - 1 messages: 2 * (ranks - 1) parts in all."),
    sizes=[dict(num_bytes=num_bytes, ranks=ranks) for ranks in (1, 2, 3, 4, 6, 8) for num_bytes in (96, 960)],
    mistakes=[
    ("2 * (ranks - 1)", "(ranks - 1)", "that is a reduce-scatter: the sums have to go around, too"),
    ("2 * (ranks - 1) * num_bytes / ranks", "2 * num_bytes", "nearly, with many ranks: a part needs ranks - 1 messages "
     "to pass all ranks, not `ranks`"),
    (" / ranks", "", "a message is a part of num_bytes / ranks, not all of them"),
    ("2 * (ranks - 1)", "2", "a part passes from rank to rank: ranks - 1 messages, and as many again"),
    ("2 * (ranks - 1) * num_bytes / ranks", "num_bytes", "each number is added up, and goes around as a sum"),
    ("2 * (ranks - 1) * num_bytes / ranks", "num_bytes * (ranks > 1)", "each number is added up, and goes around as a "
     "sum"),
    ("2 * (ranks - 1) * num_bytes / ranks", "(ranks - 1) * num_bytes", "that is a gather of everything by all ranks")])
def all_reduce_bytes(attempt, num_bytes, ranks):
    """Count the bytes that a rank sends in an all-reduce.

    Each of n ranks has a tensor of num_bytes bytes, and afterwards the sum of all. They form a ring, as in the exercise
    `ring_all_reduce`, and what a rank receives does not count. Return the bytes that one rank sends. The check runs
    the ring, and adds up its messages.
    """
    world = World(ranks)
    world.run(lambda rank: references.ring_all_reduce(torch.ones(num_bytes // 4)))
    return world.num_bytes(0)


@counts("4", "bytes", hints=(
    "Sums of (tokens, hidden): f and g of attention and of the MLP, so four in each layer, forward and backward.",
    "The embedding has a g and the projection an f: two more. The loss exchanges three numbers a token.",
    "Each sum is an all-reduce: a rank sends 2 (n - 1) / n of its bytes."),
    sizes=[dict(layers=layers, hidden=hidden, tokens=tokens, ranks=ranks) for layers, hidden, tokens in (
        (1, 16, 8), (3, 16, 8), (1, 48, 8), (1, 16, 32)) for ranks in (1, 2, 4)], mistakes=[
    ("4 * layers", "2 * layers", "half of each layer's: there are sums in backward, too, or the MLP has some as well"),
    ("4 * layers", "layers", "one of a layer's four: f and g, of attention and of the MLP"),
    ("4 * layers", "7 * layers", "q, k and v share one f, and so do gate and up"),
    ("layers + 2", "layers", "the embedding has a sum in forward, and the projection one in backward"),
    ("layers + 2", "layers + 1", "one is missing: the embedding's sum in forward, or the projection's in backward"),
    (" + 3)", ")", "the loss is missing: largest logit, sum of exponentials and target's logit of each token"),
    (" + 3)", " + 2)", "the loss exchanges three numbers a token: largest logit, sum of exponentials, target's logit"),
    ("4 * numbers", "4 * (numbers + (2 * layers + 1) * hidden)", "the norms' gradients are not summed: each rank has "
     "all of them"),
    ("hidden + 3", "hidden + 32", "the logits are not gathered: the loss exchanges three numbers a token"),
    ("2 * (ranks - 1) / ranks", "1", "an all-reduce sends 2 (n - 1) / n of its bytes, and none with one rank"),
    ("2 * (ranks - 1) / ranks", "2 * (ranks - 1)", "a message is a part: 2 (n - 1) / n of the bytes in all"),
    ("4 * numbers", "4 * numbers / ranks", "activations between blocks are whole on each rank: D and not D/tp")])
def tp_bytes(attempt, layers, hidden, tokens, ranks):
    """Count what tensor parallelism sends for a micro-batch.

    Step 8's Llama is split over `ranks` tp ranks; all numbers are float32, and the embedding is not tied. Return the
    bytes that a rank sends in forward and backward of one micro-batch of `tokens` tokens, where each all-reduce is one
    over a ring. The check runs it, and adds up the messages.
    """
    return tp_run(layers, hidden, tokens, ranks)[0]


@counts("4", "bytes/s", hints=(
    "One rank needs flops / rate seconds. With tp, computing takes 1 / ranks of that.",
    "Computing takes flops / rate * (1 - 1 / ranks) seconds less, and sending sent / link seconds more.",
    "They are equal where link = sent / (flops / rate * (1 - 1 / ranks))."),
    sizes=lambda: [dict(flops=tp_run(1, hidden, tokens, 1)[1], sent=tp_run(1, hidden, tokens, ranks)[0],
                        ranks=ranks, rate=rate) for hidden, tokens in ((16, 8), (48, 8)) for ranks in (2, 4)
                   for rate in (1e9, 1e11, 1e14)], mistakes=[
    (" * (1 - 1 / ranks)", "", "with tp the ranks still compute: 1 / ranks of it each"),
    ("(1 - 1 / ranks)", "(1 / ranks)", "that is what a rank still computes, not what is saved"),
    ("(1 - 1 / ranks)", "(ranks - 1)", "a rank is saved 1 - 1 / ranks of one rank's time"),
    ("sent / saved", "saved / sent", "bytes a second, not seconds a byte"),
    ("sent / saved", "ranks * sent / saved", "all ranks send at the same time: `sent` are the bytes of one"),
    ("flops / rate", "rate / flops", "seconds are FLOPs divided by FLOP/s")])
def slowest_link(attempt, flops, sent, ranks, rate):
    """Find the link over which tensor parallelism is as slow as no parallelism.

    One rank needs `flops` FLOPs for a micro-batch, and does `rate` FLOPs a second. With tp, each of `ranks` ranks does
    an equal part of them, and sends `sent` bytes besides. While it waits for a sum, it computes nothing. Return the
    bytes a second of a link over which both take the same time: over any slower one, tp is a loss.

    The check takes FLOPs and bytes from runs of one rank and of several, and moves the link until both take as long.
    """
    layers, hidden, tokens = next((1, *pair) for pair in ((16, 8), (48, 8)) if tp_run(1, *pair, 1)[1] == flops)
    (_, one), (num_bytes, each) = (tp_run(layers, hidden, tokens, size) for size in (1, ranks))
    low, high = 1e-3, 1e18
    for _ in range(100):
        link = (low * high) ** 0.5
        low, high = (link, high) if each / rate + num_bytes / link > one / rate else (low, link)
    return link


@counts("5", "bytes", hints=(
    "Gradients are float32, as many as there are parameters.",
    "The micro-batches' gradients add up before they are sent: once an optimizer step.",
    "An all-reduce over n ranks sends 2 (n - 1) / n of its bytes."),
    sizes=[dict(num_parameters=count_of(dict(DP_TP, layers=layers)), ranks=ranks, microbatches=microbatches)
           for layers in (1, 2) for ranks in (2, 4) for microbatches in (1, 2, 5)], mistakes=[
    ("* num_bytes", "* num_bytes * microbatches", "once an optimizer step, not once a micro-batch: gradients add up"),
    ("* num_bytes", "* num_bytes / microbatches", "the gradient of all micro-batches together is as large as one's"),
    ("2 * (ranks - 1) / ranks", "1", "an all-reduce sends 2 (n - 1) / n of its bytes"),
    ("2 * (ranks - 1) / ranks", "2 * (ranks - 1)", "a message is a part: 2 (n - 1) / n of the bytes in all"),
    ("2 * (ranks - 1) / ranks", "(ranks - 1)", "that is a gather of everything by all ranks"),
    ("2 * (ranks - 1) / ranks", "2 / ranks", "a part passes from rank to rank: ranks - 1 messages, and as many again"),
    ("(ranks - 1) / ranks", "ranks / (ranks - 1)", "it is (n - 1) / n: a rank's own part is not sent"),
    ("4 * num_parameters", "16 * num_parameters", "AdamW's moments and the weights stay where they are"),
    ("4 * num_parameters", "8 * num_parameters", "gradients alone are sent, not weights as well")])
def gradient_bytes(attempt, num_parameters, ranks, microbatches):
    """Count what data parallelism sends in an optimizer step.

    Each of `ranks` replicas computes the gradients of its micro-batches, in float32, and all get the mean. Return the
    bytes that a rank sends in the step, in all-reduces over a ring. The check runs step 8's DataParallelBucket.
    """
    return dp_run(ranks, microbatches, 1 if num_parameters == count_of(dict(DP_TP, layers=1)) else 2)[0]


@counts("6", "all-reduces", hints=(
    "Backward has the last parameter's gradient first: go through the sizes from their end.",
    "A bucket is full once it holds `limit` bytes or more; the next parameter begins a new one. It is never split.",
    "What is left over at the end is a bucket, too."),
    sizes=lambda: [dict(sizes=[param.numel() for param in llama(**DP_TP, layers=layers).parameters()], limit=limit)
                   for layers in (1, 2, 3) for limit in (1, 1000, 2048, 3000, 5000, 1 << 20)], mistakes=[
    ("reversed(sizes)", "sizes", "backward begins at the end: the last parameter's gradient is the first one"),
    ("4 * size", "size", "limit is in bytes, and a gradient has 4 a number"),
    ("held >= limit", "held > limit", "a bucket that holds exactly `limit` bytes is full"),
    ("return buckets + (held > 0)", "return buckets", "what is left over at the end is a bucket, too"),
    ("return buckets + (held > 0)", "return buckets + 1", "nothing may be left over at the end"),
    ("return buckets + (held > 0)", "return -(-4 * sum(sizes) // limit)", "a parameter is not split over buckets"),
    ("return buckets + (held > 0)", "return 4 * sum(sizes) // limit", "a parameter is not split over buckets"),
    ("return buckets + (held > 0)", "return len(sizes)", "that is step 5: one all-reduce a parameter")])
def num_buckets(attempt, sizes, limit):
    """Count the all-reduces of an optimizer step with buckets.

    `sizes` has the number of numbers of each parameter, in the model's order; gradients are float32. Buckets are filled
    in the order in which backward has the gradients, roughly from the last parameter to the first. A bucket is full
    once it holds `limit` bytes. Return the number of all-reduces. The check runs step 8's DataParallelBucket.
    """
    return dp_run(2, 1, {12: 1, 21: 2, 30: 3}[len(sizes)], limit)[1]


@counts("7", "bytes", hints=(
    "A forward sends hidden states to the next stage, a backward their gradient to the stage before.",
    "Both have the shape (tokens, hidden), once a micro-batch. The first and the last stage send in one direction.",
    "directions * microbatches * tokens * hidden * 4, with 2 directions in the middle, 1 at the ends, 0 alone."),
    sizes=[dict(stage=stage, stages=stages, microbatches=m, tokens=tokens, hidden=hidden)
           for stages, m, tokens, hidden in ((1, 2, 4, 16), (2, 3, 4, 16), (3, 2, 8, 16), (4, 4, 4, 32))
           for stage in range(stages)] + [dict(stage=0, stages=2, microbatches=1, tokens=16, hidden=16)], mistakes=[
    ("(stage < stages - 1) + (stage > 0)", "2", "the first stage has none before it, the last one none after it"),
    ("(stage < stages - 1) + (stage > 0)", "1", "a stage in the middle sends hidden states and gradients"),
    ("(stage < stages - 1) + (stage > 0)", "(stage < stages - 1)", "gradients are sent, too, to the stage before"),
    ("(stage < stages - 1) + (stage > 0)", "(stage > 0)", "hidden states are sent, too, to the next stage"),
    ("(stage < stages - 1) + (stage > 0)", "2 * (stages - 1)", "that is what all stages send together"),
    ("* microbatches", "", "once for each micro-batch"),
    ("* microbatches", "* stages", "once for each micro-batch, however many stages there are"),
    ("* tokens", "", "of each token of a micro-batch"),
    ("(stage < stages - 1) + (stage > 0)", "2 * (stage < stages - 1) + 2 * (stage > 0)", "what a stage receives is "
     "not sent by it")])
def pipeline_bytes(attempt, stage, stages, microbatches, tokens, hidden):
    """Count what a pipeline's stage sends in an optimizer step.

    A micro-batch has `tokens` tokens, and its hidden states are float32 numbers of the shape (tokens, hidden). Stages
    count from 0. Return the bytes that this stage sends in the step, but for the loss and the gradient norm, a few
    bytes. The check runs step 8's executor, and adds up the messages.
    """
    return pipeline_run(stages, microbatches, tokens, hidden)[stage]


@counts("8", "bytes", hints=(
    "A middle stage has layers / pp decoder layers: 4 hidden^2 + 3 hidden width, of which each tp rank has 1 / tp, and "
    "two norms of hidden numbers, which each has whole.",
    "Once a step all gradients are summed over dp: 2 (dp - 1) / dp of their bytes, which are those of the weights.",
    "In each micro-batch it sends (tokens, hidden) to the next stage, and as much to the one before."),
    sizes=[dict(number=number, layers=layers, hidden=hidden, width=width, dp=dp, tp=tp, pp=pp, microbatches=m,
                tokens=tokens) for layers, hidden, width, dp, tp, pp, m, tokens in (
                    (3, 16, 24, 2, 1, 3, 1, 8), (6, 16, 24, 4, 1, 3, 2, 8), (3, 32, 24, 2, 2, 3, 3, 8),
                    (4, 16, 40, 2, 2, 4, 1, 16), (6, 16, 24, 2, 1, 6, 2, 16), (3, 16, 24, 2, 1, 3, 3, 8))
           for number in (1, 2, 3)],
    mistakes=[
    (" / tp", "", "each tp rank has a part of the matrices"),
    ("layers / pp", "layers", "a stage has layers / pp of the layers"),
    (" + 2 * hidden", "", "the norms are missing: two of hidden numbers in a layer"),
    ("+ 2 * hidden)", "+ 2 * hidden / tp)", "norms are whole on each tp rank: do not divide them by tp"),
    ("+ 2 * hidden)", "+ hidden)", "a layer has two norms, one before attention, one before the MLP"),
    ("3 * hidden * width", "2 * hidden * width", "the MLP has three matrices: gate, up and down"),
    ("2 * (dp - 1) / dp", "1", "an all-reduce sends 2 (dp - 1) / dp of its bytes"),
    ("2 * (dp - 1) / dp", "(dp - 1) / dp", "the sums go around, too: 2 (dp - 1) / dp of the bytes"),
    ("2 * (dp - 1) / dp", "2 * (dp - 1)", "a message is a part: 2 (dp - 1) / dp of the bytes in all"),
    ("2 * (dp - 1) / dp", "microbatches * 2 * (dp - 1) / dp", "gradients are summed once an optimizer step, not once a "
     "micro-batch: they add up"),
    ("2 * microbatches", "microbatches", "a middle stage sends in both directions"),
    ("2 * microbatches", "2", "hidden states and gradients are sent once for each micro-batch"),
    ("2 * microbatches", "2 * pp * microbatches", "that is what all pp stages send: a rank is on one of them"),
    ("4 * tokens * hidden", "4 * tokens * hidden / tp", "hidden states between stages are whole on each tp rank")])
def rank_of_many(attempt, number, layers, hidden, width, dp, tp, pp, microbatches, tokens):
    """Predict three numbers of one rank of many.

    Step 8 trains a Llama with as many key/value heads as query heads, of `hidden` numbers together, MLPs of `width` and
    as many layers on each of pp stages, in float32. A micro-batch has `tokens` tokens. Return, for a rank of a stage in
    the middle, the bytes of its weights (number 1), or those that it sends over dp (2) or pp (3) in an optimizer step.
    The check is tools/dry_run.py, which can tell you the same of 16,384 ranks.
    """
    return rank_run(layers, hidden, width, dp, tp, pp, microbatches, tokens)[int(number) - 1]
