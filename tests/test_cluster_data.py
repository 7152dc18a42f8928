"""Data of train_distributed.py: which tokens rows become, which of them are targets of the loss.

Conversations in other words than ours, as ShareGPT's and Alpaca's, become the same tokens.
"""

import argparse
import errno
import json
import math
import os
import sys

import numpy as np
import pytest
import torch
from lab.launch import ROOT, modules_of

with modules_of(9):
    import utils
    from checkpoints.resume import Found
    from data import batches as data
    from data import encoded, rows

TINY = str(ROOT / "assets" / "tiny_llama")
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
LLAMA2 = ("{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}"
          "{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}")
EMPTY = "('<think>\n\n</think>\n\n' if loop.last and m['role'] == 'assistant' else '')"
THINKS = CHATML.replace("+ m['content']", f"+ {EMPTY} + m['content']")
PLAIN = ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
GLM = ("{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}{% endfor %}"
       "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}")
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two and two?"},
        {"role": "assistant", "content": "Four."}, {"role": "user", "content": "And three?"},
        {"role": "assistant", "content": "Seven, it is."}]
ANSWERS = {  # template -> which parts of the conversation it makes are targets
    "chatml": (CHATML, ["Four.<|im_end|>", "Seven, it is.<|im_end|>"]),
    "llama 2": (LLAMA2, [" Four.<|endoftext|>", " Seven, it is.<|endoftext|>"]),
    "thinks in its last answer": (THINKS, ["Four.<|im_end|>", "<think>\n\n</think>\n\nSeven, it is.<|im_end|>"]),
    "no special tokens": (PLAIN, [" Four.\n", " Seven, it is.\n<|endoftext|>"]),  # begins before: is the answer's
    "an end that begins the next turn": (GLM, ["\nFour.<|im_start|>", "\nSeven, it is.<|endoftext|>"]),
}


@pytest.fixture(autouse=True)
def errors_by_name(world_of_one, monkeypatch):
    """Errors are pickled by the name of their module."""
    monkeypatch.setitem(sys.modules, "utils", utils)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """tokenizers(template): a directory with the tiny tokenizer, ChatML's special tokens, and that chat template."""
    from transformers import AutoTokenizer

    made = {}

    def make(template: str) -> str:
        if template not in made:
            tokenizer = AutoTokenizer.from_pretrained(TINY)
            tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
            tokenizer.chat_template = template
            made[template] = str(tmp_path_factory.mktemp("tokenizer"))
            tokenizer.save_pretrained(made[template])
        return made[template]

    return make


def load(name):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """dataset(rows, name): writes them, one JSON object a line. The cache is in the same temporary folder."""
    monkeypatch.setattr(encoded, "CACHE", str(tmp_path / "cache"))

    def write(lines, name: str = "data.jsonl") -> str:
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(tmp_path / name)

    return write


def flags(path: str, **changes) -> argparse.Namespace:
    return argparse.Namespace(**{**dict(dataset_name=path, seq_len=32, seed=1, packing="auto", validation_split=None),
                                 **changes})


def ids_of(sample: torch.Tensor) -> list[int]:
    return torch.maximum(sample, -1 - sample).tolist()


def in_runs(words, row) -> list[str]:
    """The text of each run of targets. `row`: ids, complemented where they are no targets."""
    runs, before = [], False
    for token in row.tolist():
        if token >= 0:
            runs += [] if before else [[]]
            runs[-1].append(token)
        before = token >= 0
    return [words.decode(ids) for ids in runs]


@pytest.mark.parametrize("name", ANSWERS)
def test_the_targets_of_a_conversation_are_its_answers(tokenizers, name):
    template, expected = ANSWERS[name]
    words = load(tokenizers(template))
    row = rows.encode_messages("here", TALK, words)
    assert in_runs(words, row) == expected
    whole = words.apply_chat_template(TALK, tokenize=False)
    whole += words.eos_token * (name in ("no special tokens", "an end that begins the next turn"))
    assert np.where(row < 0, -1 - row, row).tolist() == words(whole, add_special_tokens=False)["input_ids"]


