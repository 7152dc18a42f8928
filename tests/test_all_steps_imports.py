"""Every script says what its flags are, from any working directory; what it imports for that can be imported.

And what it is told to write is there, by a name relative to that directory, in a folder that is missing as well.
"""

import json
import re
import shlex
import shutil
import subprocess

import pytest
from lab.launch import ROOT, STEPS, environment, fork, metrics
from support.clusters import made_up_cluster

ROOMS = ("step*/*.py", "beyond/*/*.py", "cluster/**/*.py", "tools/**/*.py")
ANYWHERE = """
import os, runpy
sys.path[0] = os.path.dirname(sys.argv[1])
os.chdir(sys.argv.pop())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SMALL = "--num_hidden_layers 2 --seq_len 16"
TRAIN = shlex.quote(str(STEPS["8"] / "train.py"))
WRITERS = [  # a script, its flags, and where it leaves what: {} is the name
    ("cluster/plan.py", "cluster.json --out {}", "{}"),
    ("step3_dataloader/train.py", f"{SMALL} --max_tokens 512 --log_dir {{}}", "{}/default_run/metrics.jsonl"),
    ("step8_pipeline_parallel_1f1b/train.py", f"{SMALL} --max_tokens 512 --profile_batch 1 --log_dir {{}}",
     "{}/default_run/timeline_batch1_all.json"),
    ("tools/timeline_picture.py", "run/timeline_batch1_all.json {}", "{}.png"),
    ("tools/compare_runs.py", "run --out {}", "{}/run"),
    ("tools/sanity_check.py", "--plot run other --figure {}", "{}.png"),
    ("tools/with_torch.py", "--steps 1 --seq_len 16 --out {}", "{}"),
    ("tools/maintain/make_figures.py", "grid --out {}", "{}/figure_grid.png"),
    ("exercises/try.py", "start ring_all_reduce --folder {}", "{}/ring_all_reduce.py"),
    ("tools/dry_run.py", f"--world 2 --timeline {{}} {TRAIN} --dp_size 2 {SMALL}", "{}"),
    ("same_numbers/trainers.py", "replicas {}", "{}/rank0_start.pt"),
]


@pytest.mark.parametrize("room", ROOMS)
def test_scripts_from_another_directory(run_code, tmp_path, room):
    """Nothing is written there, and nothing to stderr."""
    scripts = [path for path in sorted(ROOT.glob(room)) if "__main__" in (text := path.read_text())
               and re.search(r"parse_(known_)?args\(", text)]
    assert scripts
    (tmp_path / "empty").mkdir()
    for script in scripts:
        done = run_code(1, 1, ANYWHERE, script, "--help", tmp_path / "empty")
        assert "usage: " in done.stdout and not done.stderr and not any((tmp_path / "empty").iterdir()), (script, done)
        assert not room.startswith("tools") or "tools/" in done.stdout, f"{script}: --help shows no example"


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with what these scripts read."""
    folder = tmp_path_factory.mktemp("here")
    fork(8, 1, *SMALL.split(), "--max_tokens", 512, "--profile_batch", 1, "--log_dir", folder, "--run_name", "run")
    shutil.copytree(folder / "run", folder / "other")
    (folder / "cluster.json").write_text(json.dumps(made_up_cluster([2, 1])))
    return folder


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", ["name", "./name", "missing/folder/name"])
@pytest.mark.parametrize("script, flags, left", WRITERS, ids=[f"{script} {flags}" for script, flags, _ in WRITERS])
def test_names_relative_to_the_working_directory(run_code, here, tmp_path, script, flags, left, name):
    there = shutil.copytree(here, tmp_path / "there")
    name += ".png" * left.endswith("{}.png")
    run_code(1, 1, ANYWHERE, ROOT / script, *shlex.split(flags.format(name)), there)
    assert (there / left.removesuffix(".png" * left.endswith("{}.png")).format(name)).exists()


def test_a_plan_and_a_run_by_relative_names(run_code, tmp_path):
    """As the first commands of cluster/README.md. The run goes on from another directory, and its metrics with it."""
    def run(script, *words, folder=tmp_path):
        run_code(9, 1, ANYWHERE, ROOT / "cluster" / script, *words, folder)

    run("plan.py", "--measure", "cluster.json", "--measure_seconds", 1, *SMALL.split(), "--global_batch", 4, "--out",
        "new/plan.json")
    train = ["train_distributed.py", *SMALL.split()]
    run(*train, "--plan", "./new/plan.json", "--max_steps", 2, "--run_name", "first", "--log_dir", "logs",
        "--checkpoint_dir", "./further/checkpoints", "--profile_batch", 1)
    assert (tmp_path / "logs" / "first" / "timeline_batch1_all.json").exists()
    run(*train, "--plan", "plan.json", "--max_steps", 3, "--run_name", "second", "--log_dir", "../logs/more",
        "--checkpoint_dir", ".", "--resume", "../further/checkpoints/first", folder=tmp_path / "new")
    assert [row["step"] for row in metrics(tmp_path / "logs" / "more", "second")] == [1, 2, 3]
    assert (tmp_path / "new" / "second" / "latest").exists()


@pytest.mark.parametrize("script", sorted([*ROOT.glob("cluster/*.sh"), *ROOT.glob("tools/*.sh")]),
                         ids=lambda path: path.name)
def test_shell_scripts_from_another_directory(script, tmp_path):
    done = subprocess.run([script, "--help"], cwd=tmp_path, env=environment(), capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0 and done.stdout and not done.stderr, done.stderr
    assert not list(tmp_path.iterdir())
