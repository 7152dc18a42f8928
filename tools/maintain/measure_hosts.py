"""What several unlike machines are worth, on the three hosts of the test bed: as root.

    python tools/maintain/measure_hosts.py together --json assets/table_of_unlike.json        all cases, about an hour
    python tools/maintain/measure_hosts.py together --only "4:2:1 fast$" --rounds 2           one case
    python tools/maintain/measure_hosts.py plans --json assets/unlike_machines.json           about half an hour
    python tools/maintain/measure_hosts.py local --rounds 2 --json assets/local_steps.json
    python tools/maintain/measure_hosts.py recovery --rounds 10

together   what three machines reach together, beside the sum of what each reaches alone, in tokens a second:
           by speed    train_distributed.py without flags for the layout: each machine has the whole model, samples are
                       shared out by speed. It measures that before the first step, and corrects it by the first steps
           plan        what plan.py chose for the measured machines
           even        --equal_shares
           alone       the fastest machine by itself, the others idle, with the same samples a step
           each alone  all three at the same time, but each by itself, with its part of the samples. The sum of these is
                       what they can reach. (The hosts share a processor, so each is measured while others compute.)
           The step takes 2 s or more, because its samples are chosen by the speeds that are measured first.
plans      what planning is worth, and how well it predicts: the plan beside others, measured and predicted
           speeds      4:2:1, fast links, the tiny Llama
           links       10 Mbit/s, equal speeds, 6 M parameters, 4096 tokens a step; on the wire is float32, bfloat16 or
                       int8
local      what local steps are worth on slow links, in seconds until the evaluation's loss is that of 300 exact steps:
           seconds a step of all, in turns, over 100 and over 10 Mbit/s, and for three seeds the losses. Both together,
           about an hour
recovery   how long a run stands still that loses a host. A round takes a host away, waits until the others have made
           some steps, gives it back, and waits until it takes part again. The figure is the time from the loss to the
           next finished step, less the mean step after it. Which host it is changes from round to round

Of `together` and `plans`, the machines are measured first. Then all candidates train the same samples, from the same
weights, in turns, round by round, each in processes of its own (hosts_bench.py).
"""

import argparse
import json
import math
import pathlib
import re
import statistics
import sys
import tempfile
import time
from itertools import pairwise

sys.path[1:1] = map(str, pathlib.Path(__file__).resolve().parents[1:3])  # tools/, and where lab is
from lab.launch import Help
from maintain.bed import NODES, testbed
from maintain.elastic_bed import Training, kill_all, switch_on
from maintain.hosts_bench import Bench, Candidate
from maintain.turns import keep, read_results, table

SIZE, LAYERS, SECONDS = 4, 8, 2.2  # samples of a micro-batch; of the tiny Llama; of a step, if all compute all the time
SETTLED = 5  # steps: the early move of --replan is made after the fourth one, or sooner
QUOTAS = {"4:2:1": (100, 50, 25), "2:1:1": (80, 40, 40), "60:30:15": (60, 30, 15)}  # percent of a core
NETWORKS = {"fast": "off", "100 Mbit/s": "100mbit"}
TOGETHER = {f"{speeds} {network}": dict(speeds=quotas, rate=rate, model={}, sizes=f"1,2,{SIZE}")
            for speeds, quotas in QUOTAS.items() for network, rate in NETWORKS.items()}
TOGETHER["4:2:1 fast, LoRA"] = {**TOGETHER["4:2:1 fast"], "flags": ["--lora_rank", "16"]}
PLANS = {
    "speeds": dict(speeds=(100, 50, 25), rate="off", sizes="1,2,4", model={}),
    "links": dict(speeds=(50, 50, 50), rate="10mbit", sizes="1,2,4",
                  model=dict(hidden_size=256, intermediate_size=688, head_dim=32)),
}

EXACT, SEED = [None, "bfloat16", "int8"], "losses, seed "  # what gradients travel in; the name of a case
LOCAL = {f"{rate[:-4]} Mbit/s": dict(speeds=QUOTAS["4:2:1"], rate=rate, model={}) for rate in ("100mbit", "10mbit")}
LOCAL |= {f"{SEED}{seed}": dict(speeds=QUOTAS["4:2:1"], rate="off", model={}, seed=seed) for seed in (1, 2, 3)}
STEPS, TO_300 = (10, 30, 100), 300  # of a round; exact ones, whose loss is to be reached
A_STEP = ["--batch_size", SIZE, "--gradient_accumulation", 2]  # 3072 tokens on three machines

