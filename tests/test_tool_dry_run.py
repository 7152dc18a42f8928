"""dry_run.py: one rank alone counts what it sends and holds in a real run."""

import json
import math
import random
import resource
import subprocess
import sys
from collections import Counter

import pytest
from lab.launch import ROOT, STEPS, environment, modules_of
from lab.program import Program
from lab.ranks import processes, run, threads
from lab.watch.held import Memory
from lab.watch.kept import Allocated
from lab.watch.messages import LOGGED, Messages
from test_tool_choose import flags_of

with modules_of(9):
    import dry_run
    from lab.rank_alone import alone
    from lab.watch.dry_run import DryRun, run_rank
    from lab.watch.memory import Event, Handle
    from maintain import published_runs
    from museum.faults import FAULTS
    from sizes import split_memory, splits
    from sizes.clock import Clock, Machine, flops_per_token, play_pipeline
    from sizes.data_sheets import PRESETS, Shape

SMALL = ["--num_hidden_layers", "4", "--micro_batch_size", "2", "--device", "cpu"]
SHORT = [*SMALL, "--seq_len", "16", "--dtype", "float32"]
TWO = "--gradient_accumulation_steps 2 "
CASES = {  # step, ranks, flags; experts_per_token is all experts, so that real routing is balanced, too
    "tensor": (4, 2, TWO + "--tp_size 2"),
    "all three axes": (8, 8, TWO + "--dp_size 2 --pp_size 2 --tp_size 2"),
    "unlike pipelines": (9, 5, "--pipelines 1,3;2,1,1 --num_microbatches 3,1"),
    "chunks, backward in two parts": (11, 2, TWO + "--pp_size 2 --pp_engine interleaved_zb --virtual_stages 2"),
    "experts, ZeRO 3, recompute": (16, 4, TWO + "--num_experts 2 --dp_size 4 --ep_size 2 --zero 3 --recompute"),
    "Muon": (18, 4, TWO + "--dp_size 2 --tp_size 2 --optimizer muon"),
    "data, naive": (5, 2, TWO + "--dp_size 2"),
    "data": (6, 2, TWO + "--dp_size 2"),
    "pipeline, AFAB": (7, 4, TWO + "--pp_size 4"),
    "zero bubble": (10, 2, TWO + "--pp_size 2 --pp_engine zb"),
    "one unlike pipeline": (9, 3, "--pipelines 1,2,1 --num_microbatches 2"),
    "ZeRO 2": (12, 4, TWO + "--dp_size 2 --zero 2 --pp_size 2"),
    "unequal shares": (12, 3, TWO + "--dp_size 3 --zero 1 --zero_shares 4,2,1"),
    "groups of shards": (13, 4, TWO + "--dp_size 4 --zero 3 --shard_size 2 --dtype bfloat16"),
    "gathered once": (13, 4, TWO + "--dp_size 2 --zero 3 --pp_size 2 --gather_once"),
    "sequence": (14, 2, TWO + "--tp_size 2 --sequence_parallel"),
    "context": (15, 4, TWO + "--cp_size 2 --tp_size 2"),
    "experts": (16, 4, TWO + "--num_experts 4 --experts_per_token 4 --dp_size 4 --ep_size 4"),
    "local steps": (17, 2, TWO + "--dp_size 2 --local_steps 1 --outer_momentum 0.9")}


def cases(*quick: str):
    """All of them; those that are not named here are slow, and a run draws three of them."""
    return pytest.mark.parametrize("step, ranks, flags", [
        pytest.param(*case, id=name, marks=[] if name in quick else pytest.mark.slow(drawn=3))
        for name, case in CASES.items()])


def dry(step: int, ranks: int, rank: int, flags: list):
    return run_rank(STEPS[str(step)] / "train.py", [*map(str, flags)], ranks, rank, 8, lambda *_: 0.0, False, PRESETS)


def tokens(seq_len: int, step: int, ranks: int, flags: list) -> int:
    """Of two optimizer steps."""
    return 2 * 2 * seq_len * (4 if step == 9 else 2 * (ranks if "--dp_size" in flags else 1))


