"""Exercises that count: unlike pipelines, and what divides a training further, by runs of these steps."""

import bisect

from counting_attempt import counts
from counting_further import active_run, busy_share, fsdp_run, norms_run, ring_run, zero_run
from counting_ranks import DP_TP, played
from counting_runs import count_of

FSDP = [dict(DP_TP, hidden=hidden, width=width) for hidden, width in ((16, 24), (32, 16))]
SMALL = [count_of(dict(DP_TP, layers=layers)) for layers in (1, 2, 3, 4)]


@counts("9", "units of time", hints=(
    "All pipelines begin together, and the gradients are summed when the slowest one is through.",
    "A stage computes for its micro-batches, and waits for as long as stages - 1 micro-batches take.",
    "max over the pipelines of 3 * layers * (microbatches + stages - 1)."),
    sizes=[dict(pipelines=pipelines) for pipelines in (
        [(1, 8, 4)], [(2, 6, 4)], [(1, 8, 6), (2, 4, 2)], [(1, 6, 2), (2, 3, 6)], [(4, 3, 4), (2, 6, 4)],
        [(1, 4, 3), (1, 4, 5)], [(4, 2, 9), (1, 8, 2)], [(2, 5, 3), (2, 5, 3)], [(8, 1, 4), (4, 2, 12)],
        [(1, 8, 1), (2, 4, 1), (4, 2, 1)], [(1, 12, 2), (2, 6, 5), (4, 3, 7)], [(8, 1, 32), (1, 8, 4)])], mistakes=[
    ("max(", "next(", "that is the first pipeline: the gradients of all are summed, so the slowest one counts"),
    ("in pipelines)", "in pipelines[-1:])", "that is the last pipeline: the slowest one counts"),
    ("in pipelines)", "in [max(pipelines)])", "that is the pipeline with most stages, which need not be the slowest"),
    ("in pipelines)", "in [max(pipelines, key=lambda each: each[2])])", "that is the pipeline with most micro-batches, "
     "which need not be the slowest"),
    ("return max(", "return 1 / len(pipelines) * sum(", "the mean of all: the slowest one counts"),
    ("max(", "min(", "the fast ones wait: gradients are summed when the slowest pipeline is through"),
    ("max(", "sum(", "pipelines run at the same time, not one after the other"),
    ("3 * layers", "layers", "the forward pass only: backward takes twice as long"),
    (" + stages - 1", "", "the bubble is missing: a stage waits for stages - 1 micro-batches"),
    ("stages - 1", "stages", "stages - 1 others come before or after a stage, not all of them"),
    ("layers * (microbatches + stages - 1)", "layers * microbatches + layers * (stages - 1)", "backward waits, too: in "
     "the bubble stands a micro-batch's forward and backward"),
    ("* layers", "* 8 / stages", "`layers` says how many a stage has"),
    ("layers * ", "layers * stages * ", "a stage computes its own layers only"),
    ("3 * layers * (microbatches + stages - 1)", "3 * layers * microbatches * stages", "micro-batches overlap: while "
     "one is on the next stage, this one has another")])
def unlike_pipelines_units(attempt, pipelines):
    """Find how long a step of unlike pipelines takes.

    `pipelines` has a tuple for each: stages, layers of each of them, micro-batches. A layer's forward takes one unit of
    time and its backward two; messages take none, and all pipelines run at the same time. Return the units until
    gradients can be summed. The check plays step 9's 1F1B.
    """
    return max(played("9", "one_f_one_b", stages, m, seconds={"F": layers, "B": 2 * layers, "W": 0}).end
               for stages, layers, m in pipelines)


