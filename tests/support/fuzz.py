"""Command lines and files that chance has damaged: the same seed makes the same ones.

    script, words, ranks, damaged = command_line(seed, actions)     `damaged`: a file that has to be damaged first
    content = damage(random, name, content)                         of a file, by what kind of file it is

A command line is the one of a run that works, with one or two bad values; or a file that it reads is damaged. As a
script, `fuzz.py FOLDER SCRIPT FLAGS...`, it runs SCRIPT in FOLDER with a limit on memory.
"""

import json
import os
import pathlib
import random
import resource
import runpy
import socket
import sys

from checkpoint_runs import write_corpus, write_model
from clusters import made_up_cluster

MEMORY = 6 << 30  # bytes that a case may ask for besides what is there
HUGE, LONG = "9" * 25, "9" * 5000
BRIEF = ["0", "-1", "nan", "1e999", "", "abc", "1_0", "٣", LONG, "--"]  # where more of it takes long, rightly
NUMBERS = [*BRIEF, "7", "64", "2147483647", "2147483648", str(1 << 63), HUGE, HUGE]
FRACTIONS = ["0", "-1", "nan", "1e999", "1e308", "1e-320", "1e-30", "1e30", "-0.0", "", "abc", LONG]
TEXTS = ["", " ", "é", "日本語", "\udcff", "a/b", ".", "..", "x" * 300, "a\nb", "%s", "{}", "\x1b[2J", "-1", "auto"]
PATHS = ["", " ", "nowhere", "nowhere/deep", "file", "file/below", "binary.txt", "empty.txt", "loop", "folder", ".",
         "/dev/null", "/proc/self/nothing", "ünï", "\udcff", "x" * 300, "a\nb", "-x", "someone/something", "a/b/c",
         "https://example.invalid/x", "model/config.json", "{}", "*", "[", "corpus", "model"]
COUNTS = ["0", "", ",", "|", ";", "1,", "-1", "2,2", "4;4", "3,1;4", "1,1,1,1", "5", "8;5,3", "4|2,2", "4;|", "a", HUGE,
          "2, 2", "٤", "4;4;4", "1.5", "4|", "1," * 300 + "1"]
RUN = "checkpoints/run/step_00000004"
RESUMED = ["auto", "checkpoints/run", RUN]
TINY = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
            head_dim=4)
