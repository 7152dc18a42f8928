"""One training, from its flags to its last step. In an elastic run it begins anew where processes come or go.

    meet            the ranks join each other, and say who is there
    make_model      the model without weights, on the meta device
    find_plan       where the model is too large for one machine, or --plan says so: who holds which layers
    find_start      the run's folder, and the checkpoint to go on from
    choose_layout   which rank holds which modules, and takes which samples; form() then makes the groups of ranks
    Data            samples, the same on all machines
    set_up          this rank's stage with its weights, optimizer and scheduler; then the session begins
    train           the loop over optimizer steps

With --local_steps, a step of that loop is a round of steps that replicas take by themselves: see local_steps.py.
"""

import argparse
import functools
from collections.abc import Callable

import torch.distributed as dist
from data.batches import Data, check_data_flags, pad, weighted
from data.encoded import require_same_data
from hosts import exits
from models.causal import Model, with_weights
from models.lora import check_lora_flags, print_sizes
from planning.plan_file import machines_of
from ranks.join import meet, print_banner
from ranks.placement import renumber_ranks
from run.decide import choose_layout, find_plan
from run.evaluation import Evaluator
from run.flags import make_adamw
from run.generation import Generation, train_in_generations
from run.layout import check_layout_flags
from run.local_steps import check_local_flags
from run.loop import check_profile_batch, train
from run.samples import SamplesPlugin
from run.session import Session, Trained
from run.start import Start, find_start
from utils import TINY_LLAMA, make_scheduler


def check_flags(args) -> None:
    """Fills in defaults. Raises UserError for flags that do not go together."""
    check_layout_flags(args)
    check_local_flags(args)
    check_lora_flags(args)
    check_data_flags(args)


def run_training(args: argparse.Namespace, make_model: Callable) -> None:
    """`make_model(args, dtype)` returns a Model. Returns where all steps are made, and ends the process where it was
    told to stop before. Raises UserError."""
    if code := train_in_generations(args, functools.partial(train_generation, make_model)):
        exits.leave(code)


def train_generation(make_model: Callable, args: argparse.Namespace, generation: Generation) -> int:
    """The whole training with the processes that are there. The exit code."""
    device, dtype = meet(args, generation.join)
    print_banner(device, dtype)
    made = make_model(args, dtype)
    if made.lora:
        print_sizes(made.lora)
    if plan := find_plan(args, made, device, dtype):
        renumber_ranks(machines_of(plan))
    start = find_start(args, generation, device)
    layout = choose_layout(args, made, plan, start.found, device, dtype)
    made = with_weights(made, args, device, start.found is not None)
    plugin = layout.form(args, made.model.config)
    args.run_id = start.run_id  # from here on `args` are what the run's records say
    args.learning_rate = args.learning_rate or start.flags.get("learning_rate") or made.learning_rate
    vars(args).update(layout.as_flags())
    code = train_together(args, plugin, made, start)
    dist.destroy_process_group()
    return code


def train_together(args, plugin: SamplesPlugin, made: Model, start: Start) -> int:
    """All machines make each step together. The exit code."""
    tokenizer, vocab_size = args.model_name or TINY_LLAMA, made.model.config.vocab_size
    start.check(args, made, plugin.global_batch_size)
    data = Data(args, tokenizer, vocab_size, plugin.global_batch_size, args.max_steps, args.max_steps_per_epoch)
    require_same_data(start.found, args, tokenizer, vocab_size, data.read)
    num_steps = args.max_steps or args.epochs * data.train.steps_per_epoch
    data.train.set_steps(num_steps)
    check_profile_batch(args, num_steps)
    batches = plugin.batches(data.train, data.collate, start.step)
    session = set_up(args, plugin, made, start, tokenizer, data, num_steps)
    session.begin()
    evaluator = None
    if data.evaluation:
        evaluator = Evaluator(plugin, session.trained.model, data.evaluation, pad, made.criterion,
                              args.eval_batches)
    return train(session, batches, weighted(made.criterion), num_steps, evaluator)


def set_up(args, plugin: SamplesPlugin, made: Model, start: Start, tokenizer: str, data: Data,
           num_steps: int) -> Session:
    """This rank's stage with its weights, its optimizer and its scheduler. Collective."""
    loader, live = start.loader, start.generation.live
    if live and plugin.dp_size == dist.get_world_size():
        plugin.unfinished = live.unfinished
    if loader:
        start.clear_folder()  # before a host is sent the files that it lacks
    weights = loader.weights if loader else made.initial
    if made.lora:  # the frozen weights are the model's own, and a checkpoint has the adapters
        weights = made.lora.weights(made.initial, loader, plugin.device, is_moved=start.memory is not None)

    def load(stage) -> None:
        with start.disks.together():  # which is patient with a slow disk
            weights(stage)

    model, optimizer, _ = plugin.configure(made.model, functools.partial(make_adamw, args, make=plugin.optimizer_class),
                                           weights=weights and load, seed=args.seed)
    if not loader:
        start.clear_folder()  # now that this run can begin
    scheduler = make_scheduler(optimizer, num_steps, args.warmup_steps, args.lr_decay)
    start.lock.write(start.run_id, start.launch)
    if loader:
        start.restore(model.module, optimizer, scheduler)
    return Session(args, start, made, Trained(plugin, model, optimizer, scheduler), tokenizer,
                   data.read, data.train.steps_per_epoch)
