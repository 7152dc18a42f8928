"""Bad input: one clear error, from one rank, a non-zero exit code, no hang, and nothing left running.

What is said of flags is in support/refusal_tables.py; how a run ends is read from processes here.
"""

import json
import re
import shutil
import socket
import subprocess
import sys
import uuid

import pytest
from lab.launch import ROOT, STEPS, environment, fork, modules_of, torchrun
from lab.program import Program
from maintain.processes import processes
from support.recordings import LLAMA3
from support.refusals import SECONDS, end_of, require_refused, short_run

TINY = ROOT / "assets" / "tiny_llama"

def ends_as_it_should(folder, code: int, stderr: str, expected: list[str]) -> None:
    errors = re.findall("^error: .*", stderr, re.MULTILINE)
    assert code > 0 and len(errors) == 1, f"exit code {code}\n{stderr[-4000:]}"
    assert "Traceback" not in stderr[: stderr.index("error: ")], stderr
    assert all(text in errors[0] for text in expected), errors[0]
    assert not (folder / "runs" / "default_run").exists(), "it failed after training had begun"


def fails(folder, step, args, expected, num_processes=1):
    """The script ends as it should, in forked processes; of a hang stderr has the traceback."""
    done = fork(step, num_processes, *short_run(step, folder, args), check=False, timeout=SECONDS)
    ends_as_it_should(folder, done.returncode, done.stderr, expected)