@counts("12", "bytes", hints=(
    "Each rank has all weights, since forward needs them.",
    "Of the gradients that the optimizer reads, and of its two moments, a rank has its share.",
    "4 num_parameters + (4 + 8) num_parameters / replicas."),
    sizes=[dict(num_parameters=number, replicas=n) for number in SMALL for n in (2, 4, 8)[: 3 - (number > SMALL[1])]],
    mistakes=[
    ("4 * num_parameters +", "4 * num_parameters / replicas +", "that is --zero 3: with 1 and 2 each rank has all "
     "weights"),
    ("4 * num_parameters + 12", "8 * num_parameters + 8", "8 + 8/N is --zero 1, which leaves all gradients on each "
     "rank: with --zero 2 a rank keeps its share of them"),
    ("4 * num_parameters + 12", "2 * num_parameters + 14", "2 + 14/N has 16 bits for weights and gradients: here "
     "all is float32, 4 + 12/N"),
    ("4 * num_parameters +", "6 * num_parameters +", "there are no copies in bfloat16: all is float32"),
    ("4 * num_parameters +", "2 * num_parameters +", "weights are float32, of 4 bytes"),
    ("12 *", "16 *", "the weights are counted twice: all of them, and a share"),
    ("12 *", "8 *", "gradients are missing: the optimizer's shard has one of each number, too"),
    ("12 *", "4 *", "AdamW has two moments of each number, and there is a gradient"),
    ("12 * num_parameters / replicas", "12 * num_parameters", "that is without ZeRO: a rank has a share"),
    ("12 * num_parameters / replicas", "12 * num_parameters / (replicas + 1)", "all replicas have a share, this one "
     "too")])
def zero_bytes(attempt, num_parameters, replicas):
    """Count what ZeRO leaves on a rank.

    `replicas` ranks divide AdamW's work equally with --zero 2: `replicas` divides num_parameters. All numbers are
    float32. Return the bytes of weights, gradients and AdamW's two moments that a rank keeps when the optimizer has
    just stepped. The check runs step 12's Zero, and adds up its tensors, on average over the ranks.
    """
    return zero_run(replicas, 1 + SMALL.index(num_parameters))


@counts("13", "bytes", hints=(
    "To gather P numbers, each of n ranks sends its part to the others: 4 P (n - 1) / n bytes. So does a scatter.",
    "In each micro-batch a layer is gathered in forward and in backward; only the last one is still there.",
    "The rest is gathered once a step. All gradients are scattered in each micro-batch."),
    sizes=lambda: [dict(layer=two - one, layers=layers, rest=2 * one - two, replicas=n, microbatches=m)
                   for layers in (1, 2, 3) for k, n, m in ((0, 2, 1), (1, 2, 3), (1, 3, 2), (0, 4, 2))
                   for one, two in [[count_of(dict(FSDP[k], layers=few)) for few in (1, 2)]]], mistakes=[
    ("(of_layers + of_rest)", "3 * microbatches * (layers * layer + rest)", "3 m (N-1)/N of 4 P bytes is a bound: the "
     "last layer is not gathered again for its backward, and the rest is gathered once a step"),
    ("(of_layers + of_rest)", "2 * (layers * layer + rest)", "that is --zero 1, an all-reduce a step: here weights are "
     "gathered and gradients scattered in each micro-batch"),
    ("(of_layers + of_rest)", "3 * (layers * layer + rest)", "that is one micro-batch: each gathers and scatters"),
    ("(of_layers + of_rest)", "of_layers", "the rest is missing"),
    ("(1 + microbatches)", "3 * microbatches", "the rest is gathered once a step, and stays for backward"),
    ("microbatches * layer * (2 * layers - 1 + layers)", "layer * (microbatches * (2 * layers - 1) + layers)", "the "
     "layers' gradients are scattered in each micro-batch: no rank has room for all of them"),
    ("2 * layers - 1", "2 * layers", "the last layer's backward is next: it stays where it is"),
    ("2 * layers - 1", "layers", "backward needs the weights, too, and gathers them again"),
    (" + layers)", ")", "gradients are scattered, too, once a micro-batch"),
    ("(1 + microbatches)", "2", "the rest's gradients are scattered in each micro-batch"),
    ("(1 + microbatches)", "2 * microbatches", "the rest is gathered once a step"),
    ("microbatches * layer", "layer", "each micro-batch gathers the layers again"),
    (" * (replicas - 1) / replicas", "", "a rank's own part is not sent"),
    (" * (replicas - 1) / replicas", " / replicas", "a part goes to each of the others")])
def fsdp_bytes(attempt, layer, layers, rest, replicas, microbatches):
    """Count what fully sharded data parallelism sends.

    A model has `layers` layers of `layer` parameters, and `rest` others. `replicas` ranks divide all of it with
    --zero 3, in float32, without a pipeline. Return the bytes that a rank sends in an optimizer step. The check runs
    step 13's FullyShardedDataParallel.
    """
    shape = next(shape for shape in FSDP if count_of(dict(shape, layers=1)) == layer + rest)
    return fsdp_run(layers, replicas, microbatches, shape["hidden"], shape["width"])


