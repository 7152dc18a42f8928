"""What a model is asked: the ids of a prompt, or of a conversation in the tokenizer's chat template."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator

from hosts.host_facts import ASKS
from utils import UserError

Talk = list[dict[str, str]]  # messages, as a chat template takes them


def talks(args) -> Iterator[list[Talk]]:
    """The talks to go on with: those of all prompts at once, or the one of a chat after each line of the input, whose
    end ends it. Whoever goes on with a talk appends the answer. Raises UserError where there is no input."""
    if args.prompt is not None:
        yield [[{"role": "user", "content": prompt}] for prompt in args.prompt]
    elif args.chat:
        require_input()
        print(ASKS, flush=True)
        talk = []
        for line in filter(bytes.strip, sys.stdin.buffer):
            talk.append({"role": "user", "content": line.decode(errors="replace").strip()})
            yield [talk]


def encode(args, tokenizer, talk: Talk) -> list[int]:
    """The token ids of what the model is asked. Raises UserError where the tokenizer has no chat template."""
    if not args.chat:
        return tokenizer(talk[-1]["content"], add_special_tokens=False)["input_ids"]
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template: leave out --chat")
    return tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)


def fit(args, config, tokenizer, talk: Talk) -> list[int]:
    """The ids of the last message or, with --chat, of the conversation, which loses its first turns where it is too
    long for the model. Raises UserError for a prompt that is."""
    ids, limit = encode(args, tokenizer, talk), getattr(config, "max_position_embeddings", None)
    while limit and len(ids) + args.max_new_tokens > limit and len(talk) > 1:
        del talk[:2]
        ids = encode(args, tokenizer, talk)
    if not ids:
        raise UserError(f"the prompt {talk[-1]['content']!r} has no token: write at least one word")
    if limit and len(ids) + args.max_new_tokens > limit:
        raise UserError(f"the prompt has {len(ids)} tokens, and with --max_new_tokens {args.max_new_tokens} it is more "
                        f"than the {limit} positions of the model: shorten one of them")
    return ids


def drawing(args) -> dict:
    """How generate() is to draw the next token."""
    if args.temperature:
        return dict(do_sample=True, temperature=args.temperature, top_p=args.top_p)
    return dict(do_sample=False, temperature=None, top_p=None)


def require_input() -> None:
    """Raises UserError where nobody can type: standard input is closed, or it is /dev/null."""
    is_closed = sys.stdin is None or sys.stdin.closed
    with contextlib.suppress(OSError, ValueError):
        is_closed = is_closed or os.path.samestat(os.fstat(sys.stdin.fileno()), os.stat(os.devnull))
    if is_closed:
        raise UserError(f"--chat, but {socket.gethostname()} gets no line to answer: it has no input, as with "
                        "--detach. Give the --prompt, or start it without")
