"""What must not be lost: what the four systems have that this repository grew out of, each line a case of its own.

The Picotron tutorial; pipelines of unlike shapes from templates, as in Oobleck and Cornstarch; three stages over three
Raspberry Pis; three machines at home with GPUs. Command lines stand here as their users type them: the words that follow
in a test only make models, text and runs small. Three processes stand for three machines; tests/test_ancestors_on_hosts.py
has these. Who takes one of these things away sees here whose it was.
"""

import ast
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
from typing import NamedTuple

import pytest
import torch
from lab.launch import ROOT, STEPS, environment, fork, losses, metrics, modules_of, start_fork, torchrun
from lab.program import Program
from maintain.processes import eventually
from support.families import HeterogeneousParallelPlugin, PipelineTemplate, toy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

with modules_of(9):
    import three_stages_simple_pp as three_stages
    import train_distributed

CLUSTER, TEXT = ROOT / "cluster", "It was the best of times, it was the worst of times. "
SECRET = "c0rrect-h0rse"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> pathlib.Path:
    (path := tmp_path_factory.mktemp("ancestors") / "corpus.txt").write_text(TEXT * 2000)
    return path


# The Picotron tutorial

SIZES_1B = "--model_name TinyLlama/TinyLlama_v1.1 --num_hidden_layers 22 --num_attention_heads 32 --num_key_value_heads 4"
COMMON = f"--seq_len 1024 --max_tokens 4096000 --num_proc 16 {SIZES_1B} --use_wandb"
PICOTRON = {  # step, processes, flags after train.py
    "baseline": (3, 1, f"--micro_batch_size 4 --gradient_accumulation_steps 8 {COMMON} --run_name baseline_1B"),
    "tp": (4, 4, f"--micro_batch_size 4 --gradient_accumulation_steps 8 {COMMON} --run_name tp_1B --tp_size 4"),
    "dp": (6, 4, f"--micro_batch_size 1 --gradient_accumulation_steps 8 {COMMON} --run_name dp_1B --dp_size 4"),
    "pp": (8, 4, f"--micro_batch_size 4 --gradient_accumulation_steps 8 {COMMON} --run_name pp_1B --pp_size 4 "
                 "--pp_engine 1f1b"),
    "3d": (8, 8, f"--micro_batch_size 2 --gradient_accumulation_steps 8 {COMMON} --run_name 3D_1B --tp_size 2 "
                 "--pp_size 2 --pp_engine 1f1b --dp_size 2"),
    "card": (8, 4, "--pp_size 4 --run_name card"),
}


class Trained(NamedTuple):
    folder: pathlib.Path
    losses: list[float]


@pytest.fixture(scope="module")
def picotron(tmp_path_factory, corpus) -> dict[str, Trained]:
    """What each of the command lines leaves."""
    folder = tmp_path_factory.mktemp("picotron")
    (folder / "model").mkdir()
    sizes = json.loads((ROOT / "assets" / "tiny_llama" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**sizes, "hidden_size": 64, "intermediate_size": 64}))
    for name in "tokenizer.json", "tokenizer_config.json":
        (folder / "model" / name).write_bytes((ROOT / "assets" / "tiny_llama" / name).read_bytes())
    small = ["--seq_len", 8, "--num_proc", 1, "--dataset_name", corpus, "--log_dir", folder, "--max_tokens", 2 * 32 * 8]
    small_1b = [*small, "--model_name", folder / "model", "--num_hidden_layers", 4, "--dtype", "float64"]
    jobs = {name: start_fork(step, ranks, *shlex.split(words), *(small_1b if SIZES_1B in words else small),
                             env={"WANDB_MODE": "disabled"}, modules=["wandb"])  # the last of two of a flag counts
            for name, (step, ranks, words) in PICOTRON.items()}
    runs = {name: re.search(r"--run_name (\w+)", words)[1] for name, (_, _, words) in PICOTRON.items()}
    return {name: job.result() and Trained(folder / runs[name], losses(folder, runs[name]))
            for name, job in jobs.items()}


@pytest.mark.parametrize("line", PICOTRON)
def test_picotron_command_line(picotron, line):
    """Each trains, and all but the card's, whose model is its own, to the losses of the first: the sanity check."""
    found, expected = picotron[line].losses, picotron["baseline"].losses
    assert len(found) == 2 and max(found) < 10
    assert line == "card" or found == pytest.approx(expected, abs=1e-11)


