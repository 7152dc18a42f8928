"""Exercises that count: parameters, FLOPs and tokens a second of one process."""

import operator

import torch
from torch.utils.flop_counter import FlopCounterMode

from counting_attempt import counts
from counting_runs import SEVEN_B, SHAPES, count_of, flops_of_a_sample, llama, modules, weights_that_multiply


@counts("1", "parameters", hints=(
    "A layer has four matrices of attention, three of the MLP and two norms, of `hidden` numbers each.",
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
        (4096, 4096), (4096, 11008), (8192, 1024), (256, 256)) for b, peak, bandwidth in (
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
    (" if gain > 0 else 0", "", "in a narrow layer, a token takes longer to move than to compute: no t is enough, so "
     "return 0"),
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

    Return the least whole number of tokens t from which on computing takes at least as long as moving, and 0 if there
    is none: in a narrow layer, each token's input and output take longer to move than to compute with. The check counts
    FLOPs and bytes of tensors, for t and for t - 1.
    """
    dtype = {2: torch.bfloat16, 4: torch.float32}[number_bytes]

    def seconds(tokens: int) -> tuple[float, float]:
        """Of computing and of moving."""
        with FlopCounterMode(display=False) as counter, torch.device("meta"):
            x, weight = torch.empty(tokens, inputs, dtype=dtype), torch.empty(outputs, inputs, dtype=dtype)
            moved = sum(tensor.nbytes for tensor in (x, weight, torch.nn.functional.linear(x, weight)))
        return counter.get_total_flops() / peak, moved / bandwidth

    (one, moving), (two, more) = seconds(1), seconds(2)  # both grow evenly, which gives a place to look
    if (gain := (two - one) - (more - moving)) <= 0:
        return 0
    tokens = round((moving - one) / gain) + 1
    return next(near for near in range(tokens - 2, tokens + 3) if operator.ge(*seconds(near)))


@counts("3", "FLOPs", hints=(
    "A matmul of t tokens with a weight of N numbers is 2 N t FLOPs. Backward needs two such matmuls: one for the "
    "gradient of the input, one for that of the weight.",
    "The embedding is a lookup: no FLOPs. The projection is a matmul.",
    "Attention: the scores are T x T a head, as if each token saw all. Two matmuls forward, q k and scores v, each of "
    "2 T * head_dim FLOPs a token and head; twice that backward."),
    sizes=[dict(shape, layers=layers, seq_len=seq_len) for shape in SHAPES[2:5] for layers in (1, 2, 5)
           for seq_len in (4, 32)], mistakes=[
    ("+ vocab * hidden", "+ 2 * vocab * hidden", "the embedding is a lookup: it multiplies nothing"),
    ("+ vocab * hidden", "", "the projection to the vocabulary is missing"),
    (" + 6 * layers * scores", "", "attention is missing: the scores, and the sum over the values"),
    ("6 * layers * scores", "3 * layers * scores", "half of attention: count all T x T scores, as torch does"),
    ("6 * layers * scores", "2 * layers * scores", "attention's backward is missing"),
    ("seq_len * heads", "seq_len * kv_heads", "each query head has scores of its own"),
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
    ("8 * num_parameters", "4 * num_parameters", "12 bytes and not 16: AdamW keeps two moments of each parameter, and "
     "weights and gradients are float32"),
    ("+ 8 * num_parameters", "+ 12 * num_parameters", "the weights are float32 themselves: there is no copy of them"),
    (" + 2 * num_cast", "", "the copies in bfloat16 are missing"),
    ("2 * num_cast", "4 * num_cast", "a number in bfloat16 has 2 bytes"),
    ("2 * num_cast", "2 * num_parameters", "only num_cast of the parameters have a copy"),
    ("4 * num_parameters + 4 * num_parameters", "2 * num_parameters + 4 * num_parameters", "weights are float32, also "
     "where activations are bfloat16"),
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
           for shape in (*SHAPES[4:], SEVEN_B) for seq_len, peak, mfu, devices in (
               (128, 989e12, 0.4, 1), (128, 10e12, 0.3, 8), (1024, 989e12, 0.5, 8), (1024, 10e12, 0.4, 1))],
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
    shape = next(shape for shape in (*SHAPES[4:], SEVEN_B) if shape["layers"] == layers)
    return seq_len * devices * peak * mfu / flops_of_a_sample(seq_len, *shape.values())
