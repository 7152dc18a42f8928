"""The site's JavaScript repeats schedules, simulation and memory model: it computes what Python does."""

import itertools
import json
import random
import shutil
import subprocess

import pytest
from clusters import made_up_cluster
from launch import ROOT, modules_of

with modules_of(10):
    from pipeline_parallel import zero_bubble
with modules_of(9):
    from pipeline_parallel import SCHEDULES
    from what_if import Job, grids  # before the modules of cluster/
    from data_sheets import PRESETS, Shape, parse_nodes, synthetic_cluster
    from planning.machines import Cluster, Pipeline, Setting
    from planning.simulate import PipelineSimulation, peak_memory

needs_node = pytest.mark.skipif(not shutil.which("node"), reason="there is no node to run the site's JavaScript")
SCRIPTS = ROOT / "tools" / "site"
SIZES = [(p, m) for p in range(1, 9) for m in range(1, 17)]
COSTS = [  # F, B and W, transfer, latency, speeds
    ((1, 1, 1), 0, 0, [1] * 8),
    ((2, 3, 1.5), 0.7, 0.1, [1, 2, 1, 0.5, 3, 1, 1.25, 1]),
    ((1, 1.25, 0.5), 4, 0, [1] * 8),
]


@pytest.fixture(autouse=True)
def with_zero_bubble(monkeypatch):
    """The site knows the schedule of step 10, too."""
    monkeypatch.setitem(SCHEDULES, "zb", zero_bubble)


class SimulationWithWeights(PipelineSimulation):
    """The planner's simulation, for any seconds of F, B and W. A stage without W computes both gradients in B."""

    def __init__(self, p, m, schedule, costs, transfer, latency, speeds):
        super().__init__(Cluster(made_up_cluster(speeds[:p], layers=p, parameters=0)),
                         Pipeline(tuple(range(p)), (1,) * p, m), 1, Setting(schedule))
        forward, backward, weights = costs
        for s, actions in enumerate(self.actions):
            is_divided = any(action.kind == "W" for action in actions)
            seconds = {"F": forward, "B": backward + weights * (not is_divided), "W": weights}
            self.durations[s] = {kind: cost / speeds[s] for kind, cost in seconds.items()}
        self.links = {pair: link._replace(latency=latency, bandwidth=1.0) for pair, link in self.links.items()}
        self.num_bytes = transfer

    def neighbour(self, s, kind, step):
        return None if kind == "W" else super().neighbour(s, kind, step)


