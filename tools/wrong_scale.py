"""What a forgotten division does: step 3 as it is, and without dividing the loss by the number of micro-batches.

    python tools/wrong_scale.py [--steps 20] [--figure PICTURE]      # a minute

Trains both without clipping, which would hide the mistake, from the same weights and on the same samples. The second
is a copy of the step in a temporary folder, changed in one place: backward gets the undivided loss, so that the
gradients of 8 micro-batches are 8 times too large; what it logs is still the mean. AdamW divides each gradient by its
own running size, so the losses hardly tell the two apart. The gradient norms do.
"""

import argparse
import pathlib
import shutil
import statistics
import tempfile

from launch import ROOT, STEPS, launch, metrics

MICRO_BATCHES, TOKENS_A_STEP = 8, 32 * 128
AS_IT_IS, WRONG = "divided by 8 (as it is)", "not divided"
RIGHT_TEXT = '''\
        loss = cross_entropy(logits, batch["target_ids"]) / num_microbatches
        del logits  # the largest tensor of all, and backward does not need it
        loss.backward()  # gradients add up, and each is divided already: their sum is the gradient of the mean loss
        total_loss += loss.detach()
'''
WRONG_TEXT = '''\
        loss = cross_entropy(logits, batch["target_ids"])
        del logits  # the largest tensor of all, and backward does not need it
        loss.backward()
        total_loss += loss.detach() / num_microbatches
'''


def without_division(text: str) -> str:
    """The text of step 3's train.py with the mistake. Raises ValueError where it has not the known lines, once."""
    if (count := text.count(RIGHT_TEXT)) != 1:
        raise ValueError(f"step 3's train.py contains these lines {count} times, not once; adapt this tool to it:\n"
                         + RIGHT_TEXT)
    return text.replace(RIGHT_TEXT, WRONG_TEXT)


def train(steps: int, folder: pathlib.Path) -> dict[str, list[dict]]:
    """The rows of metrics.jsonl of both runs, by name."""
    copy = folder / "step"
    shutil.copytree(STEPS["3"], copy)
    (copy / "train.py").write_text(without_division((copy / "train.py").read_text()))
    flags = ["--max_grad_norm", 0, "--gradient_accumulation_steps", MICRO_BATCHES, "--device", "cpu", "--dtype",
             "float32", "--max_tokens", steps * TOKENS_A_STEP, "--model_name", ROOT / "assets" / "tiny_llama"]
    runs = {}
    for name, script in ((AS_IT_IS, STEPS["3"] / "train.py"), (WRONG, copy / "train.py")):
        log_dir = folder / script.parent.name
        launch(3, 1, *flags, "--log_dir", log_dir, script=script, timeout=300)
        runs[name] = metrics(log_dir)
    return runs


def compare(runs: dict[str, list[dict]]) -> tuple[list[float], list[float]]:
    """At each step, the relative difference of the losses and the ratio of the gradient norms."""
    steps = list(zip(runs[AS_IT_IS], runs[WRONG], strict=True))
    return ([abs(wrong["loss"] - right["loss"]) / right["loss"] for right, wrong in steps],
            [wrong["grad_norm"] / right["grad_norm"] for right, wrong in steps])


def draw(runs: dict[str, list[dict]], picture: pathlib.Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(10, 3.9), dpi=100, layout="constrained")
    losses, norms = figure.subplots(1, 2)
    styles = {AS_IT_IS: dict(color="#c4c4c4", linewidth=8, solid_capstyle="round"),
              WRONG: dict(color="#d55e00", linewidth=2, marker="o", markersize=4)}
    for name, rows in runs.items():
        steps = range(1, len(rows) + 1)
        losses.plot(steps, [row["loss"] for row in rows], label=name, **styles[name])
        norms.semilogy(steps, [row["grad_norm"] for row in rows], label=name, **styles[name])
    for axes, title in ((losses, "loss"), (norms, "gradient norm (log axis)")):
        axes.set_title(title, loc="left", fontsize=13)
        axes.set(xlabel="optimizer step", axisbelow=True)
        axes.locator_params(axis="x", integer=True)
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    for axis in (norms.yaxis.set_major_formatter, norms.yaxis.set_minor_formatter):
        axis(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else ""))
    losses.legend(frameon=False, fontsize=12, title="loss of a micro-batch", title_fontsize=12)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--figure", type=pathlib.Path, default=ROOT / "runs" / "wrong_scale.png",
                        help="where to draw it (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = train(args.steps, pathlib.Path(folder))
    differences, ratios = compare(runs)
    print("final loss: " + ", ".join(f"{rows[-1]['loss']:.4f} {name}" for name, rows in runs.items()))
    worst = max(differences)
    print(f"losses differ by at most {worst:.1e} of their value (at step {1 + differences.index(worst)})")
    print(f"the gradient norm without the division is {statistics.median(ratios):.2f} times as large (median; "
          f"{min(ratios):.2f} to {max(ratios):.2f}; at step 1 {ratios[0]:.4f}; in theory {MICRO_BATCHES})")
    draw(runs, args.figure)
    print(f"figure: {args.figure}")


if __name__ == "__main__":
    main()
