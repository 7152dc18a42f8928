"""cluster/generate.py over several ranks, each with a stage of the model: the texts of transformers in one process."""

import argparse
import contextlib
import io
import json
import re
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from lab.launch import ROOT, environment, fork, modules_of, torchrun
from maintain.processes import eventually
from support.checkpoint_runs import EXACT, STEPS, checkpoint, write_model
from support.refusals import end_of, require_refused

with modules_of(9):
    import generate
    from hosts.host_facts import ASKS
    from inference import make_stage, stages, talk

SCRIPT, CPU = ROOT / "cluster" / "generate.py", ["--device", "cpu"]
PROMPTS = ["The state of the union is", "We", "It was the best of times, it was the worst of times;", "And", "Why not"]
NEW = 24
LLAMA = dict(vocab_size=1024, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=96, initializer_range=0.3, head_dim=8)
KINDS = {  # of transformers -> configuration, layers of the stages; None: step 9 can't divide it, one process writes
    "llama": (LLAMA, "3,2,1"),
    "gpt2": (dict(vocab_size=1024, n_embd=32, n_layer=6, n_head=4, n_positions=96, initializer_range=0.3), "1,2,3"),
    "gemma2": (dict(LLAMA, sliding_window=8, query_pre_attn_scalar=8, tie_word_embeddings=False), "1,1,4"),
    "qwen3_next": (dict(LLAMA, layer_types=["linear_attention", "full_attention"] * 3, linear_num_value_heads=2,
                        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4,
                        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16), "2,2,2"),
    "mamba2": (dict(vocab_size=1024, hidden_size=32, state_size=8, num_hidden_layers=3, num_heads=8, head_dim=8,
                    n_groups=2), None),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):  # with one model of each kind, whose sizes make it say something else after each word
    return tmp_path_factory.mktemp("models")


def model_of(folder, kind: str):
    if not (folder / kind).exists():
        torch.manual_seed(0)
        write_model(folder / kind, kind, "float32", **KINDS[kind][0])
    return folder / kind


def write(ranks: int, *words, check: bool = True, **options) -> subprocess.CompletedProcess:
    """generate.py over so many ranks."""
    modules = [f"transformers.models.{kind}.modeling_{kind}" for kind in KINDS]
    return fork(9, ranks, *CPU, *words, script=SCRIPT, modules=["peft", *modules], check=check, timeout=100, **options)


def prompts(words=PROMPTS) -> list[str]:
    return [word for prompt in words for word in ("--prompt", prompt)]


def texts(done) -> str:
    """What it printed behind the table of the ranks."""
    return re.split(r"^pipeline 0: .*\n", done.stdout, flags=re.MULTILINE)[-1]


def in_one_process(path, adapter=None, **settings) -> str:
    """The texts of transformers' generate(), which end where the model or the tokenizer says."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, written = AutoTokenizer.from_pretrained(path), ""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model = PeftModel.from_pretrained(model, adapter) if adapter else model
    for number, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        torch.manual_seed(number)
        ends = {model.generation_config.eos_token_id, tokenizer.eos_token_id} - {None}
        settings = {"do_sample": False, "eos_token_id": [*ends], "max_new_tokens": NEW, **settings}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)
        written += tokenizer.decode(out[0], skip_special_tokens=True) + "\n"
    return re.sub("\r\n?", "\n", written)  # as a file is read


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_texts_of_one_process(folder, kind):
    """Greedy, five prompts of unlike length at once, longer than the windows of attention."""
    path, layers = model_of(folder, kind), KINDS[kind][1]
    done = write(3 if layers else 1, "--checkpoint", path, *(("--pipelines", layers) if layers else ()), *prompts(),
                 "--max_new_tokens", NEW)
    assert texts(done) == in_one_process(path)
    assert len(set(texts(done)[-60:])) > 10, "a model that repeats one word would hide a wrong position"


def test_drawn_texts(folder):
    """By temperature and top_p, a prompt by itself says what it says beside others, and in one process."""
    path = model_of(folder, "llama")
    words = ["--checkpoint", path, "--temperature", 0.9, "--top_p", 0.8, "--max_new_tokens", NEW]
    together = texts(write(3, *words, "--pipelines", "1,2,3", *prompts()))
    assert together == in_one_process(path, do_sample=True, temperature=0.9, top_p=0.8) != in_one_process(path)
    assert together.startswith(texts(write(2, *words, *prompts(PROMPTS[:1]))))
    assert together == write(1, *words, *prompts()).stdout


def beams_of(folder):
    """The Llama, whose file asks for a beam search."""
    beams = shutil.copytree(model_of(folder, "llama"), folder / "beams", dirs_exist_ok=True)
    (beams / "generation_config.json").write_text('{"num_beams": 4}')
    return beams


def test_a_beam_search(folder):
    path = beams_of(folder)
    done = write(1, "--checkpoint", path, *prompts(), "--max_new_tokens", NEW)
    assert done.stdout == in_one_process(path) != in_one_process(folder / "llama")


def adapter_of(folder, kind: str, **settings):
    """An adapter that changes what the model says."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    path = folder / f"{kind}-adapter-{len(settings)}"
    if not path.exists():
        torch.manual_seed(1)
        config = LoraConfig(task_type="CAUSAL_LM", r=4, **{"target_modules": "all-linear", **settings})
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_of(folder, kind)), config)
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.data.normal_(std=0.2)
        model.save_pretrained(path)
    return path