def node(script: str, argument) -> object:
    """What `script`, the body of a JavaScript function of `input`, `schedules` and `memory`, returns for `argument`."""
    load = "".join(f"const {name} = require({json.dumps(str(SCRIPTS / name))});" for name in ("schedules", "memory"))
    program = (f"{load} const input = JSON.parse(require('fs').readFileSync(0));"
               f"process.stdout.write(JSON.stringify((() => {{ {script} }})()))")
    done = subprocess.run(["node", "-e", program], input=json.dumps(argument), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
def test_schedules_are_those_of_python():
    found = node("""return input.map(([name, p, m]) => Array.from({ length: p }, (_, s) =>
                        schedules.SCHEDULES[name](s, p, m)));""",
                 cases := [(name, p, m) for name in SCHEDULES for p, m in SIZES])
    for (name, p, m), stages in zip(cases, found, strict=True):
        expected = [[list(action) for action in SCHEDULES[name](s, p, m)] for s in range(p)]
        assert stages == expected, (name, p, m)


@needs_node
@pytest.mark.parametrize("costs", COSTS, ids=["equal", "unlike machines", "slow links"])
def test_simulation_is_that_of_python(costs):
    (f, b, w), transfer, latency, speeds = costs
    cases = [{"p": p, "m": m, "schedule": name, "costs": {"F": f, "B": b, "W": w}, "transfer": transfer,
              "latency": latency, "speeds": speeds} for name in SCHEDULES for p, m in SIZES]
    found = node("""return input.map((options) => {
                        const { makespan, ends, spans, transfers } = schedules.simulate(options);
                        return { makespan, ends, spans: spans.length, transfers: transfers.length }; });""", cases)
    for case, result in zip(cases, found, strict=True):
        p, m, name = case["p"], case["m"], case["schedule"]
        simulation = SimulationWithWeights(p, m, name, *costs)
        run = simulation.run()
        assert result["ends"] == pytest.approx(run.ends, rel=1e-12), case
        assert result["makespan"] == max(result["ends"])
        assert (result["spans"], result["transfers"]) == (len(run.spans), len(run.transfers)), case


@needs_node
def test_bubble_and_live_microbatches_of_the_textbook():
    """Where F, B and W take a unit each and messages nothing: the formulas of step 8."""
    cases = [(name, p, m) for name in ("afab", "1f1b", "zb") for p in (1, 2, 4, 8) for m in (8, 16)]
    found = node("""return input.map(([schedule, p, m]) => schedules.simulate(
                        { p, m, schedule, costs: { F: 1, B: 1, W: 1 }, speeds: Array(p).fill(1) }));""", cases)
    for (name, p, m), result in zip(cases, found, strict=True):
        ideal = (p - 1) / (3 * m + p - 1) if name == "zb" else (p - 1) / (m + p - 1)
        assert result["bubble"] == pytest.approx(ideal, abs=1e-12), (name, p, m)
        live = {"afab": [m] * p, "1f1b": [p - s for s in range(p)], "zb": [p] * p}[name]
        assert result["live"] == live, (name, p, m)


@needs_node
def test_memory_is_that_of_the_planner():
    presets = node("return memory.MODELS;", None)
    tiny = json.loads((ROOT / "assets" / "tiny_llama" / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "vocab_size", "tie_word_embeddings", "head_dim")
    shapes = {name: Shape(*fields.values()) for name, fields in presets.items()}
    assert shapes["tiny"] == tuple(tiny[name] for name in names)
    assert (shapes["8B"], shapes["70B"]) == (PRESETS["llama-8b"], PRESETS["llama-70b"])
    shapes["tied"] = PRESETS["llama-1b"]
    fields = list(presets["tiny"])
    cases, random_state = [], random.Random(0)
    for (name, shape), tp, pp, dtype, recompute, schedule in itertools.product(
            shapes.items(), (1, 2, 4), (1, 2, 4), ("float32", "bfloat16"), (False, True), ("afab", "1f1b", "1f1b-2")):
        cuts = sorted(random_state.sample(range(1, shape.layers), pp - 1))
        layers = [stop - start for start, stop in zip([0, *cuts], [*cuts, shape.layers])]
        cases.append({"shape": dict(zip(fields, shape)), "tp": tp, "seqLen": 512, "size": random_state.choice((1, 4)),
                      "dtype": dtype, "recompute": recompute, "schedule": schedule, "layers": layers, "m": 6})
    found = node("""return input.map((job) => [memory.totalParameters(job.shape),
                        memory.stagesOf(job.layers, job.schedule, job.m, schedules).map(
                            (stage) => memory.stageMemory(job, stage).total)]);""", cases)
    for case, (parameters, stages) in zip(cases, found, strict=True):
        shape, pp = Shape(*case["shape"].values()), len(case["layers"])
        cluster = Cluster(synthetic_cluster(shape, parse_nodes(f"{pp * case['tp']}xH100:{case['tp']}"), case["tp"],
                                            case["seqLen"], case["dtype"], [case["size"]]))
        pipeline = Pipeline(tuple(range(pp)), tuple(case["layers"]), case["m"])
        expected = peak_memory(cluster, pipeline, case["size"],
                               Setting(case["schedule"], recompute=case["recompute"]))
        assert stages == pytest.approx(expected, rel=1e-12), case
        assert parameters == shape.parameters


SPLITS = """return input.map(([model, devices, job]) => memory.splits(
                { ...job, shape: memory.MODELS[model] }, devices, 0.9, schedules));"""
JOB = {"seqLen": 512, "size": 1, "globalBatch": 32, "dtype": "bfloat16", "schedule": "1f1b", "recompute": False}


@needs_node
def test_splits_are_the_grids_of_the_planner():
    """The same dp x pp x tp of like devices, each with all layers, and what the planner says of their memory."""
    names = ("8B", "70B")
    for found, name in zip(node(SPLITS, [(name, [80e9] * 8, JOB) for name in names]), names, strict=True):
        shape, nodes = PRESETS[f"llama-{name.lower()}"], parse_nodes("8xH100:8")
        job = Job(shape, nodes, JOB["seqLen"], JOB["globalBatch"], JOB["dtype"], Setting())
        assert {(grid["dp"], grid["pp"], grid["tp"]) for grid in found} == {grid[:3] for grid in grids(job, 1)}
        for grid in found:
            layers = [stage["layers"] for stage in grid["pipelines"][0]]
            assert len(grid["pipelines"]) == grid["dp"] and sum(layers) == shape.layers and min(layers) > 0
            pipeline = Pipeline(tuple(range(grid["pp"])), tuple(layers), grid["microbatches"])
            peaks = peak_memory(job.cluster(nodes, grid["tp"], [1]), pipeline, 1, Setting())
            assert [stage["total"] for stage in grid["pipelines"][0]] == pytest.approx(peaks, rel=1e-12)
            assert grid["fits"] == (max(peaks) <= 0.9 * 80e9)


@needs_node
def test_a_larger_device_gets_more_layers():
    (found,) = node(SPLITS, [("1.1B", [24e9, 8e9], JOB)])
    (pipeline,) = [grid["pipelines"][0] for grid in found if grid["pp"] == 2]
    assert pipeline[0]["layers"] > 2 * pipeline[1]["layers"]
