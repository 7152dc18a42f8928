"""ZeRO: AdamW on shards is AdamW on whole parameters, to the last bit; sums of unequal and of empty shards.

The memory of steps 12 and 13. Their gradients, norms and weights: test_all_steps_same_math.py. Their messages:
test_all_steps_messages.py.
"""

import pytest
from maintain.course_memory import SHARDS, measure_shards


def test_adamw_on_shards_is_adamw_on_parameters(run_code):
    """Given the same gradients, in float32: two ranks' mean has one rounding, whoever forms it."""
    run_code(12, 2, """
import copy
import torch
import process_group_manager as pgm
from zero import Zero

pgm.init_process_group("gloo")
pgm.setup_process_group_manager(2, 1, 1)
for shares in ([1, 1], [3, 2]):
    model = torch.nn.Sequential(torch.nn.Linear(37, 101), torch.nn.Linear(101, 7))
    for param in model.parameters():
        torch.nn.init.normal_(param, generator=torch.Generator().manual_seed(param.numel()))
    whole, divided = copy.deepcopy(model), Zero(model, 1, shares)
    one, many = (torch.optim.AdamW(params, lr=1e-2, fused=True) for params in (
        whole.parameters(), divided.named_parameters()))
    for step in range(3):
        torch.manual_seed(step)
        divided.zero_grad()
        for param, twin in zip(model.parameters(), whole.parameters()):
            gradients = torch.randn(2, *param.shape)
            twin.grad, param.grad = gradients.sum(0) / 2, gradients[pgm.process_group_manager.dp_rank].clone()
        for param in reversed([*model.parameters()]):
            divided.mark_param_as_ready(param)
        divided.finish_gradient_sync()
        one.step(), many.step()
        divided.gather_weights()
        assert all(map(torch.equal, model.parameters(), whole.parameters())), (shares, step)
""")


def test_sums_and_copies_of_unequal_shards(run_code):
    """Of all numbers, of none on some rank; the wire is quiet again after each."""
    run_code(12, 3, """
import torch
import torch.distributed as dist
from process_group_manager import init_process_group
from zero import all_gather, reduce_scatter

init_process_group("gloo")
rank, group = dist.get_rank(), dist.new_group([0, 1, 2])
for sizes in ([2, 2, 2], [4, 2, 1], [5, 0, 1], [0, 0, 3]):
    everyone = torch.arange(3 * sum(sizes), dtype=torch.float64).view(3, -1) ** 2  # row r is what rank r has
    handle, summands = reduce_scatter(everyone[rank].clone(), sizes, group)
    handle.wait()
    assert torch.equal(sum(summands), everyone.sum(0).split(sizes)[rank]), sizes
    full = torch.full_like(everyone[0], -1.0)
    full.split(sizes)[rank].copy_(everyone[0].split(sizes)[rank])
    all_gather(full, sizes, group).wait()
    assert torch.equal(full, everyone[0]), sizes
""")


@pytest.mark.slow(drawn=1)
@pytest.mark.parametrize("name", ["zero 2", "zero 1, shares 4,2,1,1", "zero 3, bfloat16"])
def test_what_is_divided_is_not_held(name):
    """Of 26 million parameters. Buckets under way come on top, before the optimizer's step there are none."""
    step, flags, most, before = SHARDS[name]
    found = measure_shards(step, flags, layers=2)
    assert found["before"] == pytest.approx(before, rel=0.01)
    assert most <= found["most"] < most + 5 * 4 * 0.46, "five layers, of which each is 46 % of the parameters"
