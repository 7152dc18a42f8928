"""The loss over unlike pipelines, where samples have unlike numbers of targets: in training, and on validation data.

train_distributed.py against a plain loop over transformers' model, row by row without padding, in float64.
"""

import argparse
import json

import pytest
import torch
import torch.nn.functional as F
from lab.huggingface import float64_throughout, their_name
from lab.launch import metrics, modules_of, start_fork
from support.checkpoint_runs import EXACT, SCRIPT, SIZES, flags_of, write_answers, write_model

with modules_of(9):
    from data import batches as data
    from data import encoded
    from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
    from pipeline_template import PipelineTemplate
    from run import evaluation

pytestmark = pytest.mark.usefixtures("world_of_one")
SAMPLES, SIZE, STEPS, RATE, TOLERANCE = 12, 2, 2, 1e-3, 1e-9  # of a step, of a micro-batch
MODELS = {
    "llama": {**SIZES, "num_hidden_layers": 3, "vocab_size": 1024, "initializer_range": 0.1},
    "mixtral": dict(vocab_size=1024, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1,
                    initializer_range=0.1)}
UNLIKE = ["--pipelines", "2,1;3", "--num_microbatches", "4,2"]
RUNS = {  # name -> ranks, model, data, flags
    "unlike": (3, "llama", "answers", UNLIKE),
    "tp": (2, "llama", "answers", ["--tp_size", "2", "--num_microbatches", "6"]),
    "mixtral": (3, "mixtral", "answers", UNLIKE),
    "text": (3, "llama", "text", UNLIKE),
    "limited": (1, "llama", "answers", ["--num_microbatches", "6", "--eval_batches", "2"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The models, answers, and text."""
    folder = tmp_path_factory.mktemp("answers")
    torch.manual_seed(0)
    for kind, sizes in MODELS.items():
        write_model(folder / kind, kind, "float64", **sizes)
    write_answers(folder, 54)
    lines = [json.dumps({"text": "word " * (1 + i * i % 16) + "."}) for i in range(54)]
    (folder / "text.jsonl").write_text("\n".join(lines * 3) + "\n")
    return folder


@pytest.fixture(scope="module")
def runs(folder, selected):
    """name -> the future of its run."""
    jobs = {}
    for name in selected("name"):
        ranks, kind, words, flags = RUNS[name]
        flags = [*flags_of(folder, name, folder / kind, dataset_name=folder / f"{words}.jsonl", seq_len=24,
                           batch_size=SIZE, max_steps=STEPS, save_every=None, warmup_steps=0, lr_decay="none",
                           learning_rate=RATE, max_grad_norm=0, validation_split=0.25), *flags]
        jobs[name] = start_fork(9, ranks, folder / f"out_{name}", SCRIPT, *flags, script=EXACT)
    return jobs


def load(folder, words: str):
    """The data that all topologies read, in steps of SAMPLES samples. A row of text has targets only."""
    args = argparse.Namespace(seq_len=24, seed=42, packing="auto", validation_split=0.25,
                              dataset_name=str(folder / f"{words}.jsonl"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoded, "CACHE", str(folder / "cache"))
        made = data.Data(args, str(folder / "llama"), 1024, SAMPLES)
    made.train.set_steps(STEPS)
    rows = [made.train[i] for i in range(STEPS * SAMPLES)]
    return [row[0] if isinstance(row, tuple) else row for row in rows], [*made.evaluation]


def losses_of(model, row) -> torch.Tensor:
    """The loss of each target."""
    tokens = torch.maximum(row, -1 - row)  # no targets are complemented
    logits = model(tokens[None, :-1]).logits[0]
    return F.cross_entropy(logits, tokens[1:], reduction="none")[row[1:] >= 0]


def in_plain_torch(folder, kind: str, words: str, num_batches: int | None):
    """The evaluation's loss before training, the losses of the steps, and the model with the gradients of the last."""
    from transformers import AutoModelForCausalLM

    settings = {"experts_implementation": "eager"} if kind == "mixtral" else {}
    model = AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float64, **settings)
    (rows, held_out), found = load(folder, words), []
    with torch.no_grad():
        evaluated = torch.cat([losses_of(model, row) for row in held_out[: num_batches and SIZE * num_batches]]).mean()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        of_step = rows[SAMPLES * step : SAMPLES * (step + 1)]
        loss = torch.cat([losses_of(model, row) for row in of_step]).mean()  # each target counts once
        for first in range(0, SAMPLES, SIZE) if kind == "mixtral" else ():
            inputs = data.pad(of_step[first : first + SIZE])["input_ids"]
            loss = loss + model.config.router_aux_loss_coef * model(inputs).aux_loss / (SAMPLES / SIZE)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return evaluated.item(), found, model


@pytest.mark.parametrize("name", ["unlike", "tp", "mixtral", "limited", pytest.param("text", marks=pytest.mark.slow)])
def test_every_target_counts_once(runs, folder, name):
    """Losses of all steps and gradients of the last, over unlike micro-batches, pipelines and stages; the evaluation,
    a mean over the targets of all validation samples."""
    ranks, kind, words, flags = RUNS[name]
    runs[name].result()
    with float64_throughout():
        evaluated, losses, model = in_plain_torch(folder, kind, words, 2 if "--eval_batches" in flags else None)
    assert [row["loss"] for row in metrics(folder / "runs", name)] == pytest.approx(losses, rel=0, abs=TOLERANCE)
    rows = [json.loads(line) for line in (folder / "runs" / name / "evaluation.jsonl").read_text().splitlines()]
    assert rows[0]["step"] == 0 and rows[0]["evaluation_loss"] == pytest.approx(evaluated, rel=0, abs=TOLERANCE)
    for rank in range(ranks):
        for key, part in torch.load(folder / f"out_{name}" / f"grads{rank}.pt").items():
            whole = model.get_parameter(their_name(key)).grad
            for dim in (dim for dim in range(whole.dim()) if whole.shape[dim] != part.shape[dim]):
                whole = whole.tensor_split(2, dim)[rank]
            assert (whole - part).abs().max() <= TOLERANCE, key


@pytest.mark.parametrize("was_training", [True, False])
def test_dropout_is_off_meanwhile_and_no_generator_is_drawn_from(monkeypatch, was_training):
    plugin = HeterogeneousParallelPlugin(tp_size=1, microbatch_size=1, device="cpu")
    plugin.set_pipelines([PipelineTemplate("dropout alone", [["dropout"]])], [1])
    model = torch.nn.Dropout(0.5).train(was_training)
    evaluator = evaluation.Evaluator(plugin, model, torch.ones(2, 1, 9), lambda rows: {"target_ids": rows[0]},
                                     lambda output, batch: output.sum())
    state = torch.get_rng_state()
    monkeypatch.setattr(evaluation, "outputs", lambda plugin, model, batches: (
        (batch, model(torch.ones(1, 9))) for batch in batches))
    assert evaluator.evaluate() == 9.0
    assert model.training == was_training and torch.equal(torch.get_rng_state(), state)


def test_a_microbatch_without_a_target_has_gradients_of_zeros():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    batch = {"target_ids": torch.full((2, 3), -100), "loss_weight": torch.zeros(())}
    loss = data.weighted(lambda *_: pytest.fail("there is nothing to compute"))(logits, batch)
    loss.backward()
    assert loss.item() == 0 and logits.grad.count_nonzero() == 0
