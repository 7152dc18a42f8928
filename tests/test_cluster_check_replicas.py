"""--check_replicas: a bit that flips in one replica ends the run, with the tensor and the rank; a healthy run goes on.

Each run draws its layout, its flip and its numbers of steps from its seed. FLIP_SEED=17 makes one of them again.
"""

import json
import os
import pathlib
import random
import re
import shlex
import signal
import socket
import sys

import pytest
import torch
from lab.launch import ROOT, losses, modules_of
from maintain.launcher import STAND_IN_SSH, Launch, eventually, write_hosts
from support.checkpoint_runs import flags_of, write_corpus, write_model

with modules_of(9):
    from run import check_replicas

SEEDS = [int(os.environ["FLIP_SEED"])] if "FLIP_SEED" in os.environ else range(20)
STARTED = r"\| process (\d) (\d+)\n"
LAYOUTS = {  # name -> ranks, whether more than two hold each tensor, flags
    "three": (3, True, ["--num_microbatches", "1,2,1"]),
    "unlike": (4, True, ["--num_microbatches", "2,1,1", "--pipelines", "3,1;4;4"]),
    "two": (2, False, ["--num_microbatches", "2,2"]),
    "two unlike": (3, False, ["--num_microbatches", "3,1", "--pipelines", "1,3;4"]),
    "tensor parallel": (4, False, ["--num_microbatches", "2,2", "--tp_size", "2"]),
}
FLIP = """
import os, torch
from run.session import Session
rank, at, entry, bit, place = {flip}
after_step = Session.after_step

def flip(session, step, *others):
    if torch.distributed.get_rank() == rank and (step == at if type(at) is int else os.path.exists(at)):
        type(at) is int or os.remove(at)
        params = [each for each in session.trained.model.module.model.named_parameters() if each[1].requires_grad]
        name, param = params[int(place * len(params))]
        words = (session.trained.optimizer.state[param][entry] if entry else param.data).view(-1).view(torch.int32)
        words[int(place * 1e6) % len(words)] ^= bit
        os.write(1, f"flipped {{name}} {{entry and f'({{entry}})'}}\\n".encode())
    return after_step(session, step, *others)

Session.after_step = flip
"""
ROUNDS_OTHERWISE = """
import os, torch
from torch.optim.optimizer import register_optimizer_step_post_hook

def nudge(optimizer, *_):
    with torch.no_grad():
        for param in (each for group in optimizer.param_groups for each in group["params"]):
            param.view(-1)[::7] = torch.nextafter(param.view(-1)[::7], torch.tensor(9.0))

if os.environ["RANK"] == "1":
    register_optimizer_step_post_hook(nudge)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    write_model(folder / "model")
    write_corpus(folder)
    return folder


def flags(folder, name, every, steps, **more) -> list:
    return [*flags_of(folder, name, folder / "model", **{
        "dtype": "float32", "max_steps": steps, "lr_decay": "none", "save_every": None, **more}),
        "--check_replicas", every]


def draw(seed: int):
    """Layout, N, rank, step, entry, bit, place, step of the checkpoint before. The last bits of an average are left
    alone: what they change may be rounded away before replicas compare, and is then gone."""
    chance = random.Random(f"flip {seed}")
    layout, every = [*LAYOUTS][seed % len(LAYOUTS)], chance.randint(2, 5)
    entry = chance.choice(["", "exp_avg", "exp_avg_sq"])
    number = chance.randrange(8 if entry else 0, 32)
    bit = 1 << number if number < 31 else -(1 << 31)
    return layout, every, chance.randrange(LAYOUTS[layout][0]), chance.randint(3, 7), entry, bit, chance.random(), 2


@pytest.mark.drawn(1)
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_a_flipped_bit_is_named(folder, run_code, seed):
    """Within N steps, and before anything is saved. From the last good checkpoint the run goes on as if undisturbed."""
    layout, every, rank, at, entry, bit, place, saved = draw(seed)
    ranks, is_majority, more = LAYOUTS[layout]
    words = flags(folder, f"flip{seed}", every, 14, save_every=2)
    done = run_code("cluster", ranks, FLIP.format(flip=(rank, at, entry, bit, place)), *words, *more,
                    then="train_distributed.py", check=False)
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    flipped = re.search("^flipped (.*)$", done.stdout, re.MULTILINE)[1]
    step, said = re.match(r"error: after step (\d+) (.*)\. The training stops, and saves nothing\. ", error).groups()
    assert at <= int(step) < at + every and flipped.split()[0] in said, f"{flipped}, step {at}: {error}"
    named = set(map(int, re.findall(r"rank (\d) on ", said)))
    assert named == {rank} if is_majority else rank in named and len(named) == 2, error
    assert ("two replicas cannot tell which of them is wrong" in error) is not is_majority
    kept = sorted(path.name for path in (folder / "checkpoints" / f"flip{seed}").glob("step_*"))
    assert kept[-1] == f"step_{(at - 1) // 2 * 2:08d}" and error.endswith(kept[-1]), error
    resume = shlex.split(error[error.index("--resume"):])
    again = run_code("cluster", ranks, "", *words, *more, *resume, then="train_distributed.py")
    assert f"going on after step {int(kept[-1][5:])}: {resume[1]}" in again.stdout
    if seed < 2:
        run_code("cluster", ranks, "", *flags(folder, f"plain{seed}", 3, 14), *more, then="train_distributed.py")
        assert losses(folder / "runs", f"flip{seed}") == losses(folder / "runs", f"plain{seed}")


@pytest.mark.slow(drawn=3)
@pytest.mark.parametrize("seed", SEEDS[3:])
def test_further_flipped_bits(folder, run_code, seed):
    test_a_flipped_bit_is_named(folder, run_code, seed)


@pytest.mark.parametrize("bits", [0, 6, 20])
def test_a_checksum_changes_with_each_bit(monkeypatch, bits):
    """Of any length and dtype, and however many words are multiplied at a time."""
    chance = random.Random(bits)
    if bits:
        monkeypatch.setattr(check_replicas, "WORDS", bits)
    for dtype in torch.float32, torch.bfloat16, torch.int8, torch.float64:
        values = (torch.rand(chance.randint(1, 200)) * 100).to(dtype)
        values = values[chance.randrange(len(values)):]  # which may begin in the middle of a word
        data, before = values.view(torch.uint8), check_replicas.checksum(values)
        if not bits:
            words = [*bytes(data.numpy()), *[0] * (-len(data) % 8)]
            words = [int.from_bytes(bytes(words[i : i + 8]), "little") for i in range(0, len(words), 8)]
            words = [word ^ word >> 32 for word in words]
            assert before.item() % 2**64 == sum((2 * i + 1) * word for i, word in enumerate(words)) % 2**64
        for _ in range(30):
            at, bit = chance.randrange(len(data)), 1 << chance.randrange(8)
            data[at] ^= bit
            assert check_replicas.checksum(values) != before
            data[at] ^= bit
        assert check_replicas.checksum(values) == before
    assert check_replicas.checksum(torch.tensor(3.0)) != check_replicas.checksum(torch.tensor(4.0))
    signs = torch.arange(1, 65.0)  # the highest bit of each word: a bit of memory that is stuck
    assert check_replicas.checksum(signs * torch.tensor([1.0, -1.0]).repeat(32)) != check_replicas.checksum(signs)


@pytest.mark.parametrize("sums, said", [
    ({0: 7, 1: 7, 2: 8}, "rank 2 on c differs from most replicas in w"),
    ({0: 7, 2: 8}, "rank 0 on a and rank 2 on c differ in w; two replicas cannot tell which of them is wrong"),
    ({0: 7, 1: 7, 2: 8, 3: 8}, "differ in w; no majority tells which of them are wrong"),
    ({0: 7, 1: 8, 2: 9}, "differ in w; no majority tells which of them are wrong"),
    ({0: 7, 1: 9, 2: 7, 3: 8, 4: 7}, "rank 1 on b and rank 3 on a differ from most replicas in w"),
])
def test_who_is_named(monkeypatch, sums, said):
    monkeypatch.setattr(check_replicas, "machines", lambda: [(name, name) for name in "abca" + "b"])
    monkeypatch.setattr(check_replicas, "host_names", lambda hosts: [name for name, _ in hosts])
    assert check_replicas.who_differs({("", "w", "", 0): sums}).endswith(said)
    many = {(entry, f"w{i}", "", 0): {0: 7, 1: 7, 2: 8} for i in range(3) for entry in ("", "exp_avg")}
    assert check_replicas.who_differs(many).endswith("in w0, w0 (exp_avg), w1, w1 (exp_avg) and 2 more")


def test_a_loss_that_is_not_finite(folder, run_code):
    """Its gradients would make all weights alike again: the rank is named before they do."""
    code = FLIP.format(flip=(2, 3, "", 0x7FC00000, 0.5)).replace("^= bit", "|= bit")
    done = run_code("cluster", 3, code, *flags(folder, "nan", 50, 9), *LAYOUTS["three"][2],
                    then="train_distributed.py", check=False)
    assert done.returncode == 2 and "error: after step 3 rank 2 on " in done.stderr, done.stderr
    assert done.stderr.rstrip().endswith("Test the memory of that machine. No checkpoint was saved yet"), done.stderr


def test_unlike_weights_at_the_start(folder, run_code):
    code = """
