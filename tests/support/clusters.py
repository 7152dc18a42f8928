"""Made-up machines for the planner's tests: what plan.py --measure would write of them."""

TINY_SIZES = [131072, *[184576] * 8, 128, 131072]  # parameters of the tiny Llama's modules


def measured(*layer_seconds: float, embedding: float = 0.0, head: float = 0.0) -> dict:
    """cluster.json of machines with these seconds for a decoder layer of the tiny Llama."""
    return {"modules": [{"parameters": size} for size in TINY_SIZES],
            "machines": [{"forward": {"1": [embedding, *[seconds] * 8, 0.0, head]}, "backward": {"1": [0.0] * 11}}
                         for seconds in layer_seconds]}


MEASURED = measured(1.0, 2.5, 1.0, head=3.0)


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
            "rank": rank, "host": f"host{rank}", "device": "cpu", "free_memory": pick("memory", rank),
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
    return {"model_name": "toy", "seq_len": 16, "dtype": "float32", "tied": it["tied"], "modules": modules,
            "hidden_bytes": it["hidden_bytes"], "machines": machines, "links": links}
