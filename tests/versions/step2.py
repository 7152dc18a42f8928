"""Wrong and right answers to the exercises of step 2; see test_exercises.py."""

from exercise_versions import Versions, Wrong

VERSIONS = {
    "ring_all_reduce": Versions(
        wrong=[
            Wrong("the second half of the rounds is missing", "range(2 * (size - 1))", "range(size - 1)", "expected"),
            Wrong("a part is cleared before it is sent", "sending.wait()", "outgoing.zero_(); sending.wait()",
                  "changed a tensor while it was being sent"),
            Wrong("all ranks send first", "sending = dist.isend(outgoing, after)", "sending = None; dist.send(outgoing, after)",
                  "circle"),
        ],
        right='''
def ring_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, travelling = tensor.clone(), tensor.clone()
    for _ in range(size - 1):  # everything once around: right, but with size / 2 times the bytes
        received = torch.empty_like(tensor)
        sending = dist.isend(travelling, (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        sending.wait()
        travelling = received
        whole += received
    tensor.copy_(whole)
'''),
}
