"""LoRA of train_distributed.py, with --tp_size too: losses, gradients and files are those of plain peft and AdamW."""

import json
import math
import subprocess
import sys
import zlib

import pytest
import torch
from lab.huggingface import float64_throughout
from lab.launch import fork, metrics
from support.checkpoint_runs import ROOT, SCRIPT, TEXT, checkpoint, flags_of, newest, write_model

TOLERANCE = 1e-9
STEPS, SAMPLES, SEQ_LEN, RANK, MAX_GRAD_NORM = 3, 8, 16, 4, 0.05
RATES = [0.005, 0.01, 0.005]  # a step of warm-up, then half a cosine to zero behind the last step
NARROW = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              head_dim=8, initializer_range=0.1, pad_token_id=0)
FAMILIES = {
    "llama": dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, initializer_range=0.1),
    "gpt2": dict(n_embd=32, n_layer=3, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                 initializer_range=0.1),
    "qwen3": NARROW, "olmo2": NARROW, "glm4": NARROW,  # norms of heads; norms of whole outputs; fused matrices
    "mixtral": {**NARROW, "num_local_experts": 4, "num_experts_per_tok": 2},
}
TOPOLOGIES = {  # name -> ranks, flags: 8 micro-batches a step of one sample in each
    "one": (1, ["--num_microbatches", "8"]),
    "3;1,2": (3, ["--num_microbatches", "5,3", "--pipelines", "3;1,2"]),
    "tp2": (2, ["--num_microbatches", "8", "--tp_size", "2"]),
    "1,1,1": (3, ["--num_microbatches", "8", "--pipelines", "1,1,1", "--recompute", "--pp_engine", "afab"]),
    "1,rest x tp2": (4, ["--num_microbatches", "8", "--pipelines", "1,2", "--tp_size", "2"]),
}
PAIRS = [*(f"pair {i}: " + "why so long? " * (1 + i % 3) for i in range(SAMPLES)),
         *("because " * (1 + i % 4) for i in range(SAMPLES))]


def write_data(folder) -> dict[str, str]:
    """An epoch of one step each: a text of 8 samples, and 8 questions with answers of unlike lengths."""
    tokenizer = read_tokenizer(folder)
    words = (TEXT * 20).split(" ")
    count = next(n for n in range(len(words)) if len(tokenizer(" ".join(words[:n]))["input_ids"]) > SAMPLES * SEQ_LEN)
    (folder / "text.txt").write_text(" ".join(words[:count]))
    rows = [{"prompt": PAIRS[i], "completion": PAIRS[i + SAMPLES]} for i in range(SAMPLES)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"text": folder / "text.txt", "pairs": folder / "pairs.jsonl"}


def read_tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "llama")


def samples(folder, data: str) -> list[tuple[list[int], int]]:
    """Tokens of each sample, and the number of those in front that are no targets."""
    tokenizer = read_tokenizer(folder)
    if data == "text":
        tokens = tokenizer((folder / "text.txt").read_text(), add_special_tokens=False)["input_ids"]
        tokens.append(tokenizer.eos_token_id)
        return [(tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1], 1) for i in range(SAMPLES)]
    found = []
    for i in range(SAMPLES):
        prompt, completion = (tokenizer(PAIRS[k], add_special_tokens=False)["input_ids"] for k in (i, i + SAMPLES))
        found.append(([*prompt, *completion, tokenizer.eos_token_id][: seq_len(data) + 1], len(prompt)))
    return found


def seq_len(data: str) -> int:
    return SEQ_LEN if data == "text" else 40


def with_adapters(model, kinds: tuple[str, ...], dtype: torch.dtype):
    """The model of peft with an adapter beside each matrix, which is a module of these `kinds`; and what it trains."""
    from peft import LoraConfig, get_peft_model

    linear = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if ".0." in name
                     and type(module).__name__ in kinds})
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=8, target_modules=linear))
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    for name, param in trained.items():
        seed = 42 + zlib.crc32(name.replace(".default.", ".").encode())
        bound = 1 / math.sqrt(param.shape[1]) if "lora_A" in name else 0.0
        param.data = torch.zeros(param.shape).uniform_(
            -bound, bound, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return model, trained


def plain_steps(model, trained: dict, samples: list, rates: list[float], max_norm: float) -> list[tuple[float, ...]]:
    """Losses, norms and rates of steps of one process without any code of ours, each with all samples."""
    optimizer, rows = torch.optim.AdamW(trained.values()), []
    for rate in rates:
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = rate
        total, count = 0.0, 0
        for tokens, given in samples:
            logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0, given - 1 :]
            total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[given:]), reduction="sum")
            count += len(tokens) - given
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), max_norm)
        rows.append((total.item() / count, norm.item(), rate))
        optimizer.step()
    return rows


