"""Made-up machines for the planner's tests: what plan.py --measure would write of them."""

import copy
import socket

TINY_SIZES = [131072, *[184576] * 8, 128, 131072]  # parameters of the tiny Llama's modules


def made_up_cluster(speeds, layers=8, sizes=(1,), **options) -> dict:
    """cluster.json of machines of these speeds.

    A machine of speed 1 takes `layer` seconds for a layer forward, twice that backward; `ends` for the embedding and
    for the projection. `bandwidth`, `latency`: one for all links, or links[i][j]. `memory`: one for all, or a list.
    `overhead`: seconds of each module and micro-batch, whatever its size.
    """
    known = {"layer": 1e-3, "ends": 0.0, "bandwidth": 1e15, "latency": 0.0, "memory": 1e15, "parameters": 1000,
             "saved_bytes": 1e4, "hidden_bytes": 4096.0, "tied": False, "optimizer_seconds": 0.0, "overhead": 0.0}
    assert options.keys() <= known.keys(), options
    it = {**known, **options}
    n = len(speeds)

    def pick(name, i):
        return it[name][i] if isinstance(it[name], list) else it[name]

    machines = []
    for rank, speed in enumerate(speeds):
        forward = [it["ends"] / speed, *[it["layer"] / speed] * layers, 0.0, it["ends"] / speed]
        machines.append({
            "device": "cpu", "free_memory": pick("memory", rank),
            "forward": {str(size): [size * t + it["overhead"] for t in forward] for size in sizes},
            "backward": {str(size): [2 * size * t + it["overhead"] for t in forward] for size in sizes},
            "optimizer_seconds": it["optimizer_seconds"]})
    names = ["embedding", *(f"decoder_layers.{i}" for i in range(layers)), "final_norm", "final_proj"]
    modules = [{"name": name, "parameters": 0 if name == "final_norm" else it["parameters"],
                "saved_bytes": it["saved_bytes"]} for name in names]

    def link(i, j):
        values = [it[name][i][j] if isinstance(it[name], list) else it[name] for name in ("latency", "bandwidth")]
        return dict(zip(("latency", "bandwidth"), values))

    links = [[None if i == j else link(i, j) for j in range(n)] for i in range(n)]
    model = {"hidden_size": it["hidden_bytes"] / 16 / 4, "intermediate_size": 160, "num_hidden_layers": layers,
             "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024, "tie_word_embeddings": it["tied"]}
    return {"model_name": "toy", "model": model, "seq_len": 16, "dtype": "float32", "flags": {},
            "hosts": [f"host{rank}" for rank in range(n)], "modules": modules, "machines": machines, "links": links}


def measured(*layer_seconds: float, embedding: float = 0.0, head: float = 0.0) -> dict:
    """cluster.json of machines with these seconds for a decoder layer of the tiny Llama."""
    found = made_up_cluster([1] * len(layer_seconds))
    for module, size in zip(found["modules"], TINY_SIZES):
        module["parameters"] = size
    for machine, seconds in zip(found["machines"], layer_seconds):
        machine.update(forward={"1": [embedding, *[seconds] * 8, 0.0, head]}, backward={"1": [0.0] * 11})
    found["model"].update(hidden_size=128, intermediate_size=352)
    return {**found, "dtype": "float64", "hosts": [socket.gethostname()] * len(layer_seconds)}


def with_odd_values(data: dict):
    """(fields that lead to it, what stands there, `data` with an odd value there), for each place and odd value."""
    def places(tree):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield (key,), value
            yield from (((key, *rest), leaf) for rest, leaf in places(value)) if isinstance(value, (dict, list)) else ()

    for path, value in places(data):
        for odd in -1, float("nan"), 1 << 63, None, "x", [], {}, [[]]:
            holder = changed = copy.deepcopy(data)
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = odd
            yield path, value, odd, changed


MEASURED = measured(1.0, 2.5, 1.0, head=3.0)
