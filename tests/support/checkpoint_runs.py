"""Runs of train_distributed.py that save and resume, of a model so small that a run takes seconds.

As a script, `checkpoint_runs.py OUT SCRIPT FLAGS...`, it runs SCRIPT with norms, softmax and routers in float64, too,
and each rank writes its parameters into OUT/rank<r>.pt in the end, and the gradients of the last step into
OUT/grads<r>.pt. With STOP=1:5:15 in the environment rank 1 (with STOP=-1:5:15 each rank) gets signal 15 in the middle
of its fifth step. With POISON=1:5 nothing is different, but that rank 1's weights are NaN after its fifth step; with
PLAIN=1 nothing is different. With HOSTS=FOLDER each rank is a host of its own, whose disk is
FOLDER/host<rank>, and the last one has started the run. With DISKS=a,b rank 0 runs in OUT/a and rank 1 in OUT/b:
relative paths are then on disks of their own.
"""

import functools
import itertools
import json
import os
import pathlib
import runpy
import shutil
import socket
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCRIPT, EXACT = ROOT / "cluster" / "train_distributed.py", pathlib.Path(__file__)
STEPS, SAVED = 12, 6
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
             head_dim=8)
TEXT = "It was the best of times, it was the worst of times; it was the age of wisdom. " * 6
PROMPT = "It was"  # of the recorded runs' samples of text
TOPOLOGIES = {  # name -> ranks, flags: 8 micro-batches a step in each
    "one": (1, ["--num_microbatches", "8"]),
    "tp2": (2, ["--num_microbatches", "8", "--tp_size", "2"]),
    "2;1": (3, ["--num_microbatches", "5,3", "--pipelines", "3,1;4"]),
}


def write_model(folder: pathlib.Path, kind: str | None = None, dtype: str | None = None, **changes) -> pathlib.Path:
    """A directory with a configuration and the tokenizer of the tiny Llama, as on the Hub.

    The configuration is that of a Llama of SIZES or, with a `kind` of transformers, as in "gpt2", of what `changes`
    says. With a `dtype` there are random weights as well.
    """
    folder.mkdir(parents=True)
    for path in (ROOT / "assets" / "tiny_llama").glob("*token*"):
        shutil.copy(path, folder)
    if kind is None:
        config = json.loads((ROOT / "assets" / "tiny_llama" / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **SIZES, **changes}))
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **changes)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)) if dtype else config
    model.save_pretrained(folder)
    return folder


def write_corpus(folder: pathlib.Path) -> pathlib.Path:
    """Text of five steps, so that a run of 12 reads it more than twice."""
    (folder / "corpus").mkdir(parents=True)
    for i in range(4):
        (folder / "corpus" / f"{i}.txt").write_text(f"{i}. {TEXT[i:]}")
    return folder / "corpus"