def in_plain_peft(folder, family: str, data: str):
    """What plain_steps() returns, and the model with its last gradients."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float64)
    model, trained = with_adapters(model, ("Linear", "Conv1D"), torch.float64)
    rows = plain_steps(model, trained, samples(folder, data), RATES, MAX_GRAD_NORM)
    assert all(norm > 1.5 * MAX_GRAD_NORM for _, norm, _ in rows), "nothing is clipped"
    return rows, model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    torch.manual_seed(0)
    for family, sizes in FAMILIES.items():
        write_model(folder / family, family, "float64", vocab_size=1024, max_position_embeddings=64, **sizes)
    write_data(folder)
    return folder


def run(folder, name: str, family: str, data: str, topology: str, *more, env=None, **changes):
    ranks, flags = TOPOLOGIES[topology]
    defaults = dict(dataset_name=folder / {"text": "text.txt", "pairs": "pairs.jsonl"}[data], seq_len=seq_len(data),
                    max_steps=STEPS, warmup_steps=1, learning_rate=RATES[1], max_grad_norm=MAX_GRAD_NORM,
                    save_every=2, lora_rank=RANK, lora_alpha=8)
    flags = [*flags_of(folder, name, folder / family, **{**defaults, **changes}), *flags, *more]
    return fork(9, ranks, folder / f"out_{name}", SCRIPT, *flags, modules=["peft"], env=env,
                script=ROOT / "tests" / "support" / "checkpoint_runs.py"), ranks


def whole(key: str, parts: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """A gradient out of those of the ranks of a tp group, of which those of what is not split are equal."""
    if parts[0].shape == shape:
        assert all((part - parts[0]).abs().max() <= TOLERANCE for part in parts), key
        return parts[0]
    dim = 1 if "lora_A" in key else 0
    chunks = [part.chunk(3 if "c_attn" in key else 1, dim) for part in parts]
    return torch.cat([chunk for each in zip(*chunks) for chunk in each], dim)


CASES = [("llama", "pairs", "3;1,2"), ("llama", "pairs", "tp2"), ("gpt2", "text", "1,rest x tp2"),
         *(pytest.param(*case, marks=pytest.mark.slow) for case in [
             ("gpt2", "pairs", "1,1,1"), ("glm4", "text", "tp2"), ("qwen3", "text", "tp2"), ("olmo2", "text", "tp2")])]


@pytest.mark.parametrize("family, data, topology", CASES)
def test_equal_to_plain_peft(folder, family, data, topology):
    """Losses, norms, rates, every adapter's clipped gradient on each rank, and what is saved, whole.

    Without --tp_size each rank is a host with a disk of its own, and the last one is where the run was started.
    """
    name, tp_size = f"{family} {data} {topology}".replace(";", "+").replace(",", "+"), 2 if "tp2" in topology else 1
    own_disks = dict(env={"HOSTS": str(folder)}, log_dir="runs", checkpoint_dir="checkpoints") if tp_size == 1 else {}
    _, ranks = run(folder, name, family, data, topology, **own_disks)
    home = folder / f"host{ranks - 1}" if own_disks else folder
    with float64_throughout():
        expected, model = in_plain_peft(folder, family, data)
    found = [(row["loss"], row["grad_norm"], row["learning_rate"]) for row in metrics(home / "runs", name)]
    assert found == [pytest.approx(row, abs=TOLERANCE) for row in expected]
    gradients = {key: param.grad for key, param in model.named_parameters() if param.grad is not None}
    seen = set()
    for first in range(0, ranks, tp_size):
        grads = [torch.load(folder / f"out_{name}" / f"grads{rank}.pt") for rank in range(first, first + tp_size)]
        assert all(each.keys() == grads[0].keys() for each in grads)
        assert all("lora_" in key for key in grads[0]), "frozen weights have no gradients"
        for key in grads[0]:
            grad = gradients[f"base_model.model.{key}"]
            assert (whole(key, [each[key] for each in grads], grad.shape) - grad).abs().max() <= TOLERANCE, key
        seen |= grads[0].keys()
    assert len(seen) == len(gradients)
    saved = read(newest(home, name) / "adapter_model.safetensors")
    trained = {key.replace(".default.", "."): param for key, param in model.named_parameters() if param.requires_grad}
    assert saved.keys() == trained.keys() and not (newest(home, name) / "config.json").exists()
    assert all((saved[key] - param).abs().max() <= TOLERANCE for key, param in trained.items())


def require_same_run(folder, name: str, other: str, tolerance: float) -> None:
    """Losses, norms and the adapter."""
    found, expected = (metrics(folder / "runs", each) for each in (name, other))
    assert len(found) == len(expected) == STEPS
    for key in "loss", "grad_norm":
        assert [row[key] for row in found] == pytest.approx([row[key] for row in expected], abs=tolerance)
    a, b = (read(newest(folder, each) / "adapter_model.safetensors") for each in (name, other))
    assert a.keys() == b.keys() and all((a[key] - b[key]).abs().max() <= tolerance for key in a)


def test_goes_on_with_another_tp_size(folder):
    """Three steps, of which the last is with another --tp_size: losses and the adapter are those of one process."""
    run(folder, "moved", "gpt2", "text", "tp2", "--max_steps", "2", lr_decay="none")
    done, _ = run(folder, "moved", "gpt2", "text", "one", "--resume", "auto", lr_decay="none")
    assert "going on after step 2: " in done.stdout
    run(folder, "at once", "gpt2", "text", "one", lr_decay="none")
    require_same_run(folder, "moved", "at once", TOLERANCE)


@pytest.mark.slow
def test_experts_over_tp_ranks(folder):
    """A mixture of experts, whose router is float32, and which plain peft can't run in float64: as one process."""
    run(folder, "experts", "mixtral", "text", "tp2")
    run(folder, "experts of one", "mixtral", "text", "one")
    require_same_run(folder, "experts", "experts of one", 1e-7)


