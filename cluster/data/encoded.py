"""Encoded data sets as files: made once, in one process of each machine, and mapped into the memory of all its ranks.

There are two formats. Text that is packed is a plain sequence of tokens, int32 as in step 9. Rows are a table of int32,
whose first row is a header and whose other rows are:

    number of tokens | number of targets | token 0 | token 1 | ... | token T | zeros where the row is shorter

A token that is no target is stored as -1 - id, as in rows.py. Token 0 never is one, because none before it predicts it.

A later run with the same data, tokenizer and lengths finds the file. A machine that lacks the data is sent the file by
one that has them, and needs no tokenizer either.

All machines have to read the same: the first stage of a pipeline takes its inputs from its own file, and the last one
its targets. So the digests of the files are compared, and a checkpoint records that of what it was trained on.
"""

import hashlib
import os
import socket
import tempfile
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from data.rows import encode_rows, find_source, first_kind, texts
from dataloader import TokenSamples, encode, files_at, load_tokenizer
from ranks.collectives import gather, say
from ranks.disks import Disks
from ranks.files import CHUNK, unmarked
from ranks.placement import home_rank, once_per_machine
from ranks.progress import progress
from stage_weights import require_content
from utils import ROOT, UserError

CACHE = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join(ROOT, "runs"), "token_cache")
ALL = 1 << 50  # samples
FORMAT = "rows 2"  # changes when encoded rows do
BEFORE = 2  # numbers in front of a row's tokens
SENT = {}  # arguments of encode_data() -> the file that this process was sent; an elastic run may lose who has the data


class RowSamples(Dataset):
    """The rows of a table, see above: (L,), int64, L from 2 to T + 1, in which what is no target is complemented."""

    def __init__(self, table: np.ndarray):
        self.header, self.table = table[0], table[1:]

    def __len__(self) -> int:
        return len(self.table)

    def num_targets(self, i: int) -> int:
        return int(self.table[i, 1])

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.from_numpy(self.table[i, BEFORE : BEFORE + self.table[i, 0]].astype(np.int64))


def load_samples(args, tokenizer: str, vocab_size: int, num_samples: int | None = None,
                 packing: str = "text") -> TokenSamples | RowSamples:
    """The first `num_samples` samples of --dataset_name, or all where it has fewer, or for None. Collective.

    `packing`: "on" cuts the encoded data into samples of T + 1 tokens, "off" makes each row a sample, and "auto" packs
    text only; "text" packs text and refuses other rows. Packed text is a TokenSamples, all else a RowSamples. Raises
    UserError, on every rank, for data that can't be read or encoded, that differ between machines, that have not one
    sample, or whose tokenizer is not the model's. `samples.read` says what was read, for a checkpoint's state.json.
    """
    path = encode_for_all(args.dataset_name, tokenizer, args.seq_len, num_samples or ALL, packing)
    numbers = np.memmap(path, dtype=np.int32, mode="r") if os.path.getsize(path) else np.empty(0, np.int32)
    digest = common_digest(args, path)
    if path.endswith(".rows"):
        samples = RowSamples(numbers.reshape(-1, BEFORE + args.seq_len + 1))
        truncated, left_out, largest, *_ = samples.header.tolist()
        report_rows(args, truncated, left_out, len(samples))
    elif len(numbers) < args.seq_len + 1:
        raise UserError(f"--dataset_name {args.dataset_name!r} holds {len(numbers)} tokens, fewer than the seq_len + 1 "
                        f"= {args.seq_len + 1} of a sample: choose a larger corpus or a smaller --seq_len")
    else:
        samples, largest = TokenSamples(path, args.seq_len, num_samples or ALL), int(numbers.max())
        samples.num_samples = min(samples.num_samples, samples.samples_per_epoch)
    if largest >= vocab_size:
        raise UserError(f"the tokenizer of {tokenizer!r} gives the id {largest}, but its config.json has vocab_size="
                        f"{vocab_size}: the two files do not belong together")
    samples.read = {"num_samples": num_samples, "digest": digest}
    return samples


