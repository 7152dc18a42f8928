"""Right answers in another form than the course's: drawn, looped, recursive, rounded up, or not the best."""

from blanks import find
from lab.launch import STEPS

RIGHT = {  # exercise -> a source
    "rotary": '''
def apply_rotary(x, cos, sin):
    half = x.shape[-1] // 2
    angle = torch.complex(cos[:, :half], sin[:, :half])
    turned = torch.complex(x[..., :half], x[..., half:]) * angle
    return torch.cat([turned.real, turned.imag], dim=-1)
''',
    "broadcast": '''
def broadcast(tensor, source):
    if dist.get_rank() == source:  # right, with n - 1 rounds
        for rank in range(dist.get_world_size()):
            if rank != source:
                dist.send(tensor, rank)
    else:
        dist.recv(tensor, source)
''',
    "accumulation": '''
def train_step(model, data_loader):
    losses = []
    for _ in range(data_loader.gradient_accumulation_steps):  # right, but all activations are kept
        batch = next(data_loader)
        losses.append(cross_entropy(model(batch["input_ids"]), batch["target_ids"]))
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.detach()
''',
    "samples_of_a_replica": '''
def __init__(self, samples, micro_batch_size, gradient_accumulation_steps, device, num_workers=0):
    self.gradient_accumulation_steps, self.device = gradient_accumulation_steps, device
    grid = pgm.process_group_manager
    first_samples = [i for i in range(len(samples)) if i % micro_batch_size == 0
                     and i // micro_batch_size % grid.dp_world_size == grid.dp_rank]
    DataLoader.__init__(self, samples, num_workers=num_workers, collate_fn=collate_batch,
                        batch_sampler=[range(first, first + micro_batch_size) for first in first_samples])
    self.batches = iter(self)
''',
    "buckets_in_order": '''
def mark_param_as_ready(self, param):
    bucket = self.bucket_of[param]
    bucket.take(param)
    if self.require_backward_grad_sync:
        bucket.awaited -= {param}
        number = sum(each.handle is not None for each in self.buckets)
        while number < len(self.buckets) and not self.buckets[number].awaited:
            self.buckets[number].sync_gradient()
            number += 1
''',
    "afab": '''
def afab(stage, num_stages, num_microbatches):
    return [Action(kind, i) for kind in ("F", "B") for i in range(num_microbatches)]
''',
    "one_f_one_b": '''
def one_f_one_b(stage, num_stages, num_microbatches):
    for i in range(num_microbatches):  # all forward, all backward: as quick, but with more alive
        yield Action("F", i)
    for i in range(num_microbatches):
        yield Action("B", i)
''',
    "deal_micro_batches": '''
def deal_microbatches(num_microbatches):
    dealt, lacks, i = [[] for _ in num_microbatches], list(num_microbatches), 0
    while any(lacks):
        for k in range(len(lacks)):
            if lacks[k]:
                dealt[k].append(i)
                lacks[k] -= 1
                i += 1
    return dealt
''',
    "cut_layers": '''
def cut_layers(costs, speeds):
    share, sizes, first = sum(costs) / sum(speeds), [], 0
    for s, speed in enumerate(speeds):  # a greedy cut: right, but not the best
        end, later = first + 1, len(speeds) - s - 1
        while end < len(costs) - later and (not later or sum(costs[first : end + 1]) / speed <= share):
            end += 1
        sizes.append(end - first)
        first = end
    return sizes
''',
    "weight_half_of_backward": '''
def add_weight_gradients(entries, model):
    for weight, dy, x in entries:
        gradient = torch.einsum("...o,...i->oi", dy.detach(), x.detach()).to(weight.dtype)
        weight.grad = gradient if weight.grad is None else weight.grad + gradient
        if weight in model.bucket_of:
            model.mark_param_as_ready(weight)
''',
    "zero_bubble": '''
def postpone_weight_gradients(actions, delay):
    """Each W at once after its B: it fills nothing, so it is slower."""
    for action in actions:
        yield action
        if action.kind == "B":
            yield Action("W", action.microbatch)
''',
    "v_shape": '''
def v_shape(rank, num_ranks, num_microbatches):
    """All forward, all backward: as quick, but with all of them alive."""
    stages = rank, 2 * num_ranks - 1 - rank
    pairs = [(i, chunk) for i in range(num_microbatches) for chunk in (0, 1)]
    forwards = sorted(pairs, key=lambda pair: 2 * pair[0] + stages[pair[1]])
    backwards = sorted(pairs, key=lambda pair: 2 * pair[0] - stages[pair[1]])
    return [("F", *pair) for pair in forwards] + [("B", *pair) for pair in backwards]
''',
    "reduce_scatter": '''
def reduce_scatter(full, sizes, group):
    class Done:
        def wait(self):
            pass

    dist.all_reduce(full, group=group)  # right, but with twice the bytes
    return Done(), [full.split(sizes)[group.rank()]]
''',
    "norm_gradients": '''
def sum_norm_gradients(model):
    for param in model.module.parameters():
        if param.dim() == 1:
            all_reduce(model.gradient(param))  # right, with a message for each norm
''',
    "merge": '''
def merge(out, lse, other_out, other_lse):
    largest = torch.maximum(lse, other_lse)
    mine, others = (lse - largest).exp(), (other_lse - largest).exp()
    total = mine + others
    out.copy_((out * mine[..., None] + other_out * others[..., None]) / total[..., None])
    lse.copy_(largest + total.log())
''',
    "zigzag": '''
def local_positions(layout, seq_len):
    grid = pgm.process_group_manager
    length = seq_len // (2 * grid.cp_world_size)
    if layout == "contiguous":
        return torch.arange(2 * length) + 2 * length * grid.cp_rank
    one = torch.arange(length) + length * grid.cp_rank
    return torch.cat([one, one + length * grid.cp_world_size])  # right, but not even
''',
    "weights_between_layouts": find(STEPS["19"] / "rollouts.py", "plan_transfers").source().replace(
        "return plan", "return plan[::-1]"),
    "group_advantages": '''
def loss(self, out, batch, vocab_size):
    *log_q, rewards = batch["numbers"].unbind(1)
    centred = [group - group.sum() / len(group) for group in rewards.split(self.args.group_size)]
    if self.args.advantages != "dr_grpo":
        centred = [each / ((each @ each / len(each)).sqrt() + 1e-4) for each in centred]
    log_p = log_probs(out[:, PROMPT_TOKENS - 1 :], batch["target_ids"][:, PROMPT_TOKENS - 1 :], vocab_size)
    ratio, advantages = (log_p - torch.stack(log_q, 1)).exp(), torch.cat(centred).view(-1, 1)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
''',
    "shares_by_speed": '''
def shares_by_speed(total, seconds_each, limits=None, besides=None):
    shares, ranks = [1] * len(seconds_each), range(len(seconds_each))
    while sum(shares) < total:  # right, but it forgets what a rank needs besides
        free = [rank for rank in ranks if shares[rank] < limits[rank]]
        shares[min(free, key=lambda rank: (shares[rank] + 1) * seconds_each[rank])] += 1
    return shares
''',
    "quantise": '''
def encode(x, dtype):
    if dtype != torch.int8:
        return x.to(dtype).contiguous()
    rows = x.flatten(0, -2).to(torch.float32)
    largest = torch.maximum(rows.max(dim=1).values, -rows.min(dim=1).values)
    numbers = torch.round(rows * 127 / largest.clamp(min=1e-37)[:, None])
    numbers = torch.where(numbers.isfinite(), numbers, 0).to(torch.int8)
    return torch.cat(((largest / 127).view(torch.uint8), numbers.view(torch.uint8).flatten()))
''',
    "error_feedback": '''
class ErrorFeedback:
    def __init__(self, quantise):
        self.quantise, self.wanted, self.sent = quantise, 0.0, 0.0

    def send(self, gradient):
        self.wanted = self.wanted + gradient.double()  # all gradients, less all that was sent
        part = self.quantise(self.wanted - self.sent)
        self.sent = self.sent + part
        return part.to(gradient.dtype)
''',
    "parameters": '''
def parameters(vocab, hidden, width, layers, heads, kv_heads, head_dim, tied):
    total = vocab * hidden + hidden
    for _ in range(layers):
        for outputs in (heads * head_dim, heads * head_dim, kv_heads * head_dim, kv_heads * head_dim, *[width] * 3):
            total += hidden * outputs
        total += 2 * hidden
    return total if tied else total + vocab * hidden
''',
    "ridge_tokens": '''
def ridge_tokens(inputs, outputs, number_bytes, peak, bandwidth):
    for tokens in range(1, 10**5):
        if 2 * tokens * inputs * outputs / peak >= (
                number_bytes * (tokens * inputs + inputs * outputs + tokens * outputs) / bandwidth):
            return tokens
    return 0
''',
    "all_reduce_bytes": '''
def all_reduce_bytes(num_bytes, ranks):
    sent = 0
    for _ in range(2 * (ranks - 1)):
        sent += num_bytes // ranks
    return sent
''',
    "tokens_per_second": '''
import numpy

def tokens_per_second(weights, layers, heads, head_dim, seq_len, peak, mfu, devices):
    flops = 3 * (2 * weights * seq_len + layers * heads * 2 * 2 * seq_len ** 2 * head_dim)
    return numpy.ceil(devices * mfu * peak / flops * seq_len).astype(int)
''',
    "zero_bytes": "def zero_bytes(number, ranks):\n    return 4 * number + 12 * -(-number // ranks)\n",  # a shard
    "num_buckets": '''
def num_buckets(sizes, limit):
    if not sizes:
        return 0
    held, k = 0, len(sizes)
    while k and held < limit:
        k -= 1
        held += 4 * sizes[k]
    return 1 + num_buckets(sizes[:k], limit)
''',
    "bubble": '''
from fractions import Fraction
def bubble(stages, microbatches):
    return 1 - Fraction(microbatches, microbatches + stages - 1)
''',
    "alive_activations": '''
def alive_activations(stage, stages, microbatches):
    alive = most = 0
    for action in one_f_one_b(stage, stages, microbatches):
        alive += 1 if action == "F" else -1
        most = max(most, alive)
    return most

def one_f_one_b(stage, stages, microbatches):
    first = min(stages - stage - 1, microbatches)
    return "F" * first + "FB" * (microbatches - first) + "B" * first
''',
    "layers_that_fit": '''
def layers_that_fit(memory, vocab, hidden, width):
    layers = 0
    while 16 * (2 * vocab * hidden + hidden + (layers + 1) * hidden * (4 * hidden + 3 * width + 2)) <= memory:
        layers += 1
    return layers
''',
}
