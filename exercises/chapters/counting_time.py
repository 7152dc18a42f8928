"""Exercises that count: the time of schedules that are played, and of trainings."""

from counting_attempt import counts
from counting_ranks import played
from counting_runs import SEVEN_B, SHAPE, flops_of_a_sample, weights_that_multiply
from lab.watch.schedule import UNITS

LLAMAS = [SEVEN_B, dict(zip(SHAPE, (32000, 2048, 5632, 22, 32, 4, 64))),
          dict(zip(SHAPE, (32000, 5120, 13824, 40, 40, 40, 128)))]  # of 7, 1 and 13 billion


@counts("7", "of the time", hints=(
    "Draw it: the last stage can begin when the first micro-batch has passed the p - 1 stages before it.",
    "A stage computes for m micro-batches, and waits for as long as p - 1 micro-batches take, forward and backward.",
    "The share is (p - 1) / (m + p - 1), however long forward and backward take."),
    sizes=[dict(stages=p, microbatches=m) for p, m in (
        (1, 4), (2, 1), (2, 2), (2, 8), (3, 3), (3, 7), (4, 1), (4, 4), (4, 8), (4, 32), (8, 8), (8, 3))], mistakes=[
    ("(microbatches + stages - 1)", "microbatches", "a share of the whole time, the waiting included, not of the time "
     "of computing"),
    ("(microbatches + stages - 1)", "(microbatches + stages)", "the whole are m + p - 1 micro-batches' times"),
    ("(stages - 1)", "stages", "p - 1 others come before or after a stage, not p"),
    ("(stages - 1)", "2 * (stages - 1)", "the whole grows as well: forward and backward both wait p - 1 times"),
    ("(stages - 1) / (microbatches + stages - 1)", "microbatches / (microbatches + stages - 1)", "that is the share in "
     "which it computes"),
    ("(stages - 1) / (microbatches + stages - 1)", "1 / stages", "more micro-batches make the bubble smaller"),
    ("(stages - 1) / (microbatches + stages - 1)", "(stages - 1) / stages", "that is with one micro-batch: more make "
     "the bubble smaller"),
    ("(stages - 1) / (microbatches + stages - 1)", "stages / (microbatches + stages)", "p - 1 of m + p - 1")])
def bubble(attempt, stages, microbatches):
    """Find the share of the time in which a stage waits.

    `stages` equally fast stages run `microbatches` micro-batches, all forward and then all backward; backward takes
    twice as long as forward, and messages take no time. Return the bubble, from 0 to 1: waiting, divided by the time of
    the whole step. The check plays step 7's schedule.
    """
    steps = played("7", "afab", stages, microbatches, seconds={"F": 1, "B": 2, "W": 0})
    return 1 - 3 * microbatches / steps.end


@counts("8", "micro-batches", hints=(
    "Under 1F1B the last stage does a backward right after each forward.",
    "A stage goes forward p - 1 - stage times before it begins to alternate, and each forward then adds one.",
    "p - stage at most, and never more than there are micro-batches."),
    sizes=[dict(stage=stage, stages=p, microbatches=m) for p, m in ((1, 4), (2, 1), (3, 8), (4, 2), (4, 8))
           for stage in range(p)], mistakes=[
    ("min(stages - stage, microbatches)", "microbatches", "that is all forward, all backward"),
    ("min(stages - stage, microbatches)", "stages - stage", "there are never more than `microbatches`"),
    ("min(stages - stage, microbatches)", "min(stages, microbatches)", "later stages hold fewer"),
    ("stages - stage", "stages - stage - 1", "one more: a stage goes forward once more before its first backward"),
    ("stages - stage", "stages - stage + 1", "one fewer: the last stage holds one, not two"),
    ("stages - stage", "stage + 1", "the other way around: the first stage holds most"),
    ("min(stages - stage, microbatches)", "1", "only the last stage holds one: the others wait for their gradients"),
    ("min(stages", "max(stages", "the smaller of the two, not the larger one")])
def alive_activations(attempt, stage, stages, microbatches):
    """Count the micro-batches whose activations a stage holds under 1F1B.

    A forward keeps its micro-batch's activations until the backward of the same micro-batch. Return the largest number
    of micro-batches that stage `stage` (from 0) of `stages` holds at the same time. The check plays step 8's schedule.
    """
    return played("8", "one_f_one_b", stages, microbatches, seconds=UNITS).peaks[stage]


@counts("10", "units of time", hints=(
    "Each stage computes for 3 units a micro-batch.",
    "With as many micro-batches as stages or more, W fills all waiting but what the first forwards cost.",
    "The last stage begins after p - 1 units and then computes all the time: 3 m + p - 1."),
    sizes=[dict(stages=p, microbatches=m) for p in (2, 3, 4, 5) for m in (p, 2 * p, 2 * p + 3)], mistakes=[
    ("3 * microbatches", "2 * microbatches", "a micro-batch has three units: forward and both halves of backward"),
    ("+ stages - 1", "+ 3 * (stages - 1)", "that is 1F1B: W fills two thirds of its bubble"),
    ("+ stages - 1", "+ 2 * (stages - 1)", "W fills two thirds of the bubble, not one"),
    ("+ stages - 1", "", "the last stage has to wait for its first micro-batch"),
    ("+ stages - 1", "+ stages", "one fewer: p - 1 stages come before the last one"),
    ("+ stages - 1", "- stages + 1", "waiting makes a step longer"),
    ("3 * microbatches + stages - 1", "3 * (microbatches + stages - 1)", "that is 1F1B: W fills two thirds of its "
     "bubble"), ("+ stages - 1", "+ (stages - 1) / 3", "in units: each of p - 1 forwards takes a whole one")])