@cases("tensor", "unlike pipelines", "chunks, backward in two parts")
def test_messages_are_those_of_a_real_run(step, ranks, flags):
    flags = [*SHORT, *flags.split()]
    program = Program(step, [*flags, "--max_tokens", tokens(16, step, ranks, flags)])
    [real] = run(program, threads(ranks), [Messages()]).watches
    for rank in {0, ranks - 1}:
        log = dry(step, ranks, rank, flags).count.log
        found = Counter((each.kind, each.group, each.peer, each.num_bytes) for each in log
                        if isinstance(each, Event) and each.num_bytes > LOGGED)
        assert found == real.of_a_step()[rank], rank


@cases("chunks, backward in two parts")
def test_memory_is_that_of_a_real_run(step, ranks, flags):
    """By torch's allocator: what the step adds to weights and averages, within 2 %. gloo's threads let go of what they
    have sent a little late, so of the ranks of a kind the least counts; and up to three runs."""
    flags, kinds = [*SMALL, "--seq_len", "128", "--dtype", "float32", *flags.split()], {}
    for rank in {0, ranks - 1}:
        count = dry(step, ranks, rank, flags).count
        grown = count.peak.total() - sum(count.snapshots["before the step"].values())
        kinds.setdefault(grown, []).append(rank)
    for attempt in range(3):
        program = Program(step, [*flags, "--max_tokens", tokens(128, step, ranks, flags)])
        [real] = run(program, processes(ranks), [Allocated()]).watches
        if all(min(real.grown[rank] for rank in of_kind) == pytest.approx(grown, rel=0.02)
               for grown, of_kind in kinds.items()):
            return
    raise AssertionError((kinds, real.grown))


@cases("tensor", "chunks, backward in two parts", "ZeRO 2")
def test_memory_by_kind_is_that_of_ranks_in_this_process(step, ranks, flags):
    """After each phase, in every byte. There, averages come with the first optimizer step, and count as such not only
    where they are AdamW's."""
    flags = [*SHORT, *flags.split()]
    program = Program(step, [*flags, "--max_tokens", tokens(16, step, ranks, flags)])
    [memory] = run(program, threads(ranks), [Memory()]).watches
    for rank in {0, ranks - 1}:
        count = dry(step, ranks, rank, flags).count
        if 5 < step < 18:  # it has a timeline, and the dry run's is the first step
            phases = [(name, held | {"optimizer": 0}) for name, held in count.moments
                      if name not in ("gradient norm", "optimizer")]
            assert phases and phases == memory.held[rank][: len(phases)], rank
        for kind in ("weights", "gradients", "optimizer") if step < 17 else ("weights",):
            assert count.snapshots["after the step"][kind] == memory.snapshots[rank]["after the step"][kind], kind
    if step < 16:  # where tokens choose experts, what arrives counts
        [one] = run(program, alone(ranks - 1, ranks), [Memory()]).watches
        assert one.held[ranks - 1] == memory.held[ranks - 1][: len(one.held[ranks - 1])]
        assert f"rank {ranks - 1} " in str(one)


