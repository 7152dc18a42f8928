"""The site's JavaScript repeats schedules and simulation: it computes what Python does."""

import json
import shutil
import subprocess

import pytest
from clusters import made_up_cluster
from launch import ROOT, modules_of
from schedule_check import simulate

with modules_of(10):
    from pipeline_parallel import zero_bubble
with modules_of(11):
    from virtual_stages import SCHEDULES as OF_STEP_11
with modules_of(9):
    from planning.machines import Cluster, Pipeline, Setting
    from planning.schedules import SCHEDULES
    from planning.simulate import PipelineSimulation

needs_node = pytest.mark.skipif(not shutil.which("node"), reason="the site's JavaScript needs apt-get install nodejs")
SCRIPTS = ROOT / "tools" / "site"
SIZES = [(p, m) for p in (1, 2, 3, 4, 6, 8) for m in (1, 2, 3, 4, 7, 8, 12, 16)]
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
    """What `script`, the body of a JavaScript function of `input` and `schedules`, returns for `argument`."""
    load = f"const schedules = require({json.dumps(str(SCRIPTS / 'simulation'))});"
    program = (f"{load} const input = JSON.parse(require('fs').readFileSync(0));"
               f"process.stdout.write(JSON.stringify((() => {{ {script} }})()))")
    done = subprocess.run(["node", "-e", program], input=json.dumps(argument), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
def test_schedules_are_those_of_python():
    cases = [(name, p, m) for name in SCHEDULES for p, m in SIZES]
    cases += [(name, p, m, v) for name in ("interleaved", "interleaved_zb") for p, m in SIZES for v in (2, 3, 4)]
    found = node("""return input.map(([name, p, ...sizes]) => Array.from({ length: p }, (_, s) =>
                        schedules.SCHEDULES[name](s, p, ...sizes)));""", cases)
    for (name, *sizes), stages in zip(cases, found, strict=True):
        expected = [[list(action) for action in (OF_STEP_11 | SCHEDULES)[name](s, *sizes)] for s in range(sizes[0])]
        assert stages == expected, (name, sizes)


@needs_node
@pytest.mark.parametrize("costs", COSTS, ids=["equal", "unlike machines", "slow links"])
def test_simulation_is_that_of_python(costs):
    (f, b, w), transfer, latency, speeds = costs
    cases = [{"p": p, "m": m, "schedule": name, "costs": {"F": f, "B": b, "W": w}, "transfer": transfer,
              "latency": latency, "speeds": speeds} for name in SCHEDULES for p, m in SIZES]
    found = node("""return input.map((options) => {
                        const { makespan, ends, spans, transfers } = schedules.simulate(options);
                        const order = spans.map(({ stage, kind, microbatch }) => [stage, kind, microbatch]);
                        return { makespan, ends, order, transfers: transfers.length }; });""", cases)
    for case, result in zip(cases, found, strict=True):
        p, m, name = case["p"], case["m"], case["schedule"]
        simulation = SimulationWithWeights(p, m, name, *costs)
        run = simulation.run()
        assert result["ends"] == pytest.approx(run.ends, rel=1e-12), case
        assert result["makespan"] == max(result["ends"])
        assert result["order"] == [[span.rank, span.kind, span.microbatch] for span in run.spans], case
        assert result["transfers"] == len(run.transfers), case


@needs_node
def test_zb_v_is_legal_and_as_long_as_the_page_says():
    """In units of half a stage, F = B = W = 1: no rank waits but for its first micro-batch, if m is large enough."""
    cases = [*SIZES, (8, 24)]
    found = node("""return input.map(([p, m]) => ({ lists: Array.from({ length: p }, (_, s) =>
                        schedules.SCHEDULES.zbv(s, p, m)), ...schedules.simulate(
                        { p, m, schedule: "zbv", costs: { F: 2, B: 2, W: 2 } }) }));""", cases)
    for (p, m), result in zip(cases, found, strict=True):
        everything = sorted((kind, i, chunk) for kind in "FBW" for i in range(m) for chunk in (0, 1))
        assert all(sorted(map(tuple, rank)) == everything for rank in result["lists"]), (p, m)
        units = max(simulate(result["lists"], dict.fromkeys("FBW", 1.0), lambda r, chunk: (r, 2 * p - 1 - r)[chunk]))
        assert units == result["makespan"] == max(6 * m + p - 1, 4 * m + 4 * p - 2), (p, m)
        assert (units == 6 * m + p - 1) == (2 * m >= 3 * p - 1)
        assert max(result["live"]) == 2 * min(p, m), (p, m)
        assert len(result["transfers"]) == 4 * m * (p - 1)
