"""Step 7: pipeline parallelism, all forward, all backward."""

import itertools

import torch

from attempt import Wrong
from catalogue import exercise
from lab.program import Program
from schedule_attempt import count, picture, play_schedule, train_with


class Asked(dict):
    """Process groups by kind of action, and which of them were asked for."""

    def __init__(self, groups: dict):
        super().__init__(groups)
        self.kinds = []

    def __getitem__(self, kind: str):
        self.kinds.append(kind)
        return super().__getitem__(kind)


def watch_groups(attempt, communication: type) -> None:
    """Forward and backward messages have groups of their own."""
    init, post_receive, send = communication.__init__, communication.post_receive, communication.send

    def watched(what: str, method, neighbours: str):
        def call(self, action, *tensor):
            is_new, self.group.kinds = action not in getattr(self, "receiving", ()), []
            # tensors that are not contiguous, as a view may be
            method(self, action, *(each.mT.contiguous().mT if getattr(each, "ndim", 0) > 1 else each
                                   for each in tensor))
            right = self.group.kinds == [action.kind] or not is_new and not tensor
            nobody = getattr(self, neighbours, {}).get(action.kind) is None
            attempt.require(right or nobody, f"{what} of {action.kind}{action.microbatch} has to use "
                            f"self.group[{action.kind!r}]: on NCCL, forward and backward messages in one group can "
                            "block each other")
            for _, kept in getattr(self, "sending", ()):
                attempt.require(isinstance(kept, torch.Tensor) and not kept.requires_grad, "self.sending has to keep "
                                "each tensor that is sent, or its memory is given to another one; detached, or it "
                                "keeps the graph as well")

        return call

    communication.__init__ = lambda self, *args: (init(self, *args), setattr(self, "group", Asked(self.group)))[0]
    communication.post_receive = watched("post_receive", post_receive, "source")
    communication.send = watched("send", send, "destination")


def check_gradients(attempt, stages: int, microbatches: int, schedule=None, order: str = "", late=False) -> None:
    """Two optimizer steps on so many stages, against one process: losses and all gradients.

    With `late` the executor posts no receive ahead of time.
    """
    flags = (f"--gradient_accumulation_steps {microbatches} --max_tokens {2 * 16 * microbatches} --max_grad_norm 0 "
             "--num_hidden_layers 3 --pp_size")

    def prepare(modules, rank):
        watch_groups(attempt, modules.pipeline_parallel.StageCommunication)
        if schedule:
            modules.pipeline_parallel.afab = schedule  # the executor runs any order
        if late:
            init = modules.pipeline_parallel.StageCommunication.__init__
            modules.pipeline_parallel.StageCommunication.__init__ = lambda self, *args: (
                init(self, *args), setattr(self, "receives_ahead", 0))[0]

    one, ours = (attempt.train(size, f"{flags} {size}", ours=True) for size in (1, stages))
    got = attempt.train(stages, f"{flags} {stages}", prepare=prepare)
    situation = f"{count(stages, 'stage')}, {count(microbatches, 'micro-batch')}{order}"
    for step, rank in itertools.product(range(2), range(stages)):
        for name in ours.gradients[rank][step]:
            what = f"{situation}: the gradient of {name} in step {step + 1}"
            if name not in got.gradients[rank][step]:
                raise Wrong(f"rank {rank}: {what} is missing: no backward has reached it")
            attempt.same(got.gradients[rank][step][name], one.gradients[0][step][name], what, rank)
    for step in range(2):
        attempt.same(got.rows[step]["loss"], one.rows[step]["loss"], f"{situation}: the loss of step {step + 1}")


