"""Exercises that count, of one process: parameters, FLOPs, bytes, seconds, beside what runs measure."""

import functools
import itertools
import types
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from counting_attempt import counts
from step_modules import StepSource

SHAPE = ("vocab", "hidden", "width", "layers", "heads", "kv_heads", "head_dim")
SHAPES = [dict(zip(SHAPE, sizes)) for sizes in (
    (32, 16, 24, 1, 2, 2, 8), (32, 16, 24, 3, 2, 1, 8), (100, 24, 40, 2, 4, 2, 6), (64, 32, 96, 2, 4, 4, 4),
    (64, 32, 96, 5, 8, 2, 6), (1024, 128, 352, 8, 8, 4, 16))]
SEVEN_B = dict(zip(SHAPE, (32000, 4096, 11008, 32, 32, 32, 128)))


@functools.cache
def modules(step: str):
    return StepSource(step).load()


def llama(vocab, hidden, width, layers, heads, kv_heads, head_dim, tied=False, device="meta"):
    """Step 8's model of this shape; on the CPU with random weights."""
    fields = dict(vocab_size=vocab, hidden_size=hidden, intermediate_size=width, num_hidden_layers=layers,
                  num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, rms_norm_eps=1e-5,
                  rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}, tie_word_embeddings=tied,
                  initializer_range=0.02, model_type="llama", hidden_act="silu", attention_bias=False, mlp_bias=False)
    with torch.device(device):
        return modules("8").model.Llama(types.SimpleNamespace(**fields))


@functools.cache
def flops_of_a_sample(seq_len: int, vocab, hidden, width, layers, *heads: int) -> int:
    """Those of forward and backward, as torch counts them. On the meta device nothing is computed.

    All layers are alike, so of more than two, each adds what the second one does.
    """
    if layers > 2:
        one, two = (flops_of_a_sample(seq_len, vocab, hidden, width, few, *heads) for few in (1, 2))
        return one + (layers - 1) * (two - one)
    model = llama(vocab, hidden, width, layers, *heads)
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        model(torch.zeros(1, seq_len, dtype=torch.long)).sum().backward()
    return counter.get_total_flops()


@functools.cache
def parameters_of(*shape: int) -> int:
    return sum(param.numel() for param in llama(*shape).parameters())


def count_of(shape: dict) -> int:
    return parameters_of(*shape.values())


def weights_that_multiply(shape: dict) -> int:
    model = llama(**shape)
    return sum(param.numel() for name, param in model.named_parameters() if param.dim() > 1 and "embedding" not in name)


