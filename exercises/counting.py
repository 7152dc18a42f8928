"""Solutions of the exercises that count: sizes in, a number out. What a run measures for them is in chapters/.

Bytes are bytes and not GB, seconds are seconds, FLOPs count a multiplication and an addition as two. Unless a size says
otherwise, numbers are float32, of 4 bytes.
"""


def parameters(vocab, hidden, width, layers, heads, kv_heads, head_dim, tied):
    """Parameters of a Llama."""
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    mlp = 3 * hidden * width
    norms = 2 * hidden
    tables = (1 if tied else 2) * vocab * hidden
    return layers * (attention + mlp + norms) + tables + hidden


def ridge_tokens(inputs, outputs, number_bytes, peak, bandwidth):
    """The least tokens for which a matmul computes at least as long as it moves its bytes; 0 if there are none.

    The roofline model, Williams et al. 2009.
    """
    # 2 t i o / peak >= b (t i + i o + t o) / bandwidth
    flops = 2 * inputs * outputs  # of a token
    a_token = number_bytes * (inputs + outputs)
    weight = number_bytes * inputs * outputs
    gain = flops / peak - a_token / bandwidth  # seconds by which a further token makes computing longer than moving
    return -(-weight / bandwidth // gain) if gain > 0 else 0


def all_reduce_bytes(num_bytes, ranks):
    """Bytes that a rank sends in a ring all-reduce."""
    # n - 1 parts until the sums are complete, and n - 1 until all ranks have all of them
    return 2 * (ranks - 1) * num_bytes / ranks


def training_flops(vocab, hidden, width, layers, heads, kv_heads, head_dim, seq_len):
    """FLOPs of forward and backward of a token."""
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    weights = layers * (attention + 3 * hidden * width) + vocab * hidden
    scores = 2 * seq_len * heads * head_dim  # of a token, in each layer: q k, and the sum over the values
    return 6 * weights + 6 * layers * scores


def state_bytes(num_parameters, num_cast):
    """Bytes between backward and the optimizer's step."""
    # weights, gradients, AdamW's two moments, copies
    return 4 * num_parameters + 4 * num_parameters + 8 * num_parameters + 2 * num_cast


def tokens_per_second(weights, layers, heads, head_dim, seq_len, peak, mfu, devices):
    """Tokens a second of a training."""
    flops = 6 * weights + 12 * layers * heads * head_dim * seq_len
    return devices * mfu * peak / flops


def tp_bytes(layers, hidden, tokens, ranks):
    """Bytes that a rank sends for a micro-batch."""
    # f and g of attention and MLP; the embedding's g and the projection's f; the loss
    sums = 4 * layers + 2
    numbers = tokens * (sums * hidden + 3)
    return 2 * (ranks - 1) / ranks * 4 * numbers


def slowest_link(flops, sent, ranks, rate):
    """Bytes a second of the link over which tensor parallelism is just as fast as one rank."""
    saved = flops / rate * (1 - 1 / ranks)
    return sent / saved


def gradient_bytes(num_parameters, ranks, microbatches):
    """Bytes that a rank sends in an optimizer step."""
    # one all-reduce of the gradients, which the micro-batches have added up
    num_bytes = 4 * num_parameters
    return 2 * (ranks - 1) / ranks * num_bytes


def num_buckets(sizes, limit):
    """All-reduces of an optimizer step."""
    buckets, held = 0, 0
    for size in reversed(sizes):
        held += 4 * size
        if held >= limit:
            buckets, held = buckets + 1, 0
    return buckets + (held > 0)


def bubble(stages, microbatches):
    """The share of the time in which a stage waits."""
    return (stages - 1) / (microbatches + stages - 1)


def pipeline_bytes(stage, stages, microbatches, tokens, hidden):
    """Bytes that a stage sends in an optimizer step."""
    # hidden states to the next stage, and gradients of that shape to the one before
    directions = (stage < stages - 1) + (stage > 0)
    return directions * microbatches * tokens * hidden * 4


def alive_activations(stage, stages, microbatches):
    """Micro-batches that wait for their backward at most."""
    return min(stages - stage, microbatches)


def layer_activations(tokens, hidden, width, heads, head_dim):
    """Bytes that a layer keeps until backward."""
    # two of each norm, both sums; q, k, v and what attention makes of them; gate, up, silu and product;
    # a number a token of each norm, and one of each head
    numbers = 6 * hidden + 4 * heads * head_dim + 4 * width + 2 + heads
    return 4 * tokens * numbers


def recomputed_activations(layers, tokens, hidden, layer_bytes):
    """Bytes that are kept when backward has just computed the last layer again."""
    outputs = 4 * (layers - 1) * tokens * hidden  # of all layers but the last
    return outputs + layer_bytes


def largest_micro_batch(memory, num_parameters, sample_bytes):
    """Samples of the largest micro-batch that fits."""
    return max(0, (memory - 16 * num_parameters) // sample_bytes)


def zero_bubble_units(stages, microbatches):
    """Units of time of an optimizer step."""
    return 3 * microbatches + stages - 1


def interleaved_units(stages, microbatches, chunks):
    """Units of time of an optimizer step."""
    # v chunks make the bubble v times smaller
    return 3 * microbatches + 3 * (stages - 1) / chunks


def training_days(weights, layers, heads, head_dim, seq_len, tokens, gpus, peak, mfu):
    """Days of a training."""
    flops = (6 * weights + 12 * layers * heads * head_dim * seq_len) * tokens
    return flops / (gpus * peak * mfu) / 86400


def layers_that_fit(memory, vocab, hidden, width):
    """The most layers of which weights, gradients and AdamW's moments fit."""
    layer = 4 * hidden * hidden + 3 * hidden * width + 2 * hidden
    rest = 2 * vocab * hidden + hidden
    return max(0, (memory / 16 - rest) // layer)


def unlike_pipelines_units(pipelines):
    """Units of time of an optimizer step."""
    # a stage waits while the micro-batches before it are on other stages, and all pipelines for the slowest
    return max(3 * layers * (microbatches + stages - 1) for stages, layers, microbatches in pipelines)


def rank_of_many(number, layers, hidden, width, dp, tp, pp, microbatches, tokens):
    """Bytes of a rank of a middle stage: 1 of its weights, or those that it sends over 2 dp or 3 pp in a step."""
    matrices = (4 * hidden * hidden + 3 * hidden * width) / tp
    weights = 4 * layers / pp * (matrices + 2 * hidden)  # norms are whole on each tp rank
    summed = 2 * (dp - 1) / dp * weights
    messages = 2 * microbatches * 4 * tokens * hidden  # hidden states go on, gradients go back
    return (weights, summed, messages)[int(number) - 1]


def zero_bytes(num_parameters, replicas):
    """Bytes that a rank keeps at the end of an optimizer step."""
    # all weights, and a share of the gradients and AdamW's two moments
    return 4 * num_parameters + 12 * num_parameters / replicas


def fsdp_bytes(layer, layers, rest, replicas, microbatches):
    """Bytes that a rank sends in an optimizer step."""
    # a layer is gathered forward and backward, but the last one stays; its gradient is scattered each time
    of_layers = microbatches * layer * (2 * layers - 1 + layers)
    of_rest = rest * (1 + microbatches)
    return 4 * (of_layers + of_rest) * (replicas - 1) / replicas


def norm_gradient_bytes(layers, hidden, ranks):
    """Bytes that a rank sends for the gradients of the norms."""
    norms = 2 * layers + 1
    return 2 * (ranks - 1) / ranks * 4 * norms * hidden


def ring_attention_bytes(tokens, kv_heads, head_dim, ranks):
    """Bytes that a rank sends in forward and backward of a layer."""
    # keys and values of a rank's own tokens go around, twice; their gradients return to where they began
    block = 2 * 4 * tokens / ranks * kv_heads * head_dim
    return block * (2 * (ranks - 1) + ranks)


def active_parameters(hidden, width, layers, experts, per_token):
    """Parameters that are multiplied by one token, in the layers."""
    # four of attention, the router, and the experts that the token passes
    matrices = 4 * hidden * hidden + hidden * experts + per_token * 3 * hidden * width
    return layers * matrices


def generators_needed(microbatches, generation, training, busy, lag):
    """Generators with which trainers compute for the share `busy` of the time at least; 0 if no number is enough."""
    period = training / busy  # seconds from step to step that are allowed
    allowed = period if lag else period - training  # of these for generation: without a lag, trainers wait for it
    each = allowed // generation  # micro-batches that a generator can answer in it
    return -(-microbatches // each) if each else 0
