"""Prompts and chats, over one process or over several ranks, each with a stage of the model.

home_rank() has the tokenizer. It reads prompts, or what a user types, tells all ranks the ids, and prints what follows.
"""

import datetime
import socket
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

import process_group_manager as pgm
from inference.make_stage import make_stage
from inference.prompts import Talk, drawing, fit, talks
from inference.stages import Writer
from inference.whole import WholeModel
from ranks.join import meet
from ranks.lost import is_lost_peer
from ranks.placement import home_rank, is_home
from ranks.sockets import connections, set_probes
from utils import UserError

PATIENCE = 15  # seconds without an answer of a rank's system, after which it counts as lost
FOREVER = datetime.timedelta(days=365)  # a user may think


def write_all(args) -> None:
    """What generate.py does. Collective. Raises UserError, also where another rank is lost."""
    device, _ = meet(args)
    if dist.get_world_size() == 1:
        writer = WholeModel(args, device, drawing(args), dist.group.WORLD)
        tokenizer = writer.tokenizer
    else:
        stage, tokenizer = make_stage(args, device)
        group = dist.new_group(backend="gloo", timeout=FOREVER)
        writer = Writer(stage, device, drawing(args), args.seed, group)
        watch_peers()
    asked = talks(args)
    try:
        while write(args, writer, tokenizer, asked):
            pass
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        if is_home():
            print(flush=True)  # behind the row that was being written
        raise UserError(f"rank {dist.get_rank()} has lost another one ({str(error).splitlines()[0]}): see why that one "
                        "has ended, and start anew") from None
    dist.destroy_process_group()


def write(args, writer: Writer | WholeModel, tokenizer, asked: Iterator[list[Talk]]) -> bool:
    """Goes on with the next talks that are `asked` on home_rank(), which prints one token by token, and several at the
    end. False where there are no more. Collective. Raises UserError, on all ranks, where one can't be written."""
    from transformers import TextStreamer

    with pgm.together(writer.group):
        now = next(asked, []) if is_home() else []
        box = [[fit(args, writer.config, tokenizer, talk) for talk in now]]
    dist.broadcast_object_list(box, home_rank(), group=writer.group)
    start, prompts, new = time.perf_counter(), box[0], [[] for _ in box[0]]
    stream = TextStreamer(tokenizer, args.chat, skip_special_tokens=True) if len(now) == 1 else None

    def show(k: int, token: int) -> None:
        new[k].append(token)
        if stream:
            stream.put(torch.tensor([token]))

    if stream:
        stream.put(torch.tensor(prompts[0]))
    writer.write(prompts, args.max_new_tokens, show)
    if stream:
        stream.end()
    if now and not args.chat and dist.get_world_size() > 1:
        count, seconds = sum(map(len, new)), time.perf_counter() - start
        print(f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s", file=sys.stderr, flush=True)
    for talk, ids, more in zip(now, prompts, new):
        text = tokenizer.decode(more if args.chat else ids + more, skip_special_tokens=True)
        talk.append({"role": "assistant", "content": text})
        if not stream:
            print(text, flush=True)
    return bool(prompts)


def watch_peers() -> None:
    """From now on the system closes connections to ranks whose machine does not answer, so that waiting for them ends
    with an error, as it does at once where a process ends."""
    for _, each in connections() if sys.platform == "linux" else ():
        set_probes(each.fileno())
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * PATIENCE)