MODEL_TYPES = {"model": {}, "qwen": dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"])}
SSH = "#!/bin/sh\nfor word; do last=$word; done\ncase \" $* \" in *\" -G \"*) echo \"hostname $last\"; exit;; esac\n" \
      "echo 'Could not resolve hostname' >&2; exit 255\n"
HOSTS = "# three machines\npi@pi0 iface=eth0\npi@pi1 port=2222 nproc=1 python=~/venv/bin/python dir='~/my tutorial'\n" \
        "\ndesk nproc=2 address=192.168.1.7\n"

LASTING = ("epochs", "max_steps", "max_steps_per_epoch", "train_steps", "local_steps", "measure_seconds",
           "max_new_tokens", "num_hidden_layers")  # flags that make a run long, rightly
DIRECTORIES = {"checkpoint_dir": "checkpoints", "log_dir": "runs"}
TRAINING = {"model_name": "model", "dataset_name": "corpus", "seq_len": "16", "dtype": "float64", "batch_size": "1",
            "num_microbatches": "2", "max_steps": "6", "run_name": "run", **DIRECTORIES}
SCRIPTS = {  # name -> share of the cases, path, flags of a run that works
    "train_distributed": (68, "cluster/train_distributed.py", TRAINING),
    "generate": (9, "cluster/generate.py", {"checkpoint": "checkpoints/run", "prompt": "The", "max_new_tokens": "4"}),
    "plan": (9, "cluster/plan.py", {"cluster_json": "cluster.json", "global_batch": "8", "measure_seconds": "1"}),
    "three_stages_simple_pp": (9, "cluster/three_stages_simple_pp.py", {
        "dataset_name": "corpus", "seq_len": "16", "batch_size": "2", "microbatch_num": "2", "train_steps": "2",
        "profile_batch": "0", **DIRECTORIES}),
    "launch_cluster": (5, "cluster/hosts/launch_cluster.py", {"hosts": "hosts.txt", "check": None}),
}
BESIDE_PLAN = ("num_microbatches", "batch_size")  # flags of a run that works which can't stand beside --plan
READ = {  # a script -> the files of which one may be damaged
    "train_distributed": ["model/config.json", "model/tokenizer.json", "model/tokenizer_config.json",
                          f"{RUN}/state.json", f"{RUN}/model-00001-of-00001.safetensors", f"{RUN}/config.json",
                          f"{RUN}/optimizer-00001-of-00001.safetensors", f"{RUN}/model.safetensors.index.json",
                          "checkpoints/run/latest", "plan.json", "rows.jsonl"],
    "generate": [f"{RUN}/config.json", f"{RUN}/tokenizer.json", f"{RUN}/model-00001-of-00001.safetensors",
                 f"{RUN}/model.safetensors.index.json", "checkpoints/run/latest", f"{RUN}/tokenizer_config.json"],
    "plan": ["cluster.json"], "three_stages_simple_pp": ["qwen/config.json"], "launch_cluster": ["hosts.txt"],
}
NEEDED = {"plan.json": "plan", "rows.jsonl": "dataset_name", "qwen/config.json": "model_name"}  # file -> a flag for it


def write_good_files(folder: pathlib.Path, make_plan) -> None:
    """One of each file that a script reads, but for checkpoints. `make_plan`: makes a plan out of a cluster."""
    for name, changes in MODEL_TYPES.items():
        config = json.loads((write_model(folder / name, **TINY, **changes) / "config.json").read_text())
    write_corpus(folder)
    rows = [json.dumps({"text": "It was the best of times. " * 30}) + "\n"] * 4
    files = {"hosts.txt": HOSTS, "file": "a file\n", "empty.txt": "", "rows.jsonl": "".join(rows),
             "bad.jsonl": '{"words": 1}\n', "bin/ssh": SSH}
    cluster = made_up_cluster([1], layers=4, sizes=(1, 2), bandwidth=1e6)
    cluster.update(dtype="float64", hosts=[socket.gethostname()],
                   model={field: config[field] for field in cluster["model"]})
    files.update({"plan.json": json.dumps(make_plan(cluster), indent=1), "cluster.json": json.dumps(cluster, indent=1)})
    (folder / "folder").mkdir()
    (folder / "bin").mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "bin" / "ssh").chmod(0o755)
    (folder / "binary.txt").write_bytes(random.Random(0).randbytes(999))
    (folder / "loop").symlink_to("loop")


def bad_values(action) -> list[str]:
    """Of a flag of argparse."""
    kind = getattr(action.type, "__name__", None)
    if kind == "int":
        return BRIEF if action.dest in LASTING else NUMBERS
    return FRACTIONS if kind == "float" else TEXTS if action.choices else [*TEXTS, *PATHS, *COUNTS]


def command_line(seed: int, actions: dict, only_a_file: bool = False) -> tuple[str, list[str], int, str | None]:
    """The script, the words behind it, the number of ranks, and the file of its folder that has to be damaged first.

    `actions`: of each script's parser. `only_a_file`: nothing but a file is bad.
    """
    rng, damaged = random.Random(seed), None
    shares = [len(READ[name]) if only_a_file else SCRIPTS[name][0] for name in SCRIPTS]
    script = rng.choices(list(SCRIPTS), shares)[0]
    known = {action.dest: action for action in actions[script] if action.dest not in ("help", "sudo_pass", "install")}
    flags = dict(SCRIPTS[script][2])
    share_of_two = {"train_distributed": 0.08, "three_stages_simple_pp": 0.08, "generate": 0.5}.get(script)
    ranks = 2 if share_of_two and rng.random() < share_of_two else 1
    if only_a_file:
        damaged = rng.choice(READ[script])
        flags.update({NEEDED[damaged]: damaged.split("/")[0]} if damaged in NEEDED else {})
        if RUN in damaged and script == "train_distributed":
            flags.update([("resume", rng.choice(RESUMED)) if rng.random() < 0.7 else ("init_from", RUN)])
        for other in BESIDE_PLAN if "plan" in flags else ():
            flags.pop(other, None)
    else:
        for name in rng.sample(sorted(known), rng.choice([1, 1, 2])):
            flags[name] = None if known[name].nargs == 0 else rng.choice(bad_values(known[name]))
    words = []
    for name, value in flags.items():
        words += known[name].option_strings[-1:] + [value] * (value is not None)
    if script == "launch_cluster" and not only_a_file and rng.random() < 0.5:
        words += ["--", *rng.choice([[], ["train.py"], ["", "é"], ["\udcff"], ["nowhere.py", "--x"]])]
    return script, words, ranks, damaged