def test_picotron_setup_takes_python_3_10():
    [call] = [node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
              if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup"]
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    assert ast.literal_eval(given["python_requires"]).startswith(">=3.10") and "install_requires" in given


def test_picotron_films_in_four_parts():
    text = (ROOT / "docs" / "VIDEOS.md").read_text()
    assert [re.search(rf"\*\*\[{part}[^]]*\]\(https://", text) is not None
            for part in ("Part 1", "Part 2", "Bonus", "Part 3")] == [True] * 4


def test_picotron_weights_and_biases(monkeypatch):
    """--use_wandb makes a run of W&B: online with a login, offline without."""
    import wandb

    step_metrics = Program(3).load().metrics
    made = []
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "init", lambda **options: made.append(options["mode"]))
    for has_login in True, False:
        monkeypatch.setattr(wandb, "login", lambda prompt, has_login=has_login: has_login)
        step_metrics.start_wandb("run", {"wandb_project": "picotron_tutorial", "wandb_group": None}, "folder")
    assert made == ["online", "offline"]


def test_picotron_sanity_check_of_all_in_one_figure(picotron, monkeypatch, capsys):
    import sanity_check

    runs = [picotron[line].folder for line in PICOTRON if line != "card"]
    monkeypatch.setattr(sys, "argv", ["sanity_check.py", "--plot", *map(str, runs)])
    assert sanity_check.main() == 0, capsys.readouterr().out
    assert (runs[0].parent / "compared.png").stat().st_size > 10_000


# Heterogeneous templates

GPT2 = "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel"


@pytest.fixture
def plugin():
    """Of a world of one."""
    import torch.distributed as dist

    yield HeterogeneousParallelPlugin(tp_size=1, device="cpu", precision="fp64")
    dist.destroy_process_group()


def test_templates_names_and_signatures(plugin):
    """One, two and three stages of slices of the model's modules; the same template twice; unlike ones mixed."""
    model = toy("gpt2")
    modules = PipelineTemplate.get_modules(model)
    one, two = PipelineTemplate(GPT2, [modules]), PipelineTemplate(GPT2, [modules[:4], modules[4:]])
    three = PipelineTemplate(GPT2, [modules[:4], modules[4:5], modules[5:]])
    for template in one, two, three:
        template.check(model)
    with pytest.raises(AssertionError, match="stages"):  # the world has one process, and all of it was understood
        plugin.set_pipelines(pipelines=[two, two, three], num_microbatches={two: 2, three: 4})
    plugin.set_pipelines(pipelines=[one], num_microbatches={one: 2})


def test_templates_error_no_policy():
    from transformers import CLIPTextConfig, CLIPTextModel

    model = CLIPTextModel(CLIPTextConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                         num_attention_heads=1))
    with pytest.raises(NotImplementedError, match="^Auto policy for .*CLIPTextModel is not implemented"):
        PipelineTemplate.get_modules(model)


def test_templates_error_other_modules():
    modules = PipelineTemplate.get_modules(model := toy("gpt2"))
    with pytest.raises(ValueError, match="^Modules in the pipeline template do not match the modules in the model"):
        PipelineTemplate(GPT2, [modules[:4], modules[5:]]).check(model)


@pytest.mark.parametrize("end", ["first", "last"])
def test_templates_error_ends(end):
    modules = PipelineTemplate.get_modules(model := toy("gpt2"))
    stages = [modules[3:4], modules[:3] + modules[4:]] if end == "first" else [modules[:4], modules[4:-1], modules[-1:]]
    with pytest.raises(ValueError, match=f"^The {end} stage must contain the .* module"):
        PipelineTemplate(GPT2, stages).check(model)


def test_templates_error_world_size(plugin):
    modules = PipelineTemplate.get_modules(toy("gpt2"))
    two = PipelineTemplate(GPT2, [modules[:4], modules[4:]])
    with pytest.raises(AssertionError, match="^Number of ranks in pipeline templates does not match world size"):
        plugin.set_pipelines(pipelines=[two], num_microbatches={two: 2})


def test_templates_error_microbatches(plugin):
    one = PipelineTemplate(GPT2, [PipelineTemplate.get_modules(toy("gpt2"))])
    with pytest.raises(AssertionError, match="^All pipelines must have a corresponding number of microbatches"):
        plugin.set_pipelines(pipelines=[one], num_microbatches={})


def test_templates_run_gpt2(tmp_path, corpus):
    """Any launcher will do that sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as fork() does."""
    fork(9, 4, "--steps", 2, "--seq_len", 16, "--dataset_name", corpus, "--log_dir", tmp_path,
         script=STEPS["9"] / "run_gpt2.py")
    assert len(metrics(tmp_path)) == 2


# Three Raspberry Pis

