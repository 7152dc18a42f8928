"""Wrong and right answers to the exercises of step 7; see test_exercises.py."""

from exercise_versions import Versions, Wrong

LAYERS = "torch.arange(num_layers, device=\"cpu\").tensor_split(grid.pp_world_size)[grid.pp_rank].tolist()"

VERSIONS = {
    "afab": Versions(
        wrong=[
            Wrong("each micro-batch goes forward and backward at once", 'yield Action("F", i)\n    for',
                  'yield Action("F", i)\n        yield Action("B", i)\n    for', "does B0 2 times"),
            Wrong("backwards in the other order", 'yield Action("B", i)', 'yield Action("B", num_microbatches - 1 - i)',
                  "has to be B0"),
            Wrong("counted from one", 'yield Action("B", i)', 'yield Action("B", i + 1)',
                  "but the micro-batches are 0 to 0"),
        ],
        right='''
def afab(stage, num_stages, num_microbatches):
    return [Action(kind, i) for kind in ("F", "B") for i in range(num_microbatches)]
'''),
    "gradient_across_processes": Versions(
        wrong=[
            Wrong("what was received gets no gradient", "received.requires_grad_()", "received", "NoneType"),
            Wrong("the loss is not divided", " / num_microbatches", "", "(4 times as large)"),
            Wrong("backward from the sum of the output", "torch.autograd.backward(out, received)",
                  "out.sum().backward()", "2 stages, 1 micro-batch: the gradient of"),
        ],
        right='''
def run_schedule(schedule, model, data_loader, tensor_shape, device):
    grid, m = pgm.process_group_manager, data_loader.gradient_accumulation_steps
    stage, alive, total = model.module, {}, torch.zeros((), device=device)
    communication = StageCommunication(tensor_shape, stage.dtype, device)
    model.peak_live_activations = 0
    for action in schedule(grid.pp_rank, grid.pp_world_size, m):
        communication.post_receive(action)
        received = communication.receive(action)
        if action.kind == "F":
            batch = next(data_loader) if grid.pp_is_first_stage or grid.pp_is_last_stage else {}
            x = batch["input_ids"] if received is None else received.detach().requires_grad_(True)
            out = model(x)
            if grid.pp_is_last_stage:
                out = cross_entropy(out, batch["target_ids"], stage.config.vocab_size)
                total = total + out.detach() / m
            communication.send(action, out)
            alive[action.microbatch] = x, out
        else:
            x, out = alive.pop(action.microbatch)
            model.require_backward_grad_sync = action.microbatch == m - 1
            out.backward(torch.full_like(out, 1 / m) if received is None else received)
            communication.send(action, x.grad)
    communication.finish()
    model.finish_gradient_sync()
    sum_tied_gradients(stage)
    return total
'''),
    "executor": Versions(
        wrong=[
            Wrong("a blocking receive", "handle = dist.irecv(buffer, source, group=group)",
                  "handle = dist.recv(buffer, source, group=group)", "deadlock"),
            Wrong("what is posted is posted again", " and action not in self.receiving", "", "receive from rank 1"),
            Wrong("both directions share a group",
                  "source, group = self.source[action.kind], self.group[action.kind]",
                  'source, group = self.source[action.kind], self.group["F"]', "post_receive of B0 has to use"),
        ],
        right='''
class StageCommunication:
    def __init__(self, tensor_shape, dtype, device):
        self.shape, self.dtype, self.device, self.receives_ahead = tensor_shape, dtype, device, 2
        grid = pgm.process_group_manager
        self.neighbours = {"F": (grid.pp_prev_rank, grid.pp_next_rank), "B": (grid.pp_next_rank, grid.pp_prev_rank)}
        self.group = {"F": grid.pp_group, "B": grid.pp_backward_group}
        self.posted, self.sending = {}, []

    def post_receive(self, action):
        source, _ = self.neighbours[action.kind]
        if source is None or action in self.posted:
            return
        buffer = torch.zeros(self.shape, dtype=self.dtype)
        self.posted[action] = dist.irecv(buffer, source, group=self.group[action.kind]), buffer

    def receive(self, action):
        handle, buffer = self.posted.pop(action, (None, None))
        if handle:
            handle.wait()
        return buffer

    def send(self, action, tensor):
        _, target = self.neighbours[action.kind]
        if target is not None:
            copy = tensor.detach().clone()
            self.sending.append((dist.isend(copy, target, group=self.group[action.kind]), copy))

    def finish(self):
        for handle, _ in self.sending:
            handle.wait()
'''),
}