@exercise("7", "pipeline_parallel.afab", hints=(
    "Two loops over the micro-batches, 0 to num_microbatches - 1.",
    "All stages get the same list: the dots in the picture come from waiting, not from the schedule.",
    'The first loop yields Action("F", i), the second one Action("B", i).'), wrong=[
    ("each micro-batch goes forward and backward at once", 'yield Action("F", i)\n    for',
     'yield Action("F", i)\n        yield Action("B", i)\n    for', "does B0 2 times"),
    ("backwards in the other order", 'yield Action("B", i)', 'yield Action("B", num_microbatches - 1 - i)',
     "has to be B0"),
    ("counted from one", 'yield Action("B", i)', 'yield Action("B", i + 1)', "but the micro-batches are 0 to 0"),
    ("7 micro-batches at most", 'for i in range(num_microbatches):\n        yield Action("B", i)',
     'for i in range(min(num_microbatches, 7)):\n        yield Action("B", i)', "never does B7")])
def afab(attempt):
    """Order the micro-batches of a stage: all forward, then all backward.

    `yield Action("F", i)` for the forward of micro-batch i, and `yield Action("B", i)` for its backward, in the order
    in which stage `stage` of `num_stages` does them. Three stages and four micro-batches:

        stage 0   F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        stage 1   .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        stage 2   .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

    You write no dots: a stage waits by itself until what it needs has come. A forward needs the forward of the same
    micro-batch on the stage before, and a backward needs its backward on the stage after. Both go through the
    micro-batches in the order 0, 1, 2, ..., because stages expect each other's messages in this order.
    """
    schedule = attempt.function()
    for p, m in ((1, 1), (2, 3), (3, 4), (4, 2), (5, 9)):
        played = play_schedule(attempt, schedule, p, m)
        for stage, spans in enumerate(played.spans):
            order = [(span.kind, span.microbatch) for span in spans]
            wanted = [(kind, i) for kind in "FB" for i in range(m)]
            k = next((k for k in range(2 * m) if order[k] != wanted[k]), None)
            got, must = ("%s%d" % each[k or 0] for each in (order, wanted))
            attempt.require(k is None, f"{count(p, 'stage')}, {count(m, 'micro-batch')}: action {k} of stage {stage} "
                                       f"is {got}, but has to be {must}: all forward in their order, then all backward."
                                       f"{picture(played)}")
    train_with(attempt, "")


@exercise("7", "pipeline_parallel.forward_microbatch", hints=(
    "What was received is numbers only. If it is to get a gradient, it has to become a leaf that requires one.",
    "x is batch[\"input_ids\"] on the first stage, else received.requires_grad_().",
    "On the last stage out is the loss, divided by the step's micro-batches: data_loader.gradient_accumulation_steps."),
    blank=('x = batch["input_ids"] if', "out = cross_entropy("), wrong=[
    ("what was received gets no gradient", "received.requires_grad_()", "received", "NoneType"),
    ("scale", "(4 times as large)"),
    ("the output is no part of a graph", "return x, out", "return x, out.detach()", "not require grad")])
def leaf_of_a_stage(attempt):
    """Compute a stage's part of a micro-batch, so that backward finds where the stage's graph begins.

    Autograd records what one process computes. Here `received` is what came from the stage before: the hidden states
    (B, T, D), and None on the first stage.

        stage 0   x = token ids --> out                                   backward, see gradient_across_processes
                                     | send                                 ^ send
        stage 1                     x = received --> out = loss --> backward

    Write two statements: `x`, the stage's input, which is batch["input_ids"] on the first stage; and on the last stage
    `out`, which is the loss of the micro-batch. The gradients of all micro-batches add up, and what is wanted is the
    gradient of the mean over the step's micro-batches. You may call cross_entropy(out, batch["target_ids"],
    stage.config.vocab_size).
    """
    for stages, microbatches in ((2, 1), (2, 4), (3, 3)):
        check_gradients(attempt, stages, microbatches)