PI = "three_stages_simple_pp.py --train_steps 5 --batch_size 8 --microbatch_num 4 --sudo_pass"


def test_raspberry_pi_command_line(command, tmp_path, corpus):
    """It trains, leaves a timeline of three ranks, and shows the password to nobody."""
    run = command([*torchrun(3, CLUSTER / PI.split()[0], *PI.split()[1:], SECRET, "--dataset_name", corpus, "--seq_len",
                             16, "--log_dir", tmp_path / "logs", "--checkpoint_dir", tmp_path / "checkpoints")])
    titles = {}  # rank -> the last one that was seen
    while run.process.poll() is None:
        titles |= {rank: title for rank, pid in run.ranks().items() if (title := title_of(pid))}
        time.sleep(0.2)
    printed = run.end(60)
    assert run.process.returncode == 0, printed[-3000:]
    trace = json.loads((tmp_path / "logs" / "three_stages" / "timeline_batch0_all.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"] if event.get("cat") == "forward"} == {0, 1, 2}
    assert len(titles) == 3 and all(b"--train_steps" in title and SECRET.encode() not in title
                                    for title in titles.values())
    assert SECRET not in printed
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 5 and not [path for path in written if SECRET.encode() in path.read_bytes()]


def title_of(pid: int) -> bytes:
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


def test_raspberry_pi_steps_or_an_epoch(parsed):
    assert parsed(three_stages, "--train_steps 5").train_steps == 5
    assert parsed(three_stages).train_steps is None


@pytest.mark.parametrize("variable, flag, default", [("BATCH_SIZE", "batch_size", 16),
                                                     ("MICROBATCH_NUM", "microbatch_num", 4)])
def test_raspberry_pi_variables(parsed, monkeypatch, variable, flag, default):
    """The flag, else the variable, else a default."""
    monkeypatch.delenv(variable, raising=False)
    assert getattr(parsed(three_stages), flag) == default
    monkeypatch.setenv(variable, str(2 * default))
    assert getattr(parsed(three_stages, "--microbatch_num 4" if flag == "batch_size" else ""), flag) == (
        2 * default if flag == "batch_size" else 8)
    assert getattr(parsed(three_stages, "--batch_size 64 --microbatch_num 2"), flag) in (64, 2)


def test_raspberry_pi_micro_batches_divide(parsed):
    with pytest.raises(ValueError, match="--batch_size 10 is not a multiple of --microbatch_num 4"):
        parsed(three_stages, "--batch_size 10 --microbatch_num 4")


@pytest.mark.parametrize("words", [f"--sudo_pas {SECRET}", f"--sudo-pass {SECRET} --batch_size 10", SECRET])
def test_raspberry_pi_errors_do_not_show_a_mistyped_password(parsed, words):
    with pytest.raises(ValueError) as error:
        parsed(three_stages, words)
    assert str(error.value) and SECRET not in str(error.value)


def test_raspberry_pi_errors_do_not_show_the_password():
    words = f"--sudo_pass {SECRET} --batch_size 10"
    done = subprocess.run([sys.executable, CLUSTER / "three_stages_simple_pp.py", *words.split()], timeout=120,
                          env=environment(), capture_output=True, text=True)
    assert done.returncode == 2 and "error: --batch_size 10" in done.stderr and SECRET not in done.stdout + done.stderr


# Three machines at home

@pytest.fixture(scope="module")
def home(tmp_path_factory, corpus) -> tuple[pathlib.Path, str, object]:
    """The folder of a run of two epochs, what it printed, and TensorBoard's view of it while it trained."""
    folder = tmp_path_factory.mktemp("home")
    job = start_fork(9, 3, "--dataset_name", corpus, "--seq_len", 16, "--batch_size", 1, "--num_microbatches", "4,2,2",
                     "--epochs", 2, "--learning_rate", 2e-4, "--max_steps_per_epoch", 10, "--eval_every", 2,
                     "--eval_batches", 2, "--validation_split", 0.05, "--sample_every", 2, "--recompute", "--keep", 9,
                     "--log_dir", folder / "logs" / "runs", "--checkpoint_dir", folder / "checkpoints",
                     script=CLUSTER / "train_distributed.py")
    run = folder / "logs" / "runs" / "train_distributed"
    rows = run / "metrics.jsonl"
    assert eventually(lambda: job.done() or rows.exists() and rows.read_text().count("\n") > 5, 120)
    while_it_trains = None if job.done() else EventAccumulator(str(run)).Reload()
    return folder, job.result().stdout, while_it_trains


