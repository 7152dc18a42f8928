"""How much faster two ranks with half of the experts each are than one process with all of them, on the CPU.

    python tools/maintain/speed_of_experts.py

Llama of hidden 256, 8 layers, 8 experts of width 688 of which a token passes 2, 32 samples of 128 tokens a step,
float32, one thread a rank. The learning rate is next to nothing, so the routers stay as they are, and --balance_bias
makes their choices about even: uneven ones cost time, but differ from run to run. The runs take turns, step by step,
see turns.py; the first step is dropped. The figure is the median of the rounds' ratios, with its quartiles.
"""

import tools_path  # noqa: F401  before launch

import argparse
import statistics
import tempfile

from launch import STEPS, Help, metrics
from turns import Program

BOTH = ("--num_experts 8 --seq_len 128 --gradient_accumulation_steps 8 --max_grad_norm 0 --learning_rate 1e-9 "
        "--balance_bias 0.01").split()
RUNS = {"one process": (1, "--micro_batch_size 4"), "dp 2": (2, "--micro_batch_size 2 --dp_size 2"),
        "ep 2": (2, "--micro_batch_size 2 --dp_size 2 --ep_size 2")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    from make_tiny_llama import make  # imports transformers: seconds, too many for --help

    with tempfile.TemporaryDirectory() as folder:
        make(f"{folder}/model", vocab_size=512, hidden_size=256, intermediate_size=688)
        flags = [*BOTH, "--model_name", f"{folder}/model", "--log_dir", folder,
                 "--max_tokens", (args.rounds + 1) * 32 * 128]
        programs = [Program(name, ranks, STEPS["16"] / "train.py", *flags, *own.split(), "--run_name", name)
                    for name, (ranks, own) in RUNS.items()]
        try:
            for each in programs:
                each.turn()
            rounds = [[each.turn() for each in programs] for _ in range(args.rounds)]
            for each in programs:
                each.end()
        finally:
            for each in programs:
                each.kill()
        loads = {name: [row["expert_load"] for row in metrics(folder, name)] for name in RUNS}
    for i, name in enumerate(RUNS):
        ratios = statistics.quantiles([seconds[0] / seconds[i] for seconds in rounds], n=4)
        middle = statistics.median(seconds[i] for seconds in rounds)
        print(f"{name}: {middle:.2f} s a step, {ratios[1]:.2f} times as fast as one process ({ratios[0]:.2f} to "
              f"{ratios[2]:.2f}), largest load {statistics.mean(loads[name]):.2f}")


if __name__ == "__main__":
    main()