class Held(TorchDispatchMode):
    """Bytes of the tensors that were made inside and are still there: `now`."""

    def __init__(self):
        super().__init__()
        self.now, self.known = 0, weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs))
                 if isinstance(tensor, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage not in self.known and storage._cdata not in given:
                self.known[storage] = None
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        return out

    def free(self, num_bytes: int) -> None:
        self.now -= num_bytes


@counts("1", "parameters", hints=(
    "A layer has four matrices of attention, three of the MLP and two norms, each with one number for each of `hidden`.",
    "q_proj is hidden x (heads * head_dim), and so is out_proj. k_proj and v_proj are hidden x (kv_heads * head_dim).",
    "The embedding and the projection are vocab x hidden each, one matrix if they are tied. There is a norm at the "
    "end."), sizes=[dict(shape, tied=tied) for shape in (*SHAPES[1:], SEVEN_B) for tied in (False, True)], mistakes=[
    ("2 * hidden * kv_heads", "2 * hidden * heads", "keys and values have kv_heads, not as many heads as the queries"),
    ("2 * hidden * kv_heads", "hidden * kv_heads", "one of keys and values is missing"),
    ("2 * hidden * heads", "hidden * heads", "out_proj, or q_proj, is missing"),
    ("3 * hidden * width", "2 * hidden * width", "the MLP has three matrices: gate, up and down"),
    ("norms = 2 * hidden", "norms = 0", "each layer has two norms with `hidden` parameters each"),
    ("norms = 2 * hidden", "norms = hidden", "each layer has two norms, one before attention, one before the MLP"),
    ("+ hidden", "", "the norm at the end is missing"),
    ("(1 if tied else 2)", "2", "where they are tied, embedding and projection share one matrix"),
    ("(1 if tied else 2)", "1", "where they are not tied, the projection has a matrix of its own"),
    ("layers * (attention", "(attention", "that is one layer: there are `layers` of them"),
    ("2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim", "4 * hidden * hidden", "heads * head_dim need "
     "not be hidden, and keys and values have fewer heads")])
def parameters(attempt, tied, **shape):
    """Count the parameters of a Llama.

    `hidden` is D, `width` the MLP's I, and `tied` says whether the projection uses the embedding's matrix. Nothing has
    a bias. heads * head_dim need not be `hidden`.

        embedding -> layers x [norm, attention (q, k, v, out), norm, MLP (gate, up, down)] -> norm -> projection

    Return the number of parameters of the whole model. The check builds the model on torch's meta device and adds up
    what its parameters have: also for a Llama of 7 billion.
    """
    return sum(param.numel() for param in llama(**shape, tied=tied).parameters())


@counts("1", "tokens", hints=(
    "Computing takes 2 * t * inputs * outputs / peak seconds.",
    "What moves: the input (t, inputs), the weight (inputs, outputs) and the output (t, outputs).",
    "Both times grow with t. Solve 2 t i o / peak >= b (t i + i o + t o) / bandwidth for t, and round up."),
    sizes=[dict(inputs=i, outputs=o, number_bytes=b, peak=peak, bandwidth=bandwidth) for i, o in (
        (4096, 4096), (4096, 11008), (8192, 1024)) for b, peak, bandwidth in (
        (2, 989e12, 3350e9), (2, 312e12, 2039e9), (4, 67e12, 3350e9), (4, 0.15e12, 17e9))], mistakes=[
    ("flops = 2 * inputs", "flops = inputs", "a multiplication and an addition are two FLOPs"),
    ("flops = 2 * inputs", "flops = 6 * inputs", "this is the forward pass alone: two FLOPs a weight and token"),
    ("number_bytes * (inputs + outputs)", "0", "the input and the output move, too, and not the weight alone"),
    ("number_bytes * (inputs + outputs)", "number_bytes * inputs", "the output has to be written, too"),
    ("number_bytes * (inputs + outputs)", "number_bytes * outputs", "the input has to be read, too"),
    ("weight = number_bytes * inputs * outputs", "weight = inputs * outputs", "the weight has number_bytes bytes a "
     "number"),
    ("weight = number_bytes * inputs", "weight = 2 * number_bytes * inputs", "the weight is read once"),
    ("number_bytes * (inputs + outputs)", "(inputs + outputs)", "input and output have number_bytes bytes a number"),
    ("-(-weight / bandwidth // gain)", "weight / bandwidth // gain", "with that many tokens moving still takes longer: "
     "round up"),
    ("-(-weight / bandwidth // gain)", "peak / bandwidth", "that is the ridge point, FLOPs a byte; what is asked for "
     "are the tokens that reach it")])
def ridge_tokens(attempt, inputs, outputs, number_bytes, peak, bandwidth):
    """Find how many tokens a matmul needs to be limited by computing.

    A device does `peak` FLOPs a second, and moves `bandwidth` bytes a second between its memory and its cores at the
    same time. A linear layer multiplies t tokens, (t, inputs) x (inputs, outputs). It reads its input and its weight,
    and writes its output, of number_bytes bytes a number, each once:

        seconds of computing      /         with few tokens, moving the weight takes longest: the device computes
        and of moving        ----/----      now and then. From some t on it computes all the time.
                                /  t

    Return the least whole number of tokens t from which on computing takes at least as long as moving. The check counts
    FLOPs and bytes of real tensors, for t and for t - 1.
    """
    def computes_longer(tokens: int) -> bool:
        with FlopCounterMode(display=False) as counter, torch.device("meta"):
            dtype = {2: torch.bfloat16, 4: torch.float32}[number_bytes]
            x, weight = torch.empty(tokens, inputs, dtype=dtype), torch.empty(outputs, inputs, dtype=dtype)
            moved = sum(tensor.nbytes for tensor in (x, weight, torch.nn.functional.linear(x, weight)))
        return counter.get_total_flops() / peak >= moved / bandwidth

    low, high = 0, 1 << 16  # low does not, high does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if computes_longer(middle) else (middle, high)
    return high


@counts("3", "FLOPs", hints=(
    "A matmul of t tokens with a weight of N numbers is 2 N t FLOPs. Backward needs two such matmuls: one for the "
    "gradient of the input, one for that of the weight.",
    "The embedding is a lookup: no FLOPs. The projection is a matmul.",
    "Attention: the scores are T x T a head, as if each token saw all. Two matmuls forward, q k and scores v, each of "
    "2 T * head_dim FLOPs a token and head; twice that backward."),
    sizes=[dict(shape, seq_len=seq_len) for shape in SHAPES for seq_len in (4, 32)], mistakes=[
    ("+ vocab * hidden", "+ 2 * vocab * hidden", "the embedding is a lookup: it multiplies nothing"),
    ("+ vocab * hidden", "", "the projection to the vocabulary is missing"),
    (" + 6 * layers * scores", "", "attention is missing: the scores, and the sum over the values"),
    ("6 * layers * scores", "3 * layers * scores", "half of attention: count all T x T scores, as torch does"),
    ("6 * layers * scores", "2 * layers * scores", "attention's backward is missing"),
    ("* heads * head_dim\n    return", "* kv_heads * head_dim\n    return", "each query head has scores of its own"),
    ("6 * layers * scores", "6 * scores", "each layer has attention"),
    ("2 * seq_len", "2", "a token's scores are T, one for each token of its sample"),
    ("3 * hidden * width", "2 * hidden * width", "the MLP has three matrices: gate, up and down"),
    ("6 * weights", "2 * weights", "the matmuls' backward is missing"),
    ("2 * hidden * kv_heads", "2 * hidden * heads", "keys and values have kv_heads, not as many heads as the queries")])
def training_flops(attempt, seq_len, **shape):
    """Count the FLOPs of a token, forward and backward.

    A multiplication and an addition are two FLOPs. Only matmuls count: those with a weight, and those of attention, of
    which each of the T = seq_len tokens of a sample has scores with all T, as torch counts it (half of them are masked
    and thrown away). This is where "6 N a token" comes from, and what it leaves out.

    Return the FLOPs of forward and backward of a sample, divided by its tokens. The check lets
    torch.utils.flop_counter count what the model does.
    """
    return flops_of_a_sample(seq_len, *shape.values()) / seq_len


@counts("3", "bytes", hints=(
    "What has as many numbers as there are parameters: weights, gradients, and what the optimizer remembers.",
    "AdamW keeps two moments for each parameter: the averages of the gradient and of its square.",
    "All of them are float32: 16 bytes a parameter. A copy in bfloat16 has 2 bytes a number."),
    sizes=lambda: [dict(num_parameters=count_of(shape), num_cast=cast * (count_of(shape) - shape["vocab"] * shape[
        "hidden"])) for shape in SHAPES for cast in (0, 1)], mistakes=[
    ("+ 8 * num_parameters", "", "AdamW's two moments are missing"),
    ("8 * num_parameters", "4 * num_parameters", "AdamW keeps two moments of each parameter, not one"),
    ("4 * num_parameters + 4 * num_parameters", "4 * num_parameters", "the gradients, or the weights, are missing"),
    (" + 2 * num_cast", "", "the copies in bfloat16 are missing"),
    ("2 * num_cast", "4 * num_cast", "a number in bfloat16 has 2 bytes"),
    ("2 * num_cast", "2 * num_parameters", "only num_cast of the parameters have a copy"),
    ("4 * num_parameters + 4 * num_parameters", "2 * num_parameters + 4 * num_parameters", "weights are float32, also "
     "where activations are bfloat16"),
    ("4 * num_parameters + 4 * num_parameters", "2 * num_parameters + 2 * num_parameters", "weights and gradients are "
     "float32, also where activations are bfloat16"),
    ("+ 2 * num_cast", "- 2 * num_cast", "the copies come on top: the float32 weights stay")])
def state_bytes(attempt, num_parameters, num_cast):
    """Count the bytes of a training's state: what is there whatever the batch.

    Weights and gradients are float32, and so is what AdamW remembers. Where activations are bfloat16, num_cast of the
    num_parameters have a copy in bfloat16 besides, which an optimizer step's matmuls share (0: float32 all through).

    Return the bytes of all of them together, at the end of a step's last backward. The check trains for a step, and
    adds up the bytes of the tensors that are there (one counter of AdamW for each parameter tensor is left out).
    """
    shape = next(shape for shape in SHAPES if count_of(shape) == num_parameters)
    model, module = llama(**shape, device="cpu"), modules("8").model
    model.dtype = torch.bfloat16 if num_cast else torch.float32
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with module.cast_weights_once():
        model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
        copies = [*module.casts.values()]
    optimizer.step()
    moments = [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.dim()]
    held = [*model.parameters(), *(param.grad for param in model.parameters()), *moments, *copies]
    return sum(tensor.nbytes for tensor in held)


@counts("3", "tokens/s", hints=(
    "MFU is the share of its peak that a device uses: it does mfu * peak FLOPs a second.",
    "A token needs 6 FLOPs for each weight that multiplies, forward and backward together.",
    "Attention adds 12 * layers * heads * head_dim * seq_len for a token."),
    sizes=lambda: [dict(weights=weights_that_multiply(shape), layers=shape["layers"], heads=shape["heads"],
                head_dim=shape["head_dim"], seq_len=seq_len, peak=peak, mfu=mfu, devices=devices)
           for shape in (SHAPES[5], SEVEN_B)
           for seq_len, peak, mfu, devices in itertools.product((128, 1024), (989e12, 0.1e12), (0.4,), (1, 8))],
    mistakes=[
    ("6 * weights", "2 * weights", "the matmuls' backward is missing: 6 for each weight, not 2"),
    ("6 * weights", "8 * weights", "8 for each weight only where forward is computed again, with --recompute"),
    ("12 * layers", "6 * layers", "half of attention: MFU counts all T x T scores"),
    ("12 * layers", "4 * layers", "attention's backward is missing"),
    (" + 12 * layers * heads * head_dim * seq_len", "", "attention is missing"),
    ("12 * layers * heads", "12 * heads", "each layer has attention"),
    ("* seq_len\n", "\n", "a token has scores with all tokens of its sample"),
    ("* mfu", "", "that is at 100 % of the peak: nobody reaches it"),
    ("devices *", "", "that is one device: there are several"),
    ("* mfu", "/ mfu", "MFU is the share that is used: multiply by it")])
def tokens_per_second(attempt, weights, layers, heads, head_dim, seq_len, peak, mfu, devices):
    """Say how many tokens a second a training makes.

    Each of `devices` could do `peak` FLOPs a second, and uses the share `mfu` of that (model FLOPs utilization).
    `weights` are the parameters that multiply, which is all but embedding and norms.

    Return the tokens a second of all devices together. The check counts the FLOPs of a sample of such a model with
    torch.utils.flop_counter, and lets the devices do as many.
    """
    shape = next(shape for shape in (SHAPES[5], SEVEN_B) if shape["layers"] == layers)
    return seq_len * devices * peak * mfu / flops_of_a_sample(seq_len, *shape.values())


LAYER = [dict(zip(("tokens", "hidden", "width", "heads", "head_dim"), sizes)) for sizes in (
    (4, 16, 24, 2, 8), (8, 16, 24, 2, 8), (32, 16, 24, 2, 8), (8, 32, 24, 2, 8), (8, 16, 96, 2, 8), (8, 16, 24, 4, 8),
    (8, 16, 24, 2, 16), (16, 32, 96, 4, 4), (64, 128, 352, 8, 16), (16, 48, 128, 4, 12), (24, 24, 40, 3, 4),
    (128, 64, 172, 4, 16))]


@functools.cache
def kept_bytes(layers: int, recompute: bool, tokens, hidden, width, heads, head_dim) -> int:
    """What `layers` layers keep of their forward; with `recompute` until the last one is computed again."""
    model = llama(32, hidden, width, layers, heads, heads, head_dim, device="cpu")
    cos, sin = modules("8").model.get_cos_sin(tokens, head_dim, torch.float32, torch.device("cpu"), rope_theta=1e4)
    x, held, seen = torch.randn(1, tokens, hidden, requires_grad=True), Held(), []
    grad = torch.ones_like(x)
    for layer in model.decoder_layers:
        def noted(*args, forward=layer.forward):
            try:
                return forward(*args)
            finally:  # computing again stops by an exception, once backward has what it needs
                seen.append(held.now)

        layer.forward = noted
    if recompute:
        modules("8").utils.recompute_layers(model.decoder_layers)
    with held:
        for layer in model.decoder_layers:
            x = layer(x, cos, sin)
        kept = held.now
        x.backward(grad)
    return seen[layers] if recompute else kept


@counts("8", "bytes", hints=(
    "Backward of a matmul needs its input. q, k and v share one, and so do gate and up.",
    "Beside what goes into matmuls: attention keeps q, k, v and its output, silu its input, the product its factors.",
    "The numbers of a token: 6 * hidden (two for each norm, both sums), 4 * heads * head_dim, 4 * width, 2 for the "
    "norms, and one a head for attention's softmax."), sizes=LAYER, mistakes=[
    ("6 * hidden +", "4 * hidden +", "a norm keeps what it has normalised, and its output is the input of the matmuls"),
    ("6 * hidden +", "2 * hidden +", "the norms are missing: each keeps two tensors"),
    ("6 * hidden +", "9 * hidden +", "q, k and v share one input, the norm's output, and so do gate and up"),
    ("6 * hidden +", "5 * hidden +", "one of these is missing: two tensors of each norm, and both residual sums"),
    ("4 * heads", "3 * heads", "attention keeps its output, too, or one of q, k and v is missing"),
    ("4 * heads", "heads", "attention keeps q, k and v for its backward"),
    ("4 * width", "3 * width", "four of the MLP's are kept: gate, up, silu(gate), and the product"),
    ("4 * width", "2 * width", "four of the MLP's are kept: gate, up, silu(gate), and the product"),
    (" + 2 + heads", "", "the norms keep a number a token each, and attention one for each head"),
    ("2 + heads", "2 + heads * tokens", "the scores are not kept: scaled_dot_product_attention computes them again "
     "in backward"),
    (" + heads\n", "\n", "attention keeps a number for each token and head: the log of its softmax's sum"),
    ("4 * tokens *", "4 *", "that is one token")])
def layer_activations(attempt, tokens, hidden, width, heads, head_dim):
    """Count what a decoder layer keeps until its backward.

    A micro-batch has `tokens` tokens, all numbers are float32, and there are as many key/value heads as query heads. A
    layer adds to what is kept:

        x -> norm -> q, k, v -> attention -> out -> + x -> norm -> gate, up -> silu(gate) * up -> down -> + -> out
             2       3          1                   1      2       2           2                         1

    The layer's input x is what the layer before has added. A norm has normalised values, and these times its weight.
    Rotated q and k take the place of those that were not.
    Return the bytes. The check runs the layer and adds up the tensors that are still there after its forward.
    """
    return kept_bytes(1, False, tokens, hidden, width, heads, head_dim)


@counts("8", "bytes", hints=(
    "With --recompute a layer keeps only its input; its output is the next one's.",
    "Backward begins at the last layer: it is computed again, and then keeps all that it would have kept.",
    "The outputs of the other layers, tokens * hidden numbers each, and layer_bytes."),
    sizes=lambda: [dict(layers=layers, tokens=size["tokens"], hidden=size["hidden"], layer_bytes=kept_bytes(
        1, False, *size.values())) for size in LAYER[4:8] for layers in (1, 2, 5)], mistakes=[
    ("outputs + layer_bytes", "outputs", "the layer that is computed again keeps all of its own meanwhile"),
    ("outputs + layer_bytes", "layer_bytes", "each layer keeps its input"),
    ("outputs + layer_bytes", "layers * layer_bytes", "that is without --recompute"),
    ("outputs + layer_bytes", "outputs + layers * layer_bytes", "only one layer at a time is computed again"),
    ("(layers - 1)", "layers", "layer_bytes has the last layer's output already"),
    ("(layers - 1)", "(layers + 1)", "the first layer's input is not counted here, and the last layer's output once"),
    ("4 * (layers - 1)", "2 * (layers - 1)", "a float32 has 4 bytes"),
    ("4 * (layers - 1)", "(layers - 1)", "bytes: a float32 has 4 of them")])
def recomputed_activations(attempt, layers, tokens, hidden, layer_bytes):
    """Count what is kept with --recompute when most is.

    Without it, each of the layers keeps layer_bytes until its backward, its output of `tokens` x `hidden` numbers among
    them. With it, a layer keeps only its input, and backward computes the layer's forward once more. This is the moment
    when the last layer has just been computed again, up to its output, which is there from the first time:

        forward     | layer 0 | layer 1 | layer 2 |        then      layer 2 again: all that it keeps
        kept          output    output    output

    The first layer's input is not counted. Return the bytes. The check runs the layers and stops at that moment.
    """
    size = next(size for size in LAYER if (size["tokens"], size["hidden"]) == (tokens, hidden)
                and kept_bytes(1, False, *size.values()) == layer_bytes)
    return kept_bytes(layers, True, *size.values())


@counts("8", "samples", hints=(
    "What is there whatever the batch: weights, gradients and AdamW's two moments, all float32.",
    "The rest of the memory holds so many times the activations of a sample.",
    "Whole samples only, and none where not even the state fits."),
    sizes=lambda: [dict(memory=16 * count_of(SHAPES[0]) + more, num_parameters=count_of(SHAPES[0]),
                        sample_bytes=sample_of(1)) for more in (
        -20000, -1, 0, *(k * sample_of(1) + rest for k in (1, 2, 3, 5) for rest in (-1, 0, 999)))], mistakes=[
    ("16 * num", "4 * num", "gradients and AdamW's moments need memory, too"),
    ("16 * num", "8 * num", "AdamW's two moments need memory, too"),
    ("16 * num", "12 * num", "one of these is missing: weights, gradients and AdamW's two moments"),
    ("memory - 16 * num_parameters", "memory", "weights, gradients and AdamW's moments need memory, too"),
    (" // sample_bytes", " / sample_bytes", "whole samples only: round down"),
    ("max(0, (memory - 16 * num_parameters) // sample_bytes)", "-((16 * num_parameters - memory) // sample_bytes)",
     "that is one sample too many: round down"),
    ("max(0, (memory - 16 * num_parameters) // sample_bytes)", "(memory - 16 * num_parameters) // sample_bytes",
     "where not even the state fits, it is none: 0"),
    ("max(0,", "max(1,", "where nothing is left beside the state, it is none: 0"),
    ("16 * num", "18 * num", "there are no copies in bfloat16: all is float32")])
def largest_micro_batch(attempt, memory, num_parameters, sample_bytes):
    """Find the largest micro-batch that fits into a device's memory.

    The device has `memory` bytes. The model has num_parameters parameters, trained with AdamW in float32, and keeps
    sample_bytes bytes of activations for each sample until backward. Return the number of samples, 0 if none fits. (A
    real device needs something for temporary tensors, too.)

    The check makes the model's state, runs the forward of 1, 2, ... samples, and adds up what is held.
    """
    model, samples = llama(**SHAPES[0], device="cpu"), 0
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    optimizer.step()
    moments = [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.dim()]
    state = sum(tensor.nbytes for tensor in (*model.parameters(), *model.parameters(), *moments))
    while state + sample_of(samples + 1) <= memory:
        samples += 1
    return samples


@functools.cache
def sample_of(samples: int) -> int:
    """Bytes that the smallest shape keeps of so many samples of 8 tokens."""
    model, held = llama(**SHAPES[0], device="cpu"), Held()
    modules("8").model.get_cos_sin(8, 8, torch.float32, torch.device("cpu"), rope_theta=1e4, rope_type="default")
    ids = torch.zeros(samples, 8, dtype=torch.long)
    with held:
        out = model(ids)
        return held.now + 0 * out.numel()
