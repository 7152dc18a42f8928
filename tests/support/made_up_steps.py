"""Three small steps in a git repository, and tools/steps.py run on them. The fixtures are imported by name."""

import shutil
import subprocess

import pytest
import steps
from course import steps_check

MODEL = "".join(f"layer{i} = {i}\n\n\n" for i in range(6))
TRAIN = "import os\nimport model\n\n\ndef main():\n    print(model.layer1)\n\n\nmain()\n"
LOOP = TRAIN.replace("    print", "    for _ in range(2):\n        print")


def table(*rows):
    lines = ["# A step", "", "Why.", "", "## Files", "", "| file | what | lines | why |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | {what} | {counts} | a reason |" for name, what, counts in rows), "",
                      "## Next", "", "| `model.py` | gone | +99 | not in the section |", ""])


@pytest.fixture(scope="session")
def clean(tmp_path_factory):
    """Three committed steps without drift: step 2 adds a module, step 3 changes model.py and drops a module."""
    root = tmp_path_factory.mktemp("clean")
    files = {
        "step1_one/model.py": MODEL, "step1_one/train.py": TRAIN,
        "step1_one/README.md": table(("model.py", "new", "+18"), ("train.py", "new", "+9")),
        "step2_two/model.py": MODEL, "step2_two/train.py": LOOP, "step2_two/grid.py": "import torch\n",
        "step2_two/README.md": table(("grid.py", "new", "+1"), ("train.py", "changed", "+2 -1"),
                                     ("model.py", "unchanged", "")),
        "step3_three/model.py": MODEL + "size = 6\n", "step3_three/train.py": LOOP,
        "step3_three/README.md": table(("grid.py", "removed", "-1"), ("model.py", "changed", "+1 -0")),
    }
    for name, text in files.items():
        write(root, name, text)
    git(root, "init", "-q", "--template=")
    commit(root)
    return root


@pytest.fixture
def repo(clean, tmp_path):
    return shutil.copytree(clean, tmp_path / "repo")


def git(root, *args):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *args], cwd=root, check=True)


def commit(root):
    git(root, "add", "-A")
    git(root, "commit", "-qm", "steps")


def write(root, name, text):
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text(text)


def replace(root, name, old, new):
    text = (root / name).read_text()
    assert text.count(old) == 1, (old, text)
    (root / name).write_text(text.replace(old, new))


def snapshot(root):
    return {path: path.read_bytes() for path in root.glob("step*/*")}


@pytest.fixture
def run(repo, capsys, monkeypatch):
    monkeypatch.setattr(steps_check, "check_tours", lambda *_: [])  # see test_tool_tour.py

    def run(command, *args, root=repo):
        code = steps.main([command, "--root", str(root), *map(str, args)])
        out, err = capsys.readouterr()
        return code, out + err

    return run