def test_an_adapter_beside_the_weights(folder):
    path = model_of(folder, "llama")
    adapter = adapter_of(folder, "llama", layers_to_transform=[1, 3], target_modules=["q_proj", "up_proj"])
    done = write(3, "--checkpoint", path, "--adapter", adapter, "--pipelines", "1,2,3", *prompts(),
                 "--max_new_tokens", NEW)
    assert texts(done) == in_one_process(path, adapter) != in_one_process(path)
    path, adapter = model_of(folder, "mamba2"), adapter_of(folder, "mamba2", target_modules=["in_proj"])
    done = write(1, "--checkpoint", path, "--adapter", adapter, *prompts(), "--max_new_tokens", NEW)
    assert done.stdout == in_one_process(path, adapter) != in_one_process(path)


def test_a_run_on_disks_of_their_own(recorded, tmp_path):
    """No disk has all files. The last host is the one that one types on."""
    whole = checkpoint(recorded, "2;1", STEPS)
    for host in range(3):
        step = shutil.copytree(whole, tmp_path / f"host{host}" / "run" / whole.name)
        shutil.copy(whole.parent / "latest", step.parent)
        (step / f"model-0000{1 + host % 2}-of-00002.safetensors").unlink()
    (step / "tokenizer.json").unlink()
    done = fork(9, 3, tmp_path / "out", SCRIPT, *CPU, "--checkpoint", "run", "--pipelines", "1,1,2", *prompts(),
                "--max_new_tokens", 8, script=EXACT, env={"HOSTS": str(tmp_path), "PLAIN": "1"}, modules=["peft"],
                timeout=100)
    assert texts(done) == in_one_process(whole, max_new_tokens=8)


