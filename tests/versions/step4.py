"""Wrong and right answers to the exercises of step 4; see test_exercises.py."""

from exercise_versions import Versions, Wrong

VERSIONS = {
    "recursive_doubling": Versions(
        wrong=[
            Wrong("the partner is the next rank", "grid.tp_rank ^ distance", "(grid.tp_rank + distance) % grid.tp_world_size",
                  "deadlock"),
            Wrong("each rank sends first and waits", "sending = dist.isend(tensor, group=grid.tp_group, group_dst=partner)",
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
