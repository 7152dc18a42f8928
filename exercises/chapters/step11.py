"""Step 11: several chunks of the model on a rank."""

from catalogue import exercise
from lab.watch.schedule import UNITS
from schedule_attempt import count, picture, play_schedule, train_with


@exercise("11", "virtual_stages.interleave", hints=(
    "As in step 8: warm-up, steady state, cool-down, with the forwards and backwards of all rounds in a row.",
    "The warm-up of the last rank is the first round but for its last chunk: len(first round) // num_chunks * "
    "(num_chunks - 1) forwards. Rank s does hops * (num_stages - 1 - s) more.",
    "zip(forwards[warm_up:], backwards) are the pairs; what is left of backwards comes last. A slice that is longer "
    "than its list is no error."), wrong=[
    ("the warm-up of step 8", "len(forwards[0]) // num_chunks * (num_chunks - 1) + hops * (num_stages - 1 - stage)",
     "num_stages - 1 - stage", "deadlock: no rank can go on"),
    ("hops is not used", "hops * (num_stages", "(num_stages", "forwards before its first backward"),
    ("the whole first round", "len(forwards[0]) // num_chunks * (num_chunks - 1)", "len(forwards[0])",
     "does 7 forwards before its first backward, and has to do 5")])
def interleaved(attempt):
    """Order the forwards and backwards of a rank that holds several chunks.

    rounds(kind, num_stages, num_microbatches, num_chunks) yields a list of actions for each round; the forwards ("F")
    of all rounds, one after the other, are the forwards of a rank in their order, and so are the backwards ("B").
    Yield them as in 1F1B: a warm-up of forwards, pairs of a forward and a backward, and the backwards that are left.

        rank 0   F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  b0 .  b1 .  b2 .  b3 B0 B1 B2 B3      p = 4, m = 4, two chunks;
        rank 3   .  .  .  F0 F1 F2 F3 f0 b0 f1 b1 f2 b2 f3 b3 B0 B1 B2 B3 .  .  .       small letters: chunk 1

    The last rank's warm-up lasts until the first micro-batch comes to its last chunk: the first round without that
    chunk. Each rank before it does `hops` forwards more than the one after it. There may be fewer forwards than that.
    Stars are for the time of the whole.
    """
    interleave = attempt.function()
    for p, m, v, hops in ((2, 4, 2, 2), (4, 2, 2, 2), (3, 7, 2, 1), (2, 4, 3, 2), (4, 8, 2, 2)):
        played = play_schedule(attempt, lambda *args: interleave(*args, hops), p, m, v)
        first_round = -(-m // max(m // p, 1))
        for r, spans in enumerate(played.spans):
            forwards = next(k for k, span in enumerate(spans) if span.kind == "B")
            wanted = min((v - 1) * first_round + hops * (p - 1 - r) + 1, v * m)
            size = f"{count(p, 'rank')}, {count(m, 'micro-batch')}, {v} chunks, hops = {hops}"
            attempt.require(forwards == wanted, f"{size}: rank {r} does {forwards} forwards before its first backward, "
                                                f"and has to do {wanted}{picture(played)}")
    train_with(attempt, "--pp_engine interleaved --virtual_stages 2")
    # The last rank waits p - 1 units, works 2 v m, and its last gradient passes p - 1 ranks.
    attempt.score("units of time, 4 ranks, 8 micro-batches, 2 chunks", played.end, 2 * (v * m + p - 1))


@exercise("11", "references:references.v_shape", hints=(
    "Write down the time of each action of micro-batch 0, as if it never waited: F on stage s at time s, and B at time "
    "4p - 1 - s. Micro-batch i comes 4 i units later.",
    "A rank's four actions for a micro-batch must not fall on the same time modulo 4. They don't if p is odd. If p is "
    "even, let all B come 2 units later.",
    "Collect (time, kind, i, chunk) for both chunks and all i, and sort them by time."), wrong=[
    ("the second chunk goes down the ranks again", "(rank, last - rank)", "(rank, num_ranks + rank)", "deadlock"),
    ("one chunk only", "enumerate((rank, last - rank))", "enumerate((rank,))", "never does F0'"),
    ("backwards come too late", "4 * i + 2 * last", "8 * num_ranks * i + 2 * last", "and may take")])
def v_shape(attempt):
    """Order the actions of ranks whose second chunk goes back through the ranks.

    Rank r of p holds the virtual stages r (its chunk 0) and 2p - 1 - r (its chunk 1): a micro-batch goes down the ranks
    and comes up again, so the first rank has the first and the last stage, and the last rank sends itself nothing.

        rank 0   F0 .  .  .  .  f0 b0 .  .  .  .  B0      stages 0 and 5       p = 3 and a single micro-batch;
        rank 1   .  F0 .  .  f0 .  .  b0 .  .  B0 .       stages 1 and 4       small letters are chunk 1
        rank 2   .  .  F0 f0 .  .  .  .  b0 B0 .  .       stages 2 and 3

    Return the list of a rank's actions, tuples (kind, micro-batch, chunk), such as ("F", 0, 1). A forward of stage s
    needs that of stage s - 1, a backward that of stage s + 1, and each takes one unit of time. The whole must take no
    more than 4 (m + p - 1) units, and 2 more if p is even. 1F1B keeps the activations of p stages, so of 2p chunks, on
    rank 0 and of 2 on the last rank; here about p + 1 are possible on every rank. Stars are for the largest number of
    chunks alive on a rank.
    """
    def schedule(rank, p, m, v):
        return attempt.function()(rank, p, m)

    for p, m in ((1, 3), (2, 4), (4, 8), (3, 14)):
        def stage_of(rank, chunk):
            return (rank, 2 * p - 1 - rank)[chunk]

        played = play_schedule(attempt, schedule, p, m, 2, seconds=UNITS, stage_of=stage_of)
        size = f"{count(p, 'rank')}, {count(m, 'micro-batch')}"
        units = 4 * (m + p - 1) + 2 * (p % 2 == 0)
        attempt.require(played.end <= units, f"{size}: the whole takes {played.end} units of time, and may take {units}"
                                             f"{picture(played)}")
    # In 4 (m + p - 1) units, m (4p + 2) / (4 (m + p - 1)) chunks are alive on average: with p = 3 and m = 14 more than
    # 3, so 4 at some time.
    attempt.score(f"chunks alive at most on a rank, {size}", max(played.peaks), p + 1)