def test_several_processes_of_torchrun_one_error(tmp_path):
    """Without HF_HUB_OFFLINE, as on a laptop in a train: no minute of retries. And nothing is left running."""
    marker = uuid.uuid4().hex
    unreachable = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}  # port 9 of this machine is nobody's
    flags = short_run(8, tmp_path, ["--dp_size", 2, "--dataset_name", "no/such"])
    done = subprocess.run(torchrun(2, STEPS["8"] / "train.py", *flags), env=environment(MARKER=marker, **unreachable),
                          capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    expected = ["'no/such'", "no such path", "Hub id", "can't be reached"]
    ends_as_it_should(tmp_path, done.returncode, done.stderr[: done.stderr.rindex("Traceback")], expected)
    assert all(word in done.stderr.strip().splitlines()[-2] for word in expected), "torchrun's last words are others"
    assert not processes(marker)


@pytest.mark.parametrize("step", [2, 9])
def test_machines_with_unlike_backends(run_code, step):
    """As one with a GPU and one without have them: each would wait for ranks that wait elsewhere."""
    done = run_code(step, 2, """
import os
from process_group_manager import init_process_group
from utils import one_clear_error
with one_clear_error():
    init_process_group("nccl" if os.environ["RANK"] == "1" else "gloo")
""", check=False, timeout=SECONDS)
    assert done.returncode == 2 and "the backend of --device is gloo on rank 0, but nccl on rank 1" in done.stderr


@pytest.mark.parametrize("step, flag, values", [
    (2, "--seq_len", (32, 16)), (5, "--seed", (1, 2)), (8, "--num_hidden_layers", (4, 2)),
    (9, "--pipelines", ("1,1", "2")), (19, "--lag", (0, 1))])
def test_ranks_with_unlike_flags(run_code, tmp_path, step, flag, values):
    """Each host was started by hand, and one command differs. Paths and names may differ."""
    sizes = {2: ["--pp_size", 2], 5: ["--dp_size", 2], 8: ["--pp_size", 2], 9: [], 19: ["--generators", 1]}[step]
    done = run_code(step, 2, f"""
import os
sys.argv[-1] = {values!r}[int(os.environ["RANK"])] if sys.argv[-2] == "{flag}" else sys.argv[-1]
sys.argv += ["--run_name", "default_run" + os.environ["RANK"]]
sys.argv = [str(word) for word in sys.argv]
""", *short_run(step, tmp_path, [*sizes, flag, "1"]), then="train.py", check=False, timeout=SECONDS)
    first, second = ("[[1, 1]]", "[[2]]") if step == 9 else values
    expected = [f"{flag} is {first} on rank 0, but {second} on rank 1"]
    ends_as_it_should(tmp_path, done.returncode, done.stderr, expected)


@pytest.mark.parametrize("step", [2, 9])
def test_a_rank_that_comes_late_hears_of_unlike_flags(run_code, step):
    """Rank 0 has the store, as where each host was started by hand: it stays until all have read what differs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = run_code(step, 3, """
import os, time
import process_group_manager as pgm
os.environ["MASTER_PORT"], rank = sys.argv[1], int(os.environ["RANK"])
del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
time.sleep(2 * (rank == 2))
try:
    pgm.init_process_group("gloo", 20, {"seed": rank % 2})
except pgm.UserError as error:
    print(error)
""", port, timeout=SECONDS)
    assert done.stdout.count("different flags: --seed is 0 on rank 0, but 1 on rank 1: give all ranks the same\n") == 3


@pytest.mark.parametrize("step, ranks, args, name", [
    (2, 2, ["--dp_size", 2], "config.json"), (3, 1, [], "metrics.jsonl"),
    (6, 2, ["--dp_size", 2, "--profile_batch", 2], "timeline_batch2_all.json"),
    (8, 2, ["--pp_size", 2], "metrics.jsonl"),
    (9, 1, ["--profile_batch", 2], "timeline_batch2_all.json"), (16, 1, [], "config.json"),
    (19, 2, ["--generators", 1, "--max_tokens", 2048], "metrics.jsonl")])
def test_a_full_disk(tmp_path, step, ranks, args, name):
    """Of which one rank hears, perhaps in the middle of a run. It says so; the others, which lose it, say nothing."""
    path = tmp_path / "runs" / "full" / name
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")
    flags = short_run(step, tmp_path, ["--log_dir", tmp_path / "runs", "--run_name", "full", *args])
    done = fork(step, ranks, *flags, check=False, timeout=SECONDS)
    expected = [f"can't write {path} (No space left on device): make room there, or choose another --log_dir"]
    ends_as_it_should(tmp_path, done.returncode, done.stderr, expected)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("step, ranks", [(3, 1), (5, 2), (9, 2)])
def test_a_disk_that_is_full_before_all_tokens_are_there(run_code, tmp_path, step, ranks):
    """Here a file may have 8 KB. No later run takes a part for all tokens."""
    args = ["--max_tokens", 4096, *{3: [], 5: ["--dp_size", 2], 9: ["--pipelines", "1,1"]}[step]]
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))"
    code = f"import resource\nsys.dont_write_bytecode = True  # nor may that be cut\n{limit}\n"
    flags = short_run(step, tmp_path, args)
    done = run_code(step, ranks, code, *flags, then="train.py", check=False, timeout=SECONDS)
    ends_as_it_should(tmp_path, done.returncode, done.stderr, ["can't write ", ".bin (File too large): make room"])
    assert not list((tmp_path / "runs" / "token_cache").glob("*.bin"))


@pytest.mark.parametrize("step", [1, 8])
def test_what_is_printed_goes_to_a_full_disk(capsys, monkeypatch, step):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # which one_clear_error replaces
    with modules_of(step):
        import utils
    with pytest.raises(SystemExit) as end, open("/dev/full", "wb", buffering=0) as full, utils.one_clear_error():
        full.write(b"a line")
    error = ("error: can't write a file, or what is printed (No space left on device): make room there (`df -h` shows "
             "which disk is full)\n")
    assert (end.value.code, capsys.readouterr().err) == (2, error)


@pytest.mark.parametrize("step, axis", [(4, "tp"), (9, "pp")])
def test_hosts_with_unlike_data(run_code, tmp_path, step, axis):
    """One host lacks a file of the corpus: its stage, replica or slice would be trained on another text."""
    for rank, files in enumerate(["abc", "ab"]):
        (tmp_path / str(rank)).mkdir()
        for name in files:
            (tmp_path / str(rank) / f"{name}.txt").write_text(f"A speech about {name}. " * 400)
    done = run_code(step, 2, """
import os, socket
socket.gethostname = lambda: "host" + os.environ["RANK"]
sys.argv[-1] += os.environ["RANK"]
""", *short_run(step, tmp_path, [f"--{axis}_size", 2, "--max_tokens", 10 ** 5, "--dataset_name", f"{tmp_path}/"]),
                    then="train.py", check=False, timeout=SECONDS)
    expected = ["ranks [1] read other tokens than rank 0", "--dataset_name"]
    ends_as_it_should(tmp_path, done.returncode, done.stderr, expected)


@pytest.mark.parametrize("bug", [ValueError("not enough values to unpack"), FileNotFoundError("weights.bin")], ids=str)
def test_a_bug_keeps_its_traceback(bug):
    """Only users' mistakes become one line: a learner who breaks something has to see where."""
    utils = Program(8).load().utils
    with pytest.raises(type(bug)) as end, utils.one_clear_error():
        raise bug
    assert end.value is bug


def test_no_flag_is_abbreviated():
    utils = Program(8).load().utils
    parser = utils.ArgumentParser()
    parser.add_argument("--password")
    for words, named in (["--pa", "secret"], "--pa"), (["--pa=secret", "--b"], "--pa"), (["secret"], "words that .*flag"):
        with pytest.raises(utils.UserError, match=f"unrecognized arguments: {named} .--help lists"):  # and no value
            parser.parse_args(words)


@pytest.mark.slow
def test_an_error_that_rank_0_does_not_meet(tmp_path):
    """The last stage writes, so it alone finds that it can't; it waits a while for rank 0 to speak."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "taken").write_text("a file")
    fails(tmp_path, 8, ["--pp_size", 2, "--run_name", "taken"], ["taken"], 2)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("step", STEPS)
def test_each_script_ends_with_one_line(tmp_path, step):
    fails(tmp_path, int(step), ["--micro_batch_size", 0], ["--micro_batch_size", "at least 1"])


@pytest.mark.parametrize("changes, files, expected", [
    ({}, {"config.json": None}, ["holds no model configuration"]),
    ({}, {"config.json": "{"}, ["holds no model configuration"]),
    ({}, {"tokenizer.json": None, "tokenizer_config.json": None}, ["holds no tokenizer"]),
    ({"vocab_size": 512}, {}, ["vocab_size=512", "do not belong together"]),
    *(({name: value}, {}, [f"{name}={value!r}", "--model_name"]) for name, value in (
        ("attention_bias", True), ("mlp_bias", True), ("hidden_act", "gelu"), ("attention_dropout", 0.1))),
    ({"model_type": "mistral"}, {}, ["model_type='mistral'", "--model_name"]),
    ({"rope_parameters": {**LLAMA3, "factor": "32"}}, {}, ["factor='32'", "a number above 0 in config.json"]),
    ({"hidden_size": 100}, {}, ["hidden_size=100", "num_attention_heads=8", "--num_attention_heads"]),
], ids=str)
def test_model_directories(tmp_path, changes, files, expected):
    """`changes` of the configuration; `files`: another content, or None where the file is missing."""
    folder = shutil.copytree(TINY, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    for name, content in files.items():
        (folder / name).unlink()
        if content:
            (folder / name).write_text(content)
    require_refused(*end_of("8", 1, short_run(8, tmp_path, ["--model_name", folder])), " ... ".join(expected))
    assert not (tmp_path / "runs" / "default_run").exists(), "it failed after training had begun"


@pytest.mark.parametrize("files, expected", [
    ({"empty.txt": b""}, ["holds 1 tokens", "seq_len + 1 = 33", "--seq_len"]),
    ({"short.txt": b"a few words"}, ["fewer than", "seq_len + 1 = 33", "larger corpus"]),
    ({"latin1.txt": "caf\u00e9 ".encode("latin-1") * 100}, ["latin1.txt", "has to be UTF-8"]),
    ({"no_text.jsonl": b'{"story": "once"}\n' * 50}, ["no string in a column 'text'", "story"]),
    ({"numbers.jsonl": b'{"text": 5}\n' * 50}, ["row 1 has no string in a column 'text'"]),
    ({"broken.jsonl": b'{"text": "a"}\n{"text": \n'}, ["broken.jsonl"]),
    ({"empty.jsonl": b""}, ["empty.jsonl"]),
    ({"rubbish.parquet": b"rubbish" * 50}, ["rubbish.parquet", "can't be read"]),
    ({"picture.png": b"\x89PNG"}, [".txt", "found none"]),
    ({"a.txt": b"words", "b.jsonl": b"words"}, ["one kind", "found jsonl, txt"]),
    ({}, ["one kind", "found none"]),
], ids=lambda value: ",".join(value))
def test_corpora(tmp_path, files, expected):
    """A file, or a folder."""
    (tmp_path / "corpus").mkdir()
    for name, content in files.items():
        (tmp_path / "corpus" / name).write_bytes(content)
    flags = short_run(8, tmp_path, ["--dataset_name", tmp_path / "corpus" / (name if len(files) == 1 else "")])
    require_refused(*end_of("8", 1, flags), " ... ".join(expected))
    assert not (tmp_path / "runs" / "default_run").exists(), "it failed after training had begun"
    left = [path.name for path in (tmp_path / "runs").glob("token_cache/*") if path.suffix != ".bin"]
    assert not left, f"half a file is left: {left}"


def test_a_run_that_diverges_says_so(tmp_path):
    """Not bad input alone, so training has begun by then: `runs` holds the steps before."""
    args = ["--learning_rate", 1e30, "--max_tokens", 2560, "--run_name", "diverges"]
    fails(tmp_path, 8, args, ["diverged: step ", "gradient norm ", "lower --learning_rate"])
