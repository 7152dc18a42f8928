"""What a run begins with: its folder, and the state of training that it goes on from.

    start = find_start(args, ...)       by all ranks together, before any rank has weights
    start.check(args, made, batch)      do the flags of this run fit to that state?
    start.clear_folder()                checkpoints that the run does not go on from get another name
    start.loader.weights(stage)         gives a stage its weights
    start.restore(stage, ...)           gives an optimizer and a scheduler their states

The state is what the processes of an elastic run still hold in memory, or else the run's newest whole checkpoint, or
else that of --resume DIR. A new run has none.
"""

import argparse
import json
import os
import socket
import uuid
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist

from checkpoints.files import STATE, step_of, write_state
from checkpoints.folder import Lock, move_aside
from checkpoints.resume import Found, Loader, find_checkpoint, read_states, run_of
from models.causal import Model, function_of
from ranks.disks import CANT_WRITE, Disks
from ranks.lost import is_elastic
from ranks.placement import is_home
from run.flags import check_text
from run.generation import Generation
from run.live_state import InMemory, find_in_memory
from utils import ROOT, UserError, positive_int, zero_or_more

FLAGS = (  # which a resumed run keeps
    "lora_rank", "lora_alpha", "lora_targets", "base_bits", "validation_split", "packing", "max_steps_per_epoch")


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint_dir", default=os.path.join(ROOT, "checkpoints"),
                        help="a run's checkpoints are in the folder RUN_NAME in it")
    parser.add_argument("--save_every", type=positive_int, metavar="N",
                        help="optimizer steps between checkpoints (default: at the end of each epoch, and of the run)")
    parser.add_argument("--keep", type=positive_int, default=2, help="so many of the newest checkpoints are kept")
    parser.add_argument("--resume", metavar="auto|DIR",
                        help="go on from the run's newest checkpoint, if there is one, or from that directory; where "
                             "a lost host or Slurm starts the run anew, from the newest in either case")
    parser.add_argument("--sample_every", type=zero_or_more, default=0, metavar="N",
                        help="print a sample of text every N steps (0: never)")
    parser.add_argument("--prompt", default="The", help="what the samples of text begin with")


@dataclass(frozen=True)
class Start:
    """What a `generation` of a run begins with. `disks`: of its folder on each host, which it has by its `lock`.
    `launch`: see launch_id.

    `found`: what it goes on from, and `loader` gives a stage its weights; None of a new run. `memory`: the loader where
    the ranks hold them. `is_own`: it is in the run's folder. `is_another_run`: it stays another run's, as what that has
    saved later, and this one has an id of its own.
    """

    generation: Generation
    disks: Disks
    lock: Lock
    launch: str | None
    run_id: str
    found: Found | None
    loader: Loader | InMemory | None
    memory: InMemory | None
    is_own: bool
    is_another_run: bool

    @property
    def step(self) -> int:
        """The optimizer steps that were made before."""
        return self.found.state["step"] if self.found else 0

    @property
    def flags(self) -> dict:
        """Those of the run that it goes on from; {} of a new run."""
        return self.found.state["flags"] if self.found else {}

    @property
    def written(self) -> int:
        """The step of the last checkpoint that this run has."""
        return self.memory.written if self.memory else self.step if self.is_own else 0

    @property
    def lines(self) -> list[str]:
        """The rows of the records of all steps before, as far as they are known."""
        return self.found.state.get("records", "").splitlines(keepends=True) if self.found else []

    def check(self, args, made: Model, global_batch: int) -> None:
        """Raises UserError where a resumed run has another model, or would read other samples than before."""
        if (found := self.found) is None:
            return
        for name, value in ("global_batch", global_batch), ("seq_len", args.seq_len), ("seed", args.seed):
            if (saved := found.state[name]) != value:
                raise UserError(f"{found.path} was saved with {name}={saved}, but this run has {value}: choose "
                                "--batch_size x micro-batches, --seq_len and --seed as they were")
        for flag in FLAGS:
            value = getattr(args, flag, None)
            if flag in self.flags and (saved := self.flags[flag]) != value:
                raise UserError(f"{found.path} was saved with --{flag} {saved}, but this run has "
                                f"{value}: give the same")
        if unlike := sorted({*made.names} ^ {*found.state["names"]}):
            raise UserError(f"{found.path} is of another model: {len(unlike)} parameters are in one of the two "
                            f"only, among them {unlike[0]}")
        saved, function = found.state.get("model", {}), function_of(made.model)
        both = sorted(saved.keys() & function.keys())  # another version of transformers may know others
        if unlike := [f"{field} {saved[field]}, now {function[field]}" for field in both
                      if saved[field] != function[field]]:
            raise UserError(f"{found.path} was saved by a model that computes something else: "
                            f"{'; '.join(unlike)}: give the same --model_name and sizes as before")

    def clear_folder(self) -> None:
        """Keeps under another name what this run does not go on from: checkpoints of other runs, and later ones.

        A host that joins late may have such, too. Those before --resume DIR become this run's. Collective.
        """
        folder = self.disks.folder
        states = read_states(folder) if self.disks.leads and self.is_own else {}
        own = {name: state for name, state in states.items()  # what can't be read may be of that run
               if run_of(state) in (None, run_of(self.found.state))
               and not (self.is_another_run and step_of(name) > self.step)}
        move_aside(self.disks, lambda name: name not in own, self.found.name if self.is_own else None)
        with self.disks.together(CANT_WRITE):
            for name, state in own.items() if self.is_another_run else ():
                if run_of(state):
                    write_state(os.path.join(folder, name, STATE), {**state, "run_id": self.run_id})

    def restore(self, stage, optimizer: torch.optim.Optimizer, scheduler) -> None:
        """Gives the optimizer its state after the last step, and the scheduler the steps that it has made. Collective.
        """
        with self.disks.together():
            self.loader.load_optimizer(optimizer, stage)
        with warnings.catch_warnings():  # of steps of the scheduler without the optimizer's
            warnings.simplefilter("ignore")
            for _ in range(self.step):  # so that --learning_rate and the other flags have their effect
                scheduler.step()