def test_weights_gradients_averages_and_operations_are_exact():
    """Of a stage's parameters P: 4 P each of weights and gradients, 8 P of averages and their counters. Operations: 6 for
    each weight and token, and those of 7 products of attention, each with half of its 16 x 16 scores for each sample."""
    rank = dry(8, 4, 3, [*SHORT, *TWO.split(), "--dp_size", 2, "--pp_size", 2])
    params, held = rank.parameters, rank.count.snapshots["after backward"]
    assert params == 2 * (2 * 128 + 2 * 128**2 + 2 * 128 * 64 + 3 * 128 * 352) + 128 + 1024 * 128
    assert (held["weights"], held["gradients"]) == (4 * params, 4 * params)
    assert held["optimizer"] == 8 * params + 4 * (2 * 9 + 2) and held["messages"] == 0
    assert rank.count.flops == 64 * 6 * (params - 5 * 128) + 4 * 2 * 7 * (2 * 128 * 16**2 // 2)
    assert rank.store_operations == 3, "it reads rank 0's flags, counts itself, and reads the outcome"


def test_a_schedule_that_never_ends_is_refused(tmp_path):
    """The rank itself runs alone, so that nothing is missing there: its messages come from nowhere."""
    flags = [*SHORT, "--pp_size", "2", "--model_name", str(ROOT / "assets" / "tiny_llama")]
    script = FAULTS["deadlock"].program().copy(tmp_path)
    rank = run_rank(script, flags, 2, 0, 8, lambda *_: 0.0, False, PRESETS)
    machine = Machine({}, 1.0, 1.0, 1.0, 1, 1.0)
    with pytest.raises(ValueError, match="never ends: stages .0, 1. wait for each other"):
        play_pipeline(dict.fromkeys(range(2), (rank, Clock(rank, machine))), machine)


def test_the_clock_tells_usual_actions_from_what_a_step_has_once():
    """Two messages at once: 2 s each, and one latency of 1 s. The last of three backwards of 4 s waits for them, too."""
    machine = Machine({}, 1.0, 1.0, 1.0, 1, 1.0)
    sends = [Event(0, "send", "dp", (0, 1), 1, 2, Handle(None)) for _ in range(2)]
    first, second, third = ([("begin", "backward", i, 0), ("compute", 4.0, 0)] for i in range(3))
    waits = [("wait", each.handle) for each in sends]
    log = [*first, ("end",), *second, ("end",), *sends, *third, *waits, ("end",)]
    (rank := DryRun()).count.log += log
    clock = Clock(rank, machine)
    assert (clock.now, clock.seconds, clock.late) == (13.0, {("B", 0): 4.0}, 1.0) and clock.exposed["dp"] == 1.0
    assert clock.computing == clock.bound_by_memory == 12.0


def test_rows_of_an_all_to_all_leave_a_machine_through_the_ports_of_their_ranks():
    """4 ranks in 2 machines: two thirds of what a rank sends leave. A ring's neighbours share the ports."""
    machine = Machine({}, 1.0, 10.0, 1.0, 2, 0.0)
    event = Event(0, "all_to_all_single", "ep", (0, 1, 2, 3), None, 30, None)
    assert machine.seconds_to_send(event) == pytest.approx(20.0)
    assert machine.seconds_to_send(event._replace(kind="all_gather")) == pytest.approx(15.0)
    assert machine.seconds_to_send(event._replace(group=(0, 1))) == pytest.approx(3.0, abs=1e-4)


def found_by(capsys, world: int, rank, step, flags: str, *more: str):
    """What the command prints as JSON."""
    small = [*SMALL, "--seq_len", "16"] if "--pipelines" not in flags else ["--seq_len", "16", "--device", "cpu"]
    dry_run.main(["--world", str(world), "--rank", str(rank), "--json", *more, str(STEPS[str(step)] / "train.py"),
                  *small, *flags.split()])
    return json.loads(capsys.readouterr().out)


def test_ranks_of_a_pipeline_take_one_time_on_slow_links(capsys):
    """Messages to rank 0 count, and those that only some stages send over: here, the second and the third one of four
    are in two machines."""
    flags = TWO + "--pp_size 4"
    times = {rank: found_by(capsys, 4, rank, 8, flags, "--between", "0.001", "--machine", "H100:2")["seconds"]
             for rank in range(4)}
    bytes_of_a_message = 2 * 16 * 128 * 4
    assert len({seconds["step"] for seconds in times.values()}) == 1
    assert times[0]["step"] > 2 * bytes_of_a_message / 0.001e9
    times = [found_by(capsys, 2, rank, 8, TWO + "--pp_size 2", "--inside", "0.01")["seconds"]["step"] for rank in (0, 1)]
    assert times[0] == pytest.approx(times[1], rel=1e-9) and times[0] > 2 * bytes_of_a_message / 0.01e9


def test_unlike_pipelines_end_their_step_together(capsys):
    """The slower one says when. Its stages are its own, also where another pipeline has as many."""
    flags = "--pipelines 8;5,3;3,5 --num_microbatches {} --micro_batch_size 1"
    shown = found_by(capsys, 5, "all-kinds", 9, flags.format("3,2,9"))
    assert [each["rank"] for each in shown] == [0, 1, 2, 3, 4]
    assert [len(each["actions"]) for each in shown] == [6, 4, 4, 18, 18]
    assert len({each["seconds"]["step"] for each in shown}) == 1
    first, last, *others = (each["parameters"] for each in shown[1:])
    assert others[1] - first == 128 == last - others[0], "the final norm"
    fewer = found_by(capsys, 5, 1, 9, flags.format("3,2,2"))
    assert fewer["seconds"]["step"] < shown[1]["seconds"]["step"] and fewer["flops"] < shown[1]["flops"]
    assert fewer["seconds"]["bubble"] < shown[1]["seconds"]["bubble"]


@pytest.mark.parametrize("step, more", [(8, {}), (16, {"num_experts": 8, "experts_per_token": 3})])
def test_one_definition_of_mfu(step, more):
    """That of the steps' metrics.py, in dry_run.py and in what_if.py."""
    modules, shape = Program(step).load(), Shape(128, 352, 4, 8, 4, 1024, False, 16)
    metrics, utils = modules.metrics, modules.utils
    config = utils.load_config(utils.TINY_LLAMA, num_hidden_layers=4, num_attention_heads=None, **more)
    assert flops_per_token(config, 64) == metrics.flops_per_token(config, 64)
    if not more:
        assert shape.flops(64) == metrics.flops_per_token(config, 64)


def engines(step: int) -> list[str]:
    """The schedules that a step's --pp_engine takes; none before there are pipelines."""
    if step < 7:
        return [""]
    return ["afab"] if step == 7 else [*dict.fromkeys(["afab", "1f1b", *["zb"] * (step not in (8, 9, 17)), *[
        "interleaved", "interleaved_zb"] * (step in (11, 12, 13, 14, 15, 16, 18))])]


QUICK = {(3, ""), (5, ""), (9, "1f1b"), (9, "afab"), (10, "zb"), (16, "interleaved"), (17, "1f1b")}


@pytest.mark.drawn(7)
@pytest.mark.parametrize("step, engine", [
    pytest.param(step, engine, marks=[pytest.mark.slow] * ((step, engine) not in QUICK))
    for step in range(3, 19) for engine in engines(step)])
def test_the_command_runs_each_step_with_each_schedule(capsys, step, engine):
    """All kinds of stages, two at least. All ranks of a pipeline take one step's time, and TFLOP, seconds and MFU fit
    together."""
    ranks = 4 if engine else 1 if step == 3 else 2
    flags = {3: "", 4: "--tp_size 2", 9: "--pipelines 3,5;8,0,0"}.get(step, "--dp_size 2")
    if engine:
        flags = f"{TWO}--dp_size 2 --pp_size 2" + f" --pp_engine {engine}" * (step > 7)
        flags += " --virtual_stages 2" * engine.startswith("interleaved")
    all_kinds = found_by(capsys, ranks, "all-kinds", step, flags)
    found = all_kinds if isinstance(all_kinds, list) else [all_kinds]
    assert len(found) == (2 if engine else 1)
    one = found_by(capsys, ranks, ranks - 1, step, flags)
    for each in (*found, one):
        seconds = each["seconds"]["step"]
        assert seconds == pytest.approx(found[0]["seconds"]["step"], rel=0.01)
        assert each["flops"] / seconds / 67e12 == pytest.approx(each["mfu"], rel=1e-9)  # an H100's, in float32
        assert each["flops"] == found[0]["flops"] and sum(each["seconds"].values()) == pytest.approx(2 * seconds)


def test_the_command(tmp_path, capsys):
    train = str(STEPS["16"] / "train.py")
    flags = ["--num_hidden_layers", "2", "--seq_len", "32", *TWO.split(), "--pp_size", "2", "--num_experts", "4",
             "--dp_size", "2", "--ep_size", "2", "--cp_size", "2", "--zero", "1"]
    dry_run.main(["--world", "8", "--rank", "all-kinds", "--timeline", str(tmp_path / "trace"), train, *flags])
    shown = capsys.readouterr().out
    assert "rank 0 of 8, DP(2)-PP(2)-CP(2)-TP(1)" in shown and "is the fullest" in shown and "4 actions: F0 " in shown
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    assert {each["pid"] for each in events} == {0, 1} and {"computes", "dp", "ep"} <= {each.get("tid") for each in events}
    dry_run.main(["--world", "8", "--json", train, *flags])
    found = json.loads(capsys.readouterr().out)
    assert {row["axis"] for row in found["sent"]} == {"all", "cp", "dp", "ep", "pp"} and found["flops"] > 0
    seconds = found["seconds"]
    assert sum(seconds.values()) == pytest.approx(2 * seconds["step"], rel=1e-6)


def test_odd_flags_are_refused_before_a_run(monkeypatch):
    monkeypatch.setattr(dry_run, "run_rank", lambda *_: pytest.fail("it runs"))
    for flags in (["--machine", "8xH100"], ["--between", "0"], ["--efficiency", "nan"], ["--rank", "2"]):
        with pytest.raises(ValueError):  # a UserError, of whichever step's utils the tools were loaded beside
            dry_run.main(["--world", "2", *flags, str(STEPS["8"] / "train.py")])


@pytest.mark.slow
def test_a_published_run():
    """Its row of the page is what the script computes."""
    row, factor = published_runs.compare(published_runs.RUNS[-1])
    assert row in (ROOT / "beyond" / "README.md").read_text().splitlines() and 0.5 < factor < 2


def draw(seed: int) -> tuple:
    """A job, a split of it that the steps take, its micro-batches and a stage. 8 to 16,384 ranks."""
    rng = random.Random(seed)
    while True:
        heads, experts = rng.choice([16, 32, 64]), rng.choice([0, 0, 8])
        dp, tp, cp, pp = (2 ** rng.choice(range(n)) for n in (8, 4, 4, 4))
        is_gpu, zero = rng.random() < 0.9, rng.choice([0, 1, 2, 3])
        shape = Shape(heads * 128, heads * 128 * 7 // 2, rng.choice([4, 6, 8, 9, 16, 20]), heads, 8, 32768,
                      rng.random() < 0.3, 128)
        engine, zero = rng.choice(splits.ENGINES) if pp > 1 else "-", zero if dp * cp > 1 else 0
        m = (4 if "interleaved" in engine else 2) * pp
        split = splits.Split(dp, tp, pp, engine, zero, cp,
                             math.gcd(dp, rng.choice([1, 2, 8])) if experts else 1, tp > 1 and rng.random() < 0.5)
        job = splits.Job(shape, rng.choice([4096, 8192]) * cp, m * dp, 1, "bfloat16" if is_gpu else "float32",
                         dp * pp * tp * cp, 8, 1e12, 1.0, 1.0, 1.0, experts=experts, is_gpu=is_gpu,
                         recompute=rng.random() < 0.3, gather_once=zero == 3 and rng.random() < 0.5)
        if not splits.refusal(job, split) and 8 <= job.ranks <= 16384 and m * shape.layers <= 80 * pp:
            return job, split, m, rng.randrange(pp)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("seed", range(12))
def test_formulas_of_random_splits(seed):
    """Weights, averages and what is sent are equal, but that an uneven shard differs by a number; gradients, too, where
    they are not divided. What a rank holds when it holds most is nearly so."""
    job, split, m, stage = draw(seed)
    flags = ["--model_name", "drawn", "--device", "cuda" if job.is_gpu else "cpu", *flags_of(job, split, m)]
    found = run_rank(STEPS["16"] / "train.py", [*map(str, flags)], job.ranks, stage * split.cp * split.tp, 8,
                     lambda *_: 0.0, job.is_gpu, {"drawn": job.shape})
    held, sent = split_memory.held(job, split, stage, m), dict.fromkeys(splits.AXES, 0)
    for event in found.count.log:
        if isinstance(event, Event) and event.kind != "receive" and event.axis in sent and event.num_bytes > LOGGED:
            sent[event.axis] += event.num_bytes
    assert found.count.held["optimizer"] == pytest.approx(held["AdamW"], rel=1e-3), (job, split)
    weights = split_memory.state_of(job, split, stage).weights
    assert found.count.most["weights"] == pytest.approx(weights, rel=1e-3), (job, split)
    assert sent == pytest.approx(splits.sent(job, split, stage, m), rel=5e-3), (job, split)
    if split.zero == 0:
        kept = found.count.snapshots["after backward"]["gradients"]
        assert kept == pytest.approx(held["gradients"], rel=1e-3), (job, split)
    assert found.count.peak.total() == pytest.approx(sum(held.values()), rel=0.03 if job.is_gpu else 0.1), (job, split)


@pytest.mark.slow
def test_a_rank_of_16384():
    """Llama 3 405B, in less than a minute of processor time and 4 GB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "dry_run.py", "--world", "16384", "--rank", "8191", "--json",
         STEPS["8"] / "train.py", *"--model_name llama-405b --seq_len 8192 --micro_batch_size 1 --tp_size 8 --pp_size "
         "16 --dp_size 128 --gradient_accumulation_steps 16".split()],
        env=environment(), capture_output=True, text=True, timeout=300, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 60 and after.ru_maxrss < 4e6
    found = json.loads(done.stdout)
    assert found["parameters"] == 3052126208 and found["store_operations"] == 3