def read(path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


PLAIN = """
import json, sys, torch
from transformers import AutoModelForCausalLM
base, adapter, out = sys.argv[1:]
from peft import PeftModel
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
assert not any(name.startswith(("training", "pipeline")) for name in sys.modules)
torch.save(model.eval()(torch.arange(32).view(2, 16)).logits.detach(), out)
"""


@pytest.mark.slow
def test_the_adapter_in_plain_peft(folder, tmp_path):
    """In a process that has none of our code: the same logits as the process that trained."""
    run(folder, "for peft", "llama", "text", "3;1,2")
    with float64_throughout():
        _, model = in_plain_peft(folder, "llama", "text")
    expected = model.eval().float()(torch.arange(32).view(2, 16)).logits.detach()
    out = tmp_path / "logits.pt"
    subprocess.run([sys.executable, "-I", "-c", PLAIN, folder / "llama", newest(folder, "for peft"), out], check=True,
                   cwd=tmp_path)
    assert (torch.load(out) - expected).abs().max() <= 1e-5
    with torch.no_grad(), model.disable_adapter():
        assert (model(torch.arange(32).view(2, 16)).logits - expected).abs().max() > 1e-3, "the adapter does something"


@pytest.mark.parametrize("ranks, more, message", [
    (1, ["--lora_targets", "q_proj,query"], "have no matrix 'query': choose among q_proj, k_proj, v_proj, o_proj, "),
    (1, ["--lora_rank", "99999999999999999999999"], "the matrices have 32 rows or columns at most"),
    (1, ["--tp_size", "1", "--from_scratch"], "--from_scratch is for training all weights"),
    (1, ["--model_name", "{bare}"], "has neither model.safetensors nor model.safetensors.index.json, but config.json, tok"),
    (1, ["--resume", "{other}", "--lora_alpha", "8"], "was saved with --lora_alpha 4.0, but this run has 8.0"),
    (1, ["--resume", "{other}", "--lora_alpha", "4", "--base_bits", "4", "--dtype", "float32"],
     "was saved with --base_bits None, but this run has 4: give the same"),
    (2, ["--tp_size", "2", "--lora_dropout", "0.1"], "--tp_size 2 with --lora_dropout 0.1: tensor-parallel ranks would"),
    (3, ["--tp_size", "3"], "num_attention_heads=4 cannot be split over tp_size=3: use a tp_size that divides 4")])
def test_mistakes(folder, tmp_path, ranks, more, message):
    names = {"bare": tmp_path / "bare", "other": checkpoint(folder, "other alpha", 2)}
    if "{bare}" in more:
        write_model(names["bare"])
    if "{other}" in more and not names["other"].exists():
        run(folder, "other alpha", "llama", "text", "one", max_steps=2, lora_alpha=4)
    more = [word.format(**names) for word in more]
    flags = flags_of(tmp_path, "wrong", folder / "llama", dataset_name=folder / "text.txt", lora_rank=RANK, max_steps=3)
    result = fork(9, ranks, *flags, "--num_microbatches", "8", *more, script=SCRIPT, check=False, modules=["peft"])
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr, result.stderr
