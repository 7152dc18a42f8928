"""The contestants of benchmark.py: our steps and what they are compared with."""

from typing import NamedTuple

BASELINE = "step 3, one process"


class Run(NamedTuple):
    """One contestant: the number of the step (None: a peer) with its flags, and what its speed is compared with."""

    name: str
    step: int | None
    ranks: int
    flags: str
    against: tuple[tuple[str, float | None], ...] = ()  # (name, ratio to reach)
    threads: int = 1


def micro_batch(size: int, accumulation: int) -> str:
    return f"--micro_batch_size {size} --gradient_accumulation_steps {accumulation}"


COMPILED = "step 3, --compile"
PP_4, PP_2 = micro_batch(4, 8) + " --pp_size 4", micro_batch(4, 8) + " --pp_size 2"
PP_2_FEW = micro_batch(8, 4) + " --pp_size 2"
DP_4 = micro_batch(1, 8) + " --dp_size 4"
INTERLEAVED = " --virtual_stages 2 --pp_engine interleaved"
TP_2, TP_4 = micro_batch(4, 8) + " --tp_size 2", micro_batch(4, 8) + " --tp_size 4"
GROUPS = {
    "One process": [
        Run(BASELINE, 3, 1, micro_batch(4, 8), (("Hugging Face", 1.0),)),
        Run("Hugging Face", None, 1, "hf"),
        Run("step 3, 2 threads", 3, 1, micro_batch(4, 8), (("Hugging Face, 2 threads", 1.0), (BASELINE, None)), 2),
        Run("Hugging Face, 2 threads", None, 1, "hf", (), 2),
    ],
    "Two stages": [
        Run("step 10, pp 2, zb, 4 micro-batches", 10, 2, PP_2_FEW + " --pp_engine zb",
            (("torch Schedule1F1B, pp 2, 4 micro-batches", 1.1), ("step 8, pp 2, 1F1B, 4 micro-batches", None))),
        Run("step 8, pp 2, 1F1B, 4 micro-batches", 8, 2, PP_2_FEW,
            (("torch Schedule1F1B, pp 2, 4 micro-batches", None),)),
        Run("torch Schedule1F1B, pp 2, 4 micro-batches", None, 2, "1f1b --microbatches 4"),
        Run("torch zero bubble, pp 2, 4 micro-batches", None, 2, "zb --microbatches 4",
            (("torch Schedule1F1B, pp 2, 4 micro-batches", None),)),
        Run("step 10, pp 2, zb, 8 micro-batches", 10, 2, PP_2 + " --pp_engine zb",
            (("torch Schedule1F1B, pp 2, 8 micro-batches", 1.05), ("step 8, pp 2, 1F1B, 8 micro-batches", None))),
        Run("step 8, pp 2, 1F1B, 8 micro-batches", 8, 2, PP_2,
            (("torch Schedule1F1B, pp 2, 8 micro-batches", None),)),
        Run("torch Schedule1F1B, pp 2, 8 micro-batches", None, 2, "1f1b"),
        Run("torch zero bubble, pp 2, 8 micro-batches", None, 2, "zb",
            (("torch Schedule1F1B, pp 2, 8 micro-batches", None),)),
    ],
    "Four stages, or twice four": [
        Run("step 10, pp 4, zb", 10, 4, PP_4 + " --pp_engine zb",
            (("torch Schedule1F1B", 1.03), ("torch zero bubble", 1.03), ("torch interleaved zero bubble", 1.03),
             ("torch zero bubble V", 1.03), (BASELINE, 1.77))),
        Run("step 8, pp 4, 1F1B", 8, 4, PP_4, (("torch Schedule1F1B", 1.05), (BASELINE, 1.8))),
        Run("torch Schedule1F1B", None, 4, "1f1b", ((BASELINE, None),)),
        Run("torch interleaved 1F1B", None, 4, "interleaved-1f1b", ((BASELINE, None),)),
        Run("torch zero bubble", None, 4, "zb", ((BASELINE, None),)),
        Run("torch interleaved zero bubble", None, 4, "interleaved-zb", ((BASELINE, None),)),
        Run("torch zero bubble V", None, 4, "zbv", ((BASELINE, None),)),
        Run("step 8, pp 4, AFAB", 8, 4, PP_4 + " --pp_engine afab",
            (("torch ScheduleGPipe", None), (BASELINE, None))),
        Run("torch ScheduleGPipe", None, 4, "gpipe", ((BASELINE, None),)),
    ],
    "Data parallel": [
        Run("step 6, dp 4", 6, 4, DP_4, (("torch DDP", 1.0), (BASELINE, 1.45))),
        Run("torch DDP", None, 4, "ddp", ((BASELINE, None),)),
    ],
    "Tensor parallel": [
        Run("step 8, tp 2", 8, 2, TP_2, (("DTensor, tp 2", 1.6), ("Hugging Face, tp 2", None), (BASELINE, 1.15))),
        Run("DTensor, tp 2", None, 2, "dtensor", ((BASELINE, None),)),
        Run("Hugging Face, tp 2", None, 2, "hf-tp", ((BASELINE, None),)),
        Run("step 8, tp 4", 8, 4, TP_4, (("DTensor, tp 4", 1.8), ("Hugging Face, tp 4", None), (BASELINE, None))),
        Run("DTensor, tp 4", None, 4, "dtensor", ((BASELINE, None),)),
        Run("Hugging Face, tp 4", None, 4, "hf-tp", ((BASELINE, None),)),
    ],
    "Sequence parallel": [
        Run("step 14, tp 2, sp", 14, 2, TP_2 + " --sequence_parallel",
            (("DTensor, tp 2, sp", 1.0), ("step 8, tp 2", None))),
        Run("DTensor, tp 2, sp", None, 2, "dtensor-sp"),
    ],
    "All three": [
        Run("step 8, 2x2x2", 8, 8, micro_batch(2, 8) + " --tp_size 2 --pp_size 2 --dp_size 2", ((BASELINE, 0.95),)),
    ],
    "Compiled": [
        Run(COMPILED, 3, 1, micro_batch(4, 8) + " --compile", (("Hugging Face", 1.1), (BASELINE, None))),
        Run("Hugging Face, compiled", None, 1, "hf --compile", (("Hugging Face", None),)),
        Run("step 3, --compile, 2 threads", 3, 1, micro_batch(4, 8) + " --compile",
            (("Hugging Face, 2 threads", 1.1), (BASELINE, None)), 2),
        Run("step 8, pp 4, 1F1B, --compile", 8, 4, PP_4 + " --compile",
            (("step 8, pp 4, 1F1B", None), (COMPILED, None))),
        Run("step 6, dp 4, --compile", 6, 4, DP_4 + " --compile", (("step 6, dp 4", None), (COMPILED, None))),
        Run("step 8, tp 2, --compile", 8, 2, TP_2 + " --compile", (("step 8, tp 2", None), (COMPILED, None))),
    ],
    "Virtual stages on two ranks": [
        Run("step 11, pp 2, interleaved", 11, 2, PP_2 + INTERLEAVED, (("torch interleaved 1F1B, pp 2", 1.0),)),
        Run("torch interleaved 1F1B, pp 2", None, 2, "interleaved-1f1b"),
        Run("step 11, pp 2, interleaved_zb", 11, 2, PP_2 + INTERLEAVED + "_zb",
            (("torch interleaved zero bubble, pp 2", 1.0),)),
        Run("torch interleaved zero bubble, pp 2", None, 2, "interleaved-zb"),
    ],
    "Virtual stages on four ranks": [
        Run("step 11, pp 4, interleaved", 11, 4, PP_4 + INTERLEAVED, (("torch interleaved 1F1B", 1.0),)),
        Run("step 11, pp 4, interleaved_zb", 11, 4, PP_4 + INTERLEAVED + "_zb",
            (("torch interleaved zero bubble", 1.0),)),
    ],
    "Shards": [
        Run("step 12, dp 4, ZeRO 1", 12, 4, DP_4 + " --zero 1", (("step 6, dp 4", 0.97),)),
        Run("step 12, dp 4, ZeRO 2", 12, 4, DP_4 + " --zero 2", (("torch fully_shard, weights kept", 1.0),)),
        Run("torch fully_shard, weights kept", None, 4, "zero2"),
        Run("step 13, dp 4, FSDP", 13, 4, DP_4 + " --zero 3", (("torch fully_shard", 1.0),)),
        Run("torch fully_shard", None, 4, "fsdp"),
    ],
}
RUNS = [run for runs in GROUPS.values() for run in runs]
