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
from hosts.host_facts import ASKS
from inference.make_stage import make_stage
from inference.prompts import drawing, fit, require_input
from inference.stages import Writer
from ranks.join import meet
from ranks.lost import is_lost_peer
from ranks.placement import home_rank, is_home
from ranks.sockets import connections, set_probes
from utils import UserError

PATIENCE = 15  # seconds without an answer of a rank's system, after which it counts as lost
FOREVER = datetime.timedelta(days=365)  # a user may think


def write_together(args) -> None:
    """What generate.py does, on all ranks together. Raises UserError, also where another rank is lost."""
    device, _ = meet(args)
    stage, tokenizer = make_stage(args, device)
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
        if is_home():
            print(flush=True)  # behind the row that was being written
        raise UserError(f"rank {dist.get_rank()} has lost another one ({str(error).splitlines()[0]}): see why that one "
                        "has ended, and start anew") from None
    dist.destroy_process_group()


def chat(args, writer: Writer, tokenizer) -> None:
    """Answers line after line until the input ends. Collective. Raises UserError where there is none."""
    talk, lines = [], (line.decode(errors="replace") for line in getattr(sys.stdin, "buffer", ()))

    def ask() -> list[list[int]]:
        if not talk:
            require_input()
        line = next(filter(str.strip, lines), None)
        if line is None:
            return []
        talk.append({"role": "user", "content": line.strip()})
        return [fit(args, writer.stage.config, tokenizer, talk)]

    if is_home():
        print(ASKS, flush=True)
    while texts := write(args, writer, tokenizer, ask):
        talk.append({"role": "assistant", "content": texts[0]})


def write(args, writer: Writer, tokenizer, ask: Callable[[], list[list[int]]]) -> list[str]:
    """Writes on after the prompts whose ids ask() returns on home_rank(), which prints one text token by token, and
    several at the end. The texts, there. Collective. Raises UserError, on all ranks, where ask() does."""
    from transformers import TextStreamer

    with pgm.together(writer.group):
        box = [ask() if is_home() else None]
    dist.broadcast_object_list(box, home_rank(), group=writer.group)
    start, prompts, new = time.perf_counter(), box[0], [[] for _ in box[0]]
    stream = TextStreamer(tokenizer, args.chat, skip_special_tokens=True) if is_home() and len(prompts) == 1 else None

    def show(k: int, token: int) -> None:
        new[k].append(token)
        if stream:
            stream.put(torch.tensor([token]))

    if stream:
        stream.put(torch.tensor(prompts[0]))
    writer.write(prompts, args.max_new_tokens, show)
    if stream:
        stream.end()
    if not is_home():
        return [""] * len(prompts)
    if not args.chat:
        count, seconds = sum(map(len, new)), time.perf_counter() - start
        print(f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s", file=sys.stderr, flush=True)
    texts = [tokenizer.decode(ids, skip_special_tokens=True)
             for ids in (new if args.chat else [ids + more for ids, more in zip(prompts, new)])]
    print("".join(f"{text}\n" for text in texts if not stream), end="", flush=True)
    return texts


def watch_peers() -> None:
    """From now on the system closes connections to ranks whose machine does not answer, so that waiting for them ends
    with an error, as it does at once where a process ends."""
    for _, each in connections() if sys.platform == "linux" else ():
        set_probes(each.fileno())
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * PATIENCE)