@counts("14", "bytes", hints=(
    "Tensor-parallel ranks hold norms whole, and with sequence parallelism each sees other tokens.",
    "Two norms in each layer and the final one, of `hidden` weights each.",
    "One all-reduce of all of them: 2 (n - 1) / n of their bytes."),
    sizes=[dict(layers=layers, hidden=hidden, ranks=n) for layers in (1, 2, 4) for hidden in (16, 48)
           for n in (1, 2, 4)], mistakes=[
    ("2 * layers + 1", "2 * layers", "the final norm is missing"),
    ("2 * (ranks - 1) / ranks", "2 * (ranks - 1) / ranks ** 2", "norms are whole on each rank: do not divide them by "
     "tp"),
    ("2 * layers + 1", "layers + 1", "a layer has two norms: before attention, and before the MLP"),
    ("2 * (ranks - 1) / ranks", "1", "an all-reduce sends 2 (n - 1) / n of its bytes"),
    ("2 * (ranks - 1) / ranks", "2 * (ranks - 1)", "a message is a part: 2 (n - 1) / n of the bytes in all")])
def norm_gradient_bytes(attempt, layers, hidden, ranks):
    """Count what sequence parallelism adds to the messages of a step.

    Each of `ranks` tp ranks has seen its own tokens, so the gradients of the norms, which all of them hold whole, are
    summed once a step. All numbers are float32. Return the bytes that a rank sends for it, in an all-reduce over a
    ring. The check runs step 14's sum_norm_gradients.
    """
    return norms_run(layers, hidden, ranks)


@counts("15", "bytes", hints=(
    "A message has the keys and values of tokens / ranks tokens: 2 * kv_heads * head_dim numbers each.",
    "Forward: a block visits all other ranks, so each rank sends ranks - 1 times. Backward does it once more.",
    "Their gradients travel with them, and one hop further: back to where they began."),
    sizes=[dict(tokens=tokens, kv_heads=heads, head_dim=dim, ranks=n) for tokens, heads, dim in (
        (24, 1, 4), (24, 2, 8), (48, 4, 4), (96, 2, 16)) for n in (2, 3, 4)], mistakes=[
    ("2 * (ranks - 1) + ranks", "4 * (ranks - 1)", "4 (cp - 1) is too much: keys and values travel cp - 1 hops in each "
     "pass, and in backward their gradients beside them, cp hops, 3 cp - 2 in all"),
    ("2 * (ranks - 1)", "(ranks - 1)", "backward needs the keys and values again: they are not kept"),
    ("2 * (ranks - 1)", "2 * ranks", "keys and values make ranks - 1 hops: their own rank has them"),
    ("+ ranks)", "+ ranks - 1)", "gradients make one hop more, home"),
    (" + ranks)", ")", "that is 4 (cp - 1) tensors: the gradients of keys and values travel, too"),
    ("2 * 4", "4", "keys, and values"),
    ("tokens / ranks", "tokens", "a block has the tokens of one rank"),
    ("kv_heads * head_dim", "(kv_heads + 1) * head_dim", "queries stay where they are")])
def ring_attention_bytes(attempt, tokens, kv_heads, head_dim, ranks):
    """Count what ring attention sends.

    A text of `tokens` tokens is divided over `ranks` cp ranks; a token has keys and values of `kv_heads` heads with
    head_dim numbers each, in float32. Return the bytes that a rank sends in forward and backward of one layer. The
    check runs step 15's RingAttention.
    """
    return ring_run(tokens, kv_heads, head_dim, ranks)


