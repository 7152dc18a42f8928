"""Rows as people have them -> token ids, and which of these are targets of the loss.

A row is of one kind, by its columns; the first kind of this list that fits counts:

    messages              a conversation, [{"role": "user", "content": "..."}, {"role": "assistant", ...}, ...], which
                          the tokenizer's chat template turns into text. Targets: what each assistant message adds
    prompt, completion    two strings. Targets: the completion and the end-of-text token. Or two lists of messages: one
                          conversation, in which only the answers of the completion are targets
    text                  one string, or a whole .txt file. Targets: all of it
    conversations         messages in ShareGPT's words: [{"from": "human", "value": "..."}, {"from": "gpt", ...}, ...]
    instruction, output   Alpaca's words for a conversation of one question, with what it is about in `input`

Of a conversation that is not in the column messages, a column `system` is the first message, where it has none.
In an encoded row a token that is no target is stored as its complement -1 - id, which is negative.
"""

import functools
import io
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import dataloader
from dataloader import BLOCK, KINDS, corpus_path, files_at, kind_of, read_corpus
from utils import UserError, require_reachable_hub

COLUMNS = "messages, or conversations, or prompt and completion, or instruction and output, or text"
CONTEXT = "messages before completion"  # of a row that is understood(): how many messages precede the first target
SHAREGPT = {"human": "user", "gpt": "assistant"}
say_once = functools.cache(tqdm.write)  # above the bar
ROLES = ("system", "developer", "user", "assistant", "tool")


class Source(NamedTuple):
    """Where rows come from: `files` of one format (`suffix`), or a data set of the Hub and one of its configurations.

    `name` is what --dataset_name says.
    """

    name: str
    path: str
    config: str | None
    files: list[str]
    suffix: str | None


def find_source(name: str) -> Source:
    """A path that exists, "sotu", or a Hub id, with :CONFIG behind it where the data set has several configurations.

    Raises UserError for a folder without files of one known format.
    """
    path = corpus_path(name)
    if not os.path.exists(path):
        path, _, config = name.partition(":")
        return Source(name, path, config or None, [], None)
    files = [file for file in files_at(path) if kind_of(file)]
    kinds = {kind_of(file) for file in files}
    if len(kinds) != 1:
        raise UserError(f"--dataset_name {name!r} must be a file, or a folder of files, of one kind among {KINDS}; "
                        f"found {', '.join(sorted(kinds)) or 'none'}")
    return Source(name, path, None, files, kinds.pop())


def read_rows(source: Source) -> Iterator[tuple[str, dict]]:
    """("FILE, row 3", its columns that are not empty) for each row, in order; the rows of a file are read one by one.

    Raises UserError for what can't be read, with the reader's reason.
    """
    if not source.files:
        require_reachable_hub(source.path, "--dataset_name")
    from datasets import load_dataset  # imported only where it is needed, because it takes seconds

    try:
        for file in source.files or [None]:
            if file:
                rows = dataloader.read_rows(file)
            else:
                rows = load_dataset(source.path, source.config, split="train", streaming=True)
            for number, row in enumerate(rows, 1):
                if not isinstance(row, dict) or all(value is None for value in row.values()):
                    raise ValueError(f"row {number} is null or empty ({row!r:.60}): leave it out")
                yield f"{file or source.name}, row {number}", {key: row[key] for key in row if row[key] is not None}
    except Exception as error:  # the library raises errors of many classes
        reason = " ".join(str(error.__cause__ or error).split())[:300]
        raise UserError(f"--dataset_name {source.name!r} can't be read: {reason}. It has to be rows of one kind, in "
                        f"UTF-8 text, with the columns {COLUMNS}") from error


