"""Wrong and right answers to the exercises of step 14; see test_exercises.py."""

from exercise_versions import Versions, Wrong

VERSIONS = {
    "gather_tokens": Versions(
        wrong=[
            Wrong("the tokens of a rank come sample after sample", "parts.transpose(0, 1).flatten(1, 2)",
                  "parts.flatten(0, 1).view(x.size(0), -1, x.size(2))", "as (sample, token, number)"),
            Wrong("the parts are in another order", "parts[grid.tp_rank] = x", "parts[-1 - grid.tp_rank] = x",
                  "as (sample, token, number)"),
            Wrong("it does not wait", "grid.tp_group).wait()", "grid.tp_group)", "ends, and what it was to receive"),
            Wrong("the samples are taken for tokens", ".transpose(0, 1).flatten(1, 2)", ".flatten(0, 2)", "has shape"),
        ],
        right='''
def gather_tokens(x):
    grid = pgm.process_group_manager
    flat = torch.zeros(grid.tp_world_size * x.numel(), dtype=x.dtype)
    flat[grid.tp_rank * x.numel() : (grid.tp_rank + 1) * x.numel()] = x.flatten()
    all_gather(flat, [x.numel()] * grid.tp_world_size, grid.tp_group).wait()
    return torch.cat([part.view(x.shape) for part in flat.chunk(grid.tp_world_size)], dim=1)
'''),
    "scatter_tokens": Versions(
        wrong=[
            Wrong("x is flattened as it is", "parts.flatten(), [parts[0]", "x.flatten(), [parts[0]",
                  "as (sample, token, number)"),
            Wrong("nothing is added", "        total += other\n", "        pass\n", "as (sample, token, number)"),
            Wrong("the shape is forgotten", "return total.view_as(parts[0])", "return total", "has shape"),
            Wrong("it does not wait", "    handle.wait()\n", "", "ends, and what it was to receive"),
        ],
        right='''
def scatter_tokens(x):
    grid = pgm.process_group_manager
    total = x.clone()
    all_reduce(total)  # right, but with twice the bytes
    return total.chunk(grid.tp_world_size, dim=1)[grid.tp_rank]
'''),
    "norm_gradients": Versions(
        wrong=[
            Wrong("the sum stays in a copy", "        gradient.copy_(total)", "        gradient = total",
                  "compared with one process"),
            Wrong("the mean is taken", "    all_reduce(flat)\n",
                  "    all_reduce(flat)\n    flat /= pgm.process_group_manager.tp_world_size\n", "1/2 of it"),
            Wrong("matrices are summed, too", " if param.dim() == 1]", "]", "same number of dimensions"),
            Wrong("param.grad is taken, which ZeRO gives up", "model.gradient(param) for", "param.grad for",
                "NoneType"),
        ],
        right='''
def sum_norm_gradients(model):
    for param in model.module.parameters():
        if param.dim() == 1:
            all_reduce(model.gradient(param))  # right, with a message for each norm
'''),
}
