"""Exercises that count: what is kept until backward, and what fits."""

import itertools

import torch

from counting_attempt import counts
from counting_runs import LAYER, SHAPE, SHAPES, count_of, kept_bytes, llama, sample_of


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
        1, False, *size.values())) for size in (*LAYER[2:5], LAYER[7]) for layers in (1, 2, 5)], mistakes=[
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
    sizes=lambda: [dict(memory=16 * count_of(shape) + more, num_parameters=count_of(shape),
                        sample_bytes=sample_of(1, **shape)) for shape in SHAPES[:2] for more in (
        -20000, -1, 0, *(k * sample_of(1, **shape) + rest for k in (1, 2, 5) for rest in (-1, 0, 999)))], mistakes=[
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
    shape = next(shape for shape in SHAPES if count_of(shape) == num_parameters)
    model, samples = llama(**shape, device="cpu"), 0
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    optimizer.step()
    moments = [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.dim()]
    state = sum(tensor.nbytes for tensor in (*model.parameters(), *model.parameters(), *moments))
    while state + sample_of(samples + 1, **shape) <= memory:
        samples += 1
    return samples


@counts("cluster", "layers", hints=(
    "Weights, gradients and AdamW's two moments: 16 bytes a parameter.",
    "A layer has 4 * hidden^2 + 3 * hidden * width + 2 * hidden parameters; the rest 2 * vocab * hidden + hidden.",
    "memory / 16 are the parameters that fit. Take off the rest, divide by a layer, round down."),
    sizes=[dict(memory=memory, vocab=vocab, hidden=hidden, width=width) for vocab, hidden, width in (
        (1024, 128, 352), (32000, 1024, 4096), (32000, 2048, 5632)) for memory in (
        1 << 30, 8 << 30, 24 * 10**9, 80 * 10**9, *(16 * (2 * vocab * hidden + hidden + layers * (
            4 * hidden**2 + 3 * hidden * width + 2 * hidden)) - less for layers in (2, 30) for less in (0, 16)))],
    mistakes=[
    ("+ 2 * hidden\n", "\n", "the norms are missing: two in each layer"),
    ("vocab * hidden + hidden", "vocab * hidden", "the norm at the end is missing"),
    ("memory / 16", "memory / 4", "gradients and AdamW's moments need memory, too: 16 bytes a parameter"),
    ("memory / 16", "memory / 8", "AdamW's moments need memory, too: 16 bytes a parameter"),
    ("memory / 16", "memory / 12", "weights, gradients and two moments are 16 bytes a parameter"),
    ("memory / 16", "memory / 18", "there are no copies in bfloat16: all is float32"),
    ("(memory / 16 - rest)", "(memory / 16)", "embedding, norm and projection are there, too"),
    ("2 * vocab", "vocab", "the projection has a matrix of its own, beside the embedding's"),
    ("4 * hidden * hidden", "3 * hidden * hidden", "attention has four matrices: q, k, v and out"),
    ("3 * hidden * width", "2 * hidden * width", "the MLP has three matrices: gate, up and down"),
    ("// layer", "/ layer", "whole layers only: round down"),
    ("max(0, (memory", "max(0, 1 + (memory", "that is one layer too many: round down")])
def layers_that_fit(attempt, memory, vocab, hidden, width):
    """Find the largest model of a shape whose training state fits into a machine: yours, for example.

    A Llama with AdamW in float32, as many key/value heads as query heads, heads * head_dim = hidden, and a projection
    of its own. Return the most layers of which weights, gradients and moments fit into `memory` bytes (activations are
    another exercise). The check adds up the parameters of such models on torch's meta device.
    """
    heads = hidden // 64
    one, two = (count_of(dict(zip(SHAPE, (vocab, hidden, width, layers, heads, heads, 64)))) for layers in (1, 2))
    fits = (16 * (one + (layers - 1) * (two - one)) <= memory for layers in itertools.count(1))
    return sum(1 for _ in itertools.takewhile(bool, fits))