@counts("16", "parameters", hints=(
    "Attention has four matrices of hidden x hidden here; the router one of hidden x experts.",
    "An expert is an MLP of three matrices, and a token passes `per_token` of them.",
    "layers * (4 hidden^2 + hidden * experts + per_token * 3 * hidden * width)."),
    sizes=[dict(hidden=hidden, width=width, layers=layers, experts=experts, per_token=k)
           for hidden, width, layers in ((16, 24, 1), (16, 24, 2), (32, 16, 2))
           for experts, k in ((2, 1), (4, 2), (8, 2), (8, 3))], mistakes=[
    ("per_token *", "experts *", "those are all that there are: a token passes per_token experts"),
    ("per_token *", "", "a token passes per_token experts, not one"),
    (" + hidden * experts", "", "the router is missing: a matrix of hidden x experts"),
    ("4 * hidden * hidden + ", "", "attention is missing"),
    ("4 * hidden", "3 * hidden", "attention has four matrices: q, k, v and out"),
    ("return layers * matrices", "return layers * (matrices + 2 * hidden)", "the norms' weights are no matrices: leave "
     "them out"),
    ("return layers * matrices", "return layers * (matrices + hidden)", "the norms' weights are no matrices: leave "
     "them out"),
    ("return layers * matrices", "return layers * (matrices + 2 * hidden) + hidden", "the norms' weights are no "
     "matrices: leave them out"),
    ("return layers *", "return", "that is one layer"),
    ("per_token *", "per_token / experts *", "a token passes per_token whole experts"),
    ("3 * hidden * width", "2 * hidden * width", "an expert has three matrices: gate, up, down"),
    ("hidden * experts", "hidden * per_token", "the router scores all experts to choose some")])
def active_parameters(attempt, hidden, width, layers, experts, per_token):
    """Count the parameters that a token of a mixture of experts uses.

    Each layer has attention with as many key and value heads as query heads, of `hidden` numbers together, a router,
    and `experts` MLPs of width `width`, of which a token passes `per_token`. Return the parameters of the layers'
    matrices that one token is multiplied by. The check runs one token through step 16's model, and counts the matrices
    that take part.
    """
    return active_run(hidden, width, layers, experts, per_token)


@counts("19", "generators", hints=(
    "Of training / busy seconds from step to step, trainers compute for `training`, and may wait for the rest.",
    "Without a lag, generation has only that rest; with a lag, it has all the time from step to step.",
    "A generator answers allowed // generation whole micro-batches in this time: round microbatches / that up."),
    sizes=[dict(zip(("microbatches", "generation", "training", "busy", "lag"), size)) for size in (
        (8, 1, 4, 0.5, 0), (8, 1, 4, 1, 1), (6, 1.5, 4, 0.7, 1), (6, 0.5, 4, 0.7, 0), (9, 2, 9, 0.9, 1),
        (9, 0.3, 9, 0.9, 0), (4, 3, 2, 0.5, 1), (4, 3, 2, 0.5, 0), (7, 1, 5, 0.75, 1), (7, 0.7, 5, 0.75, 0))],
    mistakes=[
    ("period if lag else period - training", "period", "without a lag generators wait while trainers compute"),
    ("period if lag else period - training", "period - training", "with a lag both work at the same time"),
    ("if lag", "if not lag", "the other way around: with a lag both work at the same time"),
    ("training / busy", "training", "trainers may wait for the share 1 - busy of the time"),
    ("training / busy", "training * (2 - busy)", "`busy` is a share of the time from step to step, not of `training`"),
    ("allowed // generation", "allowed / generation", "one generator answers a micro-batch: count whole ones"),
    ("allowed // generation", "max(1, allowed // generation)", "a micro-batch takes as long with more generators: "
     "no number is enough"),
    ("-(-microbatches // each)", "microbatches // each", "round up: some generator answers what is left over"),
    ("-(-microbatches // each)", "(microbatches // each + 1)", "where it comes out even, that is one too many")])
def generators_needed(attempt, microbatches, generation, training, busy, lag):
    """Count the generators that keep trainers busy.

    Generators share the `microbatches` micro-batches of a step, and each answers one after the other, in `generation`
    seconds. When all answers are there, the trainers compute for `training` seconds. With lag 0 generators then begin
    the next step, with new weights; with lag 1 they answer its prompts meanwhile. Messages take no time.

    Return the least number of generators with which trainers compute for the share `busy` of the time or more, from the
    end of a step to the end of the next; 0 if no number is enough. The check runs step 19's generators and trainer,
    with clocks in place of a model.
    """
    least = 1 + bisect.bisect_left(range(1, microbatches + 1), True, key=lambda generators: busy_share(
        microbatches, generators, generation, training, lag) > busy - 1e-9)
    return least if least <= microbatches else 0
