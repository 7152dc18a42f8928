"""Published runs beside what the dry run says of them: prints the table of beyond/README.md, in some minutes.

    python tools/maintain/published_runs.py [WORD ...]      only the runs that have one of the words in their names

Each is step 16 with the flags that are most like the run's, as its first, second and last stage. A rank runs the
micro-batches of two rounds of its pipeline, since each further round holds and takes the same; the schedule is played
with all. A Llama has gated MLPs, the same experts in each layer, and no latent attention: those here have as many
weights as the run's. DeepSeek-V3's shared expert is one more to choose, whose rows are not sent, and the ranks of a
group of experts are neighbours, as they were there: a machine has eight of one stage.
"""

import multiprocessing
import pathlib
import statistics
import sys

sys.path[1:1] = map(str, pathlib.Path(__file__).resolve().parents[1:3])  # tools/, and where lab is

from lab.watch.dry_run import run_rank
from lab.watch.memory import Event
from sizes.clock import Clock, Machine, machine_of, predict
from sizes.data_sheets import EFFICIENCY, PRESETS, Shape, parse_nodes

TRAIN = pathlib.Path(__file__).resolve().parents[2] / "beyond" / "step16_expert_parallel" / "train.py"
INTERLEAVED = "--pp_engine interleaved --virtual_stages "
LLAMA, GPT_175B = PRESETS["llama-405b"], Shape(12288, 32768, 96, 96, 96, 51200, True, 128)
GPT_1T = Shape(25600, 68264, 128, 160, 160, 51200, True, 160)


def gpt_flops(shape: Shape, batch: int) -> float:
    """Of a step, with a second forward: formula 3 of Narayanan et al. 2021."""
    further = 2048 / (6 * shape.hidden) + shape.vocab / (16 * shape.layers * shape.hidden)
    return 96 * batch * 2048 * shape.layers * shape.hidden**2 * (1 + further)


# Name, machine, TFLOP/s by its data sheet; dp, tp, pp, cp, ep; shape; tokens of a sample, samples of a micro-batch,
# micro-batches; flags; what is published, and the seconds of a step that this makes.
RUNS = [  # Dubey et al. 2024, table 4; Narayanan et al. 2021, tables 2 and 1; DeepSeek-AI 2024, sections 1, 3.2, 4.2;
    # Nvidia 2024, table 2; Ai2 2025 and OLMo-core's script of this run, on Google's A3 Mega; Hugging Face 2025
    ("Llama 3 405B", "8xH100:8", 989, (128, 8, 16, 1, 1), LLAMA, (8192, 1, 16), "--sequence_parallel --zero 1 "
     + INTERLEAVED + "7", "400 TFLOP/s, 41 % MFU", 2**24 * LLAMA.flops(8192) / (16384 * 400e12)),
    ("the same, 131,072 tokens", "8xH100:8", 989, (8, 8, 16, 16, 1), LLAMA, (131072, 1, 16), "--sequence_parallel "
     "--zero 1 " + INTERLEAVED + "7", "380 TFLOP/s, 38 % MFU", 2**24 * LLAMA.flops(131072) / (16384 * 380e12)),
    ("GPT-3 175B", "8xA100:8", 312, (16, 8, 12, 1, 1), GPT_175B, (2048, 1, 96), "--recompute " + INTERLEAVED + "8",
     "141 TFLOP/s", gpt_flops(GPT_175B, 1536) / (1536 * 141e12)),
    ("GPT 1T", "8xA100:8", 312, (6, 8, 64, 1, 1), GPT_1T, (2048, 1, 512), "--recompute " + INTERLEAVED + "2",
     "163 TFLOP/s", gpt_flops(GPT_1T, 3072) / (3072 * 163e12)),
    ("DeepSeek-V3, FP8", "8xH800:8", 1979, (128, 1, 16, 1, 64), Shape(7168, 2048, 61, 64, 4, 129280, False, 192),
     (4096, 1, 120), "--num_experts 256 --experts_per_token 9 --zero 1 --pp_engine zb", "180,000 h for 1T tokens",
     180e3 * 3600 / 1e12 * 15360 * 4096 / 2048),
    ("Nemotron-4 340B", "8xH100:8", 989, (64, 8, 12, 1, 1), Shape(18432, 49152, 96, 96, 8, 256000, False, 192),
     (4096, 1, 36), "--sequence_parallel --zero 1 " + INTERLEAVED + "8", "8.0 s, 41.0 % MFU", 8.0),
    ("OLMo 2 32B", "8xH100:8@1600gbit", 989, (1024, 1, 1, 1, 1), Shape(5120, 27648, 64, 40, 8, 100352, False, 128),
     (4096, 2, 1), "--zero 3 --shard_size 64 --recompute", "over 1,800 tokens/s, 38 % MFU", 2 * 4096 / 1800),
    ("SmolLM3 3B", "8xH100:8", 989, (192, 2, 1, 1, 1), Shape(2048, 11008, 36, 16, 4, 128256, True, 128), (4096, 3, 1),
     "--sequence_parallel --zero 1", "14,000 tokens/s, 29.4 % MFU", 3 * 4096 / (2 * 14000)),
]