def digest_of(path: str) -> str:
    """Reads a part at a time: a file that is mapped would count as this process's memory."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(CHUNK):
            digest.update(part)
    return digest.hexdigest()


def common_digest(args, path: str) -> str:
    """The digest of each machine's encoded file. Collective. Raises UserError, on every rank, where they differ."""
    digest = once_per_machine(lambda: digest_of(path))  # other machines wait as long as it takes
    everyone = gather((digest, socket.gethostname()))
    if unlike := [f"{host} (rank {rank})" for rank, (other, host) in enumerate(everyone) if other != everyone[0][0]]:
        raise UserError(f"--dataset_name {args.dataset_name!r}, once encoded, is not the same on all machines: "
                        f"{', '.join(unlike)} would read other tokens than {everyone[0][1]} (rank 0): copy the data "
                        "and the tokenizer of rank 0 to all machines")
    return digest


def require_same_data(found, args, tokenizer: str, vocab_size: int, read: dict) -> None:
    """Raises UserError, on every rank, where the run that saved the checkpoint `found` read other data. Collective.

    `read`: as load_samples leaves it on this run's samples. Where the other run asked for another number of samples, so
    many are encoded once more. A checkpoint without this record is accepted.
    """
    before = found and found.state.get("data")
    if not before:
        return
    digest = read["digest"]
    if before["num_samples"] != read["num_samples"]:
        digest = load_samples(args, tokenizer, vocab_size, before["num_samples"], args.packing).read["digest"]
    if digest != before["digest"]:
        raise UserError(f"{found.path} was trained on other data than --dataset_name {args.dataset_name!r}, encoded by "
                        f"the tokenizer of {tokenizer!r}: give those that it was trained with, or train a new run on "
                        f"these data, from its weights: --init_from {found.path}")


def report_rows(args, truncated: int, left_out: int, count: int) -> None:
    """Rank 0 says what was lost. Raises UserError where no sample is left."""
    remedy = f"raise --seq_len {args.seq_len}, or shorten the rows"
    if not count:
        raise UserError(f"--dataset_name {args.dataset_name!r} has no sample with a target among its first seq_len + 1 "
                        f"= {args.seq_len + 1} tokens: {remedy}")
    if truncated or left_out:
        say(f"{truncated} rows are longer than seq_len + 1 = {args.seq_len + 1} tokens and were truncated; "
            f"{left_out} samples have no target and are left out; {count} samples remain ({remedy}, to lose fewer)")


def encode_for_all(dataset_name: str, *more) -> str:
    """The path, in each rank's own cache, of the file that encode_data() writes with these arguments. Collective.

    A machine without the data is sent the file by one that has them, by home_rank() if it does. Raises UserError, on
    every rank, for what encode_data() raises, and where a disk does not take the file.
    """
    rank, key = dist.get_rank(), (dataset_name, *more)
    is_here, known = once_per_machine(lambda: (bool(find_source(dataset_name).files), SENT.get(key)))
    lacks = gather(not is_here and not known)
    if all(lacks):  # a Hub id, or encode_data() says what is missing
        return once_per_machine(lambda: encode_data(*key))
    path = once_per_machine(lambda: lacks[rank] or (encode_data(*key) if is_here else known))
    if any(lacks):
        source = min(range(len(lacks)), key=lambda each: (lacks[each], each != home_rank()))
        disks = Disks(CACHE, "the encoded data can't be written: {}: make room there", needs_room=False)
        name, size = gather(lacks[rank] or (os.path.basename(path), os.path.getsize(path)))[source]
        if lacks[rank]:
            path = SENT[key] = os.path.join(CACHE, name)
        has_file = disks.gather(os.path.exists(path) and os.path.getsize(path) == size)
        disks.copy(CACHE, [(name, source, disk.leader) for disk in disks.all
                           if any(lacks[each] and not has_file[each] for each in disk.ranks)],
                   f"the encoded data can't be written: {{}}: free {size / 1e6:.0f} MB there")
    return path