RECOVERY = ["--seq_len", "16", "--dtype", "float64", "--batch_size", "1", "--num_hidden_layers", "4", "--device", "cpu",
            "--equal_shares", "--save_every", "10", "--max_steps", "4000", "--num_microbatches", "6"]
LOSSES = {  # name -> (how a host is lost, flags)
    "killed, copies live": (kill_all, []),
    "killed, a checkpoint is read": (kill_all, ["--pipelines", "2,1,1|2,2"]),
    "cable cut, copies live": (lambda node: testbed("cut", node), []),
}


def measure_together(case: dict, rounds: int, folder: pathlib.Path) -> dict:
    bench = Bench(case, folder)
    if "flags" in case:
        write_weights(bench.model)
    bench.prepare()
    seconds = [(sum(machine["forward"][str(SIZE)]) + sum(machine["backward"][str(SIZE)])) / SIZE
               for machine in bench.cluster["machines"]]  # of a sample
    speed, unit = sum(1 / each for each in seconds), SIZE * len(seconds)
    batch = unit * round(SECONDS * speed / unit)
    parts = [max(1, round(batch / SIZE / each / speed)) for each in seconds]
    by_speed, plan = ["--batch_size", SIZE, "--gradient_accumulation", batch // unit], bench.plan(batch)
    alone = bench.predict(SIZE, ((seconds.index(min(seconds)),), (LAYERS,), batch // SIZE))
    measured = bench.train({
        "by speed": Candidate(by_speed, SETTLED),
        "plan": Candidate(bench.by_plan("plan", plan), SETTLED),
        "even": Candidate([*by_speed, "--equal_shares"]),
        "alone": Candidate(bench.by_plan("alone", alone)),
        "each alone": Candidate([["--batch_size", SIZE, "--gradient_accumulation", part] for part in parts]),
    }, rounds)
    return {"seconds": measured, "batch": batch, "parts": parts, "plan": plan, "cluster": bench.cluster}


def write_weights(model: pathlib.Path) -> None:
    """Random ones, beside which LoRA trains."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)


def layers_of(plan: dict) -> str:
    return f"`{';'.join(','.join(map(str, each['layers'])) for each in plan['pipelines'])}`"


def table_together(results: dict) -> str:
    """In tokens a second."""
    rows = []
    for name, found in results.items():
        step = {key: statistics.median(seconds) for key, seconds in found["seconds"].items()}
        seq_len = found["cluster"]["seq_len"]
        speed = {key: found["batch"] * seq_len / step[key] for key in ("by speed", "plan", "even", "alone")}
        each = [SIZE * part * seq_len / step[f"each alone {k}"] for k, part in enumerate(found["parts"])]
        rows.append([name, f"{step['by speed']:.2f}", f"{speed['by speed']:.0f}", f"{speed['plan']:.0f}",
                     layers_of(found["plan"]), f"{speed['even']:.0f}", f"{speed['alone']:.0f}",
                     ", ".join(f"{one:.0f}" for one in each), f"{sum(each):.0f}",
                     *(f"{speed[key] / sum(each):.3f}" for key in ("by speed", "plan"))])
    return table(["speeds, network", "step s", "by speed", "plan", "its layers", "even", "fastest alone", "each alone",
                  "sum of these", "by speed / sum", "plan / sum"], rows)


def plans_of_speeds(bench: Bench) -> dict[str, dict]:
    whole, batch = (LAYERS,), 56
    return {
        "plan": bench.plan(batch),
        "uniform, data parallel": bench.predict(4, *(((k,), whole, n) for k, n in enumerate((5, 5, 4)))),
        "uniform, one pipeline": bench.predict(4, ((0, 1, 2), (3, 3, 2), batch // 4)),
        **{f"machine {k} alone": bench.predict(4, ((k,), whole, batch // 4)) for k in range(3)},
        "pipeline 5,2,1": bench.predict(2, ((0, 1, 2), (5, 2, 1), batch // 2)),
        "pipeline 1,2,5": bench.predict(1, ((2, 1, 0), (1, 2, 5), batch)),
        "8; 5,3": bench.predict(2, ((0,), whole, 16), ((1, 2), (5, 3), 12)),
        "6,2; 8": bench.predict(2, ((0, 2), (6, 2), 20), ((1,), whole, 8)),
        "shares 8;4;2": bench.predict(4, ((0,), whole, 8), ((1,), whole, 4), ((2,), whole, 2)),
        "two machines": bench.predict(2, ((0,), whole, 19), ((1,), whole, 9)),
    }


def plans_of_links(bench: Bench) -> dict[str, dict]:
    whole, batch = (LAYERS,), 32
    plans = {"pipeline 4,4": bench.predict(2, ((0, 1), (4, 4), batch // 2)),
             "machine 0 alone": bench.predict(4, ((0,), whole, batch // 4))}
    for dtype in (None, "bfloat16", "int8"):
        of_dtype = f", {dtype}" if dtype else ""
        plans[f"plan{of_dtype}"] = bench.plan(batch, *(("--wire_dtype", dtype) if dtype else ()))
        for schedule in ("1f1b", "1f1b-2"):
            plans[f"3,3,2, {schedule}{of_dtype}"] = bench.predict(1, ((0, 1, 2), (3, 3, 2), batch), wire_dtype=dtype,
                                                                  schedule=schedule)
        plans[f"data parallel{of_dtype}"] = bench.predict(
            1, *(((k,), whole, n) for k, n in enumerate((11, 11, 10))), gradient_wire_dtype=dtype)
    return plans


def measure_plans(case: dict, rounds: int, folder: pathlib.Path) -> dict:
    bench = Bench(case, folder)
    bench.prepare()
    plans = (plans_of_links if case["rate"] != "off" else plans_of_speeds)(bench)
    seconds = bench.train({name: Candidate([*bench.by_plan(name, plan), "--replan", "off"])
                           for name, plan in plans.items()}, rounds)
    return {"seconds": seconds, "plans": plans, "cluster": bench.cluster}


def table_of_plans(results: dict) -> str:
    return "\n\n".join(f"{name}:\n\n{table_of_case(found)}" for name, found in results.items())


def table_of_case(found: dict) -> str:
    rows = []
    for name, seconds in sorted(found["seconds"].items(), key=lambda item: statistics.median(item[1])):
        plan, measured = found["plans"][name], statistics.median(seconds)
        predicted, pipelines = plan["predicted"]["step_seconds"], plan["pipelines"]
        numbers = ",".join(str(each["num_microbatches"]) for each in pipelines)
        rows.append([name, layers_of(plan), f"{numbers} of {plan['micro_batch_size']}",
                     "; ".join(",".join(map(str, each["machines"])) for each in pipelines),
                     plan["schedule"] if max(len(each["layers"]) for each in pipelines) > 1 else "",
                     f"{measured:.2f}", f"{min(seconds):.2f} - {max(seconds):.2f}", f"{predicted:.2f}",
                     f"{measured / predicted:.2f}"])
    return table(["plan", "layers", "micro-batches", "machines", "schedule", "measured s", "smallest - largest",
                  "predicted s", "measured / predicted"], rows)


def local(steps: int, **options) -> Candidate:
    return Candidate([*A_STEP, "--local_steps", steps, "--gradient_wire_dtype", "int8"], local_steps=steps, **options)


def measure_local(case: dict, rounds: int, folder: pathlib.Path) -> dict:
    bench = Bench(case, folder)
    bench.slow_down()
    if seed := case.get("seed"):
        bench.case["flags"] = ["--seed", seed, "--validation_split", 0.03, "--eval_batches", 32]
        trained = {"exact": (Candidate([*A_STEP], counted=TO_300 - 2), 10),
                   **{f"H = {steps}": (local(steps, counted=-(-360 // steps) - 2), steps) for steps in STEPS}}
        bench.train({name: each._replace(flags=[*each.flags, "--eval_every", every])
                     for name, (each, every) in trained.items()}, 1)
        losses = {name: [(row["step"], row["evaluation_loss"]) for row in map(
            json.loads, bench.find(f"runs/{name}_0/evaluation.jsonl").read_text().splitlines())] for name in trained}
        return {"seconds": {}, "losses": losses}
    candidates = {f"exact, {dtype or 'float32'}": Candidate(
        [*A_STEP, *(["--gradient_wire_dtype", dtype] if dtype else [])], SETTLED, 10) for dtype in EXACT}
    candidates["each alone"] = Candidate([["--batch_size", SIZE, "--gradient_accumulation", 6 // (host + 1)]
                                          for host in range(3)], counted=10)
    candidates |= {f"H = {steps}": local(steps, counted=max(1, 60 // steps)) for steps in STEPS}
    return {"seconds": bench.train(candidates, rounds)}


def steps_to(loss: float, curve: list[tuple[int, float]], unit: int) -> float | None:
    """The optimizer steps after which an evaluation has that loss; between two of them along a straight line. `curve`:
    (step, or round of `unit` steps, loss). None where it is never reached."""
    for (step, before), (later, after) in pairwise(curve):
        if after <= loss:
            return unit * (step + (later - step) * (before - loss) / (before - after))
    return None


def table_of_local(results: dict) -> str:
    """For each link: seconds and tokens/s of a step, and the median over seeds of the time to the loss."""
    seeds = [found["losses"] for name, found in results.items() if name.startswith(SEED)]
    samples, rows = {f"each alone {host}": SIZE * (6 // (host + 1)) for host in range(3)}, []
    for link in (name for name in LOCAL if name in results and "Mbit" in name):
        speed, seconds = {}, results[link]["seconds"]
        for name, measured in seconds.items():
            unit = int(name.removeprefix("H = ")) if name.startswith("H") else 1
            speed[name] = 128 * unit * samples.get(name, SIZE * 6) / statistics.median(measured)
        total = sum(speed[f"each alone {host}"] for host in range(3))
        for name in speed:
            curve, unit = (name, int(name[4:])) if name.startswith("H") else ("exact", 1)
            needed = [steps_to(each["exact"][-1][1], each[curve], unit) for each in seeds]
            after = [each[curve][TO_300 // unit][1] / each["exact"][-1][1] - 1 for each in seeds] if unit > 1 else []
            steps = statistics.median(value or math.inf for value in needed) if needed else math.nan
            seconds_to_it = steps * 128 * SIZE * 6 / speed[name]
            rows.append([link, name, f"{speed[name]:.0f}", f"{speed[name] / total:.2f}",
                         f"{statistics.median(after):+.1%}" if after else "",
                         *([f"{steps:.0f}", f"{seconds_to_it:.0f}"] if steps < math.inf else ["more than 360", ""])])
    return table(["links", "", "tokens/s", "of the sum", "loss after 300 steps", "steps to the loss", "seconds"], rows)


def recover(case: tuple, rounds: int, folder: pathlib.Path) -> dict:
    (lose, words), since, seconds = case, 0, []
    run = Training(folder, "cluster/train_distributed.py", *RECOVERY, *words, "--log_dir", folder,
                   "--checkpoint_dir", folder / "checkpoints")
    for number in range(rounds):
        run.went_on(3, since)
        run.reaches(run.steps()[-1] + 12)
        node, since, lost_at = NODES[number % 3], run.mark(), time.perf_counter()
        lose(node)
        run.went_on(2, since)
        went_on_at, step = time.perf_counter(), run.steps()[-1]
        run.reaches(step + 20)
        a_step = (time.perf_counter() - went_on_at) / (run.steps()[-1] - step)
        seconds.append(went_on_at - lost_at - a_step)
        since = run.mark()
        switch_on(node)
    run.went_on(3, since)
    run.stop()
    return {"seconds": {"standing still": seconds}}


def table_of_recovery(results: dict) -> str:
    return table(["a host is lost", "median s", "smallest - largest", "rounds"], [
        [name, f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f} - {max(seconds):.2f}", len(seconds)]
        for name, seconds in ((name, found["seconds"]["standing still"]) for name, found in results.items())])


CASES = {  # what -> its cases, how each is measured, and the table of all of them
    "together": (TOGETHER, measure_together, table_together),
    "plans": (PLANS, measure_plans, table_of_plans),
    "local": (LOCAL, measure_local, table_of_local),
    "recovery": (LOSSES, recover, table_of_recovery),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("what", choices=CASES, help="to measure")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name fits")
    parser.add_argument("--rounds", type=int, default=3, help="each candidate trains so often, or so many losses")
    parser.add_argument("--json", type=pathlib.Path, help="keep what is found here; the table is of all that it holds")
    args = parser.parse_args()
    cases, measure, table_of = CASES[args.what]
    if not (chosen := [name for name in cases if re.search(args.only, name)]):
        parser.error(f"--only {args.only!r} fits none of: {'; '.join(cases)}")
    results = read_results(args.json) if args.json else {}
    testbed("up")
    try:
        for name in chosen:
            with tempfile.TemporaryDirectory() as folder:
                results[name] = measure(cases[name], args.rounds, pathlib.Path(folder))
            keep(args.json, name, results[name])
            print(table_of({name: results[name] for name in cases if name in results}), flush=True)
    finally:
        testbed("down")


if __name__ == "__main__":
    main()
