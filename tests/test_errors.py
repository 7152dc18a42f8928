"""Bad input: one clear error, from one rank, a non-zero exit code, soon, and nothing left running."""

import json
import shutil
import subprocess
import sys
import time

import pytest

from launch import ROOT, STEPS, environment, launch, torchrun

TINY = ROOT / "assets" / "tiny_llama"
SECONDS = 20
SHORT = ["--seq_len", "32", "--micro_batch_size", "1", "--max_tokens", "512"]


def fails(tmp_path, step, num_processes, args, expected, env=None):
    """Runs the step and checks that it ends soon with one error line holding all of `expected`."""
    words = [*SHORT, *(["--log_dir", tmp_path / "runs"] if step >= 3 else []), *args]
    if num_processes == 1:
        command = [sys.executable, str(STEPS[str(step)] / "train.py"), *map(str, words)]
    else:
        command = torchrun(num_processes, STEPS[str(step)] / "train.py", *words)
    start = time.perf_counter()
    done = subprocess.run(command, env=environment(**(env or {})), capture_output=True, text=True, timeout=60,
                          stdin=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode != 0 and len(errors) == 1, done.stderr[-3000:]
    assert all(text in errors[0] for text in expected), errors[0]
    assert seconds < SECONDS, f"{seconds:.0f} s until {errors[0]}"
    assert STEPS[str(step)].name not in done.stderr.replace(" ".join(command), ""), "a traceback of ours:\n" + done.stderr
    assert not (tmp_path / "runs" / "default_run").exists(), "it failed after training had begun"


@pytest.mark.parametrize("step, num_processes, args, expected", [
    (8, 4, ["--tp_size", "2", "--pp_size", "2", "--dp_size", "2"], ["dp_size=2 x pp_size=2 x tp_size=2", "8", "4 run"]),
    (4, 3, ["--tp_size", "3"], ["num_attention_heads=8", "tp_size=3", "divides 8"]),
    (8, 4, ["--tp_size", "4", "--num_key_value_heads", "2"], ["num_key_value_heads=2", "tp_size=4", "divides 2"]),
    (8, 3, ["--pp_size", "3", "--num_hidden_layers", "2"], ["pp_size=3", "num_hidden_layers=2"]),
    (8, 2, ["--dp_size", "2", "--dataset_name", "no/such"], ["'no/such'", "no such path", "Hub id"]),
    (8, 2, ["--pp_size", "2", "--model_name", "no/such"], ["'no/such'", "no such path", "Hub id"]),
], ids=lambda value: None if not isinstance(value, list) else " ".join(value[:4]))
def test_several_processes_one_error(tmp_path, step, num_processes, args, expected):
    fails(tmp_path, step, num_processes, args, expected)


@pytest.mark.parametrize("step, args, expected", [
    (1, ["--micro_batch_size", "0"], ["--micro_batch_size", "at least 1", "0"]),
    (8, ["--tp_size", "0"], ["--tp_size", "at least 1", "0"]),
    (8, ["--seq_len", "-1"], ["--seq_len", "at least 1", "-1"]),
    (8, ["--gradient_accumulation_steps", "0"], ["--gradient_accumulation_steps", "at least 1"]),
    (8, ["--max_tokens", "255"], ["--max_tokens 255", "256"]),
    (8, ["--profile_batch", "3"], ["--profile_batch 3", "1 to 2"]),
    (8, ["--run_name", "a/b"], ["--run_name 'a/b'", "without slashes"]),
    (8, ["--device", "cuda"], ["--device cuda", "no GPU", "--device cpu"]),
    (8, ["--no_such_flag"], ["--no_such_flag", "--help"]),
    (8, ["--num_attention_heads", "7"], ["--num_attention_heads 7", "128"]),
    (3, ["--tp_size", "2"], ["--tp_size 2", "step 4"]),
    (4, ["--dp_size", "2"], ["--dp_size 2", "step 5"]),
    (6, ["--pp_size", "2"], ["--pp_size 2", "step 7"]),
], ids=lambda value: " ".join(value[:2]) if isinstance(value, list) and value[0].startswith("--") else None)
def test_flags(tmp_path, step, args, expected):
    fails(tmp_path, step, 1, args, expected)


def test_unreachable_hub_is_found_out_quickly(tmp_path):
    """Without HF_HUB_OFFLINE, as on a laptop in a train: no minute of retries."""
    env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    fails(tmp_path, 1, 1, ["--model_name", "no/such"], ["no such path", "can't be reached"], env)
    fails(tmp_path, 8, 1, ["--dataset_name", "no/such"], ["no such path", "can't be reached"], env)


def test_model_directories(tmp_path):
    (tmp_path / "empty").mkdir()
    fails(tmp_path, 1, 1, ["--model_name", tmp_path / "empty"], ["holds no model configuration"])
    for name, change, expected in (
        ("small_vocabulary", {"vocab_size": 512}, ["vocab_size=512", "do not belong together"]),
        ("biased", {"attention_bias": True}, ["attention_bias=True"]),
    ):
        folder = shutil.copytree(TINY, tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        fails(tmp_path, 8, 1, ["--model_name", folder], expected)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    fails(tmp_path, 8, 1, ["--model_name", folder], ["holds no tokenizer"])


@pytest.mark.parametrize("name, content, expected", [
    ("empty.txt", b"", ["holds 1 tokens", "seq_len + 1 = 33"]),
    ("short.txt", b"a few words", ["fewer than", "seq_len + 1 = 33"]),
    ("latin1.txt", "caf\u00e9 ".encode("latin-1") * 100, ["not UTF-8", "latin1.txt"]),
    ("no_text.jsonl", b'{"story": "once"}\n' * 50, ["no column 'text'", "story"]),
    ("numbers.jsonl", b'{"text": 5}\n' * 50, ["no column 'text' of strings"]),
    ("broken.jsonl", b'{"text": "a"}\n{"text": \n', ["can't be read"]),
    ("picture.png", b"\x89PNG", [".txt", "found none"]),
], ids=lambda value: value if isinstance(value, str) else None)
def test_corpora(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    fails(tmp_path, 8, 1, ["--dataset_name", tmp_path / name], expected)


def test_folder_of_several_kinds(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("words")
    (folder / "b.jsonl").write_text('{"text": "words"}')
    fails(tmp_path, 8, 1, ["--dataset_name", folder], [".jsonl, .txt", "one kind"])


def test_a_run_that_diverges_says_so(tmp_path):
    done = launch(8, 2, *SHORT, "--pp_size", 2, "--max_tokens", 5120, "--learning_rate", 1e30, "--log_dir", tmp_path,
                  check=False)
    assert done.returncode != 0 and "the run has diverged, lower --learning_rate" in done.stderr