def zero_bubble_units(attempt, stages, microbatches):
    """Count the units of time of a step with zero bubble.

    Forward, the gradient of a stage's input (B) and that of its weights (W) take one unit each; messages take none.
    There are at least as many micro-batches as stages. Return the units from the first forward to the end of the last
    action of any stage. The check plays step 10's schedule.
    """
    return played("10", "zero_bubble", stages, microbatches, seconds={"F": 1, "B": 1, "W": 1}).end


@counts("11", "units of time", hints=(
    "A stage of one chunk: 3 units a micro-batch, and 3 (p - 1) units of bubble.",
    "With v chunks, an action takes 1 / v of the time: the pipeline fills and empties v times as fast.",
    "3 m + 3 (p - 1) / v."),
    sizes=[dict(stages=p, microbatches=m, chunks=v) for p in (2, 3, 4) for m in (p, 2 * p) for v in (2, 3)], mistakes=[
    (" / chunks", "", "that is without chunks: they make the bubble smaller"),
    ("/ chunks", "* chunks", "chunks make the bubble smaller, not larger"),
    ("3 * microbatches + 3 * (stages - 1) / chunks", "(3 * microbatches + 3 * (stages - 1)) / chunks", "chunks shorten "
     "the bubble; a micro-batch takes as long as before"),
    ("3 * (stages - 1)", "(stages - 1)", "backward waits, too: a bubble of forward and backward"),
    ("3 * (stages - 1)", "3 * stages", "p - 1 stages come before the last one"),
    ("+ 3 * (stages - 1) / chunks", "", "there is a bubble left"),
    ("3 * microbatches", "3 * microbatches * chunks", "all chunks of a stage together take 3 units a micro-batch"),
    ("3 * microbatches", "2 * microbatches", "forward and backward take 3 units together")])
def interleaved_units(attempt, stages, microbatches, chunks):
    """Count the units of time of a step with virtual stages.

    A rank's forward of a micro-batch takes one unit and its backward two, divided between its `chunks` chunks; messages
    take no time, and `stages` ranks divide the number of micro-batches. Return the units of a step under the
    interleaved schedule, from the first forward to the last backward. The check plays step 11's schedule.
    """
    seconds = {"F": 1 / chunks, "B": 2 / chunks, "W": 0}
    return played("11", "interleaved", stages, microbatches, chunks, seconds=seconds).end


@counts("cluster", "days", hints=(
    "FLOPs a token: 6 for each weight, and 12 * layers * heads * head_dim * seq_len for attention.",
    "All GPUs together do gpus * peak * mfu FLOPs a second.", "A day has 86,400 seconds."),
    sizes=lambda: [dict(weights=weights_that_multiply(shape), layers=shape["layers"], heads=shape["heads"],
                        head_dim=shape["head_dim"], seq_len=seq_len, tokens=tokens, gpus=gpus, peak=peak, mfu=mfu)
                   for shape in LLAMAS for seq_len, tokens, gpus, peak, mfu in (
                       (2048, 1e12, 64, 989e12, 0.4), (8192, 2e12, 64, 989e12, 0.5), (2048, 1e11, 8, 312e12, 0.3),
                       (8192, 1e12, 256, 312e12, 0.4))], mistakes=[
    (" + 12 * layers * heads * head_dim * seq_len", "", "attention is missing"),
    ("12 * layers", "6 * layers", "half of attention: MFU counts all T x T scores"),
    ("12 * layers", "4 * layers", "attention's backward is missing"),
    ("6 * weights", "2 * weights", "the matmuls' backward is missing: 6 for each weight, not 2"),
    ("* mfu", "", "that is at 100 % of the peak: nobody reaches it"),
    ("gpus * ", "", "that is one GPU: there are several"),
    (" * seq_len", "", "a token has scores with all tokens of its sample"),
    ("* mfu", "/ mfu", "MFU is the share that is used")])
def training_days(attempt, weights, layers, heads, head_dim, seq_len, tokens, gpus, peak, mfu):
    """Say how many days a training takes: of a 7B on 64 GPUs, for example.

    `weights` are the parameters that multiply. `tokens` are read in samples of seq_len, each of `gpus` GPUs could do
    `peak` FLOPs a second and uses the share `mfu`. Return the days.

    The check counts the FLOPs of a sample with torch.utils.flop_counter, on the meta device, where a 7B fits.
    """
    shape = next(shape for shape in LLAMAS if shape["layers"] == layers)
    flops = flops_of_a_sample(seq_len, *shape.values()) / seq_len * tokens
    return flops / (gpus * peak * mfu) / (24 * 3600)