def unsent(log: list, experts: int) -> None:
    """One of the experts of a token, the shared one, is on its rank."""
    for i, each in enumerate(log):
        if isinstance(each, Event) and each.axis == "ep":
            log[i] = each._replace(num_bytes=each.num_bytes * (experts - 1) // experts)


def compare(run: tuple) -> tuple[str, float]:
    """A row of the table, and the predicted seconds by the published ones."""
    name, machine, tflops, sizes, shape, (seq_len, samples, microbatches), flags, published, seconds = run
    (dp, tp, pp, cp, ep), node = sizes, parse_nodes(machine)[0]
    device = node.device._replace(bfloat16=tflops * 1e12)
    machine = machine_of(node._replace(device=device), EFFICIENCY)
    if ep > 1:
        machine = type("Neighbours", (Machine,), {"machines": lambda self, ranks: Machine.machines(
            self, [rank % pp * dp + rank // pp for rank in ranks])})(*machine)
    flags += (f" --model_name published --seq_len {seq_len} --micro_batch_size {samples} --gradient_accumulation_steps "
              f"{min(microbatches, 2 * pp)} --dp_size {dp} --tp_size {tp} --pp_size {pp} --cp_size {cp} --ep_size {ep}")
    world = dp * tp * pp * cp
    ranks = [run_rank(TRAIN, flags.split(), world, stage * tp * cp, node.count, machine.seconds_of, True,
                      {"published": shape})
             for stage in sorted({0, min(1, pp - 1), pp - 1})]
    for rank in ranks:
        rank.microbatches = microbatches
        unsent(rank.count.log, rank.args.experts_per_token)
    kinds = [(rank, Clock(rank, machine)) for rank in ranks]
    found, peak = predict(*kinds[0], machine, kinds), max(rank.count.peak.total() for rank in ranks)
    fits = f"{'yes' if peak <= device.memory else 'no'}: {peak / 1e9:.0f} GB"
    return (f"| {name} | {world:,} {node.name} | {', '.join(map(str, sizes))} | {published} | {seconds:.3g} | "
            f"{found.seconds:.3g} | {found.seconds / seconds - 1:+.0%} | {fits} |", found.seconds / seconds)


def main(words: list[str]) -> None:
    print("| run | GPUs | dp, tp, pp, cp, ep | published | seconds | predicted | error | fits into 80 GB |\n"
          "| --- | --- | --- | --- | ---: | ---: | ---: | --- |")
    runs, errors = [run for run in RUNS if not words or any(word in run[0] for word in words)], {}
    assert runs, f"none of {', '.join(run[0] for run in RUNS)} has one of {words} in it"
    with multiprocessing.Pool(2) as pool:
        for run, (row, factor) in zip(runs, pool.imap(compare, runs)):
            errors[run[0]] = abs(factor - 1)
            print(row, flush=True)
    worst = max(errors, key=errors.get)
    print(f"\nmedian error {statistics.median(errors.values()):.0%}, worst {errors[worst]:.0%}, of {worst}")


if __name__ == "__main__":
    main(sys.argv[1:])
