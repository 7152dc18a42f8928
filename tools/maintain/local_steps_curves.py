"""What local steps cost and gain: loss against tokens, and against hours over links of 10 Mbit/s.

    python tools/maintain/local_steps_curves.py curves sweep hosts rates --json assets/local_steps.json
    python tools/maintain/local_steps_curves.py --plot assets/local_steps.png --json assets/local_steps.json

curves   the tiny Llama on three ranks of this machine, from the same seed: 500 exact steps, and as many tokens with
         local steps; `'curves=NAME;NAME'` trains only some of them
sweep    the same with steps of a quarter of the tokens: learning rates and momenta of the outer optimizer
hosts    seconds a step of the same trainings on three hosts of the test bed (50 % of a core, 10 Mbit/s). Hours of a
         curve are its steps times these seconds
rates    tokens/s of 6.3 M parameters with 4096 tokens a local step on these hosts, beside one host alone
"""

import tools_path  # noqa: F401  before launch

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

from launch import ROOT, environment, launch, metrics
from unlike_machines import BED, CASES, NODES, bed, on_all_hosts

SCRIPT = ROOT / "cluster" / "train_distributed.py"
STEPS = 500
COMMON = {"equal_shares": None, "batch_size": 16, "gradient_accumulation": 1, "seq_len": 64, "dtype": "float32",
          "warmup_steps": 20, "lr_decay": "cosine"}
INT8 = {"gradient_wire_dtype": "int8"}
NESTEROV = {"outer_learning_rate": 0.7, "outer_momentum": 0.9}  # DiLoCo as published; by default weights are averaged
CURVES = {  # name -> flags
    "exact": {},
    "H = 1": {"local_steps": 1},
    "H = 10": {"local_steps": 10},
    "H = 50": {"local_steps": 50},
    "H = 10, Nesterov": {"local_steps": 10, **NESTEROV},
    "H = 50, Nesterov": {"local_steps": 50, **NESTEROV},
    "H = 50, int8, overlap 10": {"local_steps": 50, "overlap_steps": 10, **INT8},
}
SWEEP = {  # learning rate and momentum of the outer optimizer
    "exact": {}, **{f"{rate}, {momentum}": {"local_steps": 50, "outer_learning_rate": rate, "outer_momentum": momentum}
                    for rate, momentum in ((0.4, 0.9), (0.7, 0.9), (1.0, 0.9), (0.7, 0.5), (1.0, 0.0))},
    "1.0, 0.0, int8": {"local_steps": 50, **INT8},
}
HOSTS = {"exact": 6, "H = 1": 6, "H = 10": 30, "H = 50": 100, "H = 50, int8, overlap 10": 100}  # name -> steps
LARGE = {**COMMON, "batch_size": 4, "seq_len": 128, "gradient_accumulation": 8}  # 4096 tokens a local step
RATES = {  # name -> steps, flags
    "one host alone": (4, {}),
    "exact": (3, {"num_microbatches": "3,3,2"}),
    "exact, int8": (4, {"num_microbatches": "3,3,2", **INT8}),
    "H = 50, int8": (50, {"local_steps": 50, **INT8}),  # a round, with all that it sends
}
COLOURS = {"exact": "#999999", "H = 1": "#4477aa", "H = 10": "#228833", "H = 50": "#ee7733",
           "H = 50, int8, overlap 10": "#aa3377", "H = 10, Nesterov": "#aadd99", "H = 50, Nesterov": "#ffcc99"}


def flags_of(folder: pathlib.Path, steps: int, flags: dict) -> list[str]:
    every = {**flags, "max_steps_per_epoch": steps, "log_dir": folder, "checkpoint_dir": folder / "checkpoints",
             "run_name": "run"}
    return [str(word) for name, value in every.items() for word in (f"--{name}", value) if word is not None]


def seconds_of_a_step(folder: pathlib.Path) -> float:
    """The median over all rows of metrics but the first. All rows of a round have its mean."""
    return statistics.median(row["step_seconds"] for row in metrics(folder, "run")[1:])


def train_here(results: dict, part: str, name: str) -> None:
    """The losses of one training on three ranks of this machine."""
    flags = {**COMMON, **CURVES[name]} if part == "curves" else {**COMMON, "batch_size": 4, **SWEEP[name]}
    with tempfile.TemporaryDirectory() as folder:
        launch(9, 3, *flags_of(pathlib.Path(folder), STEPS, flags), script=SCRIPT, timeout=1500)
        results[part][name] = [row["loss"] for row in metrics(folder, "run")]
    print(f"{part}, {name}: {last_loss(results, name, part):.4f}", flush=True)


