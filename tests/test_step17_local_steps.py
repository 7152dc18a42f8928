"""Step 17's replicas against a single process that plays all of them, one after the other, in plain loops."""

import copy

import pytest
import torch
from lab.program import Program
from lab.ranks import random_samples
from support.recordings import NUM_LAYERS, TOLERANCE, Case, assemble, train_here

STEP = Program(17).load()
NESTEROV = dict(outer_learning_rate=0.7, outer_momentum=0.9)
MEAN = dict(outer_learning_rate=1.0, outer_momentum=0.0)  # of the weights


def build(case: Case, models) -> torch.nn.Module:
    config = STEP.utils.load_config(str(models / f"model_{case.variant}"), num_hidden_layers=NUM_LAYERS,
                               num_attention_heads=None, num_key_value_heads=None)
    with torch.device("meta"):
        model = STEP.model.Llama(config, torch.float64)
    STEP.model.init_weights(model, 42, torch.device("cpu"), lambda full, dim: full)
    return model


def local_step(replica: torch.nn.Module, optimizer, micro_batches: list[torch.Tensor]) -> tuple[float, float]:
    """An optimizer step of one replica by itself: its loss, and the norm of its gradients before they are clipped."""
    optimizer.zero_grad()
    losses = [torch.nn.functional.cross_entropy(replica(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
              for tokens in micro_batches]
    (mean := sum(losses) / len(losses)).backward()
    norm = torch.nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
    optimizer.step()
    return mean.item(), norm.item()


def play(case: Case, models) -> tuple[list[tuple[float, float]], torch.nn.Module]:
    """The rows of all steps, means over the replicas, and the weights that they agree on in the end.

    A round's last row ends with the loss of held-out samples, which is that of the weights agreed on.
    """
    agreed, rows = build(case, models), []
    replicas = [copy.deepcopy(agreed) for _ in range(case.dp)]
    learning_rate = STEP.utils.default_learning_rate(agreed.config.hidden_size)
    inner = [torch.optim.AdamW(replica.parameters(), lr=learning_rate) for replica in replicas]
    outer = torch.optim.SGD(agreed.parameters(), lr=case.outer_learning_rate, momentum=case.outer_momentum,
                            nesterov=case.outer_momentum > 0)
    samples, held_out = random_samples("", "", case.seq_len, agreed.config.vocab_size, case.num_steps * case.samples, "",
                                       case.samples)
    held_out = torch.stack([held_out[i] for i in range(case.samples)])
    micro_batches = torch.stack([samples[i] for i in range(len(samples))]).view(
        case.num_steps, case.accumulation, case.dp, -1, case.seq_len + 1)
    for step in range(1, case.num_steps + 1):
        of_replicas = [local_step(replica, optimizer, list(micro_batches[step - 1, :, r]))
                       for r, (replica, optimizer) in enumerate(zip(replicas, inner))]
        rows.append(tuple(sum(each) / case.dp for each in zip(*of_replicas)))
        if step % case.local_steps == 0 or step == case.num_steps:
            for param, *own in zip(agreed.parameters(), *(replica.parameters() for replica in replicas)):
                param.grad = sum(param.detach() - each.detach() for each in own) / case.dp
            outer.step()
            for replica in replicas:
                replica.load_state_dict(agreed.state_dict())
            if step % case.local_steps == 0:
                with torch.no_grad():
                    rows[-1] += (torch.nn.functional.cross_entropy(
                        agreed(held_out[:, :-1]).flatten(0, 1), held_out[:, 1:].flatten()).item(),)
    return rows, agreed


@pytest.mark.parametrize("case", [
    Case(17, dp=3, samples=12, accumulation=2, num_steps=5, local_steps=2, **NESTEROV),  # the last round has one step
    Case(17, dp=1, samples=4, accumulation=2, num_steps=4, local_steps=2, **NESTEROV),
    Case(17, dp=3, pp=3, samples=12, accumulation=2, num_steps=4, local_steps=2, variant="tied", **NESTEROV),
    Case(17, dp=2, tp=2, pp=2, samples=8, accumulation=2, num_steps=4, local_steps=3, **MEAN),
], ids=str)
def test_replicas_are_those_of_one_process(case, models):
    """assemble() compares all copies of a parameter, over dp, tp and the ends of a pipeline, to the last bit."""
    expected, agreed = play(case, models)
    found = train_here(case, models)
    names = ("loss", "grad_norm", "validation_loss")
    assert [tuple(row[name] for name in names if name in row) for row in found.rows] == [
        pytest.approx(row, rel=0, abs=TOLERANCE) for row in expected]
    weights, final = dict(agreed.named_parameters()), assemble(found.ranks, "final")
    assert final.keys() == weights.keys()
    for name, weight in weights.items():  # AdamW divides by the gradient's size, so rounding grows
        assert (final[name] - weight).abs().max() <= (TOLERANCE if case.tp == case.pp == 1 else 1e-8), name


def test_one_local_step_of_sgd_is_a_synchronous_step(models, monkeypatch):
    """The mean of weights is the mean of gradients then, which nothing may clip."""
    monkeypatch.setattr(torch.optim, "AdamW", lambda params, lr, fused: torch.optim.SGD(params, lr=lr))
    sizes = dict(dp=2, tp=2, samples=8, accumulation=2, num_steps=4, variant="tied", max_grad_norm=0)
    one, many = (train_here(Case(17, **sizes, **more), models) for more in ({}, dict(local_steps=1, **MEAN)))
    assert [row["loss"] for row in many.rows] == [pytest.approx(row["loss"], abs=TOLERANCE) for row in one.rows]
    expected, final = (assemble(run.ranks, "final") for run in (one, many))
    assert all((final[name] - weight).abs().max() <= TOLERANCE for name, weight in expected.items())
