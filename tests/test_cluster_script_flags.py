"""What the scripts for a few unlike machines take and refuse: flags; layers by speed."""

import argparse
import re
import sys

import pytest
import torch
from lab.launch import ROOT, STEPS, modules_of
from torch.distributed.run import get_args_parser

with modules_of(9):
    import three_stages_simple_pp as three_stages
    import train_distributed
    import train_single_test as single_test
    from run import decide, flags, loop

SECRET = "c0rrect-h0rse"
MADE = argparse.Namespace(model=argparse.Namespace(config=None))


def test_ends_of_a_model_weigh_as_much_as_measured():
    """Layers of the toy Qwen: the head's seconds count at the last stage, the embedding's at the first."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def layers(num_layers, embedding=0.0, layer=(1.0, 1.0, 1.0), head=0.0) -> list[int]:
        with torch.device("meta"):
            model = Qwen3ForCausalLM(Qwen3Config(**{**three_stages.TOY, "num_hidden_layers": num_layers}))
        return decide.layers_of_stages(model, [[embedding, *[each] * num_layers, head] for each in layer], 3)

    assert layers(9) == [3, 3, 3] and layers(6, layer=(1.0, 2.5, 1.0), head=3.0) == [4, 1, 1]
    assert layers(10, head=2.0) == [4, 4, 2] and layers(10, embedding=2.0) == [2, 4, 4]
    assert layers(9, embedding=3.0, head=3.0) == [2, 5, 2]
    with pytest.raises(ValueError, match="3 stages for a model of 2 decoder layers.* at most 2 processes"):
        layers(2)


def test_without_speeds_the_head_counts_by_its_parameters():
    """A vocabulary of 60 layers' parameters: the last stage gets one layer, as many as a stage has at least."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        toy = Qwen3ForCausalLM(Qwen3Config(**three_stages.TOY))
        large = Qwen3ForCausalLM(Qwen3Config(**{**three_stages.TOY, "vocab_size": 90_000}))
    assert decide.layers_of_stages(toy, None, 3) == [2, 2, 2]
    assert decide.layers_of_stages(toy, None, 1) == [6]
    assert decide.layers_of_stages(large, None, 3) == [3, 2, 1]


@pytest.fixture
def parse(monkeypatch):
    def parse(*flags, module=three_stages, **variables):
        for name in "BATCH_SIZE", "MICROBATCH_NUM", "PROFILE_BATCH":
            monkeypatch.setenv(name, variables.get(name, ""))
        monkeypatch.setattr(sys, "argv", ["script.py", *map(str, flags)])
        return module.parse_args()

    return parse


def test_flags_then_environment_then_defaults(parse):
    def found(args):
        return args.batch_size, args.microbatch_num, args.profile_batch, args.train_steps

    assert found(parse(BATCH_SIZE="", MICROBATCH_NUM=" ")) == (16, 4, 0, None)
    assert found(parse(BATCH_SIZE="6", MICROBATCH_NUM="3", PROFILE_BATCH="-1")) == (6, 3, -1, None)
    assert found(parse("--batch_size", 9, "--train_steps", 5, BATCH_SIZE="6", MICROBATCH_NUM="3")) == (9, 3, 0, 5)
    for module in (three_stages, train_distributed, single_test):
        assert parse("--dtype", "float64", module=module).dtype == "float64"


