"""Conversations in other words than ours: ShareGPT's, Alpaca's, and prompts and completions that are messages."""

import pytest
from launch import ROOT, modules_of

with modules_of(9):
    from ranks import course  # noqa: F401  before step 9's modules
    from data import rows
    from utils import UserError

TEMPLATE = ("{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}")
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two and two?"},
        {"role": "assistant", "content": "Four."}, {"role": "user", "content": "And three?"},
        {"role": "assistant", "content": "Seven, it is."}]
FIRST, LAST = "Four.<|endoftext|>", "Seven, it is.<|endoftext|>"
SAID = [{"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]} for m in TALK]
ADD = [{"role": "user", "content": "Add.\n\n2 + 2"}, {"role": "assistant", "content": "4"}]
SAME = {  # name -> (row, the same conversation as messages, its targets)
    "conversations": ({"conversations": SAID}, TALK, [FIRST, LAST]),
    "with a system": ({"system": "Be brief.", "conversations": SAID[1:3]}, TALK[:3], [FIRST]),
    "of both words": ({"conversations": [*SAID[:2], {**TALK[2], "from": None, "value": None}]}, TALK[:3], [FIRST]),
    "weights of one": ({"conversations": [{**each, "weight": 1} for each in SAID]}, TALK, [FIRST, LAST]),
    "Alpaca": ({"instruction": "Add.", "input": "2 + 2", "output": "4"}, ADD, ["4<|endoftext|>"]),
    "no input": ({"instruction": "Add.\n\n2 + 2", "input": "", "output": "4", "system": "Be brief."}, [TALK[0], *ADD],
                 ["4<|endoftext|>"]),
    "completion": ({"prompt": TALK[:4], "completion": TALK[4:]}, TALK, [LAST]),
    "completion with a system": ({"system": "Be brief.", "prompt": TALK[1:2], "completion": TALK[2:]}, TALK,
                                 [FIRST, LAST]),
    "two systems": ({"system": "Talk.", "conversations": SAID}, TALK, [FIRST, LAST]),
    "completion with two systems": ({"system": "Talk.", "prompt": TALK[:4], "completion": TALK[4:]}, TALK, [LAST]),
}
OTHERS = {"conversations": SAID, "instruction": "a", "output": "b"}


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(ROOT / "assets" / "tiny_llama")
    made.chat_template = TEMPLATE
    return made


@pytest.mark.parametrize("name", SAME)
def test_the_same_conversation(tokenizer, name):
    row, messages, targets = SAME[name]
    kind, row = rows.understood("here", row)
    assert kind == "messages"
    ids = rows.encode_messages("here", row["messages"], tokenizer, row.get(rows.CONTEXT, 0)).tolist()
    assert tokenizer.decode([max(id, -1 - id) for id in ids]) == tokenizer.apply_chat_template(messages, tokenize=False)
    runs, before = [], False
    for id in ids:
        runs += [[]] if id >= 0 and not before else []
        if id >= 0:
            runs[-1].append(id)
        before = id >= 0
    assert [tokenizer.decode(run) for run in runs] == targets


@pytest.mark.parametrize("own", [{"messages": TALK}, {"prompt": "a", "completion": "b"}, {"text": "a"},
                                 {"text": "a", "completion": TALK}])
def test_rows_of_our_own_kinds_stay_what_they_are(own):
    """What is encoded already, or was saved with a checkpoint, keeps its meaning."""
    assert rows.understood("here", {**own, **OTHERS})[1] == {**own, **OTHERS}


@pytest.mark.parametrize("row, expected", [
    ({"instruction": "a"}, "here has an instruction but no output"),
    ({"conversations": "hello"}, "here: messages must be a list .*hello"),
    ({"conversations": ["hello"]}, "here: messages must be a list .*hello"),
    ({"conversations": [{"from": "robot", "value": "a"}]}, "here: a message has the role 'robot'.*assistant"),
    ({"conversations": [{"from": ["human"], "value": "a"}]}, "here: a message has the role"),
    ({"conversations": SAID[:2]}, "here has no message of an assistant"),
    ({"conversations": [*SAID[:2], {**SAID[2], "weight": 0}]}, "here: a message has a weight, but each answer counts"),
    ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "here has a history, which is not read"),
    ({"instruction": 3, "output": "b"}, r"the content of a message is \[3\], but must be a string"),
    ({"prompt": TALK[:2], "completion": "b"}, "must be two strings, or two lists of messages, but only one is a list"),
    ({"system": "Be brief.", "prompt": "a", "completion": "b"}, "here has a system beside plain strings"),
    ({"prompt": TALK[:3], "completion": TALK[3:4]}, "here has no message of an assistant"),
])
def test_bad_rows(tokenizer, row, expected):
    with pytest.raises(UserError, match=expected):
        _, row = rows.understood("here", row)
        rows.encode_messages("here", row["messages"], tokenizer, row.get(rows.CONTEXT, 0))