def test_home_trains_two_epochs(home):
    folder, printed, _ = home
    assert len(metrics(folder / "logs" / "runs", "train_distributed")) == 20, printed


def test_home_says_who_is_where(home):
    """Each rank of how many, its local rank, the backend, and the name of its processor, or GPU."""
    assert re.search(r"^3 ranks over gloo, float32", home[1], re.M)
    assert re.search(r"^rank +local rank +host +CPU +network\n(\d +\d +\S+ +.*cores.*\n){3}", home[1], re.M)


@pytest.mark.parametrize("tag", [
    "loss", "grad_norm", "learning_rate", "tokens_per_second", "evaluation_loss", "perplexity",
    *(f"{name}/rank{rank}" for name in ("compute_seconds", "wait_seconds", "cpu_memory_gb", "cpu_percent")
      for rank in range(3))])
def test_home_tensorboard_while_it_trains(home, tag):
    assert home[2], "the run ended before anybody could look"
    assert len(home[2].Scalars(tag)) >= 2 and all(event.value >= 0 for event in home[2].Scalars(tag))


@pytest.mark.parametrize("name", ["sample", "hosts"])
def test_home_tensorboard_texts(home, name):
    assert home[2].Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0]


def test_home_gpus_are_watched(monkeypatch):
    """Where there is a GPU: its memory, and how busy it is."""
    with modules_of(9):
        from run import times
    step = times.StepTimes(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2e9)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 87)
    step.start(0, began=1.0)
    step.stop()
    assert dict(zip(times.USED, step.used))["gpu_memory_gb"] == 2.0
    assert dict(zip(times.USED, step.used))["gpu_percent"] == 87.0


def test_home_checkpoint_an_epoch(home):
    """In safetensors: nothing that runs code when it is read."""
    folder = home[0] / "checkpoints" / "train_distributed"
    assert {"step_00000010", "step_00000020"} <= {path.name for path in folder.iterdir()}
    names = [path.name for path in folder.rglob("*") if path.is_file()]
    assert any(name.endswith(".safetensors") for name in names)
    assert not [name for name in names if re.search(r"\.(pt|pth|bin|pkl)$", name)]


@pytest.mark.parametrize("words, name, value", [
    ("--model_name mistralai/Mistral-7B-v0.1", "model_name", "mistralai/Mistral-7B-v0.1"),
    ("--dataset_name data/processed", "dataset_name", "data/processed"), ("--epochs 3", "epochs", 3),
    ("--learning_rate 2e-4", "learning_rate", 2e-4), ("--batch_size 2", "batch_size", 2),
    ("--num_microbatches 8", "num_microbatches", [[8]]), ("--recompute", "recompute", True),
    ("--lora_rank 16", "lora_rank", 16), ("--lora_rank 16 --base_bits 4", "base_bits", 4)])
def test_home_what_can_be_set(parsed, words, name, value):
    found = getattr(parsed(train_distributed, words), name)
    assert found == value or [found] == value


def test_home_default_folders(parsed):
    args = parsed(train_distributed)
    assert (args.log_dir, args.checkpoint_dir) == (str(ROOT / "logs" / "runs"), str(ROOT / "checkpoints"))


def test_home_learning_rate_of_adapters():
    with modules_of(9):
        from models.lora import RATE
    assert RATE == 2e-4


def test_home_each_machine_alone(tmp_path, corpus):
    """train_single_test.py, which says which batch size fits."""
    printed = fork(9, 1, "--steps", 2, "--max_batch_size", 2, "--seq_len", 16, "--dataset_name", corpus,
                   script=CLUSTER / "train_single_test.py").stdout
    assert re.search(r"^rank +host +device.*tokens/s.*batch size", printed, re.M), printed


def test_home_torchrun_and_launcher():
    """The home cluster's own command line, of as many machines as one likes, and its script for all of them."""
    from torch.distributed.run import get_args_parser

    words = ("--nnodes=4 --nproc_per_node=1 --rdzv_id=100 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:29500 "
             "--node_rank=3 train_distributed.py")
    assert get_args_parser().parse_args(words.split()).training_script == "train_distributed.py"
    assert os.access(CLUSTER / "launch_cluster.sh", os.X_OK)


@pytest.mark.parametrize("words", ["NCCL_DEBUG=INFO", "firewall", "port", "out of memory", "--batch_size"])
def test_home_when_it_hangs(words):
    """A page says what to look at."""
    pages = [ROOT / "README.md", ROOT / "docs" / "DEBUGGING.md", CLUSTER / "LAUNCH.md"]
    assert any(words in page.read_text() for page in pages)
