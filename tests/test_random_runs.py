"""Runs that chance has drawn compute, in float64, what one process computes that was never stopped.

    pytest tests/test_random_runs.py                                     a few of each
    FUZZ=200 pytest tests/test_random_runs.py -m "" -s                   200 of each, and how they ended
    FUZZ=200 pytest tests/test_random_runs.py -m "" -k "chain-17-"       one of them again

A topology: a step's train.py with drawn sizes, model and flags. A chain: up to three runs of train_distributed.py, each
under another topology. Each goes on where the one before it has ended, by Ctrl-C or by its own --max_steps. What is not
possible has to be refused in one clear error. What fails prints its command lines; its folder stays there.
"""

import json
import os
import shlex
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import random_runs
import torch
from checkpoint_runs import ROOT, SCRIPT, TEXT, checkpoint, flags_of, write_model
from launch import STEPS, fork, fork_server, metrics, start_fork
from processes import eventually, left_behind
from tokenizers import Tokenizer

TOLERANCE = {"topology": 1e-10, "chain": 1e-9}  # of losses, norms and evaluations
QUICK = {"topology": 5, "chain": 3}  # kind -> how many every run has
COUNT = max(20, int(os.environ.get("FUZZ", 0)))  # the other ones of 20 are for `slow`
CASES = [pytest.param((kind, seed), marks=pytest.mark.slow if seed >= quick else (), id=f"{kind}-{seed}-")
         for kind, quick in QUICK.items() for seed in range(COUNT)]
EXACT = ROOT / "tests" / "support" / "checkpoint_runs.py"
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


@pytest.fixture(scope="module")
def ended():
    """Counts how cases ended, and prints it."""
    counts = {kind: Counter() for kind in QUICK}
    yield counts
    print("".join(f"\n{kind}: {sum(each.values())} cases, {dict(each)}" for kind, each in counts.items() if each))


@pytest.fixture(scope="module")
def jobs(selected, tmp_path_factory):
    """case -> (its folder, the future of how it ended). Models are written first, which draws from torch's generator."""
    root, jobs = tmp_path_factory.mktemp("random"), {}
    write_data(root)
    with ThreadPoolExecutor(4) as pool:
        for kind, seed in selected("case"):
            folder = root / f"{kind}{seed}"
            drawn = getattr(random_runs, kind)(seed)
            torch.manual_seed(seed)
            write = {"topology": write_llama, "chain": write_family}[kind]
            write(folder / "model", drawn)
            run = {"topology": run_topology, "chain": run_chain}[kind]
            jobs[kind, seed] = folder, pool.submit(run, folder, drawn)
        yield jobs


