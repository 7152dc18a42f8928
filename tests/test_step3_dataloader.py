"""The data loader, as step 5 completes it: which tokens are in which sample, and which rank reads which sample."""

import csv
import functools
import gzip
import io
import json
import pickle
import sys

import pytest
import torch
from lab.launch import ROOT, fork, losses, metrics, modules_of
from tokenizers import Tokenizer

with modules_of(5):
    import dataloader
    import process_group_manager as pgm

pytestmark = pytest.mark.usefixtures("world_of_one")
TINY = ROOT / "assets" / "tiny_llama"
END = 0  # the id of the end-of-text token
DOCUMENTS = [f"Document {i}. " + "We the people of the United States. " * (i + 2) + "\n" for i in range(12)]


@pytest.fixture
def loader(monkeypatch, tmp_path):
    """Makes the loader that dp rank `dp_rank` of `dp_size` has. The grid is all it asks about other ranks."""

    def loader(corpus, seq_len=8, micro_batch_size=2, accumulation=3, num_samples=60, dp_rank=0, dp_size=1,
               device="cpu"):
        monkeypatch.setattr(pgm, "process_group_manager", grid := pgm.ProcessGroupManager(1, 1, 1))
        grid.dp_rank, grid.dp_world_size = dp_rank, dp_size
        [samples] = dataloader.load_samples(str(corpus), str(TINY), seq_len, 1024, num_samples, str(tmp_path / "cache"))
        return dataloader.MicroBatchDataLoader(samples, micro_batch_size, accumulation, torch.device(device))

    return loader


def token_ids(documents) -> list[int]:
    """What the corpus should be, by way of another library: each document's ids and the end-of-text token."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    return [i for text in documents for i in (*tokenizer.encode(text, add_special_tokens=False).ids, END)]


def take(loader, count: int) -> list[tuple[list, list]]:
    """The next `count` samples, each (inputs, targets)."""
    samples = []
    while len(samples) < count:
        batch = next(loader)
        assert batch.keys() == {"input_ids", "target_ids"}
        assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in batch.values())
        samples += zip(batch["input_ids"].tolist(), batch["target_ids"].tolist())
    assert len(samples) == count
    return samples


def consecutive(ids: list[int], count: int, seq_len: int = 8) -> list[tuple[list, list]]:
    """The first samples as they should be, without an epoch's end among them."""
    starts = range(0, count * seq_len, seq_len)
    return [(ids[i : i + seq_len], ids[i + 1 : i + seq_len + 1]) for i in starts]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("".join(DOCUMENTS))
    return path


def test_a_worker_is_sent_the_name_of_the_file_and_not_the_tokens(loader, corpus, monkeypatch):
    """Where processes are spawned, as on macOS, the data set is pickled for each worker."""
    samples = loader(corpus).dataset
    samples.num_samples = 7
    monkeypatch.setitem(sys.modules, "dataloader", dataloader)  # in a step it can be imported
    sent = pickle.dumps(samples)
    assert len(sent) < 1000 < 4 * len(samples.tokens)
    received = pickle.loads(sent)
    assert len(received) == 7 and all(torch.equal(received[i], samples[i]) for i in range(7))


def test_samples_are_consecutive_and_targets_are_the_next_tokens(loader, corpus):
    ids = token_ids(["".join(DOCUMENTS)])
    assert take(loader(corpus), 60) == consecutive(ids, 60) and len(ids) > 60 * 8 + 1


def test_a_long_document_is_whole(loader, tmp_path):
    """It is encoded in pieces that end where lines end. That may change a token there, but no character."""
    text = "".join(f"Line {i}: café, Größe, 語.\n{'  indented' * (i % 3)}\n" for i in range(6000))
    assert len(text) > 2 * dataloader.BLOCK
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    data = loader(tmp_path / "long.txt", micro_batch_size=1, num_samples=10**5)
    ids = [i for inputs, _ in take(data, data.dataset.samples_per_epoch) for i in inputs]
    decoded = Tokenizer.from_file(str(TINY / "tokenizer.json")).decode(ids, skip_special_tokens=False)
    assert len(text) - len(decoded.rstrip("\ufffd")) < 80 and text.startswith(decoded.rstrip("\ufffd"))


