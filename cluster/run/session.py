"""A training that can be stopped, killed and moved: where it goes on, and what it leaves behind.

    run = Run(args)                               finds the checkpoint to go on from, if there is one
    ... plugin.configure(model, optimizer, weights=run.weights(...)) ...
    run.begin(plugin, model, optimizer, ...)      loads the optimizer's state, makes the Checkpointer
    run.after_step(number)                        saves when it is time; whether to stop
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import socket
import uuid
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

import process_group_manager as pgm
from checkpoints.files import STATE, name_of_step, step_of, write_state
from checkpoints.folder import Lock, move_aside
from checkpoints.loader import Loader
from checkpoints.resume import Found, find_checkpoint, read_states, run_of
from checkpoints.save import Checkpointer
from data.encoded import require_same_data
from models.published import read_tokenizer_files
from ranks.collectives import say, wait_for_all
from ranks.disks import CANT_WRITE, Disks
from ranks.lost import NEWCOMER, PATIENCE, MembershipChanged, is_elastic
from ranks.placement import from_home, is_home
from ranks.stopping import StopAgreement
from run.evaluation import Sampler
from run.live_state import Commit, Moved, in_memory, who_has_what
from utils import ROOT, UserError, positive_int, zero_or_more

ALONE = 4.0  # seconds that a rank waits for its own agent to stop it

FLAGS = "lora_rank", "lora_alpha", "lora_targets", "base_bits", "validation_split", "packing"  # a resume keeps them
PACKAGES = ("torch", "transformers", "safetensors", "numpy")


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint_dir", default=os.path.join(ROOT, "checkpoints"),
                        help="a run's checkpoints are in the folder RUN_NAME in it")
    parser.add_argument("--save_every", type=positive_int, metavar="N",
                        help="optimizer steps between checkpoints (default: at the end of each epoch, and of the run)")
    parser.add_argument("--keep", type=positive_int, default=2, help="so many of the newest checkpoints are kept")
    parser.add_argument("--checkpoint_copies", type=positive_int, default=2,
                        help="where hosts share no disk: on so many of them each file is kept; with 2 or more, the "
                             "host on which the run was started has them all")
    parser.add_argument("--resume", metavar="auto|DIR",
                        help="go on from the run's newest checkpoint, if there is one, or from that directory; where "
                             "a lost host or Slurm starts the run anew, from the newest in either case")
    parser.add_argument("--sample_every", type=zero_or_more, default=0, metavar="N",
                        help="print a sample of text every N steps (0: never)")
    parser.add_argument("--prompt", default="The", help="what the samples of text begin with")


class Run:
    """All ranks make one together, when they have joined. `found`: the checkpoint to go on from, or None.

    `generation`: of the processes, see membership/. What they still hold in memory is taken for a checkpoint.

    Raises UserError for a --checkpoint_dir that can't be written, a --resume that can't be read.
    """

    def __init__(self, args, generation):
        generation.run, self.has_begun = self, False  # a generation may end before it has begun
        self.checkpointer = self.loader = self.record = self.read = self.lock = self.specs = self.commit = None
        if os.path.basename(args.run_name) != args.run_name or args.run_name in ("", ".", ".."):
            raise UserError(f"--run_name {args.run_name!r} becomes a directory's name: use one without slashes")
        for name, value in vars(args).items():
            if isinstance(value, str) and not value.isprintable():  # bytes that are no UTF-8, line ends
                raise UserError(f"--{name} {value!r} has characters that can't be printed: leave them out")
        self.args, self.folder = args, os.path.join(os.path.abspath(args.checkpoint_dir), args.run_name)
        newcomers = generation.members and generation.members.newcomers
        self.generation, self.stop_agreement = generation, StopAgreement(newcomers, generation.signals)
        self.disks = Disks(self.folder, needs_room=generation.held is None)
        if is_home() and int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:  # hosts
            print(f"what the run leaves for you is on {socket.gethostname()}, in {self.folder}", flush=True)
        self.lock = Lock(self.disks)
        self.launch, may_be_again = launch_id(args.resume)
        self.run_id = next((each["run_id"] for each in self.disks.gather(self.lock.before)
                            if may_be_again and each.get("launch") == self.launch), None)
        self.found, self.branches = self.in_memory() or self.find()
        is_own = self.found and os.path.realpath(self.found.folder) == os.path.realpath(self.folder)
        self.is_own = self.disks.gather(is_own)[0]  # the checkpoint is one of this run's folder
        if self.found and not self.branches:
            self.run_id = run_of(self.found.state)
        args.run_id = self.run_id = self.run_id or self.disks.gather(uuid.uuid4().hex)[0]
        self.start = self.found.state["step"] if self.found else 0
        if self.found and not args.learning_rate:
            args.learning_rate = self.found.state["flags"].get("learning_rate")
        if self.found and is_home():
            print(f"going on after step {self.start}: {'in memory' if self.specs else self.found.path}", flush=True)

    def in_memory(self) -> tuple[Found, bool] | None:
        """As find(), of what the ranks hold since the last generation. Collective."""
        if found := in_memory(self.generation.held, self.disks, self.generation.number):
            self.specs, self.commit, state = found
            if not self.specs[self.disks.rank]:
                self.generation.held = None  # of other steps than the run's
            return Found(name_of_step(state["step"]), self.folder, state, {}), False
        if any(self.disks.gather(self.generation.held is not None)) and is_home():
            print("a part of the model was on lost hosts alone: all ranks go back to the last checkpoint", flush=True)
        self.generation.held = None
        return None

    def find(self) -> tuple[Found | None, bool]:
        """The checkpoint to go on from, and whether it is that of --resume DIR. Collective.

        DIR counts for the first start of a launch only: a later one goes on with what this very run has saved since.
        """
        wanted = self.args.resume
        if self.run_id or wanted == "auto":
            if found := find_checkpoint("auto", self.folder, self.disks, self.run_id):
                return found, False
            if self.run_id and dist.get_rank() == 0:
                print(f"{self.folder} has no whole checkpoint of this run: it starts as it did first", flush=True)
        if wanted in (None, "auto"):
            return None, False
        return find_checkpoint(wanted, self.folder, self.disks), True

    def clear_folder(self) -> None:
        """Keeps under another name what this run does not go on from: checkpoints of other runs, and later ones.

        A host that joins late may have such, too. Those before --resume DIR become this run's. Collective.
        """
        states = read_states(self.folder) if self.disks.leads else {}
        own = {name: state for name, state in states.items()
               if self.is_own and run_of(state) in (None, run_of(self.found.state))
               and not (self.branches and step_of(name) > self.start)}
        move_aside(self.disks, lambda name: name not in own, self.is_own and self.found.name)
        with self.disks.together(CANT_WRITE):
            for name, state in own.items() if self.branches else ():
                if run_of(state):
                    write_state(os.path.join(self.folder, name, STATE), {**state, "run_id": self.run_id})

    def weights(self, device: torch.device, made) -> Callable | dict | None:
        """What plugin.configure takes as `weights`: the checkpoint's, or those of `made`, a Model, in a new run.

        With LoRA these are the frozen weights, and a checkpoint has the adapters. `source`: where they are read from.
        """
        self.source = self.found.path if self.found else made.source
        if self.found:
            self.clear_folder()
            self.loader = Moved(self.generation.held, self.specs, self.disks, device) if self.specs else Loader(
                self.found, self.disks, device)
        if made.lora:
            return made.lora.weights(made.initial, self.loader, device, is_moved=bool(self.specs))
        return self.loader.weights if self.found else made.initial

    def check(self, names: list[str], global_batch: int, seq_len: int) -> None:
        """Raises UserError where a resumed run has another model, or would read other samples than before."""
        if self.found is None:
            return
        for name, value in ("global_batch", global_batch), ("seq_len", seq_len), ("seed", self.args.seed):
            if (saved := self.found.state[name]) != value:
                raise UserError(f"{self.found.path} was saved with {name}={saved}, but this run has {value}: choose "
                                "--batch_size x micro-batches, --seq_len and --seed as they were")
        before = self.found.state["flags"]
        for flag in FLAGS:
            value = getattr(self.args, flag, None)
            if flag in before and before[flag] != value:
                raise UserError(f"{self.found.path} was saved with --{flag} {before[flag]}, but this run has {value}: "
                                "give the same")
        if unlike := sorted({*names} ^ {*self.found.state["names"]}):
            raise UserError(f"{self.found.path} is of another model: {len(unlike)} parameters are in one of the two "
                            f"only, among them {unlike[0]}")

    def check_data(self, tokenizer: str, vocab_size: int, read: dict) -> None:
        """`read`: as load_samples leaves it. Raises UserError where a resumed run reads other data. Collective."""
        require_same_data(self.found, self.args, tokenizer, vocab_size, read)
        self.read = read

    def begin(self, plugin, model, optimizer, scheduler, names: list[str], files: dict[str, bytes], tokenizer: str,
              steps_per_epoch: int | None) -> None:
        """`names`: of all parameters that are saved. `files`: config.json, or what adapters have. Collective."""
        if self.found is None:
            self.clear_folder()
        self.lock.write(self.run_id, self.launch)
        if self.loader:
            with self.disks.together():
                self.loader.load_optimizer(optimizer, model.module)
            with warnings.catch_warnings():  # of steps of the scheduler without the optimizer's
                warnings.simplefilter("ignore")
                for _ in range(self.start):  # so that --learning_rate and the other flags have their effect
                    scheduler.step()
        args, grid, batch = self.args, pgm.process_group_manager, plugin.global_batch_size
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}

        def describe(step: int) -> dict:
            epoch, position = divmod(step, steps_per_epoch) if steps_per_epoch else (0, step)
            return {"tokens": step * batch * args.seq_len, "epoch": epoch, "position": position * batch,
                    "seed": args.seed, "global_batch": batch, "seq_len": args.seq_len, "names": names,
                    "flags": {name: value for name, value in vars(args).items() if not callable(value)},
                    "topology": grid.topology, "run_id": self.run_id, "data": self.read,
                    "versions": {"python": platform.python_version(), **versions}}

        small = {**files, **from_home(lambda: read_tokenizer_files(tokenizer))}
        self.checkpointer = Checkpointer(self.folder, self.disks, model, optimizer, scheduler, describe, small,
                                         args.keep, args.checkpoint_copies)
        self.sampler = args.sample_every and Sampler(plugin, model, tokenizer, args.prompt, args.seq_len)
        self.step, self.tp_rank, self.steps_per_epoch = self.start, grid.tp_rank, steps_per_epoch
        if members := self.generation.members:
            self.everything, words = who_has_what(model.module, grid.tp_rank, members.me.address)
            say(words)
            if needed := members.roster.needed_hosts():
                say(f"where {' or '.join(needed)} is lost, too few are left: the run then waits for it, and goes back "
                    "to the last checkpoint")
        if self.specs:
            held = self.generation.held
            self.checkpointer.written = max(self.disks.gather(held.keeper.written if held else 0))
        self.has_begun, self.generation.held, self.loader = True, None, None
        self.stop_agreement.begin()
        if self.specs:
            if self.is_due(self.start, False) and self.start > self.checkpointer.written:
                self.checkpointer.save(self.start, waits=True)
        elif self.is_own:
            self.checkpointer.written = self.start
        elif self.found:  # whoever is lost next, the run goes on from here
            self.checkpointer.save(self.start, waits=True)  # nobody knows what memory a copy leaves for the first step

    def commits(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, learning_rate: float) -> None:
        """All gradients of a step are complete on all ranks: from here on it counts, also where a rank is lost."""
        if not (detector := self.generation.failure_detector):
            return
        commit = Commit(step, loss.item(), grad_norm.item(), learning_rate)
        if dist.get_backend() == "nccl" and detector.reason:  # the group was aborted: these are no sums
            raise MembershipChanged(detector.reason)
        self.commit = commit

    def take_in(self) -> None:
        """Where processes wait to be taken in, ends this generation: raises MembershipChanged. Collective."""
        if self.stop_agreement.has_newcomers:
            self.checkpointer.wait()
            wait_for_all("ended")
            raise MembershipChanged(NEWCOMER)

    def is_due(self, step: int, stops: bool) -> bool:
        """Whether a checkpoint is saved after this step."""
        every = self.args.save_every or self.steps_per_epoch
        return stops or bool(every) and step % every == 0

    def after_step(self, step: int, stops: bool, is_last: bool) -> str | None:
        """Saves when it is time. Returns, on home_rank(), the text that was sampled after this step. Collective."""
        if self.is_due(step, stops or is_last):
            self.checkpointer.save(step, stops, is_last)
        elif self.args.save_every and step == self.start + 1:
            self.checkpointer.prepare()
        self.checkpointer.report()
        if not self.sampler or step % self.args.sample_every:
            return None
        if (text := self.sampler.sample()) is not None:
            print(f"sample after step {step}: {text!r}", flush=True)
        return text

    def end(self, was_stopped: bool) -> None:
        """Waits for the last checkpoint. From then on no rank needs to hear of another one. Collective."""
        self.checkpointer.wait()
        if self.generation.failure_detector:
            if self.checkpointer.is_broken:
                raise MembershipChanged("a rank was lost while the last checkpoint was written")
            self.generation.failure_detector.ended.set()
        with contextlib.suppress(RuntimeError):  # others may have left
            dist.barrier(self.disks.group, async_op=True).wait(datetime.timedelta(seconds=PATIENCE))
        if self.generation.members and not was_stopped:
            self.generation.members.keep(is_done=True)
        if was_stopped:
            if dist.get_rank() == 0:
                saved = self.checkpointer.written
                goes_on = f"goes on {'from there' if saved == self.step else f'after step {saved}'}" if saved else (
                    "begins anew, as no step was saved")
                print(f"stopped after step {self.step}, as it was told: --resume auto {goes_on}", flush=True)
            if is_elastic() and (not self.stop_agreement.signals.wait(ALONE) or self.generation.members):
                os._exit(1)  # its agent, unless it ends too, starts this process anew, with those that are there

    def leave(self) -> None:
        """This generation has ended: its files can be opened by the next one."""
        if self.record:
            self.record.leave()
        if self.lock and self.lock.file:
            self.lock.file.close()


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
