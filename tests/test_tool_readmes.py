"""Every file and folder of this repository that a README.md names exists: in links, code spans and code blocks."""

import pathlib
import re

import pytest
from launch import ROOT

READMES = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("README.md"), *ROOT.glob("*/README.md")])
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.S | re.M)
LINK = re.compile(r"\]\(([^)\s]+)\)")
GENERATED = ("runs", "logs", "checkpoints")  # folders that a run writes
PATH = re.compile(r"[\w.*<>{}-]+(?:/[\w.*<>{}-]+)+/?|\b\w+\.(?:py|sh)\b")  # with a slash, or a program's name


def missing_paths(text: str, folder: pathlib.Path) -> list[str]:
    """What `text`, a README in `folder`, names and is not there, from the folder or the root of the repository.

    A name with a slash counts where it begins with one of the repository's folders or the name of a step; one without
    where it is that of a Python or shell program, which may lie anywhere in the repository. Patterns do not count.
    """
    links = [link for link in LINK.findall(text) if not re.match(r"\w+:|#", link)]
    missing = [link for link in links if not (folder / link.partition("#")[0]).exists()]
    for name in (name for code in CODE.findall(text) for name in PATH.findall(code)):
        name = name.removeprefix("./").rstrip("./")
        first, _, rest = name.partition("/")
        if any(character in name for character in "*<>{}") or first == "stepN" or first in GENERATED:
            continue
        if not rest:
            found = any(ROOT.glob(f"*/**/{name}")) or (ROOT / name).exists()
        else:
            is_ours = (ROOT / first).is_dir() or (folder / first).is_dir() or re.match(r"step\d", first)
            found = not is_ours or (folder / name).exists() or (ROOT / name).exists()
        if not found:
            missing.append(name)
    return list(dict.fromkeys(missing))


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_named_paths_exist(readme):
    missing = missing_paths((ROOT / readme).read_text(encoding="utf-8"), (ROOT / readme).parent)
    assert not missing, f"{readme} names {missing}"


def test_every_room_has_a_readme():
    assert {path.parent.name for path in READMES} >= {"", "cluster", *(path.name for path in ROOT.glob("step*_*"))}


@pytest.mark.parametrize("text, missing", [
    ("[a](README.md#top) [b](https://x.org/y) [c](#here) [d](nowhere.md)", ["nowhere.md"]),
    ("`tools/steps.py` and `tools/stairs.py`, words/alone.py", ["tools/stairs.py"]),
    ("`step1_model/`, `step1_modle/train.py`, `stepN/README.md`, `step*/train.py`", ["step1_modle/train.py"]),
    ("`train.py` `trane.py` `runs/x/metrics.jsonl` `hosts.txt`", ["trane.py"]),
    ("```bash\npython tools/steps.py table  # tests/nothing\ntools/testbed.sh up && ./nosuch.sh\n```",
     ["tests/nothing", "nosuch.sh"]),
])
def test_what_is_found_missing(text, missing):
    assert missing_paths(text, ROOT) == missing