import os
from run.session import Session
init = Session.__init__
def nudge(session, args, start, made, trained, *others):
    if os.environ["RANK"] == "1":
        next(iter(trained.model.module.model.parameters())).data.view(-1)[0] += 1e-3
    init(session, args, start, made, trained, *others)
Session.__init__ = nudge
"""
    done = run_code("cluster", 3, code, *flags(folder, "unlike", 2, 4), *LAYOUTS["three"][2], then="train_distributed.py",
                    check=False)
    assert done.returncode == 2 and "error: before step 1, rank 1 on " in done.stderr, done.stderr
    assert "by --init_from" in done.stderr and "memory" not in done.stderr, done.stderr


def test_local_steps(folder, run_code):
    """Averages of the replicas differ, their weights do not where a round ends; there a flip is found."""
    words = flags(folder, "rounds", 4, 8, local_steps=2, gradient_accumulation=1, save_every=4)
    printed = run_code("cluster", 3, "", *words, "--outer_momentum", 0.5, then="train_distributed.py").stdout
    assert "weights, with their momentum_buffer, every 2 rounds and before anything is saved\n" in printed
    flip = FLIP.format(flip=(1, 2, "momentum_buffer", 1 << 20, 0.3))
    done = run_code("cluster", 3, flip, *words, "--run_name", "flip rounds", "--outer_momentum", 0.5,
                    then="train_distributed.py", check=False)
    assert done.returncode == 2 and "error: after step 2 rank 1 on " in done.stderr, done.stderr


@pytest.mark.parametrize("env, ranks, code, said", [
    ({}, 1, "", "error: --check_replicas 2 compares the bits of replicas, but no tensor is on two ranks, as with one "
                "pipeline: leave it out"),
    ({}, 3, ROUNDS_OTHERWISE, "error: --check_replicas 2 compares the bits of replicas, but the optimizer rounds "
                              "otherwise on rank 1 (a CPU with "),
    ({"TORCHELASTIC_MAX_RESTARTS": "1", "TORCHELASTIC_RUN_ID": "it"}, 3, ROUNDS_OTHERWISE,
     "replicas are not compared: the optimizer rounds otherwise on rank 1 (a CPU with "),
])
def test_nothing_to_compare(folder, run_code, env, ranks, code, said):
    """One line says why: an error or, in an elastic run, whose ranks change, no error. No replica that only rounds
    otherwise is taken for a faulty one."""
    words = flags(folder, f"none{ranks}{len(env)}", 2, 4)
    done = run_code("cluster", ranks, code, *words, "--num_microbatches", ",".join("1" * ranks),
                    then="train_distributed.py", check=False, env=env)
    assert done.returncode == (0 if env else 2), done.stderr
    assert (done.stdout + done.stderr).count(said) == 1 and "replicas compare" not in done.stdout, done.stderr


@pytest.mark.slow(drawn=2)
@pytest.mark.parametrize("seed", range(1, 17))
def test_further_healthy_runs(folder, run_code, seed):
    test_healthy_runs_go_on(folder, run_code, seed)


def test_healthy_runs_go_on(folder, run_code, seed=0):
    """In two parts, on unlike layouts, with the flag that the losses do not depend on."""
    chance = random.Random(f"healthy {seed}")
    for end in (chance.randint(2, 5), chance.randint(6, 9)):
        ranks, _, more = LAYOUTS[chance.choice([*LAYOUTS])]
        more = [*more, *chance.choice([[], [], ["--gradient_wire_dtype", "int8"], ["--recompute"]])]
        words = flags(folder, f"healthy{seed}", chance.randint(1, 3), end, save_every=chance.choice([None, 2]))
        done = run_code("cluster", ranks, "", *words, *more, "--resume", "auto", then="train_distributed.py")
        assert "replicas compare " in done.stdout and "error" not in done.stderr, done.stderr
    assert len(losses(folder / "runs", f"healthy{seed}")) == end


@pytest.fixture
def elastic(folder, tmp_path):
    """elastic(name, rank, every) -> a Launch of three processes on this host, and a file: when that is made, the run's
    rank `rank` flips a bit."""
    (tmp_path / "ssh").write_text(STAND_IN_SSH)
    (tmp_path / "ssh").chmod(0o755)
    launched = []

    def start(name: str, rank: int, every: int) -> tuple[Launch, pathlib.Path]:
        script, now = tmp_path / "flips.py", tmp_path / "now"
        script.write_text(f"""import sys
