"""Three ranks that hold unlike parts of a training, as after the loss of a host, and check what each has afterwards."""

import argparse
import contextlib
import gc
import itertools
import json
import os
import pathlib
import random
import sys
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent.parent / "cluster"))

from ranks import course  # noqa: E402, F401  before step 9's modules

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import process_group_manager as pgm  # noqa: E402
from checkpoints.save import Checkpointer  # noqa: E402
from hosts import exits  # noqa: E402
from pipeline_template import PipelineTemplate  # noqa: E402
from ranks.collectives import gather  # noqa: E402
from ranks.disks import Disks  # noqa: E402
from ranks.lost import VARIABLE, MembershipChanged  # noqa: E402
from run.generation import Generation, train_in_generations  # noqa: E402
from run.live_state import Commit, LiveState, find_in_memory, key_of, who_has_what  # noqa: E402
from run.samples import SamplesPlugin  # noqa: E402
from utils import UserError  # noqa: E402

STATES = "incomplete", "complete", "committed", "applied"  # of the step in which the host was lost
REPLICAS = [[4], [4], [4]]
ROW = '{"step": 1, "loss": 0.5, "grad_norm": 3.0, "memory_gb": 1.5}\n'


def whole(seed: int, is_tied: bool = False) -> LlamaForCausalLM:
    """Of four layers, with random weights and a buffer that checkpoints have."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=12, intermediate_size=24, num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=3,
        vocab_size=30, tie_word_embeddings=is_tied)).double()
    for i, layer in enumerate(model.model.layers):
        layer.register_buffer("seen", torch.tensor(float(seed + i)))
    return model


def train(disks: Disks, pipelines, weights=None, step: int = 5, seed: int = 1, tied: bool = False, tp_size: int = 1):
    """A plugin whose `pipelines` have so many layers a stage, the model that it has made, and its state. `weights`: as
    plugin.configure has it; without, they are those that all ranks draw by `seed`."""
    model = whole(seed, tied)
    plugin = SamplesPlugin(tp_size, 1, "float64", "cpu")
    plugin.set_pipelines([PipelineTemplate.from_layers_per_stage(model, each) for each in pipelines],
                         [1] * len(pipelines))
    model, optimizer, _ = plugin.configure(model, lambda named: torch.optim.AdamW(named, lr=0.1), weights=weights)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    checkpointer = Checkpointer(disks, model, optimizer, scheduler, lambda step: {"tokens": 9 * step, "records": ""}, {})
    tp_rank = pgm.process_group_manager.tp_rank
    live = LiveState(checkpointer, 1, tp_rank, 1.0, step)
    live.everything, _ = who_has_what(model.module, tp_rank, str(dist.get_rank()))
    return plugin, model, live


def in_memory(live: LiveState | None, disks: Disks):
    """What the ranks hold, as the next generation finds it; and that generation."""
    generation = Generation(None, None, live)
    return find_in_memory(generation, disks, torch.device("cpu")), generation


def a_step_is_made_by_all_or_by_none(rank: int, disks: Disks) -> None:
    """Whoever has passed the norm's all-reduce knows that all gradients are complete; nobody else has applied any."""
    _, _, live = train(disks, REPLICAS, step=0)
    params = [*live.stage.model.parameters()]
    start, of_optimizer = [param.detach().clone() for param in params], live.optimizer.state_dict()
    of_scheduler = live.scheduler.state_dict()

    def after(state: str) -> None:
        """Gradients are there in part, or all of them, or the rank is committed, or has taken the step."""
        live.step, live.commit, live.generation = 0, None, 1
        live.optimizer.load_state_dict(of_optimizer)
        live.scheduler.load_state_dict(of_scheduler)
        for i, (param, value) in enumerate(zip(params, start)):
            param.data.copy_(value)
            param.grad = torch.full_like(param, (0.3 if state == "incomplete" else 2.0) * (i + 1))
        if state in ("committed", "applied"):
            live.clip(3.0)
            live.commit = Commit(1, 0.5, 3.0, 0.1)
        if state == "applied":
            live.optimizer.step()
            live.scheduler.step()
            live.step = 1
        records = ROW * live.step
        live.checkpointer.describe = lambda step: {"tokens": 9 * step, "records": records}

    expected = {}
    for state in STATES[0], STATES[-1]:
        after(state)
        expected[state] = {key: value.detach().clone() for key, value in live.tensors().items()}
    for states in itertools.product(STATES, repeat=3):
        commits = bool({"committed", "applied"} & {*states})
        if commits and "incomplete" in states:
            continue
        after(states[rank])
        memory, _ = in_memory(live, disks)
        assert live.step == memory.found.state["step"] == commits == (memory.commit is not None), states
        made = json.dumps({**memory.commit._asdict(), "trained_tokens": 9}) + "\n" if commits else ""
        assert memory.found.state["records"] == (ROW if "applied" in states else made), states
        assert live.scheduler.last_epoch == live.step and all(memory.specs)
        found, those = live.tensors(), expected["applied" if commits else "incomplete"]
        assert found.keys() == those.keys() and all(torch.equal(found[key], those[key]) for key in those), states


def only_what_is_of_the_run_counts(rank: int, disks: Disks) -> None:
    """Not a step before the run's, nor steps that a part made which was cut off, be they more."""
    _, _, live = train(disks, REPLICAS)
    for facts in [(3, 1), (1, 1), None], [(3, 4), (8, 3), (3, 3)]:
        if facts[rank]:
            live.step, live.generation = facts[rank]
        memory, generation = in_memory(live if facts[rank] else None, disks)
        assert [bool(spec) for spec in memory.specs] == [True, False, False] and memory.found.state["step"] == 3
        assert (generation.live is live) == generation.has_state == (rank == 0)
    _, _, live = train(disks, [[2, 1, 1]])
    for lost in {1}, {0, 1, 2}:
        memory, generation = in_memory(None if rank in lost else live, disks)
        assert memory is generation.live is None, "a part is held by nobody: back to a checkpoint"