def understood(place: str, row: dict) -> tuple[str, dict]:
    """The kind of a row, and the row, as messages where it is a conversation in other words.

    Raises UserError for a row whose columns are those of no kind, that lacks a string, or of which something would be
    ignored.
    """
    if "messages" in row:
        return "messages", row
    if "prompt" in row and "completion" in row:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            before = after_system(row, prompt)
            return "messages", {"messages": before + completion, CONTEXT: len(before)}
        if row.get("system"):
            raise UserError(f"{place} has a system beside plain strings: put it in front of the prompt, or use "
                            "messages")
        return "prompt/completion", with_strings(place, row, "prompt", "completion")
    if "text" in row:
        return "text", with_strings(place, row, "text")
    if "conversations" in row:
        said = row["conversations"]
        if isinstance(said, list):
            if any(isinstance(each, dict) and each.get("weight") not in (None, 1) for each in said):
                raise UserError(f"{place}: a message has a weight, but each answer counts: remove those that should "
                                "not")
            said = after_system(row, [as_message(each) for each in said])
        return "messages", {"messages": said}
    if "instruction" in row and "output" in row:
        if row.get("history"):
            raise UserError(f"{place} has a history, which is not read: write the conversation as messages")
        words = [row[name] for name in ("instruction", "input") if row.get(name)]
        question = "\n\n".join(words) if all(isinstance(each, str) for each in words) else words
        return "messages", {"messages": after_system(row, [{"role": "user", "content": question},
                                                           {"role": "assistant", "content": row["output"]}])}
    raise UserError(f"{place} has the columns {', '.join(row) or 'none'}: rows need {COLUMNS}: rename yours")


def with_strings(place: str, row: dict, *columns: str) -> dict:
    for column in columns:
        if not isinstance(row[column], str):
            raise UserError(f"{place}: the column {column!r} holds a {type(row[column]).__name__}, but must hold a "
                            "string")
    return row


def after_system(row: dict, messages: list) -> list:
    """The messages of a row behind its column `system`, unless they begin with one of their own."""
    has_own = messages and isinstance(messages[0], dict) and messages[0].get("role") == "system"
    return messages if has_own or not row.get("system") else [{"role": "system", "content": row["system"]}, *messages]


def as_message(said):
    """One of ShareGPT's as ours. What is none of these is left as it is, for check_messages()."""
    if not isinstance(said, dict) or said.get("from") is None:
        return said
    return {"role": SHAREGPT.get(str(said["from"]), said["from"]), "content": said.get("value")}


def first_kind(source: Source) -> str:
    """The kind of the first row, which all others must have. Raises UserError for a data set without rows."""
    if source.suffix == "txt":
        return "text"
    for place, row in read_rows(source):
        return understood(place, row)[0]
    raise UserError(f"--dataset_name {source.name!r} holds no rows: choose another")


def rows_of_kind(source: Source, kind: str) -> Iterator[tuple[str, dict]]:
    """The rows, understood(). Raises UserError where one is of another kind than the first."""
    for place, row in read_rows(source):
        other, row = understood(place, row)
        if other != kind:
            raise UserError(f"{place} is of the kind {other}, and the first row is of the kind {kind}: give each kind "
                            "a data set of its own")
        yield place, row


def texts(source: Source) -> Iterator[str]:
    """The text of all documents in pieces, and "" after each. Raises UserError."""
    if source.suffix == "txt":
        yield from read_corpus(source.path)
        return
    for _, row in rows_of_kind(source, "text"):
        document = io.StringIO(row["text"])
        while text := document.read(BLOCK):
            yield text + document.readline(BLOCK)
        yield ""


def encode_rows(source: Source, kind: str, tokenizer, width: int) -> Iterator[np.ndarray]:
    """Each row's int32 ids, complemented where they are no targets.

    Of a document, little more than `width` are encoded. Raises UserError where the tokenizer has no chat template and
    the rows are conversations.
    """
    if kind == "messages" and not tokenizer.chat_template:
        raise UserError(f"the rows are conversations (messages), and the tokenizer of {tokenizer.name_or_path!r} has "
                        "no chat template: use the instruction-tuned model's tokenizer, add a chat_template.jinja to "
                        "the model's directory, or rewrite the rows as prompt and completion")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if kind == "text":
        ids = []
        for text in texts(source):
            if text:
                ids += ids_of(tokenizer, text) if len(ids) <= width else []
            else:
                yield np.array(ids + end, np.int32)
                ids = []
        return
    for place, row in rows_of_kind(source, kind):
        if kind == "messages":
            yield encode_messages(place, row["messages"], tokenizer, row.get(CONTEXT, 0))
        elif not row["completion"].strip():
            raise UserError(f"{place} has an empty completion: each row needs an answer, remove it or add one")
        else:  # the prompt is encoded by itself, as it will be when the model is asked
            prompt, answer = (ids_of(tokenizer, row[column]) for column in ("prompt", "completion"))
            yield np.array([*(-1 - id for id in prompt), *answer, *end], np.int32)


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []


