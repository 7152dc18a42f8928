"""Bad input: one clear line that names it, a code for a fault, and nothing is left on the disk."""

import functools
import re
import shlex
import sys
from unittest import mock

import pytest
from maintain.launcher import make_tools
from support.checkpoint_runs import (SCRIPT, TEXT, checkpoint, flags_of,
                                     write_model)
from support.refusal_tables import TABLE
from support.refusals import (SECRET, end_of, in_this_process, require_refused,
                              short_run)

from lab.launch import ROOT, STEPS

TOY = dict(vocab_size=1024, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
           intermediate_size=48, max_position_embeddings=64)


def marks(script: str) -> list[pytest.MarkDecorator]:
    """Of its step or its room."""
    name = re.match(r"step\d+|cluster|tools", f"step{script}" if script.isdigit() else script)
    return [getattr(pytest.mark, name[0])] if name else []


def rows(text: str):
    """Script, ranks, flags and words of each row of the table."""
    for line in filter(None, re.sub(r"\\\n +", "", text).splitlines()):
        if line[0] != " ":
            script, _, common = line.partition(" ")
            continue
        ranks, flags, words = re.fullmatch(r" +(?:x(\d+) )?(.*?) ?\| (.*)", line).groups()
        first = re.search("{(.+?)}", flags)
        for i, value in enumerate(first[1].split(",") if first else [""]):
            typed, said = (re.sub("{(.+?)}", lambda found: found[1].split(",")[i], each.replace("{}", value))
                           for each in (f"{common} {flags}", words))
            yield pytest.param(script, int(ranks or 1), typed, said, marks=marks(script), id=f"{script}: {said}"[:70])


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """places(name): what $NAME stands for, made once."""
    folder = tmp_path_factory.mktemp("places")
    known = {"RED": "We\x1b[31m", "NONE": folder / "none", "GPT2": STEPS["9"] / "run_gpt2.py", "TRAIN": SCRIPT,
             "TEXT": folder / "corpus.txt", "TINY": ROOT / "assets" / "tiny_llama",
             **{f"STEP{step}": STEPS[step] / "train.py" for step in "128"}}
    for name, text in {"corpus.txt": TEXT * 9, "BINARY": "a\nb \udcff\n", "ABC": "a\nb\nc\n",
                       "IPV6": "a address=10.0.0.1\nb address=fd00::2\n",
                       "TWICE": "a address=10.0.0.1\nb address=10.0.0.1\n"}.items():
        (folder / name).write_text(text, errors="surrogateescape")
    models = {  # type of the weights if there are any, configuration
        "BARE": (None, {}), "WIDER": (None, dict(hidden_size=64)), "DEEPER": (None, dict(num_hidden_layers=5)),
        "HEADS": (None, dict(num_attention_heads=2, num_key_value_heads=2, head_dim=16)),
        "ROTARY": (None, dict(rope_parameters={"rope_type": "default", "rope_theta": 1.0})),
        "LLAMA": ("float32", dict(kind="llama", head_dim=8, tie_word_embeddings=True)),
        "QWEN3": (None, dict(kind="qwen3")), "GPT_NEO": (None, dict(kind="gpt_neo", attention_types=[[["global"], 4]])),
        "GPT_OSS": (None, dict(kind="gpt_oss", rope_parameters={"rope_type": "default", "rope_theta": 1e4}))}

    @functools.cache
    def place(name: str):
        if name in models:
            dtype, config = models[name]
            write_model(folder / name, dtype=dtype, **(TOY if "kind" in config else {}), **config)
        elif name == "TOOLS":
            make_tools(folder / name)
        elif name in ("SAVED", "OTHER"):  # a checkpoint; and one with another --lora_alpha
            model, flags = ("BARE", {}) if name == "SAVED" else ("LLAMA", dict(lora_rank=4, lora_alpha=4))
            assert end_of(str(SCRIPT), 1, flags_of(
                folder, name, place(model), dataset_name=place("TEXT"), max_steps=2, save_every=2, warmup_steps=0,
                lr_decay="none", num_microbatches=2, **flags)) == (0, "")
            return checkpoint(folder, name, 2)
        return known.get(name, folder / name)

    return place


@pytest.mark.parametrize("script, ranks, flags, words", [*rows(TABLE)])
def test_refusals(places, tmp_path, monkeypatch, script, ranks, flags, words):
    def filled(text: str) -> str:
        return re.sub(r"\$([A-Z_0-9]+)", lambda name: str(tmp_path if name[1] == "HERE" else places(name[1])), text)

    monkeypatch.chdir(tmp_path)
    typed = [filled(word) for word in shlex.split(flags)]
    variables = [word for word in typed if re.match("[A-Z_]+=", word)]
    typed = [word for word in typed if word not in variables]
    if script.isdigit():
        typed = short_run(script, tmp_path, typed)
    code, stderr = end_of(script, ranks, typed, **dict(each.split("=", 1) for each in variables))
    require_refused(code, stderr, filled(words))
    left = {path.name for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".bin"}  # of encoded text
    assert left <= {".lock"} and SECRET not in stderr, left


@pytest.mark.parametrize("script", [pytest.param(script, marks=marks(script)) for script in (*STEPS, *(
    f"cluster/{name}.py" for name in ("train_distributed", "three_stages_simple_pp", "train_single_test", "generate",
                                      "plan")))])
def test_every_number_has_a_range(script):
    """No flag takes what is no number, and none a negative one, but a step's --seed, and --profile_batch where -1 is
    for none. One that has to be positive does not take zero either."""
    def stop(parser, *_):
        parsers.append(parser)
        sys.exit(1)

    parsers, path = [], STEPS[script] / "train.py" if script in STEPS else ROOT / script
    with mock.patch("argparse.ArgumentParser.parse_args", stop):
        assert in_this_process(path, []) == (1, "")
    numbers = {action.option_strings[-1]: action for action in parsers[0]._actions
               if action.option_strings and getattr(action.type, "__name__", "") in ("int", "float")}
    assert len(numbers) > 3
    for flag, action in numbers.items():
        if action.type in (int, float) and not action.choices:
            assert flag == "--seed"
            continue
        said, is_none = "", flag == "--profile_batch" and "three" in script
        for value in ("nan", "", "x", "-2", *["-1"] * (not is_none), "0"):
            if value != "0" or re.search("at least 1|above 0", said):
                with pytest.raises(ValueError, match=f"argument .*{flag}: .*{value.strip('nan')}") as error:
                    parsers[0].parse_args([f"{flag}={value}"])
                said = str(error.value)