def encode_data(dataset_name: str, tokenizer: str, seq_len: int, num_samples: int, packing: str) -> str:
    """The path of the encoded file, which is written if it is not there. For one process of a machine."""
    source, width = find_source(dataset_name), seq_len + 1
    for file in source.files + [file for file in files_at(tokenizer) if "token" in os.path.basename(file)]:
        require_content(file)
    stamps = [(file, os.path.getsize(file), os.path.getmtime(file)) for file in source.files + files_at(tokenizer)]
    key = (FORMAT, packing, os.path.abspath(source.path), source.config, os.path.abspath(tokenizer), stamps, seq_len,
           num_samples)
    stem = os.path.join(CACHE, hashlib.sha256(repr(key).encode()).hexdigest()[:16])
    text, rows = f"{stem}.bin", f"{stem}.rows"
    for path in text, rows:
        if os.path.exists(path):
            return path
    if (kind := first_kind(source)) == "text" and packing != "off":
        count = num_samples * seq_len + 1
        write(text, up_to(count, encode(texts(source), load_tokenizer(tokenizer))), count)
        return text
    if packing == "text":
        raise UserError(f"--dataset_name {dataset_name!r} holds rows of the kind {kind}, and this training reads a "
                        "column 'text' of strings only: train_distributed.py without --local_steps reads the others")
    encoded = encode_rows(source, kind, unmarked(load_tokenizer(tokenizer)), width)
    header = [0] * (BEFORE + width)  # rows truncated, samples left out, the largest id
    table = table_of(packed(encoded, width) if packing == "on" else encoded, width, num_samples, header)
    write(rows, table, num_samples * (BEFORE + width), header)
    return rows


def up_to(count: int, parts: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """The parts, until `count` numbers are there."""
    for part in parts:
        yield part[:count]
        if (count := count - len(part)) <= 0:
            break


def packed(rows: Iterator[np.ndarray], width: int) -> Iterator[np.ndarray]:
    """The rows one after the other, cut into samples. The last token of one sample is the first one of the next."""
    left = np.empty(0, np.int32)
    for row in rows:
        left = np.concatenate([left, row])
        while len(left) >= width:
            yield left[:width]
            left = left[width - 1 :]
    yield left


def table_of(rows: Iterator[np.ndarray], width: int, num_samples: int, header: list[int]) -> Iterator[np.ndarray]:
    """Rows as the file has them, (BEFORE + width,). Counts in `header` what is lost, and notes the largest id."""
    written = 0
    for row in rows:
        header[0] += len(row) > width
        tokens = row[:width].copy()
        tokens[:1] = np.minimum(tokens[:1], -1 - tokens[:1])  # nothing predicts the first
        if not (tokens >= 0).any():
            header[1] += 1
            continue
        header[2] = max(header[2], int(np.maximum(tokens, -1 - tokens).max()))
        yield np.array([len(tokens), (tokens >= 0).sum(), *tokens, *[0] * (width - len(tokens))], np.int32)
        if (written := written + 1) >= num_samples:
            break


def write(path: str, parts: Iterator[np.ndarray], count: int, header: list[int] | None = None) -> None:
    """Writes int32 numbers, `count` at most, to a file that appears under its name when it is whole. The header is read
    at the end. Raises UserError where the folder can't be written.
    """
    try:
        os.makedirs(CACHE, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as name:
            bar = progress("encoding", total=count if count < ALL else None, unit=" tokens")
            with bar, open(unfinished := os.path.join(name, "unfinished"), "wb") as file:
                file.seek(4 * len(header or ()))
                for part in parts:
                    file.write(part.astype(np.int32).tobytes())
                    bar.update(len(part))
                file.seek(0)
                file.write(np.array(header or (), np.int32).tobytes())
            os.replace(unfinished, path)
    except OSError as error:
        if error.filename and not str(error.filename).startswith(CACHE):  # a file of the data set, which can't be read
            raise
        raise UserError(f"can't write to {CACHE} ({error.strerror}): free space there, or make it writable") from None