sys.path[0] = {str(ROOT / "cluster")!r}
from ranks import course
import os, runpy
os.write(1, f"process {{os.environ['LOCAL_RANK']}} {{os.getpid()}}\\n".encode())
{FLIP.format(flip=(rank, str(now), "exp_avg", 1 << 22, 0.4))}
sys.argv[0] = {str(ROOT / "cluster" / "train_distributed.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
""")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        hosts = write_hosts(tmp_path, f"a address=127.0.0.1 iface=lo nproc=3 python={sys.executable}")
        words = flags(folder, name, every, 10_000, save_every=None)
        launched.append(Launch(hosts, "--elastic", "1:1", "--port", port, "--env", "OMP_NUM_THREADS=1", "--", script,
                               *words, *LAYOUTS["three"][2], tools=tmp_path))
        assert eventually(lambda: "| step 6/" in launched[0].output(), 120), launched[0].output()
        return launched[0], now

    yield start
    if launched and launched[0].process.poll() is None:
        os.killpg(launched[0].process.pid, signal.SIGINT)
        launched[0].end()


def test_a_survivor_that_was_sent_a_layer_is_no_witness(folder, run_code):
    """Rank 0 has a wrong bit, and rank 1 has not. Before the next comparison rank 3 ends, and layers move: rank 2 is
    sent what rank 0 holds. The two that held it compare, as they do before a new process is given a copy."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        run = {"id": "moves", "token": "token", "hosts": ["127.0.0.1"], "host": 0, "port": free.getsockname()[1],
               "at_least": 1, "at_most": 1, "nproc": 4}
    code = FLIP.format(flip=(0, 3, "", 1 << 22, 0.0)) + """
def leave(session, step, *others):
    if step == 4 and os.environ["LOCAL_RANK"] == "3":
        os._exit(0)
    return flip(session, step, *others)

Session.after_step = leave
"""
    words = flags(folder, "moves", 10_000, 10_000, save_every=None)
    done = run_code("cluster", 4, code, *words, "--pipelines", "4;2,1,1|4;4;4", "--num_microbatches", "2,2|1,1,2",
                    then="train_distributed.py", check=False, env={"ELASTIC_RUN": json.dumps(run)})
    said = r"error: after step \d rank 0 on \S+ and rank 1 on \S+ differ in embedding.weight; two replicas cannot tell"
    assert re.search(said, done.stderr) and done.returncode == 2, done.stdout + done.stderr


def end(run: Launch) -> str:
    """What it has printed, when it has ended with one error, and no process was started after that."""
    assert eventually(lambda: run.process.poll() is not None, 120), run.output()
    code, text = run.end()
    text = text.partition("launch_cluster: its last lines")[0]
    assert code == 2 and text.count("error: ") == 1 and not re.search(STARTED, text[text.index("error: "):]), text
    return text


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow(drawn=1)) for n in (1, 2))])
def test_an_elastic_run(elastic, seed):
    """A process is killed; the generations without it and with the new one raise no alarm. Then a bit flips: the run
    ends with code 2, and nothing starts anew."""
    killed, bad = random.Random(f"elastic {seed}").sample(range(3), 2)
    run, now = elastic(f"elastic{seed}", bad, 4)
    pids = dict(re.findall(STARTED, run.output())[:3])  # of the first processes
    os.kill(int(pids[str(killed)]), signal.SIGKILL)
    assert eventually(lambda: run.output().count("3 ranks, tp 1") == 2, 120), run.output()
    now.touch()
    text = end(run)
    [flipped] = re.findall(r"flipped (\S+) ", text)
    assert re.search(rf"error: after step \d+ rank {bad} on \S+ differs from most replicas in ", text), text
    assert f"{flipped} (exp_avg)" in text and text.count("replicas compare ") == 3, text
    assert text.count("going on after step") == 2 and len(re.findall(STARTED, text)) == 4, text
