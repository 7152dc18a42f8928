"""What a page names exists: files and folders in links, code spans and code blocks; the headings that it links to."""

import pathlib
import re

import pytest
from lab.launch import ROOT

READMES = sorted(path.relative_to(ROOT) for path in [
    *ROOT.glob("*.md"), *ROOT.glob("[a-z]*/*.md"), *ROOT.glob("beyond/*/*.md")])
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.S | re.M)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
GENERATED = ("runs", "logs", "checkpoints")  # folders that a run writes
# where readers write
READERS = ("exercises/mine", "models/smollm2", "undivided.py", "shown.py", "shifted.py", "typed.py", "no_f.py",
           "no_g.py", "low.py", "noise.py")
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
        if any(character in name for character in "*<>{}") or first == "stepN" or first in GENERATED or (
                name.startswith(READERS)):
            continue
        if not rest:
            found = any(ROOT.glob(f"*/**/{name}")) or (ROOT / name).exists()
        else:
            is_ours = (ROOT / first).is_dir() or (folder / first).is_dir() or re.match(r"step\d", first)
            found = not is_ours or (folder / name).exists() or (ROOT / name).exists()
        if not found:
            missing.append(name)
    return list(dict.fromkeys(missing))


def anchors(text: str) -> set[str]:
    """What a link may name behind #: the headings, in lower case, with hyphens for spaces and without punctuation."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_anchors(text: str, folder: pathlib.Path, page: pathlib.Path) -> list[str]:
    """The links to headings that are not there, on this page and on others."""
    broken = []
    for link in LINK.findall(text):
        name, mark, anchor = link.partition("#")
        target = folder / name if name else page
        if mark and target.suffix == ".md" and ":" not in name and anchor not in anchors(target.read_text()):
            broken.append(link)
    return broken


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_headings_and_pictures(readme):
    text, page = (ROOT / readme).read_text(encoding="utf-8"), ROOT / readme
    assert not (broken := broken_anchors(text, page.parent, page)), f"{readme} links to {broken}"
    for words, picture in PICTURE.findall(text):
        assert (page.parent / picture).is_file(), picture
        assert len(words.split()) >= 4, f"{picture}: say in words what is to be seen, for those who can't see it"


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_named_paths_exist(readme):
    missing = missing_paths((ROOT / readme).read_text(encoding="utf-8"), (ROOT / readme).parent)
    assert not missing, f"{readme} names {missing}"


@pytest.mark.parametrize("readme", [page for page in READMES if page.parts[0] not in ("cluster", "exercises", "tools")])
def test_no_line_is_longer_than_a_screen_is_wide(readme):
    """But for what is printed or typed, a link, which can't be broken, and tables that a tool has written."""
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / readme).read_text(encoding="utf-8"), flags=re.S | re.M)
    long = [line for line in text.splitlines() if len(line) > 120]
    long = [line for line in long if not re.fullmatch(r" *(Look at )?!?\[.*\)\S*", line)]
    assert not long or readme.name in (
        "FAMILIES.md", "MUSEUM.md", "SAME_NUMBERS.md", "SCOREBOARD.md", "TYPES.md"), "\n".join(long)


def test_every_room_has_a_readme():
    assert {path.parent.name for path in READMES} >= {"", "cluster", *(path.name for path in ROOT.glob("step*_*"))}


def test_each_name_on_the_films_screens_is_on_their_page():
    names = """flash_attention TritonRMSNorm get_cos_sin set_all_seed utils.print tokenize_dataset tokenizer_group_text
        collate_batch Copy Reduce Gather split_tensor_along_last_dim reset_parameters register_backward_hook
        _allreduce_grads BucketManager mark_param_as_ready main_grad DataParallelNaive _initialize_buckets sync_gradient
        grad_data _make_param_hook param_hook _post_backward gather_output _replace_module sampler tp_first_rank
        tp_last_rank pp_first_rank dp_first_rank pp_dp_group pp_next_rank grad_acc_steps global_batch_size bucket_cap_mb
        pipeline_communicate bidirectional_pipeline_communicate PipelineParallel.distribute_layers
        PipelineParallel.backward train_step_pipeline_afab train_step_pipeline_1f1b"""
    page = (ROOT / "docs" / "VIDEOS.md").read_text()
    assert not [name for name in names.split() if not re.search(rf"\b{re.escape(name)}\b", page)]
