"""What a run begins with: its folder, and the state of training that it goes on from.

    start = find_start(args, generation)     by all ranks together, before any rank has weights
    start.check(args, made, batch)           do the flags of this run fit to that state?
    start.clear_folder()                     checkpoints that the run does not go on from get another name
    loader = start.loader(held, device)      gives a stage its weights
    restore(start, loader, ...)              gives an optimizer and a scheduler their states

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

from checkpoints.files import STATE, name_of_step, step_of, write_state
from checkpoints.folder import Lock, move_aside
from checkpoints.resume import Found, Loader, find_checkpoint, read_states, run_of
from models.causal import Model, function_of
from ranks.disks import CANT_WRITE, Disks
from ranks.lost import is_elastic
from ranks.placement import is_home
from run.flags import check_text
from run.live_state import InMemory, PeerLoader, find_in_memory
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
class Origin:
    """What a run goes on from: `found`, or nothing. Each kind of it is one of the classes below.

    `is_own`: it is in the run's folder. `is_another_run`: it stays another run's, and this one has an id of its own.
    `is_in_memory`: no disk has it. `written`: the step of the last checkpoint that this run has. `commit`: that of the
    last step, where the ranks have it in memory.
    """

    found: Found | None = None
    is_own = is_another_run = is_in_memory = False
    written, commit = 0, None

    @property
    def step(self) -> int:
        """The optimizer steps that were made before."""
        return self.found.state["step"] if self.found else 0

    @property
    def flags(self) -> dict:
        """Those of the run that it goes on from; {} of a new run."""
        return self.found.state["flags"] if self.found else {}

    @property
    def lines(self) -> list[str]:
        """The rows of the records of all steps before, as far as they are known."""
        return self.found.state.get("records", "").splitlines(keepends=True) if self.found else []

    def keeps(self, name: str, state: dict | str) -> bool:
        """Whether that checkpoint in the run's folder is one of those that led here, or may be."""
        return (self.is_own and run_of(state) in (None, run_of(self.found.state))
                and not (self.is_another_run and step_of(name) > self.step))

    def loader(self, held, disks: Disks, device: torch.device) -> Loader | PeerLoader | None:
        return Loader(self.found, disks, device) if self.found else None


class New(Origin):
    """A run that begins."""


class Newest(Origin):
    """The newest whole checkpoint of this very run."""

    is_own, written = True, Origin.step


class Earlier(Newest):
    """--resume DIR, in the run's own folder: what was saved there later is another run's from now on."""

    is_another_run = True


class Branch(Origin):
    """--resume DIR, in another folder."""

    is_another_run = True


@dataclass(frozen=True)
class Memory(Origin):
    """What the ranks of an elastic run hold in memory. `found` says what state.json would."""

    held: InMemory | None = None
    is_own = is_in_memory = True
    written, commit = property(lambda self: self.held.written), property(lambda self: self.held.commit)

    def loader(self, held, disks: Disks, device: torch.device) -> PeerLoader:
        return PeerLoader(held, self.held.specs, disks, device)


@dataclass(frozen=True)
class Start:
    """`folder`: the run's on each host, on these `disks`; the run has it by its `lock`. `launch`: see launch_id."""

    folder: str
    disks: Disks
    lock: Lock
    launch: str | None
    run_id: str
    origin: Origin

    def check(self, args, made: Model, global_batch: int) -> None:
        """Raises UserError where a resumed run has another model, or would read other samples than before."""
        if (found := self.origin.found) is None:
            return
        for name, value in ("global_batch", global_batch), ("seq_len", args.seq_len), ("seed", args.seed):
            if (saved := found.state[name]) != value:
                raise UserError(f"{found.path} was saved with {name}={saved}, but this run has {value}: choose "
                                "--batch_size x micro-batches, --seq_len and --seed as they were")
        for flag in FLAGS:
            value = getattr(args, flag, None)
            if flag in self.origin.flags and (saved := self.origin.flags[flag]) != value:
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
        origin, states = self.origin, read_states(self.folder) if self.disks.leads else {}
        own = {name: state for name, state in states.items() if origin.keeps(name, state)}
        move_aside(self.disks, lambda name: name not in own, origin.found.name if origin.is_own else None)
        with self.disks.together(CANT_WRITE):
            for name, state in own.items() if origin.is_another_run else ():
                if run_of(state):
                    write_state(os.path.join(self.folder, name, STATE), {**state, "run_id": self.run_id})

    def loader(self, held, device: torch.device) -> Loader | PeerLoader | None:
        """`held`: what this rank holds, a LiveState or None. None of a new run."""
        return self.origin.loader(held, self.disks, device)


def restore(start: Start, loader, stage, optimizer: torch.optim.Optimizer, scheduler) -> None:
    """Gives the optimizer its state after the last step, and the scheduler the steps that it has made. Collective."""
    with start.disks.together():
        loader.load_optimizer(optimizer, stage)
    with warnings.catch_warnings():  # of steps of the scheduler without the optimizer's
        warnings.simplefilter("ignore")
        for _ in range(start.origin.step):  # so that --learning_rate and the other flags have their effect
            scheduler.step()


def find_start(args, generation) -> Start:
    """`generation`: of the processes. What they still hold in memory counts first. Collective.

    Raises UserError for a --checkpoint_dir that can't be written, a --resume that can't be read.
    """
    check_texts(args)
    folder = os.path.join(os.path.abspath(args.checkpoint_dir), args.run_name)
    disks = Disks(folder, needs_room=generation.held is None)
    if is_home() and int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:  # hosts
        print(f"what the run leaves for you is on {socket.gethostname()}, in {folder}", flush=True)
    lock = Lock(disks)
    generation.at_end.callback(lock.close)
    launch, may_be_again = launch_id(args.resume)
    run_id = next((each["run_id"] for each in disks.gather(lock.before)
                   if may_be_again and each.get("launch") == launch), None)
    if memory := find_in_memory(generation, disks):
        origin = Memory(Found(name_of_step(memory.state["step"]), folder, memory.state, {}), memory)
    else:
        origin = find_on_disks(args.resume, folder, disks, run_id)
    if origin.found and not origin.is_another_run:
        run_id = run_of(origin.found.state)
    if origin.found and is_home():
        print(f"going on after step {origin.step}: {'in memory' if memory else origin.found.path}", flush=True)
    return Start(folder, disks, lock, launch, run_id or disks.gather(uuid.uuid4().hex)[0], origin)


def check_texts(args) -> None:
    """Raises UserError for a --run_name that is no name of a directory, and for flags that no terminal can show."""
    if os.path.basename(args.run_name) != args.run_name or args.run_name in ("", ".", ".."):
        raise UserError(f"--run_name {args.run_name!r} becomes a directory's name: use one without slashes")
    for name, value in vars(args).items():
        if isinstance(value, str):
            check_text(f"--{name}", value)


def find_on_disks(wanted: str | None, folder: str, disks: Disks, run_id: str | None) -> Origin:
    """`wanted`: --resume. Collective.

    DIR counts for the first start of a launch only: a later one, which knows its `run_id`, goes on with what this very
    run has saved since.
    """
    if run_id or wanted == "auto":
        if found := find_checkpoint("auto", folder, disks, run_id):
            return Newest(found)
        if run_id and dist.get_rank() == 0:
            print(f"{folder} has no whole checkpoint of this run: it starts as it did first", flush=True)
    if wanted in (None, "auto") or not (found := find_checkpoint(wanted, folder, disks)):
        return New()
    is_own = disks.gather(os.path.realpath(found.folder) == os.path.realpath(folder))[0]
    return Earlier(found) if is_own else Branch(found)


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