def write_data(root) -> None:
    """A text whose ids are all small, text of some steps, and conversations of unlike lengths."""
    ids = Tokenizer.from_file(str(ROOT / "assets" / "tiny_llama" / "tokenizer.json")).encode
    words = [word for word in (ROOT / "README.md").read_text().split() if max(ids(f" {word}").ids) < random_runs.WORDS]
    (root / "small.txt").write_text("".join(f" {word}" for word in words))
    (root / "text.jsonl").write_text("".join(json.dumps({"text": f"{i}. {TEXT[i:]}"}) + "\n" for i in range(30)))
    talks = [[("user", "So? " * (1 + i % 3)), ("assistant", "word " * (1 + i * i % 7) + ".")] * (1 + i % 2)
             for i in range(30)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    (root / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_llama(folder, drawn) -> None:
    write_model(folder, **drawn.model)


def write_family(folder, drawn) -> None:
    kind = drawn.family and drawn.family.replace("-", "_")
    write_model(folder, kind, "float64" if drawn.flags["lora_rank"] else None, **drawn.model)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def show(folder, step, ranks: int, flags: list) -> None:
    """Writes the command line down, to run it again by hand."""
    with open(folder / "commands.txt", "a") as file:
        file.write(f"torchrun --nproc_per_node {ranks} {step} {shlex.join(map(str, flags))}\n")


def check_quiet(done, code: int = 0) -> None:
    assert done.returncode == code and "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr


def compare(kind: str, what: str, expected: list[dict], found: list[dict], names: tuple) -> None:
    """Both are rows of steps."""
    assert [row["step"] for row in found] == [row["step"] for row in expected], what
    for name in names:
        off = [abs(a[name] - b[name]) for a, b in zip(expected, found)]
        assert max(off, default=0) <= TOLERANCE[kind], f"{name} of the steps: {off} apart"


def run_topology(folder, drawn) -> str:
    common = ["--model_name", folder / "model", "--dataset_name", folder.parent / "small.txt", "--log_dir", folder]
    flags = [*drawn.flags, *common, "--run_name", "many"]
    one = start_fork(3, 1, *drawn.one, *common, "--run_name", "one", check=False)
    show(folder, STEPS[str(drawn.step)] / "train.py", drawn.ranks, flags)
    many = fork(drawn.step, drawn.ranks, *flags, check=False)
    if drawn.error:
        check_quiet(many, 2)
        assert many.stderr.count("error: ") == 1 and drawn.error in many.stderr, many.stderr
        return "refused"
    check_quiet(many)
    check_quiet(one.result())
    expected, found = metrics(folder, "one"), metrics(folder, "many")
    assert expected
    compare("topology", "steps", expected, found, ("loss", "grad_norm", "learning_rate", "trained_tokens"))
    return f"step {drawn.step} equal"


def run_chain(folder, drawn) -> str:
    data = folder.parent / ("chats.jsonl" if drawn.is_chat else "text.jsonl")
    modules = [f"transformers.models.{kind}.modeling_{kind}" for kind in [(drawn.family or "").replace("-", "_")] if kind]

    def run(name: str, ranks: int, *more, env=None, **changes):
        flags = [*flags_of(folder, name, folder / "model", **{**drawn.flags, "dataset_name": data, **changes}), *more]
        show(folder, f"{' '.join(f'{k}={v}' for k, v in (env or {}).items())} {EXACT} {folder / 'out'} {SCRIPT}", ranks, flags)
        return start_fork(9, ranks, folder / "out", SCRIPT, *flags, script=EXACT, check=False, env=env,
                          modules=modules + ["peft"] * bool(drawn.flags["lora_rank"]))

    one = run("one", 1, *drawn.one, eval_every=1)
    start, name, resume = 0, "link0", []
    for i, link in enumerate(drawn.links):
        if i:
            resume = ["--resume", "auto" if link.resume_auto else checkpoint(folder, name, start)]
            name = name if link.resume_auto else f"link{i}"
        env = {"STOP": f"{link.stopped}:{link.end - start}:2"} if link.stopped is not None else {}
        steps = drawn.flags["max_steps"] if env else link.end
        done = run(name, link.ranks, *link.flags, *resume, env=env, max_steps=steps).result()
        check_quiet(done)
        assert (f"stopped after step {link.end}, as it was told" in done.stdout) == bool(env), done.stdout
        start = link.end
    check_quiet(one.result())
    compare("chain", "steps", *(metrics(folder / "runs", each) for each in ("one", name)),
            ("loss", "grad_norm", "learning_rate", "trained_tokens"))
    one, many = ([json.loads(row) for row in open(folder / "runs" / each / "evaluation.jsonl")] for each in ("one", name))
    every, ends = drawn.flags["eval_every"], {link.end for link in drawn.links if link.stopped is None}
    wanted = [row for row in one if row["step"] in {0, *ends} or every and row["step"] % every == 0]
    compare("chain", "evaluations", wanted, many, ("evaluation_loss",))
    return "equal"


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_chance_has_drawn(jobs, ended, case):
    folder, job = jobs[case]
    ended[case[0]]["fault"] += 1
    try:
        outcome = job.result()
    except AssertionError as error:
        pytest.fail(f"{case}: {folder}\n{(folder / 'commands.txt').read_text()}{error}", pytrace=False)
    group = fork_server().process.pid
    assert eventually(lambda: not left_behind(group), 20), f"{case}: left running: {left_behind(group)}"
    ended[case[0]].update([outcome])
    ended[case[0]]["fault"] -= 1
    shutil.rmtree(folder)