def write_answers(folder: pathlib.Path, count: int) -> None:
    """answers.jsonl: answers of 1 to 16 words after questions of 1 to 3."""
    rows = [{"prompt": "So? " * (1 + i % 3), "completion": "word " * (1 + i * i % 16) + "."} for i in range(count)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def flags_of(folder: pathlib.Path, name: str, model: pathlib.Path, **changes) -> list[str]:
    """Those of a run in `folder`/runs and `folder`/checkpoints, without its topology."""
    flags = {"model_name": model, "dataset_name": folder / "corpus", "seq_len": 16, "dtype": "float64", "device": "cpu",
             "batch_size": 1, "max_steps": STEPS, "save_every": SAVED, "keep": 5, "warmup_steps": 3,
             "lr_decay": "cosine", "log_dir": folder / "runs", "checkpoint_dir": folder / "checkpoints",
             "run_name": name, **changes}
    return ["--equal_shares", *(str(word) for name, value in flags.items() for word in (f"--{name}", value)
                                if value is not None)]


def checkpoint(folder: pathlib.Path, name: str, step: int) -> pathlib.Path:
    return folder / "checkpoints" / name / f"step_{step:08d}"


def newest(folder: pathlib.Path, name: str) -> pathlib.Path:
    """What `latest` of a run points to."""
    run = folder / "checkpoints" / name
    return run / (run / "latest").read_text().strip()


def tensors_of(path: pathlib.Path, kind: str = "model") -> dict:
    """The weights of a checkpoint; with the kind "optimizer" AdamW's averages, with "" all. Each is in one file."""
    from safetensors.torch import load_file

    parts = [load_file(file) for file in path.glob(f"{kind}*.safetensors")]
    found = {name: tensor for part in parts for name, tensor in part.items()}
    assert len(found) == sum(map(len, parts)), "a tensor is in two files"
    return found


def record(folder: pathlib.Path) -> None:
    """Runs of the same STEPS, one process's "one" and "2;1", as TOPOLOGIES has them, with checkpoints of every second
    step; NAME.txt is what each prints. `model`: a tiny Llama without weights."""
    from lab.launch import start_fork
    from support.recordings import LLAMA3

    write_model(folder / "model", rope_parameters=LLAMA3)
    write_corpus(folder)
    jobs = {}
    for name in "one", "2;1":
        ranks, flags = TOPOLOGIES[name]
        words = flags_of(folder, name, folder / "model", save_every=2, keep=STEPS, sample_every=STEPS, prompt=PROMPT)
        jobs[name] = start_fork(9, ranks, *words, *flags, script=SCRIPT)
    for name, job in jobs.items():
        (folder / f"{name}.txt").write_text(job.result().stdout)


def put_nan(numbers, rank: int, step: int, optimizer, _args, _kwargs) -> None:
    """After the optimizer's step `step` on `rank`."""
    if next(numbers) == step and int(os.environ["RANK"]) == rank:
        for param in optimizer.param_groups[0]["params"]:
            param.data.fill_(float("nan"))


def stop(numbers, rank: int, step: int, number: int, _optimizer, _args, _kwargs) -> None:
    """The signal `number` to `rank`, or with -1 to each rank, before the optimizer's step `step`."""
    if next(numbers) == step and rank in (-1, int(os.environ["RANK"])):
        os.kill(os.getpid(), number)
        time.sleep(0.2)  # until it is noted


def be_a_host(folder: str) -> None:
    rank = os.environ["GROUP_RANK"] = os.environ["RANK"]
    socket.gethostname = lambda: f"host{rank}"
    if int(rank) == int(os.environ["WORLD_SIZE"]) - 1:
        os.environ["LAUNCH_CLUSTER_HOME"] = "1"
    os.makedirs(os.path.join(folder, f"host{rank}"), exist_ok=True)
    os.chdir(os.path.join(folder, f"host{rank}"))


def main() -> None:
    import torch
    from lab.huggingface import float64_throughout
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    out, script = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    sys.path[0] = str(pathlib.Path(script).parent)
    if disks := os.environ.get("DISKS"):
        os.chdir(os.path.join(out, disks.split(",")[int(os.environ["RANK"])]))
    if "HOSTS" in os.environ:
        be_a_host(os.environ["HOSTS"])
    faults = {"POISON": (register_optimizer_step_post_hook, put_nan), "STOP": (register_optimizer_step_pre_hook, stop)}
    if fault := next((name for name in faults if name in os.environ), None):
        register, act = faults[fault]
        register(functools.partial(act, itertools.count(1), *map(int, os.environ[fault].split(":"))))
    if disks or "PLAIN" in os.environ or fault == "POISON":
        runpy.run_path(script, run_name="__main__")
        return
    imported = runpy.run_path(script, run_name="imported")  # its modules see both dtypes, for the files
    held = {}
    register_optimizer_step_post_hook(lambda optimizer, *_: held.update(optimizer.param_groups[0]))
    with float64_throughout():
        imported["main"]()
    os.makedirs(out, exist_ok=True)
    trained = [*zip(held.get("param_names", ()), held.get("params", ()))]  # none where there was nothing to do
    final = {name: param.detach().clone() for name, param in trained}
    grads = {name: param.grad.clone() for name, param in trained if param.grad is not None}
    for name, tensors in ("rank", final), ("grads", grads):
        torch.save(tensors, os.path.join(out, f"{name}{os.environ['RANK']}.pt"))


if __name__ == "__main__":
    sys.path.append(str(ROOT))
    main()