@pytest.mark.parametrize("words, kept", [
    (["--sudo_pass", SECRET, "--train_steps", "5"], ["--train_steps", "5"]),
    (["--train_steps", "5", f"--sudo_pass={SECRET}"], ["--train_steps", "5"]),
    (["--sudo_pass", f"--su{SECRET}", "--run_name", "a"], ["--run_name", "a"]),
    (["--run_name", "a", "--sudo_pass"], ["--run_name", "a"]),
    (["--sum", "1", "--sudo_passes", "2", "--su=3", "-su"], None),
])
def test_a_password_leaves_the_command_line(monkeypatch, capsys, words, kept):
    """The process starts anew without it. No other flag is dropped, whatever it begins with. One rank warns."""
    started = []
    monkeypatch.setattr(three_stages.os, "execv", lambda path, words: started.append(words))
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-u", "script.py", *words])
    for rank in "0", "1":
        monkeypatch.setenv("RANK", rank)
        three_stages.drop_password()
    assert capsys.readouterr().err.count("warning: --sudo_pass is ignored") == (kept is not None)
    assert started == ([] if kept is None else [[sys.executable, "-u", "script.py", *kept]] * 2)


def test_flags_of_adamw(parse):
    args = parse("--weight_decay", 3, "--adam_betas", "0.7,0.8", "--learning_rate", 1, module=train_distributed)
    made = flags.make_adamw(args, [("trained", torch.nn.Parameter(torch.ones(1))),
                                   ("frozen", torch.nn.Parameter(torch.ones(1), False))])
    assert made.defaults["betas"] == (0.7, 0.8) and made.defaults["weight_decay"] == 3
    assert [len(group["params"]) for group in made.param_groups] == [1]


@pytest.mark.parametrize("first, last", [(1, 20), (0, 19)])
def test_a_timeline_of_no_step(first, last):
    """Steps count from 1, as in the course, and batches of three_stages_simple_pp.py from 0, as in its ancestor."""
    for batch in first - 1, first, last:
        loop.check_profile_batch(argparse.Namespace(profile_batch=batch, first_batch=first), 20)
    for batch in first - 2, last + 1:
        with pytest.raises(ValueError, match=f"--profile_batch {batch} is not among the steps {first} to {last}: .* "
                                             f"{first - 1} for none"):
            loop.check_profile_batch(argparse.Namespace(profile_batch=batch, first_batch=first), 20)


def test_numbers_of_micro_batches(parse, monkeypatch):
    def shares_of(args, total=None) -> list[int]:
        told = args.num_microbatches and args.num_microbatches[0]
        return decide.choose_shares(args, MADE, 3, told, total, None, None)

    monkeypatch.setattr(decide.dist, "get_world_size", lambda: 3)
    for counts in ("4,2", "4,2,1,1"):
        args = parse("--num_microbatches", counts, module=train_distributed)
        with pytest.raises(ValueError, match=rf"--num_microbatches {counts}: write 3 numbers"):
            shares_of(args)
    assert shares_of(parse("--num_microbatches", "4,2,1", module=train_distributed)) == [16, 8, 4]
    equal = parse("--equal_shares", module=train_distributed)
    assert shares_of(equal) == [32, 32, 32]
    assert shares_of(equal, total=7) == [3, 2, 2]  # a checkpoint's
    for total in (2, 1 << 40):
        with pytest.raises(ValueError, match=f"{total} samples a step for 3 pipelines: choose 3 to 1048576"):
            shares_of(equal, total=total)


def test_no_flag_is_an_ambiguous_prefix_of_torchruns():
    """torchrun's parser looks at all words, the script's too, and ends with an error where it could mean several."""
    paths = [path for folder in (*STEPS.values(), ROOT / "cluster") for path in folder.rglob("*.py")]
    flags = {flag for path in paths for flag in re.findall(r'"(--[a-z_]+)"', path.read_text())}
    assert {"--measure", "--equal_shares", "--memory_gb", "--plan", "--microbatch_size"} <= flags
    options = get_args_parser()._option_string_actions
    for flag in flags:
        spellings = flag.replace("_", "-"), "--" + flag[2:].replace("-", "_")
        assert get_args_parser().parse_args(["script.py", flag, "value"]).training_script_args == [flag, "value"]
        assert all(each in options or sum(known.startswith(each) for known in options) < 2 for each in spellings), flag
    with pytest.raises(SystemExit):
        get_args_parser().parse_args(["script.py", "--even"])