@exercise("7", "pipeline_parallel.backward_microbatch", hints=(
    "torch.autograd.backward(out, gradient) continues backward from `out`.",
    "On the last stage `out` is the loss, and `received` is None, which is what backward of a loss needs.",
    "The stage before needs the gradient of x, which backward leaves in x.grad."), wrong=[
    ("backward from the sum of the output", "torch.autograd.backward(out, received)", "out.sum().backward()",
     "2 stages, 1 micro-batch: the gradient of"),
    ("backward without its gradient", "backward(out, received)", "backward(out)", "scalar outputs"),
    ("what was received goes on", "return x.grad", "return received", "a function without a return")])
def gradient_across_processes(attempt):
    """Let a gradient cross from one process to the one before it.

    `x` and `out` are the two ends of a micro-batch's graph on this stage: its input and its output, which on the last
    stage is the loss. `received` is the gradient of `out` that came from the stage after, None on the last stage.

        stage 0   x = token ids --> out                                   backward from `received`
                                     | send                                 ^ send
        stage 1                     x = received --> out = loss --> backward, x.grad

    Go backward from `out` through this stage, and return what the stage before needs; None on the first stage.
    """
    for stages, microbatches in ((2, 1), (2, 4), (3, 3)):
        check_gradients(attempt, stages, microbatches)


@exercise("7", "pipeline_parallel.StageCommunication", hints=(
    "A blocking receive or send would keep a stage from its next action: dist.irecv and dist.isend return at once.",
    "post_receive: nothing to do where source is None, or where this action's receive is posted already. Else make "
    "an empty buffer, start dist.irecv, and keep the handle and the buffer in self.receiving[action].",
    "send: nothing to do where destination is None. Else append (dist.isend(tensor, destination, group=group), tensor) "
    "to self.sending. The tensor has to be detached and contiguous, and lives as long as the pair does."),
    blank=("if self.source[action.kind] is not None", "if self.destination[action.kind] is None",
           "tensor = tensor.detach()", "destination, group =", "self.sending.append("), wrong=[
    ("a blocking receive", "handle = dist.irecv(buffer, source, group=group)",
     "handle = dist.recv(buffer, source, group=group)", "deadlock"),
    ("what is posted is posted again", " and action not in self.receiving", "", "receive from rank 1"),
    ("both directions share a group", "source, group = self.source[action.kind], self.group[action.kind]",
     'source, group = self.source[action.kind], self.group["F"]', "post_receive of B0 has to use"),
    ("what is sent is not kept", "group=group), tensor))", "group=group), None))", "self.sending has to keep"),
    ("the graph is kept, too", "tensor.detach().to", "tensor.to", "detached, or it keeps the graph"),
    ("sent as it lies", ".to(self.wire_device).contiguous()", ".to(self.wire_device)", "not contiguous")])
def executor(attempt):
    """Receive early and send in the background, so that no stage waits without need.

    The executor calls post_receive(action) for an action and up to two later ones, then receive(action), which waits
    for its tensor, computes, and calls send(action, result):

        now:          F2                                       post_receive(F2), (B0), (F3): those not posted yet
        then:         receive(F2) --> compute --> send(F2, out): the message travels while F3 is computed

    It calls post_receive again for an action that is posted already: then there is nothing to do. An action has a kind,
    "F" or "B", and a microbatch. Write post_receive and send; receive and finish show what they read. For each kind,
    self.source[kind] and self.destination[kind] are the ranks of the neighbours (None at the pipeline's ends), and
    self.group[kind] the process group. A tensor is of self.shape and self.dtype, on self.wire_device.

    self.receiving: action -> (handle, buffer). self.sending: a deque of pairs (handle, tensor), because a tensor must
    not be freed before it is sent. You may call dist.irecv(buffer, rank, group=...), dist.isend(tensor, rank,
    group=...) and timeline.background(handle, "receive", action.microbatch, source), which returns a handle that is
    timed. The check also runs it where each receive is posted only when it is needed: a send must not wait for that.
    """
    alternate = Program("8").load().pipeline_parallel.one_f_one_b
    check_gradients(attempt, 2, 1)
    check_gradients(attempt, 3, 5)
    check_gradients(attempt, 3, 3, alternate, ", one forward, one backward", late=True)