def from_any_layout_to_any_other(rank: int, disks: Disks) -> None:
    """Layers of old pipelines to those of new ones. What a rank has stays where it is."""
    for seed in range(8):
        chance, tied = random.Random(seed), seed % 3 == 0

        def layout() -> list[list[int]]:
            """Some ranks hold all, and the others share the layers."""
            cut = sorted(chance.sample(range(1, 4), chance.choice([0, 1, 2])))
            return [[b - a for a, b in zip([0, *cut], [*cut, 4])]] + [[4]] * (2 - len(cut))

        old, new = layout(), layout()
        _, _, live = train(disks, old, tied=tied)
        for param, state in ((param, live.optimizer.state[param]) for param in live.stage.model.parameters()):
            state |= {"step": torch.tensor(7.0), "exp_avg": param.detach() * 10}
        if old == REPLICAS and rank == chance.randrange(3):
            live = None  # a process that has just been started
        memory, generation = in_memory(live, disks)
        _, model, there = train(disks, new, memory.weights, seed=2, tied=tied)
        memory.load_optimizer(there.optimizer, model.module)
        own, found, right = live.tensors() if live else {}, there.tensors(), whole(1, tied).state_dict()
        for key, value in found.items():
            expected = right[key[0]] * (10 if key[1] else 1)
            assert torch.equal(value, torch.tensor(7.0) if key[1] == "step" else expected), (seed, key)
            assert key not in own or value.data_ptr() == own[key].data_ptr(), (seed, key)
        assert {key[1] for key in found} == {"", "step", "exp_avg"} and "seen" in "".join(key[0] for key in found)


def tensor_parallel_parts_keep_apart(rank: int, disks: Disks) -> None:
    """Each tensor-parallel rank has its own part under the same name."""
    _, model, live = train(disks, [[4]], tp_size=3)
    memory, name = in_memory(live, disks)[0], "model.layers.0.mlp.up_proj.weight"
    parts = gather(model.module.model.get_parameter(name).detach())
    for key in ((name, "", part) for part in range(3)):
        assert torch.equal(memory.move({key})[key], parts[key[2]]) and not torch.equal(parts[key[2]], parts[key[2] - 1])
    assert key_of(model.module, "layers.0.base_layer.weight", "", 0) == ("layers.0.weight", "", 0)
    assert key_of(model.module, "layers.0.lora_a", "exp_avg", 1) == ("layers.0.lora_a", "exp_avg", 1)


def what_a_generation_has_made_goes_with_it(rank: int, disks: Disks) -> None:
    """The buckets with their gradients, too, while its weights are still held, and a checkpoint can be described."""
    plugin, model, live = train(disks, REPLICAS)
    what_a_process_without_room_ends(rank, disks, plugin, live)
    made, generation = [weakref.ref(plugin), *map(weakref.ref, model.buckets)], Generation(None, None)
    generation.begin(live, plugin)
    generation.end(MembershipChanged("a host is lost"))
    del plugin, model
    gc.collect()
    assert len(made) > 1 and not any(each() for each in made) and not dist.is_initialized()
    assert generation.live is live and live.checkpointer.state(3)["step"] == 3
    live.stage.model.parameters = lambda: [object()]  # of a torch that has changed
    with pytest.raises(UserError, match="torch no longer has .*'_post_accumulate_grad_hooks'"):
        live.release(SamplesPlugin)


def what_a_process_without_room_ends(rank: int, disks: Disks, plugin: SamplesPlugin, live: LiveState) -> None:
    """Its records are made when the session has begun. The run goes on where another process has no room; an error that
    came of the training ends it, and a process that has just come, which nobody needs, ends alone."""
    os.environ[VARIABLE] = json.dumps({"id": "run", "token": "token", "hosts": ["127.0.0.1"], "host": 0, "port": 0,
                                       "at_least": 1, "at_most": 1, "nproc": 3})
    args = argparse.Namespace(checkpoint_dir=disks.folder, run_name="run", tp_size=1)
    lost, no_room = MembershipChanged("a host is lost"), UserError("rank 1: can't write runs: No space left on device")
    for raised, made, ends in ((None, 0, [lost, no_room, None]), (UserError, 1, [lost, no_room]),
                               (SystemExit, 0, [no_room])):
        left, has_state = iter(ends), lost in ends

        def train_once(args, generation: Generation) -> int:
            generation.members.contacts.found_running = not has_state
            if has_state:
                generation.begin(live, plugin)
            live.step += made
            if error := next(left):
                raise error
            return exits.DONE

        expected = pytest.raises(raised) if raised else contextlib.nullcontext()
        with expected as found, mock.patch("os._exit", sys.exit):
            assert train_in_generations(args, train_once) == exits.DONE
        assert not [*left] and (has_state or found.value.code == exits.OF_THIS_MACHINE)


def main() -> None:
    pgm.init_process_group("gloo")
    rank, disks = dist.get_rank(), Disks(sys.argv[1])
    for check in (a_step_is_made_by_all_or_by_none, only_what_is_of_the_run_counts, from_any_layout_to_any_other,
                  tensor_parallel_parts_keep_apart, what_a_generation_has_made_goes_with_it):
        check(rank, disks)
        print(f"done: {check.__name__}")


main()
