"""Bad input: one clear error, from one rank, a non-zero exit code, no hang, and nothing left running.

What is said is read from ranks in this process; how a run ends, from processes.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from unittest import mock

import pytest
from lab.launch import ROOT, STEPS, environment, fork, modules_of, torchrun
from lab.program import Program
from lab.thread_ranks import World
from maintain.processes import processes
from support.recordings import LLAMA3

TINY = ROOT / "assets" / "tiny_llama"
SECONDS = 60  # what runs longer hangs
SHORT = ["--seq_len", 32, "--micro_batch_size", 1, "--max_tokens", 256, "--num_hidden_layers", 2]  # 4 steps


def words(step: int, folder, args) -> list[str]:
    """The flags of a short run, with `args` last: of a flag given twice the second one counts."""
    data = ["--gradient_accumulation_steps", 2, "--log_dir", folder / "runs"] if step >= 3 else []
    return [str(word) for word in (*SHORT, *data, *args)]


def ends_as_it_should(folder, code: int, stderr: str, expected: list[str]) -> None:
    errors = re.findall("^error: .*", stderr, re.MULTILINE)
    assert code > 0 and len(errors) == 1, f"exit code {code}\n{stderr[-4000:]}"
    assert "Traceback" not in stderr[: stderr.index("error: ")], stderr
    assert all(text in errors[0] for text in expected), errors[0]
    assert not (folder / "runs" / "default_run").exists(), "it failed after training had begun"


@pytest.fixture
def says(tmp_path):
    def says(step: int, args: list, expected: list[str], num_ranks: int = 1) -> None:
        """The mistake is a UserError with these texts, before training has begun. On ranks in this process."""
        modules = [Program(step).load() for _ in range(num_ranks)]
        flags = ["train.py", *words(step, tmp_path, args)]
        with mock.patch.object(sys, "argv", flags), pytest.raises(ValueError) as end:
            World(num_ranks).run(lambda rank: modules[rank].train.main(), SECONDS)
        assert isinstance(end.value, modules[end.value.rank].utils.UserError), repr(end.value)
        assert all(text in str(end.value) for text in expected), end.value
        assert not (tmp_path / "runs" / "default_run").exists(), "it failed after training had begun"

    return says


def fails(folder, step, args, expected, num_processes=1):
    """The script ends as it should, in forked processes; of a hang stderr has the traceback."""
    done = fork(step, num_processes, *words(step, folder, args), check=False, timeout=SECONDS)
    ends_as_it_should(folder, done.returncode, done.stderr, expected)


def title(value):
    return " ".join(map(str, value[:4])) or None if isinstance(value, list) and str(value[0])[:2] == "--" else None


EXPERTS = ["--num_experts", 4]


def test_several_processes_of_torchrun_one_error(tmp_path):
    """Without HF_HUB_OFFLINE, as on a laptop in a train: no minute of retries. And nothing is left running."""
    marker = uuid.uuid4().hex
    unreachable = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}  # port 9 of this machine is nobody's
    flags = words(8, tmp_path, ["--dp_size", 2, "--dataset_name", "no/such"])
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
""", *words(step, tmp_path, [*sizes, flag, "1"]), then="train.py", check=False, timeout=SECONDS)
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
    flags = words(step, tmp_path, ["--log_dir", tmp_path / "runs", "--run_name", "full", *args])
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
    flags = words(step, tmp_path, args)
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
""", *words(step, tmp_path, [f"--{axis}_size", 2, "--max_tokens", 10 ** 5, "--dataset_name", f"{tmp_path}/"]),
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


@pytest.mark.parametrize("step, num_processes, args, expected", [
    (8, 4, ["--tp_size", 2, "--pp_size", 2, "--dp_size", 2], ["dp_size=2 x pp_size=2 x tp_size=2", "8", "4 run"]),
    (4, 3, ["--tp_size", 3], ["num_attention_heads=8", "tp_size=3", "divides 8"]),
    (8, 2, ["--tp_size", 2, "--num_key_value_heads", 1], ["num_key_value_heads=1", "tp_size=2", "divides 1"]),
    (7, 3, ["--pp_size", 3], ["pp_size=3", "num_hidden_layers=2", "--pp_size 2"]),
    (8, 1, ["--seq_len", "long"], ["--seq_len", "'long'"]),
    (3, 1, ["--lr_decay", "linear"], ["--lr_decay", "'linear'", "cosine"]),
    (8, 1, ["--max_tokens", 63], ["--max_tokens 63", "64"]),
    (8, 1, ["--profile_batch", 5], ["--profile_batch 5", "1 to 4"]),
    (8, 1, ["--run_name", "a/b"], ["--run_name 'a/b'", "without slashes"]),
    (8, 1, ["--device", "cuda"], ["--device cuda", "no GPU", "--device cpu"]),
    (8, 1, ["--no_such_flag"], ["--no_such_flag", "--help"]),
    (9, 2, ["--pipelines", "2;1,1"], ["Number of ranks in pipeline templates does not match world size: stages [1, 2]",
                                      "tp_size=1 need 3 processes, but 2 run"]),
    (9, 2, ["--pipelines", "2;2", "--num_microbatches", "6"],
     ["All pipelines must have a corresponding number of microbatches: got [6] for 2 pipelines: give a dictionary"]),
    (9, 2, ["--pipelines", "2;1"], ["stages of 1 decoder layers have 1 together, but the model has 2"]),
    (9, 1, ["--model_name_or_path", TINY], ["unrecognized arguments: --model_name_or_path"]),  # it reads no weights
    (9, 1, ["--random_weights"], ["unrecognized arguments: --random_weights"]),
    (9, 2, ["--pipelines", ""], ["argument --pipelines: '': write positive numbers and commas, as in 5,3"]),
    (9, 2, ["--pipelines", "2;2", "--dp_size", "2"], ["leave out --dp_size and --pp_size"]),
    (11, 2, ["--pp_size", 2, "--virtual_stages", 2, "--pp_engine", "zb"], ["--virtual_stages 2 with --pp_engine zb:"]),
    (11, 2, ["--pp_size", 2, "--pp_engine", "interleaved"], ["--virtual_stages 1 with --pp_engine interleaved:"]),
    (11, 2, ["--dp_size", 2, "--virtual_stages", 2], ["divides the stages of a pipeline: use --pp_size 2 or more"]),
    (11, 2, ["--pp_size", 2, "--virtual_stages", 5, "--pp_engine", "interleaved"], ["pp_size=2 x virtual_stages=5"]),
    (11, 2, ["--pp_size", 2, "--pp_engine", "zb", "--compile"],
     ["--pp_engine zb divides backward, but --compile leaves it in one piece"]),
    (12, 1, ["--zero", 1], ["--zero 1", "--dp_size 1", "raise --dp_size"]),
    (12, 2, ["--dp_size", 2, "--zero_shares", "2,1"], ["--zero_shares", "--zero 0", "use --zero"]),
    (12, 2, ["--dp_size", 2, "--zero", 1, "--zero_shares", "4,2,1"], ["3 parts", "among 2", "number for each"]),
    (12, 1, ["--zero_shares", "2,0"], ["--zero_shares", "at least 1, got 0"]),
    (13, 2, ["--dp_size", 2, "--zero", 3, "--shard_size", 3], ["--shard_size 3", "2 replicas", "a divisor"]),
    (13, 2, ["--dp_size", 2, "--gather_once"], ["--gather_once", "--zero is 0", "use --zero 3"]),
    (14, 1, ["--sequence_parallel"], ["--sequence_parallel", "--tp_size 1", "raise --tp_size"]),
    (14, 2, ["--tp_size", 2, "--sequence_parallel", "--seq_len", 5], ["5 tokens", "--tp_size 2", "multiple of 2"]),
    (15, 1, ["--zero", 1], ["--zero 1", "raise --dp_size or --cp_size"]),
    (15, 2, ["--cp_size", 2, "--zero", 1, "--zero_shares", "4,2,1"], ["3 parts", "among 2", "number for each"]),
    (15, 2, ["--cp_size", 2, "--seq_len", 30], ["--seq_len 30", "cp_size=2", "multiple of 4"]),
    (15, 2, ["--cp_size", 3], ["cp_size=3 x tp_size=1 needs 3", "2 run", "--nproc_per_node 3"]),
    (16, 2, ["--dp_size", 2, "--ep_size", 2], ["--ep_size", "are for experts", "use --num_experts"]),
    (16, 1, ["--balance_loss", 0.1], ["--balance_loss", "are for experts", "use --num_experts"]),
    (16, 2, [*EXPERTS, "--dp_size", 2, "--ep_size", 4], ["--ep_size 4 has to divide", "--dp_size 2"]),
    (16, 3, [*EXPERTS, "--dp_size", 3, "--ep_size", 3], ["--ep_size 3 has to divide --num_experts 4"]),
    (16, 1, [*EXPERTS, "--experts_per_token", 5], ["--experts_per_token 5 is more than --num_experts 4", "lower it"]),
    (17, 1, ["--outer_momentum", 0.5], ["--outer_momentum 0.5 with --local_steps 0", "add --local_steps"]),
    (17, 1, ["--local_steps", 5, "--outer_momentum", 1], ["--outer_momentum", "0 or more and below 1, got 1"]),
    (19, 1, ["--generators", 1], ["tp_size=1 + generators=1 needs 2 processes, but 1 run"]),
    (19, 4, ["--generators", 3, "--generator_tp_size", 2], ["--generators 3 is no multiple of --generator_tp_size 2"]),
    (19, 1, ["--generators", 0, "--generator_tp_size", 2], ["--generators 0 is no multiple of --generator_tp_size 2"]),
    (19, 4, ["--generators", 3, "--generator_tp_size", 3], ["num_attention_heads=8", "generator_tp_size=3"]),
    (19, 1, ["--generators", 0, "--group_size", 1], ["--group_size 1", "use 2 or more"]),
    (19, 1, ["--generators", 0, "--lag", 2], ["--lag", "invalid choice: 2", "0, 1"]),
    (19, 1, ["--lag", 1], ["--lag 1 without --generators", "add --generators 1"]),
    (19, 1, ["--generators", 0, "--seq_len", 3], ["--seq_len 3", "4 tokens of a prompt"]),
    (19, 1, ["--generators", 0, "--eval_every", 2], ["--eval_every 2", "rollouts read no corpus"]),
    (19, 1, ["--generators", 0, "--max_tokens", 511], ["--max_tokens 511 is less than the 512 of one step"]),
    (1, 1, ["--num_key_value_heads", 3], ["num_attention_heads=8", "num_key_value_heads=3"]),
    (3, 1, ["--tp_size", 2], ["--tp_size 2", "step 4"]),
    (3, 1, ["--dp_size", 2], ["--dp_size 2", "step 5"]),
    (3, 1, ["--pp_size", 2], ["--pp_size 2", "step 7"]),
    *((step, 1, [flag, "no/such"], [f"{flag} 'no/such'", f"no such path ({os.path.abspath('no/such')})", "Hub id"])
      for step, flag in ((1, "--model_name"), (8, "--model_name"), (8, "--dataset_name"))),
], ids=title)
def test_flags(says, step, num_processes, args, expected):
    says(step, args, expected, num_processes)


@pytest.mark.parametrize("step", STEPS)
def test_every_number_has_a_range(step, monkeypatch):
    """No flag but --seed takes a negative number, one takes zero where it may, and none what is no number."""
    modules = Program(step).load()
    flags = re.findall(r'add_argument\("(--\w+)", type=(\w+)', (STEPS[step] / "train.py").read_text())
    kinds = {"positive_int": "at least 1", "positive_float": "a number above 0", "zero_or_more": "0 or more",
             "zero_or_more_float": "0 or more"}
    assert {"--seq_len", "--learning_rate"} <= dict(flags).keys()
    assert {flag for flag, kind in flags if kind in ("int", "float")} <= {"--seed"}
    for flag, kind in ((flag, kind) for flag, kind in flags if kind in kinds):
        for value in ("-1", "nan", "0")[: 3 if kind.startswith("positive") else 2]:
            expected = f"argument {flag}: " + f"must be {kinds[kind]}, got {value}" * (value != "nan")
            monkeypatch.setattr("sys.argv", ["train.py", f"{flag}={value}"])
            with pytest.raises(modules.utils.UserError, match=expected):
                modules.train.parse_args(*["A script."] * (step == "9"))


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
def test_model_directories(says, tmp_path, changes, files, expected):
    """`changes` of the configuration; `files`: another content, or None where the file is missing."""
    folder = shutil.copytree(TINY, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    for name, content in files.items():
        (folder / name).unlink()
        if content:
            (folder / name).write_text(content)
    says(8, ["--model_name", folder], expected)


@pytest.mark.parametrize("files, expected", [
    ({"empty.txt": b""}, ["holds 1 tokens", "seq_len + 1 = 33", "--seq_len"]),
    ({"short.txt": b"a few words"}, ["fewer than", "seq_len + 1 = 33", "larger corpus"]),
    ({"latin1.txt": "caf\u00e9 ".encode("latin-1") * 100}, ["has to be UTF-8", "latin1.txt"]),
    ({"no_text.jsonl": b'{"story": "once"}\n' * 50}, ["no string in a column 'text'", "story"]),
    ({"numbers.jsonl": b'{"text": 5}\n' * 50}, ["row 1 has no string in a column 'text'"]),
    ({"broken.jsonl": b'{"text": "a"}\n{"text": \n'}, ["broken.jsonl"]),
    ({"empty.jsonl": b""}, ["empty.jsonl"]),
    ({"rubbish.parquet": b"rubbish" * 50}, ["rubbish.parquet", "can't be read"]),
    ({"picture.png": b"\x89PNG"}, [".txt", "found none"]),
    ({"a.txt": b"words", "b.jsonl": b"words"}, ["found jsonl, txt", "one kind"]),
    ({}, ["found none", "one kind"]),
], ids=lambda value: ",".join(value))
def test_corpora(says, tmp_path, files, expected):
    """A file, or a folder."""
    (tmp_path / "corpus").mkdir()
    for name, content in files.items():
        (tmp_path / "corpus" / name).write_bytes(content)
    says(8, ["--dataset_name", tmp_path / "corpus" / (name if len(files) == 1 else "")], expected)
    left = [path.name for path in (tmp_path / "runs").glob("token_cache/*") if path.suffix != ".bin"]
    assert not left, f"half a file is left: {left}"


def test_a_run_that_diverges_says_so(tmp_path):
    """Not bad input alone, so training has begun by then: `runs` holds the steps before."""
    args = ["--learning_rate", 1e30, "--max_tokens", 2560, "--run_name", "diverges"]
    fails(tmp_path, 8, args, ["diverged: step ", "gradient norm ", "lower --learning_rate"])
