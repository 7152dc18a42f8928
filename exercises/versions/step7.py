"""Wrong and right answers to the exercises of step 7."""

from versions import Versions, Wrong, museum

VERSIONS = {
    "afab": Versions(
        wrong=[
            Wrong("each micro-batch goes forward and backward at once", 'yield Action("F", i)\n    for',
                  'yield Action("F", i)\n        yield Action("B", i)\n    for', "does B0 2 times"),
            Wrong("backwards in the other order", 'yield Action("B", i)', 'yield Action("B", num_microbatches - 1 - i)',
                  "has to be B0"),
            Wrong("counted from one", 'yield Action("B", i)', 'yield Action("B", i + 1)',
                  "but the micro-batches are 0 to 0"),
            Wrong("7 micro-batches at most", "for i in range(num_microbatches):\n        yield Action(\"B\", i)",
                  "for i in range(min(num_microbatches, 7)):\n        yield Action(\"B\", i)", "never does B7"),
        ],
        right='''
def afab(stage, num_stages, num_microbatches):
    return [Action(kind, i) for kind in ("F", "B") for i in range(num_microbatches)]
'''),
    "leaf_of_a_stage": Versions(
        wrong=[
            Wrong("what was received gets no gradient", "received.requires_grad_()", "received", "NoneType"),
            museum("scale", "(4 times as large)"),
            Wrong("the output is no part of a graph", "return x, out", "return x, out.detach()", "not require grad"),
        ]),
    "gradient_across_processes": Versions(
        wrong=[
            Wrong("backward from the sum of the output", "torch.autograd.backward(out, received)",
                  "out.sum().backward()", "2 stages, 1 micro-batch: the gradient of"),
            Wrong("backward without its gradient", "backward(out, received)", "backward(out)", "scalar outputs"),
            Wrong("what was received goes on", "return x.grad", "return received", "a function without a return"),
        ]),
    "executor": Versions(
        wrong=[
            Wrong("a blocking receive", "handle = dist.irecv(buffer, source, group=group)",
                  "handle = dist.recv(buffer, source, group=group)", "deadlock"),
            Wrong("what is posted is posted again", " and action not in self.receiving", "", "receive from rank 1"),
            Wrong("both directions share a group", "source, group = self.source[action.kind], self.group[action.kind]",
                  'source, group = self.source[action.kind], self.group["F"]', "post_receive of B0 has to use"),
            Wrong("what is sent is not kept", "group=group), tensor))", "group=group), None))",
                  "self.sending has to keep"),
            Wrong("the graph is kept, too", "tensor.detach().to", "tensor.to", "detached, or it keeps the graph"),
            Wrong("sent as it lies", ".to(self.wire_device).contiguous()", ".to(self.wire_device)", "not contiguous"),
        ]),
}