def test_the_cache_by_the_name_that_this_transformers_gives_it(monkeypatch):
    """"past_key_values" until 5.23. What the base of a model takes, the model takes."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda self, input_ids, **kwargs: None)
    monkeypatch.setattr(LlamaModel, "forward", lambda self, input_ids, past_key_values=None: None)
    assert stages.name_of_cache(model) == "past_key_values"
    monkeypatch.setattr(LlamaModel, "forward", lambda self, input_ids, cache=None: None)
    assert stages.name_of_cache(model) == "cache"
    monkeypatch.setattr(LlamaModel, "forward", lambda self, input_ids, kv_store=None: None)
    monkeypatch.setattr("transformers.__version__", "9.9")
    with pytest.raises(NotImplementedError, match=r"takes no cache or past_key_values: .* this version, 9\.9, is new"):
        stages.name_of_cache(model)


def test_layers_by_memory(monkeypatch):
    """The embedding and the head, of which each is worth four layers, count on the first and the last rank."""
    monkeypatch.setattr(make_stage, "parts_of", lambda model: (400, 100, 400, 12))
    for free, layers in ([8, 8, 8], [3, 7, 2]), ([16, 8, 8], [6, 5, 1]), ([8, 8, 1], [4, 7, 1]):
        assert make_stage.layers_by_memory(None, free) == layers
    with pytest.raises(ValueError, match="12 decoder layers, and each of 13 processes needs at least one"):
        make_stage.layers_by_memory(None, [8] * 13)


def test_prompts_as_people_write(monkeypatch):
    prompts = ["We must\ngo", "a\tb", "Allez\u00a0!", "\u3000a", "a\u200db"]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    monkeypatch.setattr(sys, "argv", ["generate.py", "--checkpoint", "model", *words])
    assert generate.parse_args().prompt == prompts


TEMPLATE = ("{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}")
LINES = "Who are you?\n\n  And thén?\nWhy?\n"


@pytest.fixture(scope="module")
def chatty(folder):
    """A model with a chat template."""
    path = shutil.copytree(model_of(folder, "llama"), folder / "chatty")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def test_a_chat_remembers_its_turns_as_far_as_there_is_room(monkeypatch, tmp_path, capsys):
    """Each question comes with all that was said before, but for the first turns; one that is too long is left out.

    A byte-order mark, with which the template and the input begin, is no part of them."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "tiny_llama")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8-sig")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=1024, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                 num_attention_heads=2, max_position_embeddings=100,
                                 initializer_range=0.3)).save_pretrained(tmp_path)
    asked, said, seen, write = [], [], [], LlamaForCausalLM.generate

    def listen(model, input_ids, **settings):
        seen.append(capsys.readouterr().out)
        out = write(model, input_ids, **settings)
        seen.append(capsys.readouterr().out)
        asked.append(tokenizer.decode(input_ids[0]))
        said.append(tokenizer.decode(out[0, input_ids.shape[1]:], skip_special_tokens=True))
        return out

    monkeypatch.setattr(LlamaForCausalLM, "generate", listen)
    monkeypatch.setitem(sys.modules, "inference.make_stage", make_stage)  # where a Facts is unpickled
    monkeypatch.setattr(sys, "argv", ["generate.py", "--checkpoint", str(tmp_path), "--chat", "--device", "cpu",
                                      "--max_new_tokens", "8"])
    lines = [f"Question {i}" + " word" * 99 * (i == 2) for i in range(10)]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n\n".join(lines).encode("utf-8-sig"))))
    generate.main()
    assert len(asked) == 9 and asked[0] == "<user>Question 0\n<assistant>" and "not answered" in "".join(seen)
    assert any(seen[1::2]), "words are printed while the model writes"
    assert asked[1:3] == [f"{asked[i]}{said[i]}\n<user>Question {1 + 2 * i}\n<assistant>" for i in range(2)]
    assert "Question 0\n" not in asked[-1] and asked[-1].endswith(f"{said[-2]}\n<user>Question 9\n<assistant>")


def test_a_prompt_out_of_a_file_with_a_byte_order_mark():
    """As $(cat FILE) gives it."""
    args = argparse.Namespace(chat=False, prompt=["\ufeffWe", "\ufeff"], max_new_tokens=1)
    with pytest.raises(generate.UserError, match="the prompt '' has no token"):
        next(talk.talks(args, None, lambda text, **_: {"input_ids": [*map(ord, text)]}))
    args.prompt.pop()
    assert next(talk.talks(args, None, lambda text, **_: {"input_ids": [*map(ord, text)]}))[1] == [[*map(ord, "We")]]


def start_chat(path, command: list, **options) -> subprocess.Popen:
    words = [*command, *CPU, "--checkpoint", path, "--chat", "--max_new_tokens", 8]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(list(map(str, words)), env=environment(), start_new_session=True, **{**pipes, **options})


@pytest.mark.slow
def test_a_chat(chatty):
    """Three turns, each with all that was said before, as in one process; and nobody who could type."""
    found, expected = (start_chat(chatty, command).communicate(LINES, timeout=100)[0].split(f"{ASKS}\n")[1]
                       for command in (torchrun(3, SCRIPT), [sys.executable, SCRIPT]))
    assert found == expected and len(found) > 20
    silent = start_chat(chatty, torchrun(2, SCRIPT), stdin=subprocess.DEVNULL)
    assert f"{socket.gethostname()} gets no line to answer" in silent.communicate(timeout=100)[0]
    assert silent.returncode == 1


