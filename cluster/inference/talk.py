"""Prompts and chats over several ranks, each with a stage of the model.

home_rank() has the tokenizer. It reads prompts, or what a user types, tells all ranks the ids, and prints what follows.
"""

import datetime
import socket
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import process_group_manager as pgm
from inference.load import load_stage
from inference.prompts import drawing, fit
from inference.stages import Writer
from launching.host_facts import ASKS
from machine_facts import home_rank, is_home
from membership.watch import connections, is_lost_peer, set_probes
from training.common import meet
from utils import UserError

PATIENCE = 15  # seconds without an answer of a rank's system, after which it counts as lost
FOREVER = datetime.timedelta(days=365)  # a user may think


def write_together(args) -> None:
    """What generate.py does, on all ranks together. Raises UserError, also where another rank is lost."""
    device, _ = meet(args)
    stage, tokenizer = load_stage(args, device)
    group = dist.new_group(backend="gloo", timeout=FOREVER)
    writer = Writer(stage, device, drawing(args), args.seed, group)
    watch_peers()
    try:
        if args.prompt is None:
            chat(args, writer, tokenizer)
        else:
            talks = [[{"role": "user", "content": prompt}] for prompt in args.prompt]
            write(args, writer, tokenizer, lambda: [fit(args, stage.config, tokenizer, talk) for talk in talks])
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise UserError(f"rank {dist.get_rank()} has lost another one ({str(error).splitlines()[0]}): see why that one "
                        "has ended, and start anew") from None
    dist.destroy_process_group()


def chat(args, writer: Writer, tokenizer) -> None:
    """Answers line after line until the input ends. Collective. Raises UserError where there is none."""
    talk, lines = [], (line.decode(errors="replace") for line in sys.stdin.buffer)

    def ask() -> list[list[int]]:
        line = next(filter(str.strip, lines), None)
        if line is None and not talk:
            raise UserError(f"--chat, but {socket.gethostname()} gets no line to answer: its input is empty, as with "
                            "--detach, or where a --plan leaves the host idle on which you type")
        if line is None:
            return []
        talk.append({"role": "user", "content": line.strip()})
        return [fit(args, writer.stage.config, tokenizer, talk)]

    if is_home():
        print(ASKS, flush=True)
    while texts := write(args, writer, tokenizer, ask):
        talk.append({"role": "assistant", "content": texts[0]})


def write(args, writer: Writer, tokenizer, ask: Callable[[], list[list[int]]]) -> list[str]:
    """Writes on after the prompts whose ids ask() returns on home_rank(), which prints them. The texts, there.

    Collective. Raises UserError, on all ranks, where ask() does.
    """
    with pgm.together(writer.group):
        box = [ask() if is_home() else None]
    dist.broadcast_object_list(box, home_rank(), group=writer.group)
    start, printer = time.perf_counter(), Printer(box[0], tokenizer, args.chat) if is_home() else None
    writer.write(box[0], args.max_new_tokens, printer.show if printer else lambda *_: None)
    if printer and not args.chat:
        count, seconds = sum(map(len, printer.new)), time.perf_counter() - start
        print(f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s", file=sys.stderr, flush=True)
    return printer.texts() if printer else ["" for _ in box[0]]


class Printer:
    """Prints texts in the order of their prompts: of the first that is not complete each token as it comes."""

    def __init__(self, prompts: list[list[int]], tokenizer, is_chat: bool):
        from transformers import TextStreamer

        self.prompts, self.tokenizer, self.new = prompts, tokenizer, [[] for _ in prompts]
        self.current, self.over = 0, set()
        self.stream = TextStreamer(tokenizer, skip_prompt=is_chat, skip_special_tokens=True)

    def show(self, k: int, token: int, is_over: bool) -> None:
        """Takes the next token of prompt k."""
        self.new[k].append(token)
        self.over |= {k} if is_over else set()
        fresh = self.new[k][-1:] if k == self.current else []
        while fresh:
            if len(fresh) == len(self.new[self.current]):
                self.stream.put(torch.tensor(self.prompts[self.current]))
            self.stream.put(torch.tensor(fresh))
            fresh = []
            if self.current in self.over:
                self.stream.end()
                self.current += 1
                fresh = self.new[self.current] if self.current < len(self.new) else []

    def texts(self) -> list[str]:
        return [self.tokenizer.decode(new, skip_special_tokens=True) for new in self.new]


def watch_peers() -> None:
    """From now on the system closes connections to ranks whose machine does not answer, so that waiting for them ends
    with an error, as it does at once where a process ends."""
    for _, each in connections() if sys.platform == "linux" else ():
        set_probes(each.fileno())
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * PATIENCE)