NESTED = json.loads("[" * 60 + "]" * 60)
ODD = [None, True, False, -1, 0, 1, 2, 3, 7, 0.5, -0.5, 1e308, float("nan"), float("inf"), 10**30, 1 << 63, -(1 << 63),
       "", "x", "é", "\ud800", "../x", "/etc/passwd", "1", "NaN", [], {}, [[]], [1], [None], ["x"], {"a": None}, [{}]]


def change_tree(rng: random.Random, tree):
    """The JSON value with one change somewhere; at a shallow place as likely as at a deep one."""
    holder, key = [tree], 0
    root = holder
    while isinstance(holder[key], (dict, list)) and holder[key] and (holder is root or rng.random() < 0.75):
        holder = holder[key]
        key = rng.choice(sorted(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    value = holder[key]
    change = rng.choice(["odd"] * 4 + ["delete", "wrap", "text", "number", "rename", "repeat", "swap", "nested"])
    if change == "delete" and holder is not root:
        del holder[key]
    elif change == "wrap":
        holder[key] = rng.choice([[value], {"a": value}])
    elif change == "text":
        holder[key] = str(value)
    elif change == "number" and type(value) in (int, float):
        holder[key] = rng.choice([-value, value + 1, value - 1, value * 2, float(value), value / 3, value * 1000])
    elif change == "rename" and isinstance(holder, dict):
        holder[f"{key}x"] = holder.pop(key)
    elif change == "repeat" and isinstance(holder, list) and holder is not root:
        holder.insert(key, value)
    elif change == "swap" and holder is not root:
        other = rng.choice(sorted(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        holder[key], holder[other] = holder[other], value
    else:
        holder[key] = NESTED if change == "nested" else rng.choice(ODD)
    return root[0]


def change_bytes(rng: random.Random, content: bytes) -> bytes:
    """A file that a disk, an editor or a copy has damaged."""
    place, other = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    flipped = bytearray(content or b" ")
    flipped[min(place, len(flipped) - 1)] ^= 1 << rng.randrange(8)
    text = content.decode("utf-8", "replace")
    return rng.choice([
        lambda: bytes(flipped), lambda: content[:place], lambda: content[:place] + content[other:],
        lambda: content[:other] + content[place:], lambda: content[:place] + rng.randbytes(8) + content[place:],
        lambda: text.encode("utf-16"), lambda: b"\xef\xbb\xbf" + content, lambda: content.replace(b"\n", b"\r\n"),
        lambda: content[:place] + "é".encode("latin-1") + content[place:], lambda: b"", lambda: bytes(len(content)),
        lambda: b"[" * 100_000, lambda: b'{"a":' * 100_000, lambda: content * 2, lambda: b"null", lambda: b"\n"])()


def damage(rng: random.Random, name: str, content: bytes) -> bytes:
    """Another content of the file, by what kind of file it is."""
    if name.endswith(".json") and rng.random() < 0.75:
        tree = json.loads(content)
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            tree = change_tree(rng, tree)
        return json.dumps(tree, indent=1).encode()
    return change_bytes(rng, content)


def main() -> None:
    os.chdir(sys.argv[1])
    sys.argv = sys.argv[2:]
    sys.path[0] = str(pathlib.Path(sys.argv[0]).parent)
    sys.stdout.reconfigure(errors="strict")  # as where the locale is a UTF-8 one
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
