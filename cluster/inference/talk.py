"""Prompts and chats, over one process or over several ranks, each with a stage of the model.

home_rank() has the tokenizer. It reads prompts, or what a user types, tells all ranks the ids, and prints what follows.
"""

import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

import process_group_manager as pgm
from hosts.host_facts import ASKS
from inference.make_stage import make_stage
from inference.stages import DividedModel
from inference.whole import WholeModel
from ranks.collectives import once, say
from ranks.join import meet
from ranks.lost import FOREVER, is_lost_peer
from ranks.placement import home_rank, is_home
from ranks.sockets import connections, set_probes
from utils import UserError

PATIENCE = 15  # seconds without an answer of a rank's system, after which it counts as lost
Talk = list[dict[str, str]]  # messages, as a chat template takes them


def generate_all(args) -> None:
    """What generate.py does. Collective. Raises UserError, also where another rank is lost."""
    device, dtype = meet(args)
    args.lacks_bfloat16 = device.type == "cuda" and dtype == torch.float32  # by step 9's choice, or as asked for
    settings = drawing(args), args.seed, dist.new_group(backend="gloo", timeout=FOREVER)
    if dist.get_world_size() == 1:
        generator = WholeModel(args, device, *settings)
        model, tokenizer = generator.model, generator.tokenizer
    else:
        stage, tokenizer = make_stage(args, device)
        model, generator = stage.model, DividedModel(stage, device, *settings)
        watch_peers()
    generator.drawing["eos_token_id"] = ends(model, tokenizer)
    asked = talks(args, generator.config, tokenizer)
    try:
        while generate(args, generator, tokenizer, asked):
            pass
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        say("", home_rank())  # behind the row that was being written
        raise UserError(f"rank {dist.get_rank()} has lost another one ({str(error).splitlines()[0]}): see why that one "
                        "has ended, and start anew") from None
    dist.destroy_process_group()


def generate(args, generator: DividedModel | WholeModel, tokenizer, asked: Iterator) -> bool:
    """Goes on with the next of the talks() that are `asked` on home_rank(), which prints one token by token, and
    several at the end. False where there are no more. Collective. Raises UserError, on all ranks, as talks() does."""
    from transformers import TextStreamer

    with pgm.together(generator.group):
        now, *box = next(asked, ([], [])) if is_home() else ([], [])
    dist.broadcast_object_list(box, home_rank(), group=generator.group)
    start, prompts, new = time.perf_counter(), box[0], [[] for _ in box[0]]
    stream = TextStreamer(tokenizer, args.chat, skip_special_tokens=True) if len(now) == 1 else None

    def show(k: int, token: int) -> None:
        new[k].append(token)
        if stream:
            stream.put(torch.tensor([token]))

    if stream:
        stream.put(torch.tensor(prompts[0]))
    generator.generate(prompts, args.max_new_tokens, show)
    if stream:
        stream.end()
    is_timed = now and not args.chat and dist.get_world_size() > 1
    if is_timed:
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


def talks(args, config, tokenizer) -> Iterator[tuple[list[Talk], list[list[int]]]]:
    """The talks to go on with, and the ids of each: those of all prompts at once, or the one of a chat after each line
    of the input, whose end ends it; a line that is too long is left out. Who goes on with a talk appends the answer.
    Raises UserError where there is no input or no chat template, and for a prompt that is too long."""
    if args.chat and not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template: leave out --chat")
    if args.prompt is not None:
        prompts = [prompt.removeprefix("\ufeff") for prompt in args.prompt]  # of "$(cat FILE)", as below
        asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
        yield asked, [fit(args, config, tokenizer, talk) for talk in asked]
    elif args.chat:
        require_input()
        print(ASKS, flush=True)
        talk = []
        for line in filter(bytes.strip, sys.stdin.buffer):
            text = line.decode("utf-8-sig", errors="replace").strip()  # of a file, maybe, that begins with a mark
            longer = [*talk, {"role": "user", "content": text}]
            try:
                ids = fit(args, config, tokenizer, longer)
            except UserError as error:
                print(f"not answered: {error}", flush=True)
                continue
            talk = longer
            yield [talk], [ids]


def encode(args, tokenizer, talk: Talk) -> list[int]:
    """The token ids of what the model is asked."""
    if not args.chat:
        return tokenizer(talk[-1]["content"], add_special_tokens=False)["input_ids"]
    return tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)


def fit(args, config, tokenizer, talk: Talk) -> list[int]:
    """The ids of the last message or, with --chat, of the conversation, which loses its first turns where it is too
    long for the model. Raises UserError for a prompt that is."""
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    ids, room = encode(args, tokenizer, talk), limit - args.max_new_tokens
    while len(ids) > room and len(talk) > 1:
        del talk[:2]
        ids = encode(args, tokenizer, talk)
    if not ids:
        raise UserError(f"the prompt {talk[-1]['content']!r} has no token: write at least one word")
    if len(ids) > room:
        raise UserError(f"the prompt has {len(ids)} tokens, and with --max_new_tokens {args.max_new_tokens} it is more "
                        f"than the {limit} positions of the model: shorten one of them")
    return ids


def drawing(args) -> dict:
    """How generate() is to draw the next token."""
    if args.temperature:
        return dict(do_sample=True, temperature=args.temperature, top_p=args.top_p)
    return dict(do_sample=False, temperature=None, top_p=None)


def ends(model, tokenizer) -> list[int] | None:
    """The ids that end a text: the model's, and the tokenizer's, which chat templates write and training rows end with.
    Collective."""
    known = model.generation_config.eos_token_id
    known = known if isinstance(known, list) else [known]
    return sorted({*known, once(home_rank(), lambda: tokenizer.eos_token_id)} - {None}) or None


def require_input() -> None:
    """Raises UserError where nobody can type: standard input is closed, or it is /dev/null."""
    is_closed = sys.stdin is None or sys.stdin.closed
    with contextlib.suppress(OSError, ValueError):
        is_closed = is_closed or os.path.samestat(os.fstat(sys.stdin.fileno()), os.stat(os.devnull))
    if is_closed:
        raise UserError(f"--chat, but {socket.gethostname()} gets no line to answer: it has no input, as with "
                        "--detach. Give the --prompt, or start it without")