def encode_messages(place: str, messages, tokenizer, first: int = 0) -> np.ndarray:
    """A conversation's ids; targets are the answers from message `first` on, each with the token that ends its turn.

    Templates need not say which text is an answer's. So the conversation is rendered up to the place where answer k
    begins (that of a model that is asked), and up to its end: what the second adds to the first is the answer. A token
    that begins before an answer and ends in it belongs to it. Where a template writes no special token behind the last
    answer, the end-of-text token follows it, a target: else the model would never learn to stop.
    Raises UserError for messages that are malformed, that have no answer, or that the template refuses.
    """
    messages = check_messages(place, messages, first)

    def render(count: int, ask: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=ask)
        except Exception as error:  # a template may raise an error of its own
            raise UserError(f"{place}: the tokenizer's chat template refuses the messages "
                            f"({' '.join(str(error).split())}): correct the row") from None

    whole, spans = render(len(messages)), []
    for i, message in enumerate(messages):
        is_answer = message["role"] == "assistant" and message["content"].strip()
        if is_answer and i >= first:
            start = common_length(whole, render(i, ask=True)) if i else max(0, whole.find(message["content"].strip()))
            spans.append((start, end_of_answer(place, whole, start, render(i + 1), message["content"], tokenizer)))
    ids = ids_of(tokenizer, whole)
    row = -1 - np.array(ids, np.int32)
    for span in spans:
        first, last = (common_length(ids, ids_of(tokenizer, whole[:end])) for end in span)  # the tokens before its ends
        row[first:last] = ids[first:last]
    text = whole.rstrip()
    if spans[-1][1] < len(text) or text.endswith(tuple(tokenizer.all_special_tokens)):
        return row
    if tokenizer.eos_token_id is None:
        raise UserError(f"{place}: the chat template ends the last answer by no special token, and the tokenizer has "
                        "no end-of-text token, so no model would learn to stop: give the tokenizer an eos_token")
    say_once(f"the chat template ends no turn by a token: {tokenizer.eos_token} ends the last answer")
    return np.append(row, np.int32(tokenizer.eos_token_id))


def end_of_answer(place: str, whole: str, start: int, until: str, content: str, tokenizer) -> int:
    """Where the answer that begins at `start` ends in `whole`, the special token that ends its turn included: its own,
    or the one that begins the next turn.

    `until` is the conversation up to and with this answer. Some templates render an answer in another way once others
    follow; then the answer's own words are looked for.
    """
    specials = tuple(tokenizer.all_special_tokens)
    if whole.startswith(until):
        end, answer = len(until), until[start:].rstrip()  # the white space after the end of a turn is no part of it
        if answer.endswith(specials):
            return start + len(answer)
    elif (at := whole.find(content.strip(), start)) < 0:
        raise UserError(f"{place}: the tokenizer's chat template changes the answer {content[:40]!r}, so that it "
                        "can't be told which tokens are its own: use another template, or prompt and completion")
    else:
        end = at + len(content.strip())
    rest = whole[end:].lstrip()
    special = next((token for token in specials if rest.startswith(token)), None)
    return len(whole) - len(rest) + len(special) if special else end


def common_length(a, b) -> int:
    """How many items from the first on are equal."""
    return len(os.path.commonprefix([a, b]))


def check_messages(place: str, messages, first: int = 0) -> list[dict]:
    """The messages without the fields that are None. Raises UserError, with the place, for what is no conversation."""
    is_list = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    if not is_list or not messages:
        raise UserError(f"{place}: messages must be a list of one or more {{'role': ..., 'content': ...}}, got "
                        f"{str(messages)[:80]}")
    for message in messages:
        if message.get("role") not in ROLES:
            raise UserError(f"{place}: a message has the role {message.get('role')!r}: use one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise UserError(f"{place}: the content of a message is {message.get('content')!r:.80}, but must be a "
                            "string")
    if not any(message["role"] == "assistant" and message["content"].strip() for message in messages[first:]):
        raise UserError(f"{place} has no message of an assistant with a content: each row needs an answer, remove it "
                        "or add one")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]
