"""Right answers in another form than the course's: drawn, looped, recursive, rounded up. See test_exercises.py."""

RIGHT = {
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