def test_a_template_with_a_byte_order_mark(tokenizers, dataset):
    """It would be the first token of each conversation."""
    path, marked = dataset([{"messages": TALK}]), "\ufeff" + CHATML
    found = [ids_of(encoded.load_samples(flags(path), tokenizers(each), 1026, packing="off")[0])
             for each in (CHATML, marked)]
    assert found[0] == found[1] and load(tokenizers(marked)).chat_template == marked


FIRST, LAST = "Four.<|im_end|>", "Seven, it is.<|im_end|>"
SAID = [{"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]} for m in TALK]
ADD = [{"role": "user", "content": "Add.\n\n2 + 2"}, {"role": "assistant", "content": "4"}]
SAME = {  # name -> (row, the same conversation as messages, its targets)
    "conversations": ({"conversations": SAID}, TALK, [FIRST, LAST]),
    "with a system": ({"system": "Be brief.", "conversations": SAID[1:3]}, TALK[:3], [FIRST]),
    "of both words": ({"conversations": [*SAID[:2], {**TALK[2], "from": None, "value": None}]}, TALK[:3], [FIRST]),
    "Alpaca": ({"instruction": "Add.", "input": "2 + 2", "output": "4"}, ADD, ["4<|im_end|>"]),
    "no input": ({"instruction": "Add.\n\n2 + 2", "input": "", "output": "4", "system": "Be brief."}, [TALK[0], *ADD],
                 ["4<|im_end|>"]),
    "completion": ({"prompt": TALK[:4], "completion": TALK[4:]}, TALK, [LAST]),
    "two systems": ({"system": "Talk.", "conversations": SAID}, TALK, [FIRST, LAST]),
}


def encoded_row(row: dict, words):
    kind, row = rows.understood("here", row)
    assert kind == "messages"
    return rows.encode_messages("here", row["messages"], words, row.get(rows.CONTEXT, 0))


@pytest.mark.parametrize("name", SAME)
def test_the_same_conversation_in_other_words(tokenizers, name):
    (row, messages, targets), words = SAME[name], load(tokenizers(CHATML))
    found = encoded_row(row, words)
    whole = words.apply_chat_template(messages, tokenize=False)
    assert np.where(found < 0, -1 - found, found).tolist() == words(whole, add_special_tokens=False)["input_ids"]
    assert in_runs(words, found) == targets


@pytest.mark.parametrize("own", [{"messages": TALK}, {"prompt": "a", "completion": "b"}, {"text": "a"}])
def test_rows_of_our_own_kinds_stay_what_they_are(own):
    """What is encoded already, or was saved with a checkpoint, keeps its meaning."""
    row = {**own, "conversations": SAID, "instruction": "a", "output": "b"}
    assert rows.understood("here", row)[1] == row


@pytest.mark.parametrize("row, expected", [
    ({"instruction": "a"}, "here has the columns instruction: rows need messages, or"),
    ({"conversations": ["hello"]}, "here: messages must be a list .*hello"),
    ({"conversations": [{"from": "robot", "value": "a"}]}, "here: a message has the role 'robot'.*assistant"),
    ({"conversations": SAID[:2]}, "here has no message of an assistant"),
    ({"conversations": [*SAID[:2], {**SAID[2], "weight": 0}]}, "here: a message has a weight, but each answer counts"),
    ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "here has a history, which is not read"),
    ({"prompt": TALK[:2], "completion": "b"}, "here: the column 'prompt' holds a list, but must hold a string"),
    ({"system": "Be brief.", "prompt": "a", "completion": "b"}, "here has a system beside plain strings"),
])
def test_bad_rows_in_other_words(tokenizers, row, expected):
    with pytest.raises(utils.UserError, match=expected):
        encoded_row(row, load(tokenizers(CHATML)))


def test_a_full_disk_under_the_cache(tmp_path, monkeypatch):
    """And a file of the data set that can't be read is not taken for one."""
    monkeypatch.setattr(encoded, "CACHE", str(tmp_path / "cache"))

    def parts(error):
        yield np.zeros(3, np.int32)
        raise error

    with pytest.raises(utils.UserError, match=r"^can't write to .*cache \(No space left on device\): free space there"):
        encoded.write(str(tmp_path / "tokens"), parts(OSError(errno.ENOSPC, "No space left on device")), 6)
    with pytest.raises(PermissionError):
        encoded.write(str(tmp_path / "tokens"), parts(PermissionError(errno.EACCES, "no", "/data/rows.jsonl")), 6)
    assert os.listdir(tmp_path / "cache") == []


def test_text_that_is_not_packed_is_a_sample_a_document(dataset, tmp_path):
    texts, words = ["One sentence.", "Another one, which is longer: " + "and on " * 40], load(TINY)
    (path := tmp_path / "texts").mkdir()
    for i, text in enumerate(texts):
        (path / f"{i}.txt").write_text(text)
    samples = encoded.load_samples(flags(str(path)), TINY, 1024, packing="off")
    for i, text in enumerate(texts):
        ids = [*words(text, add_special_tokens=False)["input_ids"], words.eos_token_id][:33]
        assert ids_of(samples[i]) == ids and samples.num_targets(i) == len(ids) - 1
    assert len(ids) == 33, "the second one is truncated"


def test_packed_rows_follow_each_other_and_keep_their_targets(dataset):
    pairs = [{"prompt": f"What is {i}? ", "completion": f"The number {i}."} for i in range(20)]
    path = dataset(pairs)
    alone = encoded.load_samples(flags(path), TINY, 1024, packing="off")
    stream = torch.cat([*alone])
    samples = encoded.load_samples(flags(path), TINY, 1024, packing="on")
    assert len(samples) == math.ceil((len(stream) - 1) / 32)
    for i, row in enumerate(samples):
        part = stream[32 * i : 32 * i + 33]
        assert ids_of(row) == ids_of(part) and torch.equal(row[1:], part[1:]) and row[0] < 0
    assert sum(map(samples.num_targets, range(len(samples)))) > 0.8 * (stream >= 0).sum()


def test_what_is_too_long_is_truncated_and_said(dataset, capfd):
    pairs = [{"prompt": "Short? ", "completion": "Yes."}, {"prompt": "Short? ", "completion": "No, " * 60},
             {"prompt": "Long " * 60, "completion": "Yes."}]
    samples = encoded.load_samples(flags(dataset(pairs)), TINY, 1024, packing="auto")
    assert [len(row) for row in samples] == [len(samples[0]), 33]
    for _ in range(2):  # also in a run that finds the file
        assert "2 rows are longer than seq_len + 1 = 33 tokens and were truncated; 1 samples have no target and are " \
               "left out; 2 samples remain" in capfd.readouterr().out
        encoded.load_samples(flags(dataset(pairs)), TINY, 1024, packing="auto")


CHATS, PAIR = [{"messages": TALK}], {"prompt": "a", "completion": "b"}
BAD = {  # name -> rows, changes of the flags, chat template, words of the error
    "no template": (CHATS, {}, None, ["messages", "no chat template", "chat_template.jinja"]),
    "no answer": ([*CHATS, {"messages": TALK[:2]}], {}, CHATML, ["data.jsonl, row 2", "no message of an assistant"]),
    "empty completion": ([PAIR, {**PAIR, "completion": ""}], {}, None, ["data.jsonl, row 2", "empty completion"]),
    "number": ([{"prompt": "a", "completion": 3}], {}, None, ["row 1", "'completion'", "a string"]),
    "columns": ([{"question": "a", "answer": "b"}], {}, None, ["row 1", "question, answer", "prompt and completion"]),
    "mixed": ([{"text": "a"}, PAIR], {}, None, ["row 2", "prompt/completion", "the kind text", "of its own"]),
    "empty split": ([PAIR] * 4, {"validation_split": 0.1}, None, ["0.1 of 4 samples", "empty validation", "0.25"]),
    "too few": ([PAIR] * 4, {"validation_split": 0.5}, None, ["has 2 samples, fewer than the 3"]),
    "no target": ([{"prompt": "a " * 99, "completion": "b"}], {}, None, ["no sample with a target", "--seq_len 32"]),
    "no rows": ([], {}, None, ["data.jsonl"]), "null": ([None], {}, None, ["data.jsonl", "row 1 is null"])}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_one_clear_error(dataset, tokenizers, name):
    lines, changes, template, words = BAD[name]
    with pytest.raises(utils.UserError) as caught:
        tokenizer = tokenizers(template) if template else TINY
        data.Data(flags(dataset(lines), **{"packing": "off", **changes}), tokenizer, 4096, 3)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_what_is_no_text_and_another_models_tokenizer(dataset, tokenizers, tmp_path):
    (bad := tmp_path / "bad.txt").write_bytes(b"\xff\xfe no text")
    for path, tokenizer, packing, words in (
            (str(bad), TINY, "text", "bad.txt' can't be read: 'utf-8' codec"),
            (dataset([PAIR], "pairs.jsonl"), TINY, "text", "kind prompt/completion"),
            (dataset(CHATS), tokenizers(CHATML), "auto", "vocab_size=1024")):
        with pytest.raises(utils.UserError, match=words):
            encoded.load_samples(flags(path), tokenizer, 1024, packing=packing)


def test_a_configuration_of_a_hub_set(dataset, tmp_path, monkeypatch):
    """NAME:CONFIG asks the library for that configuration. A path that exists is a path."""
    import datasets

    asked = []

    def load_dataset(*words, **options):
        asked.append((words, options))
        return iter([{"text": ""}, {"text": "A sentence of the corpus. " * 20}])

    path = dataset([{"text": "A local sentence. " * 20}], "wikitext:local.jsonl")
    local = encoded.load_samples(flags(path, seq_len=8), TINY, 1024)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(rows, "require_reachable_hub", lambda name, flag: asked.append(name))
    samples = encoded.load_samples(flags("wikitext:wikitext-2-raw-v1", seq_len=8), TINY, 1024, 5)
    assert asked[:2] == ["wikitext", (("wikitext", "wikitext-2-raw-v1"), dict(split="train", streaming=True))]
    assert len(samples) == 5 and load(TINY).decode(local[0]).startswith("A local sentence.")


def test_a_checkpoint_goes_on_with_its_own_data(dataset):
    """Also where the run that goes on needs more of them. What is behind those that were read is free to change."""
    lines = [{"text": f"This is sentence {i}."} for i in range(60)]
    args = flags(dataset(lines), seq_len=8)
    found = Found("step_4", "", {"data": encoded.load_samples(args, TINY, 1024, 10).read}, {})
    for changed, is_same in ((lines, True), (lines[:50], True), (lines[1:], False)):
        dataset(changed)
        for num_samples in (10, 20):
            read = encoded.load_samples(args, TINY, 1024, num_samples).read
            if is_same:
                encoded.require_same_data(found, args, TINY, 1024, read)
                continue
            with pytest.raises(utils.UserError, match="step_4 was trained on other data than .*--init_from step_4"):
                encoded.require_same_data(found, args, TINY, 1024, read)
    encoded.require_same_data(found._replace(state={}), args, TINY, 1024, read)  # an older one does not say
    encoded.require_same_data(None, args, TINY, 1024, read)


def test_the_split_is_drawn_from_all_and_never_trained_on(dataset):
    pairs = [{"prompt": f"{i} ", "completion": f"number {i}"} for i in range(40)]
    made = data.Data(flags(dataset(pairs), validation_split=0.25), TINY, 1024, 4)
    texts = [load(TINY).decode(ids_of(row)) for row in made.evaluation]
    numbers = [int(text.split()[0]) for text in texts]
    assert len(set(numbers)) == 10 and numbers == sorted(numbers) and min(numbers) < 10 and max(numbers) >= 30
    made.train.set_steps(20)  # more than two epochs
    seen = {load(TINY).decode(ids_of(row)) for row, _ in (made.train[i] for i in range(80))}
    assert len(seen) == 30 and not seen & set(texts) and made.train.steps_per_epoch == 7