def find_start(args, generation: Generation, device: torch.device) -> Start:
    """What the processes of the generation still hold in memory counts first. Weights go to the device. Collective.

    Raises UserError for a --checkpoint_dir that can't be written, a --resume that can't be read.
    """
    check_texts(args)

    # its folder, which no other run may have
    folder = os.path.join(os.path.abspath(args.checkpoint_dir), args.run_name)
    disks = Disks(folder, needs_room=generation.live is None)
    if is_home() and int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:  # hosts
        print(f"what the run leaves for you is on {socket.gethostname()}, in {folder}", flush=True)
    lock = Lock(disks)
    generation.at_end.callback(lock.close)

    # what this very run has left there, if this is a later start of one launch
    launch, may_be_again = launch_id(args.resume)
    run_id = next((each["run_id"] for each in disks.gather(lock.before)
                   if may_be_again and each.get("launch") == launch), None)

    # the state of training
    if memory := find_in_memory(generation, disks, device):
        found, is_own, is_another_run = memory.found, True, False
    else:
        found, is_own, is_another_run = find_on_disks(args.resume, disks, run_id)
    if found and not is_another_run:
        run_id = run_of(found.state)
    if found and is_home():
        print(f"going on after step {found.state['step']}: {'in memory' if memory else found.path}", flush=True)
    return Start(generation, disks, lock, launch, run_id or disks.gather(uuid.uuid4().hex)[0], found,
                 memory or found and Loader(found, disks, device), memory, is_own, is_another_run)


def check_texts(args) -> None:
    """Raises UserError for a --run_name that is no name of a directory, and for flags that no terminal can show."""
    if os.path.basename(args.run_name) != args.run_name or args.run_name in ("", ".", ".."):
        raise UserError(f"--run_name {args.run_name!r} becomes a directory's name: use one without slashes")
    for name, value in vars(args).items():
        if isinstance(value, str):
            check_text(f"--{name}", value)


def find_on_disks(wanted: str | None, disks: Disks, run_id: str | None) -> tuple[Found | None, bool, bool]:
    """What a Start has as found, is_own and is_another_run. `wanted`: --resume. Collective.

    DIR counts for the first start of a launch only: a later one, which knows its `run_id`, goes on with what this very
    run has saved since.
    """
    if run_id or wanted == "auto":
        if found := find_checkpoint("auto", disks.folder, disks, run_id):
            return found, True, False
        if run_id and dist.get_rank() == 0:
            print(f"{disks.folder} has no whole checkpoint of this run: it starts as it did first", flush=True)
    if wanted in (None, "auto"):
        return None, False, False
    if not (found := find_checkpoint(wanted, disks.folder, disks)):
        return None, False, False
    return found, disks.gather(os.path.realpath(found.folder) == os.path.realpath(disks.folder))[0], True


def launch_id(resume: str | None) -> tuple[str | None, bool]:
    """What all starts of one launch have in common, and whether this may be a later one of them.

    torchrun's agents start an elastic run anew when hosts come and go, Slurm a job that it requeues. Raises UserError.
    """
    if "ELASTIC_RUN" in os.environ:
        return json.loads(os.environ["ELASTIC_RUN"])["id"], True
    if not is_elastic():
        count = os.environ.get("SLURM_RESTART_COUNT", "0")
        return os.environ.get("SLURM_JOB_ID"), resume is not None and count != "0"
    if (launch := os.environ.get("TORCHELASTIC_RUN_ID", "none")) == "none":
        raise UserError("torchrun with --max-restarts but without --rdzv-id: give each launch an id of its own, by "
                        "which a process that is started anew knows the checkpoints of its own run")
    return launch, True
