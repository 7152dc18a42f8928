"""What one rank alone finds before the first step, as a damaged file of its stage: all end with its error, in one line.

Step 9 and train_distributed.py read the same directories, in two stages; what is damaged is that of the second stage.
"""

import json
import shutil
import socket
import subprocess
import sys

import pytest
from lab.launch import MODELS, STEPS, environment, modules_of, start_fork
from safetensors.torch import load_file, save_file
from support.checkpoint_runs import SCRIPT, SIZES, flags_of, write_corpus, write_model

with modules_of(9):
    from ranks.disks import Disks
    from utils import UserError

OWN, INDEX = "model.layers.3.mlp.up_proj.weight", "model.safetensors.index.json"  # of the second stage


def change_index(path, change) -> None:
    index = json.loads((path.parent / INDEX).read_text())
    change(index["weight_map"])
    (path.parent / INDEX).write_text(json.dumps(index))


def scaled(factor: float):
    """What multiplies the numbers of the last norm, and so the logits."""
    def scale(path) -> None:
        tensors = load_file(path)
        tensors["model.norm.weight"] *= factor
        save_file(tensors, path, {"format": "pt"})

    return scale


DAMAGES = {  # name -> what is done to the file, what the error has
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:20_000]), "incomplete metadata, file not fully covered"),
    "removed": (lambda path: path.unlink(), "No such file"),
    "no entry in the index": (lambda path: change_index(path, lambda files: files.pop(OWN)), "has no weights for "),
    "another file in the index": (
        lambda path: change_index(path, lambda files: files.update({OWN: files["model.embed_tokens.weight"]})),
        f"does not contain tensor {OWN}"),
}
STEP9 = STEPS["9"] / "run_causal_lm.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import transformers

    folder = tmp_path_factory.mktemp("alone")
    write_model(folder / "good", "llama", **SIZES, vocab_size=1024, max_position_embeddings=32)
    config = transformers.AutoConfig.from_pretrained(folder / "good")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "good", max_shard_size="90KB")
    write_corpus(folder)
    return folder


def damaged(folder, name: str, damage):
    """A copy of the model, of whose file with OWN `damage` is called."""
    shutil.copytree(folder / "good", folder / name)
    damage(folder / name / json.loads((folder / "good" / INDEX).read_text())["weight_map"][OWN])
    return folder / name


def words(folder, script, name: str, model, **changes) -> list[str]:
    changes = {**dict(max_steps=2, save_every=None, keep=None, dtype="float32", pipelines="2,2", num_microbatches=2),
               **changes}
    if script == SCRIPT:
        return flags_of(folder, name, model, **changes)
    changes |= dict(max_steps=None, steps=2, checkpoint_dir=None, batch_size=None, micro_batch_size=1)
    return flags_of(folder, name, model, **changes)[1:]  # without --equal_shares


def start(folder, script, *more, **changes):
    return start_fork(9, 2, *words(folder, script, *more, **changes), script=script, check=False, modules=MODELS)


def check(code: int, printed: str, *expected: str) -> None:
    errors = [line for line in printed.splitlines() if "error: " in line]
    assert code == 2 and len(errors) == 1 and "Traceback" not in printed, printed
    assert all(text in errors[0] for text in expected), errors[0]


@pytest.fixture(scope="module")
def runs(folder, selected):
    """(damage, script) -> the run, all at the same time."""
    cases = selected("case")
    models = {name: damaged(folder, name, DAMAGES[name][0]) for name in dict.fromkeys(name for name, _ in cases)}
    return {(name, script): start(folder, script, f"{name} {script.stem}", models[name]) for name, script in cases}


@pytest.mark.parametrize("case", [("cut", STEP9), *(
    pytest.param((name, SCRIPT), marks=() if "index" in name else pytest.mark.slow) for name in DAMAGES)],
                         ids=lambda case: f"{case[0]} {case[1].stem}")
def test_a_file_of_the_second_stage_is_damaged(runs, folder, case):
    name, script = case
    done = runs[case].result()
    check(done.returncode, done.stderr, "error: rank 1: ", DAMAGES[name][1])
    assert not (folder / "runs" / f"{name} {script.stem}").exists()


@pytest.mark.parametrize("script, flag, other, changes, expected", [
    (SCRIPT, "run_name", "taken", {}, "can't write "),
    (SCRIPT, "model_name", "broken", dict(local_steps=2, max_steps=None, pipelines=None, num_microbatches="1,1"),
     "file not fully covered"),
])
def test_each_rank_is_a_host(run_code, folder, script, flag, other, changes, expected):
    """Rank 1 has its data, its weights or its disk in another place."""
    if not (folder / "broken").exists():
        damaged(folder, "broken", DAMAGES["cut"][0])
        (folder / "runs").mkdir(exist_ok=True)
        (folder / "runs" / "taken").write_text("a file")
    done = run_code("cluster", 2, f"""
import os, socket
socket.gethostname = lambda: "host" + os.environ["RANK"]
os.environ["LOCAL_RANK"] = "0"
if os.environ["RANK"] == "1":
    sys.argv[sys.argv.index("--{flag}") + 1] = {str(folder / other) if flag != "run_name" else other!r}
""", *words(folder, script, "hosts", folder / "good", **changes), then=script.name, check=False, modules=MODELS)
    check(done.returncode, done.stderr, "error: rank 1: ", expected)


def test_errors_that_are_no_mistake_in_the_flags(run_code, world_of_one, tmp_path):
    """A GPU without memory on one rank is an error of all. Of a lost rank nobody tells the others: they hear of it."""
    done = run_code("cluster", 2, """
import torch
import process_group_manager as pgm
from utils import one_clear_error
with one_clear_error(out_of_memory="use less"):
    pgm.init_process_group("gloo")
    with pgm.together():
        if pgm.dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
""", check=False)
    check(done.returncode, done.stderr, "error: out of memory (rank 1: CUDA out of memory.): use less")
    disks = Disks(str(tmp_path))
    with pytest.raises(RuntimeError, match="^Connection closed by peer$"), disks.together():
        raise RuntimeError("Connection closed by peer")
    with pytest.raises(UserError, match="(?s)Traceback .*division by zero"), disks.together():
        1 / 0


def test_a_first_loss_that_no_step_has_made(folder):
    """Weights that were read may be damaged, and random ones are no damaged ones."""
    huge, wild = damaged(folder, "huge", scaled(1e20)), write_model(folder / "wild", rms_norm_eps=-1.0)
    jobs = [start(folder, SCRIPT, name, model) for name, model in (("huge", huge), ("wild", wild))]
    for job, expected in zip(jobs, (f"read from {huge}: they may be damaged", "the weights were drawn at random")):
        done = job.result()
        check(done.returncode, done.stderr, "error: step 1 has the loss ", "Nothing was trained yet", expected)


def test_without_torchrun_one_rank_says_what_all_have(folder, tmp_path):
    """As under Slurm, MPI and our own agent: nobody ends the others."""
    (tmp_path / "data.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        words = flags_of(folder, "said_once", folder / "good", dataset_name=tmp_path / "data.jsonl", max_steps=2)
        variables = environment(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                                MASTER_PORT=str(port))
        ranks.append(subprocess.Popen([sys.executable, SCRIPT, *words], env=variables, stderr=subprocess.PIPE, text=True,
                                      stdout=subprocess.DEVNULL))
    said = [each.communicate(timeout=120)[1] for each in ranks]
    assert [each.returncode for each in ranks] == [2, 2], said
    assert "".join(said).count("error: ") == 1 and "chat template" in said[0] and not said[1], said