@pytest.mark.slow
def test_a_rank_that_is_lost_in_a_chat(chatty, tmp_path):
    """The others end at the next line, with one of their own; here without a torchrun that would end them at once."""
    words = [sys.executable, SCRIPT, *CPU, "--checkpoint", chatty, "--chat", "--max_new_tokens", 8]
    ranks = []
    for rank in range(3):
        variables = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT="29653", WORLD_SIZE="3", RANK=str(rank),
                                LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="3")
        with open(tmp_path / str(rank), "w") as output:
            ranks.append(subprocess.Popen(list(map(str, words)), env=variables, stdin=subprocess.PIPE, stdout=output,
                                          stderr=output, text=True))
    assert eventually(lambda: ASKS in (tmp_path / "0").read_text(), 60)
    print("Hello", file=ranks[0].stdin, flush=True)
    assert eventually(lambda: len((tmp_path / "0").read_text().split(ASKS)[1]) > 8)
    ranks[2].kill()
    with contextlib.suppress(BrokenPipeError):  # it was still writing the first answer
        print("And now?", file=ranks[0].stdin, flush=True)
    assert ranks[0].wait(30) == ranks[1].wait(30) == 2
    for rank, text in enumerate((tmp_path / name).read_text() for name in "01"):
        assert re.findall("^error: (.*) has lost", text, re.MULTILINE) == [f"rank {rank}"] and "Traceback" not in text


@pytest.mark.parametrize("ranks, words, message", [
    (3, ["--prompt", "word " * 90], "tokens, and with --max_new_tokens 24 it is more than the 96 positions"),
    (3, ["--prompt", "We", "--adapter", "{gpt2}"], "is no adapter for this model"),
    (2, ["--chat", "--prompt", "We"], "has no chat template"),
    (2, ["--checkpoint", "{beams}", "--prompt", "We"], "asks for a beam search (num_beams 4)"),
    (3, ["--checkpoint", "{qwen3_next}", "--prompt", "We", "--pipelines", "1,2,3"], "has none of attention"),
    (2, ["--checkpoint", "{mamba2}", "--prompt", "We"], "One process writes with it: start generate.py without"),
    (1, ["--prompt", "We", "--adapter", "{gpt2}"], "is no adapter for this model"),
    (1, ["--prompt", "We", "--adapter", "{deeper}"], "is no adapter for this model: 70 of its matrices"),
    (1, ["--checkpoint", "{large}", "--prompt", "We"], "not enough memory for the weights (needed of free MB: "),
])
def test_mistakes(folder, ranks, words, message):
    deeper = shutil.copytree(adapter_of(folder, "llama"), folder / "deeper", dirs_exist_ok=True)
    config = json.loads((deeper / "adapter_config.json").read_text())
    (deeper / "adapter_config.json").write_text(json.dumps({**config, "layers_to_transform": [1]}))
    large = shutil.copytree(model_of(folder, "llama"), folder / "large", dirs_exist_ok=True)
    config = json.loads((large / "config.json").read_text())
    (large / "config.json").write_text(json.dumps({**config, "vocab_size": 10**12}))
    names = {"large": large, "gpt2": adapter_of(folder, "gpt2"), "beams": beams_of(folder), "deeper": deeper,
             **{kind: model_of(folder, kind) for kind in ("qwen3_next", "mamba2")}}
    flags = ["--checkpoint", model_of(folder, "llama"), "--max_new_tokens", NEW, *(word.format(**names) for word in words)]
    require_refused(*end_of("cluster/generate.py", ranks, [*CPU, *flags]), message)


@pytest.mark.parametrize("dtype, device, chosen, stored, expected", [
    ("auto", "cuda", torch.float32, torch.bfloat16, "float32"), ("auto", "cuda", torch.float32, torch.float16, "auto"),
    ("auto", "cuda", torch.bfloat16, torch.bfloat16, "auto"), ("auto", "cpu", torch.float32, torch.bfloat16, "auto"),
    ("bfloat16", "cuda", torch.bfloat16, torch.bfloat16, "bfloat16")])
def test_weights_on_a_gpu_without_bfloat16(monkeypatch, dtype, device, chosen, stored, expected):
    """Where step 9 chooses float32 on a GPU, weights that are stored in bfloat16 are in float32, too; others stay."""
    from transformers import LlamaConfig

    class Made(Exception):
        pass

    def make(args, *_):
        raise Made(make_stage.dtype_here(args, make_stage.Facts("", "", LlamaConfig(dtype=stored), None, None)))

    monkeypatch.setattr(talk, "meet", lambda args: (torch.device(device), chosen))
    monkeypatch.setattr(talk, "drawing", lambda args: {})
    monkeypatch.setattr(talk, "WholeModel", make)
    monkeypatch.setattr(talk.dist, "new_group", lambda **_: None)
    monkeypatch.setattr(talk.dist, "get_world_size", lambda: 1)
    with pytest.raises(Made, match=f"^{expected}$"):
        talk.generate_all(argparse.Namespace(dtype=dtype, seed=0))
