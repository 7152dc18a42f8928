"""Wrong and right answers to the exercises of step 4; see test_exercises.py."""

from exercise_versions import Versions, Wrong

VERSIONS = {
    "f": Versions(
        wrong=[
            Wrong("the gradient is handed on", "        all_reduce(grad)\n", "", "the gradient of the input"),
            Wrong("the gradient is summed in place", "grad = grad.clone(memory_format=torch.contiguous_format)",
                  "grad = grad.contiguous()", "Autograd may use it elsewhere"),
            Wrong("the copy has the strides of the gradient", "grad.clone(memory_format=torch.contiguous_format)",
                  "grad.clone()", "is_contiguous()"),
        ],
        right='''
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        total = torch.zeros(grad.shape, dtype=grad.dtype) + grad
        dist.all_reduce(total, group=pgm.process_group_manager.tp_group)
        return total
'''),
    "g": Versions(
        wrong=[
            Wrong("backward sums, too",
                  "        return grad\n", "        grad = grad.clone()\n        all_reduce(grad)\n"
                  "        return grad\n", "the gradient of this rank's term"),
            Wrong("nothing is summed", "        all_reduce(x)\n", "", "the output"),
            Wrong("the mean instead of the sum", "        return x\n",
                  "        x /= pgm.process_group_manager.tp_world_size\n        return x\n", "(1/2 of it)"),
        ],
        right='''
class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()
'''),
    "vocab_parallel_cross_entropy": Versions(
        wrong=[
            Wrong("each rank subtracts its own largest logit", "all_reduce(largest, dist.ReduceOp.MAX)", "pass",
                  "the loss of 4 tokens"),
            Wrong("nothing is subtracted", "logits = logits - largest.unsqueeze(-1)", "logits = logits.clone()",
                  "logits up to 2"),
            Wrong("other ranks count column 0 as the target",
                  ".squeeze(-1).masked_fill(elsewhere, 0.0)", ".squeeze(-1)",
                  "the loss of 4 tokens"),
        ],
        right='''
def forward(ctx, logits, target_ids, vocab_size):
    grid = pgm.process_group_manager
    own = torch.logsumexp(logits, dim=-1)  # each rank's own; then the log of the sum of the ranks' exp
    all_own = [torch.empty_like(own) for _ in range(grid.tp_world_size)]
    dist.all_gather(all_own, own, group=grid.tp_group)
    total = torch.logsumexp(torch.stack(all_own), dim=0)
    local_ids, elsewhere = to_local_ids(target_ids, vocab_size)
    target = torch.where(elsewhere, 0.0, logits[torch.arange(len(logits)), local_ids])
    all_reduce(target)
    ctx.save_for_backward((logits - total[:, None]).exp(), local_ids, elsewhere)
    return (total - target).mean()
'''),
    "norm_over_tp": Versions(
        wrong=[
            Wrong("what is not split counts on every rank", "if is_first or param in split", "",
                  "the gradient norm with tp_size 2"),
            Wrong("each rank has the norm of its part",
                  "all_reduce(squares)", "pass", "the gradient norm with tp_size 2"),
            Wrong("norms are summed instead of squares", "get_total_norm(rows) ** 2\n", "get_total_norm(rows)\n",
                  "the gradient norm with tp_size 2"),
        ],
        right='''
def clip_grad_norm(model, max_norm):
    split = {getattr(module, name) for module in model.modules() for name in getattr(module, "tp_dims", ())}
    params = [param for param in model.parameters() if param.grad is not None]
    grid = pgm.process_group_manager
    squares = torch.zeros((), dtype=params[0].grad.dtype)
    for param in params:
        own = param.grad.pow(2).sum()
        squares += own if param in split else own / grid.tp_world_size  # a share from each of the equal ones
    all_reduce(squares)
    norm = squares.sqrt()
    if max_norm and norm > max_norm:
        for param in params:
            param.grad *= max_norm / norm
    return norm
'''),
    "recursive_doubling": Versions(
        wrong=[
            Wrong("the partner is the next rank",
                  "grid.tp_rank ^ distance", "(grid.tp_rank + distance) % grid.tp_world_size",
                  "deadlock"),
            Wrong("each rank sends first and waits",
                  "sending = dist.isend(tensor, group=grid.tp_group, group_dst=partner)",
                  "dist.send(tensor, group=grid.tp_group, group_dst=partner); sending = None", "circle"),
            Wrong("the maximum is forgotten", "torch.add if op == dist.ReduceOp.SUM else torch.maximum", "torch.add",
                  "the maximum"),
        ],
        right='''
def all_reduce(tensor, op=dist.ReduceOp.SUM):
    grid = pgm.process_group_manager
    combine = torch.add if op == dist.ReduceOp.SUM else torch.maximum
    distance = grid.tp_world_size // 2
    while distance:
        partner, received = grid.tp_rank ^ distance, torch.zeros_like(tensor)
        handles = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, tensor.clone(), group=grid.tp_group, group_peer=partner),
            dist.P2POp(dist.irecv, received, group=grid.tp_group, group_peer=partner)])
        for handle in handles:
            handle.wait()
        tensor.copy_(combine(tensor, received))
        distance //= 2
'''),
}