@pytest.mark.parametrize("dp_size, micro_batch_size, accumulation", [(2, 2, 3), (3, 1, 4), (4, 3, 1)])
def test_dp_ranks_together_read_what_one_process_reads(loader, corpus, dp_size, micro_batch_size, accumulation):
    per_rank, steps = micro_batch_size * accumulation, 6  # more than an epoch holds, for the larger batches
    num_samples = steps * per_rank * dp_size
    one = loader(corpus, micro_batch_size=micro_batch_size, accumulation=accumulation * dp_size,
                 num_samples=num_samples)
    ranks = [loader(corpus, micro_batch_size=micro_batch_size, accumulation=accumulation, num_samples=num_samples,
                    dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    for _ in range(steps):
        apart = [take(rank, per_rank) for rank in ranks]
        together = take(one, per_rank * dp_size)
        assert sorted(sum(apart, [])) == sorted(together)
        turns = [apart[i % dp_size][i // dp_size * micro_batch_size :][:micro_batch_size]  # a micro-batch each
                 for i in range(accumulation * dp_size)]
        assert sum(turns, []) == together


def test_a_short_corpus_is_repeated_and_says_so(loader, corpus, capsys):
    ids = token_ids(["".join(DOCUMENTS)])
    per_epoch = (len(ids) - 1) // 8
    loader(corpus, num_samples=per_epoch)
    assert "corpus" not in capsys.readouterr().out
    data = loader(corpus, micro_batch_size=per_epoch - 1, num_samples=3 * (per_epoch - 1))
    times = f"{3 * (per_epoch - 1) / per_epoch:.1f}"
    assert capsys.readouterr().out == f"the corpus holds {per_epoch} samples: this run reads it {times} times\n"
    epoch = consecutive(ids, per_epoch)
    assert take(data, 3 * (per_epoch - 1)) == (epoch * 3)[: 3 * (per_epoch - 1)]


@pytest.mark.parametrize("per_epoch", [6, None])  # before the corpus ends, and to its end
def test_held_out_samples_are_in_no_epoch(corpus, per_epoch, tmp_path):
    ids = token_ids(["".join(DOCUMENTS)])
    kept = per_epoch or (len(ids) - 1) // 8 - 4
    load = functools.partial(dataloader.load_samples, str(corpus), str(TINY), 8, 1024, cache_dir=str(tmp_path))
    trained, held_out = ([sample.tolist() for sample in map(part.__getitem__, range(len(part)))]
                         for part in load(num_samples=per_epoch or 3 * kept, held_out=4))
    expected = [[*inputs, targets[-1]] for inputs, targets in consecutive(ids, kept + 4)]
    assert trained == (3 * expected[:kept])[: len(trained)] and held_out == (99 * expected[kept:])[: len(held_out)]
    with pytest.raises(dataloader.UserError, match=f"holds {len(ids)} tokens, fewer than .* a sample and the 8000 of"):
        load(num_samples=1, held_out=1000)


def test_workers_change_nothing(tmp_path):
    """In train.py: workers that pytest's own process forks would inherit its threads, and end only after seconds."""
    for workers in (0, 2):
        fork(3, 1, "--num_hidden_layers", 1, "--seq_len", 16, "--micro_batch_size", 1, "--max_tokens", 512,
             "--num_workers", workers, "--eval_every", 2, "--log_dir", tmp_path, "--run_name", workers)
    assert losses(tmp_path, "0") == losses(tmp_path, "2") != []
    evaluated = [[row.get("validation_loss") for row in metrics(tmp_path, name)] for name in "02"]
    assert evaluated[0] == evaluated[1] and any(evaluated[0])


ROWS = [*DOCUMENTS, "2024-01-05", "A book. " * 20000, "", 'He said "no",\n\nand left.']  # a date is text


def as_csv(rows) -> str:
    text = io.StringIO()
    csv.writer(text).writerows([["id", "text"], *enumerate(rows)])
    return text.getvalue()


@pytest.mark.parametrize("name, write", [
    ("a.jsonl", lambda lines: "\ufeff" + lines), ("a.jsonl.gz", lambda lines: gzip.compress(f"\ufeff{lines}".encode())),
    ("a.json", lambda lines: "\ufeff\n[" + lines.strip().replace("\n", ",\n") + "]"),
    ("a.csv", lambda _: "\ufeff" + as_csv(ROWS))])
def test_files_as_people_have_them(tmp_path, name, write):
    """Compressed, with a byte-order mark, a list, quoted; in a folder with a card and what the Hub puts beside them."""
    lines = "".join(json.dumps({"text": text, "date": "2024-01-05T10:00:00"}) + "\n" for text in ROWS)
    for other in ("README.md", "dataset_infos.json", ".gitattributes"):
        (tmp_path / other).write_text("{}")
    content = write(lines)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    pieces = list(dataloader.read_corpus(str(tmp_path)))
    assert max(map(len, pieces)) <= 2 * dataloader.BLOCK
    documents, last = [], ""
    for piece in pieces:
        last += piece
        if not piece:
            documents.append(last)
            last = ""
    assert documents == ROWS


def test_a_byte_order_mark_is_no_token(tmp_path):
    (tmp_path / "a.txt").write_text("Text", encoding="utf-8-sig")
    assert list(dataloader.read_corpus(str(tmp_path))) == ["Text", ""]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.jsonl.gz"])
def test_a_git_lfs_pointer_is_no_text(tmp_path, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ValueError, match=rf"{name} is a Git LFS pointer, .*: git lfs pull"):
        dataloader.encode_to_file(str(tmp_path), str(TINY), 9, str(tmp_path / "cache"))


def test_the_cache_of_a_hub_id_is_found_from_any_folder(tmp_path, monkeypatch):
    """Its key is the id, not a path below the working directory."""
    monkeypatch.setattr(dataloader, "require_reachable_hub", lambda *_: None)
    monkeypatch.setattr(dataloader, "load_tokenizer", lambda _, load=dataloader.load_tokenizer: load(str(TINY)))
    monkeypatch.setattr(dataloader, "read_corpus", lambda _: iter(()))
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        dataloader.encode_to_file("owner/name", "owner/model", 9, str(tmp_path / "cache"))
    assert len(list((tmp_path / "cache").iterdir())) == 1
