"""What launch_cluster.sh starts on the hosts of the test bed: a run that loses hosts, and a model that writes.

recovery   A round takes a host away, waits until the others have made some steps, gives it back, and waits until it
           takes part again. The figure is the time from the loss to the next finished step, less the median step after
           it, by this machine's clock. Which host it is changes from round to round, so the first is among them.
talk       Three stages of SmolLM2 in float32, of 12, 12 and 6 layers (the head counts as eight), on half a core each.
           With one prompt one stage works at a time. With several, all three do: at most three times the tokens.
"""

import tools_path  # noqa: F401  before launch

import pathlib
import re
import statistics
import sys
import tempfile
import time

from launch import ROOT, metrics
from bed import NODES, SSH_CONFIG, testbed
from elastic_bed import Training, kill_all, switch_on
from launcher import Launch, write_hosts
from turns import table

FLAGS = ["--seq_len", "16", "--dtype", "float64", "--batch_size", "1", "--num_hidden_layers", "4", "--device", "cpu",
         "--equal_shares", "--save_every", "10", "--max_steps", "4000", "--log_dir", "runs", "--num_microbatches", "6"]
LOSSES = {  # name -> (how a host is lost, flags)
    "killed, copies live": (kill_all, []),
    "killed, a checkpoint is read": (kill_all, ["--pipelines", "2,1,1|2,2"]),
    "cable cut, copies live": (lambda node: testbed("cut", node), []),
}
PROMPTS = {"1 prompt": 1, "8 prompts at once": 8}
TALK = ["cluster/generate.py", "--checkpoint", "models/smollm2-135m-instruct", "--dtype", "float32", "--pipelines",
        "12,12,6", "--max_new_tokens", "40"]


def recover(case: tuple, rounds: int) -> dict:
    lose, words = case
    with tempfile.TemporaryDirectory() as folder:
        name = pathlib.Path(folder).name
        run, since, seconds = Training(pathlib.Path(folder), "cluster/train_distributed.py", *FLAGS, *words,
                                       "--run_name", name), 0, []
        for number in range(rounds):
            run.went_on(3, since)
            run.reaches(run.steps()[-1] + 12)
            node, since, lost_at = NODES[number % 3], run.mark(), time.perf_counter()
            lose(node)
            run.went_on(2, since)
            stood_still = time.perf_counter() - lost_at
            run.reaches(run.steps()[-1] + 6)
            seconds.append(stood_still - statistics.median(
                row["step_seconds"] for row in metrics(ROOT / "runs", name)[-5:]))
            since = run.mark()
            switch_on(node)
        run.went_on(3, since)
        run.stop()
    return {"seconds": {"standing still": seconds}}


def table_of_recovery(results: dict) -> str:
    return table(["a host is lost", "median s", "smallest - largest", "rounds"], [
        [name, f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f} - {max(seconds):.2f}", len(seconds)]
        for name, seconds in ((name, found["seconds"]["standing still"]) for name, found in results.items())])


def talk(num_prompts: int, rounds: int) -> dict:
    """Seconds of a token, of all prompts together."""
    words = [*TALK, *(word for k in range(num_prompts) for word in ("--prompt", f"A list of {k + 2} rivers:"))]
    testbed("slow", "all", 50)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        hosts = write_hosts(pathlib.Path(folder), *(f"{node} python={sys.executable}" for node in NODES))
        for _ in range(rounds):
            text = Launch(hosts, "--", *words, options=f"-F {SSH_CONFIG}").end(600)[1]
            if not (found := re.search(r"in [\d.]+ s, ([\d.]+) tokens/s", text)):
                sys.exit(text)
            seconds.append(1 / float(found[1]))
    return {"seconds": {"a token": seconds}}


def table_of_talk(results: dict) -> str:
    medians = {name: statistics.median(found["seconds"]["a token"]) for name, found in results.items()}
    first = next(iter(medians.values()))
    return table(["prompts", "tokens/s", "times the first"],
                 [[name, f"{1 / each:.1f}", f"{first / each:.2f}"] for name, each in medians.items()])