def on_one_host(*flags: str) -> None:
    command = [BED, "exec", NODES[0], "taskset", "-c", "0", sys.executable, "-m", "torch.distributed.run",
               "--standalone", "--local_addr", "127.0.0.1", SCRIPT, *flags]
    subprocess.run(command, env=environment(), check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def measure(results: dict, part: str, name: str) -> None:
    """Seconds a step, or tokens/s, of one training on the hosts, which are up."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        if part == "hosts":
            on_all_hosts(SCRIPT, *flags_of(folder, HOSTS[name], {**COMMON, **CURVES[name]}), timeout=900)
            results[part][name] = seconds_of_a_step(folder)
        else:
            model = folder / "model"
            shutil.copytree(ROOT / "assets" / "tiny_llama", model)
            config = json.loads((model / "config.json").read_text())
            (model / "config.json").write_text(json.dumps({**config, **CASES["links"]["model"]}))
            steps, flags = RATES[name]
            flags = flags_of(folder, steps, {**LARGE, "model_name": model, **flags})
            on_one_host(*flags) if name == "one host alone" else on_all_hosts(SCRIPT, *flags, timeout=1500)
            rows = metrics(folder, "run")
            tokens = rows[-1]["trained_tokens"] / len(rows)
            results[part][name] = tokens / seconds_of_a_step(folder)
    print(f"{part}, {name}: {results[part][name]:.3f}", flush=True)


def last_loss(results: dict, name: str, part: str = "curves") -> float:
    return statistics.fmean(results[part][name][-20:])


def tables(results: dict) -> None:
    exact = last_loss(results, "exact")
    print("| | mean of the last 20 losses | above exact | s a step, 10 Mbit/s | minutes in all |\n"
          "| --- | ---: | ---: | ---: | ---: |")
    for name in results["curves"]:
        loss, seconds = last_loss(results, name), results["hosts"][name.removesuffix(", Nesterov")]
        above = f"{100 * (loss / exact - 1):+.1f} %"
        print(f"| {name} | {loss:.4f} | {above} | {seconds:.3g} | {seconds * STEPS / 60:.1f} |")
    for name in results["sweep"]:
        loss, exact = last_loss(results, name, "sweep"), last_loss(results, "exact", "sweep")
        print(f"| {name} | {loss:.4f} | {100 * (loss / exact - 1):+.1f} % |")
    for name, rate in results["rates"].items():
        print(f"| {name} | {rate:.0f} | {rate / results['rates']['one host alone']:.2f} |")


def draw(results: dict, picture: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, losses in results["curves"].items():
        smooth = [statistics.fmean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
        tokens = COMMON["batch_size"] * COMMON["gradient_accumulation"] * COMMON["seq_len"] * len(NODES)
        left.plot([tokens * (i + 1) / 1e3 for i in range(len(smooth))], smooth, color=COLOURS[name], linewidth=1.2,
                  label=name)
        seconds = results["hosts"][name.removesuffix(", Nesterov")]  # which momentum does not change
        right.plot([seconds * (i + 1) / 3600 for i in range(len(smooth))], smooth, color=COLOURS[name], linewidth=1.2)
    left.set(xlabel="thousand tokens", ylabel="loss, mean of ten steps")
    right.set(xlabel="hours, links of 10 Mbit/s", xscale="log")
    left.legend(frameon=False)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="curves, sweep, hosts, rates; curves=NAME;NAME for some of them")
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / "runs" / "local_steps.json")
    parser.add_argument("--plot", help="draw what --json holds")
    args = parser.parse_args()
    everything = {"curves": CURVES, "sweep": SWEEP, "hosts": HOSTS, "rates": RATES}
    results = {part: {} for part in everything}
    if args.json.exists():
        results |= json.loads(args.json.read_text())
    args.json.parent.mkdir(parents=True, exist_ok=True)
    for part, _, names in (part.partition("=") for part in args.parts):
        names = names.split(";") if names else list(everything[part])
        if part in ("hosts", "rates"):
            bed("up")
            bed("rate", "all", "10mbit")
            bed("slow", "all", 50)
        try:
            for name in names:
                (train_here if part in ("curves", "sweep") else measure)(results, part, name)
                args.json.write_text(json.dumps(results))
        finally:
            if part in ("hosts", "rates"):
                bed("down")
    if args.plot:
        tables(results)
        draw(results, args.plot)


if __name__ == "__main__":
    main()
