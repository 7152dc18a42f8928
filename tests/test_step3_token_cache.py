"""The cache of tokens: a file for each need, renamed into place when complete; kills, runs at once, lazy reading."""

import functools
import json
import os
import pathlib
import shutil
import signal

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from lab.launch import ROOT
from lab.program import Program

dataloader = Program(3).load().dataloader
dataloader.load_tokenizer = functools.cache(dataloader.load_tokenizer)  # a second saved in most tests
dataloader.BLOCK = 2048  # and small texts still come in several pieces
TINY = str(ROOT / "assets" / "tiny_llama")
TEXTS = [f"Speech {i}, café.\n" + f"We the people, line {i}.\r\n" * (i % 7 * 40) for i in range(40)]  # some in pieces


def write_txt_folder(folder, texts=TEXTS):
    (folder / "corpus").mkdir()
    (folder / "corpus" / "LICENSE").write_text("of another kind, and not a document")
    for i, text in reversed(list(enumerate(texts))):  # not in the order of their names
        (folder / "corpus" / f"{i:03}.txt").write_text(text, encoding="utf-8", newline="")
    return folder / "corpus"


def write_line(folder, texts=TEXTS):
    path = folder / "corpus.txt"
    path.write_text("".join(texts).replace("\r", " ").replace("\n", " "), encoding="utf-8")
    return path


def write_jsonl(folder, texts=TEXTS):
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


def write_parquet(folder, texts=TEXTS):
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "corpus.parquet")  # in one row group
    return folder / "corpus.parquet"


@pytest.fixture
def cache(tmp_path):
    """encode_to_file into the test's cache, but for the corpus and the number of tokens; `cache.encoded` counts ids."""

    class Cache:
        folder, encoded = tmp_path / "cache", 0

        def __call__(self, corpus, num_tokens: int) -> list[int]:
            path = dataloader.encode_to_file(str(corpus), TINY, num_tokens, str(self.folder))
            return np.fromfile(path, dtype=np.int32).tolist()

    cache, encode = Cache(), dataloader.encode

    def counting(documents, tokenizer):
        for ids in encode(documents, tokenizer):
            cache.encoded += len(ids)
            yield ids

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataloader, "encode", counting)
        yield cache


def in_one_go(corpus, folder) -> list[int]:
    path = dataloader.encode_to_file(str(corpus), TINY, 10**9, str(folder / "whole"))
    return np.fromfile(path, dtype=np.int32).tolist()


@pytest.mark.parametrize("write", [write_txt_folder, write_line, write_jsonl, write_parquet])
def test_a_file_holds_what_a_run_needs(cache, tmp_path, write):
    corpus = write(tmp_path)
    whole = in_one_go(corpus, tmp_path)
    for need in (1, 4000, 4001, len(whole), 10**9):
        assert cache(corpus, need) == whole[:need]
    cache.encoded = 0
    assert cache(corpus, 4000) == whole[:4000] and cache.encoded == 0, "tokens of the cache were encoded again"


def test_a_changed_corpus_or_tokenizer_is_not_served_from_the_cache(cache, tmp_path):
    corpus = write_line(tmp_path)
    before = cache(corpus, 1000)
    corpus.write_text(corpus.read_text().replace("people", "elpoep"))  # of the same size
    os.utime(corpus, (1, 1))
    assert cache(corpus, 1000) != before

    model = shutil.copytree(TINY, tmp_path / "model")
    dataloader.encode_to_file(str(corpus), str(model), 1000, str(cache.folder))
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + " ")
    dataloader.encode_to_file(str(corpus), str(model), 1000, str(cache.folder))
    assert len(list(cache.folder.glob("*.bin"))) == 4


def test_a_killed_run_leaves_nothing_that_another_takes_for_tokens(cache, run_code, tmp_path):
    corpus = write_txt_folder(tmp_path)
    begun = cache(corpus, 100)
    done = run_code(3, 1, """
import os, signal
import dataloader
encode = dataloader.encode
def killed(documents, tokenizer):
    for number, ids in enumerate(encode(documents, tokenizer)):
        if number == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        yield ids
dataloader.encode, dataloader.BLOCK = killed, int(sys.argv[4])
dataloader.encode_to_file(sys.argv[1], sys.argv[2], 10**9, sys.argv[3])
""", corpus, TINY, cache.folder, dataloader.BLOCK, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(cache.folder.rglob("*"))) > 1, "it was killed while it wrote"
    assert cache(corpus, 100) == begun, "what was there has changed"
    assert cache(corpus, 10**9) == in_one_go(corpus, tmp_path)


@pytest.mark.parametrize("mine, others", [(4000, 4000), (10**9, 4000)])
def test_runs_at_once(cache, tmp_path, monkeypatch, mine, others):
    """Another run does all its work in the middle of this one's, while a third trains on what there was before."""
    corpus = write_txt_folder(tmp_path)
    whole = in_one_go(corpus, tmp_path)
    cache(corpus, 100)
    [path] = cache.folder.iterdir()
    mapped, encode, found = np.memmap(path, dtype=np.int32, mode="r"), dataloader.encode, []

    def interrupted(documents, tokenizer):
        for number, ids in enumerate(encode(documents, tokenizer)):
            if number == 0:
                with monkeypatch.context() as patch:
                    patch.setattr(dataloader, "encode", encode)
                    found.append(cache(corpus, others))
            yield ids

    monkeypatch.setattr(dataloader, "encode", interrupted)
    found.append(cache(corpus, mine))
    assert found == [whole[:others], whole[:mine]] and mapped.tolist() == whole[:100]


def bytes_read() -> int:
    return int(pathlib.Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not pathlib.Path("/proc/self/io").exists(), reason="only Linux counts what is read: run it there")
@pytest.mark.parametrize("write", [write_txt_folder, write_line])  # of .jsonl, 20 MB; of .parquet, a row group at least
def test_no_more_is_read_than_is_needed(tmp_path, write):
    rng = np.random.default_rng(0)  # letters that do not compress much, 18 MB
    texts = [rng.integers(97, 123, 12000, dtype=np.uint8).tobytes().decode() + "\n" for _ in range(1500)]
    corpus = write(tmp_path, texts)
    (tmp_path / "small").mkdir()
    next(dataloader.read_corpus(str(write(tmp_path / "small"))))  # whatever is imported is imported now
    before = bytes_read()
    documents = dataloader.read_corpus(str(corpus))
    assert len(next(documents)) >= 1000
    assert bytes_read() - before < 6e6
