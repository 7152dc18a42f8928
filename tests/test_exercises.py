"""The exercises: the course's own solution is right and has all stars, wrong answers are not, another right one is."""

import functools
import importlib.util
import re
import statistics
import sys
import time

import attempt
import pytest
from blanks import Unwritten, find
from catalogue import EXERCISES, Exercise, judge, load, source_path, stub
from counting_attempt import COUNTS, RATIOS, mistaken, named, near
from lab import baton
from lab.launch import ROOT, STEPS
from museum.faults import FAULTS
from right_answers import RIGHT

load()
SECONDS = 5.0  # of a check; here twice that, of processor time, as other tests run beside it
EMPTIES = """
def {}(*args, **flags):
    copies = [each[:] if isinstance(each, list) else each for each in args]
    [each.clear() for each in args if isinstance(each, list)]
    return right(*copies, **flags)
"""


def solution(one: Exercise) -> str:
    return find(source_path(one), one.name_in_module).source()


def verdict(one: Exercise, source: str, folder):
    path = folder / f"{one.name}.py"
    path.write_text(source, encoding="utf-8")
    return judge(one, path)


def test_pages_name_them():
    """The list of exercises/README.md is whole, and each chapter ends with those of its step."""
    listed = re.findall(r"`(\w+)`[,| ]", (ROOT / "exercises" / "README.md").read_text().partition("## The exercises")[2]
                        .partition("\n## ")[0])
    assert listed == [*EXERCISES]
    for chapter in dict.fromkeys(one.chapter for one in EXERCISES.values()):
        page = (STEPS.get(chapter) or ROOT / chapter) / "README.md"
        section = page.read_text().partition("## Write it yourself")[2].partition("\n## ")[0]
        wanted = [one.name for one in EXERCISES.values() if one.chapter == chapter and one.name not in COUNTS]
        assert [name for name in re.findall(r"^\| `(\w+)` \|", section, re.M) if name not in COUNTS] == wanted, page


@pytest.mark.drawn(27)
@pytest.mark.parametrize("name", EXERCISES)
def test_solution_is_right(name, tmp_path):
    """Also where it empties its lists, if it is a function: the check measures with its own."""
    one, start = EXERCISES[name], time.process_time()
    source = re.sub(rf"^def {one.name_in_module}\(", "def right(", solution(one), flags=re.M)
    found = verdict(one, source + EMPTIES.format(one.name_in_module) * ("def right(" in source), tmp_path)
    assert found.is_right and found.stars == 3, (found.message, found.scores)
    assert time.process_time() - start < 2 * SECONDS


@pytest.mark.parametrize("name", EXERCISES)
def test_blank_is_a_sentence(name, tmp_path):
    """The course still has the place, and the empty body is no error but a sentence."""
    one = EXERCISES[name]
    with pytest.raises(Unwritten, match="still empty"):
        verdict(one, stub(one), tmp_path)


@pytest.mark.slow(drawn=16)
@pytest.mark.parametrize("name", EXERCISES)
def test_wrong_answers_are_refused(name, tmp_path):
    one, ours = EXERCISES[name], solution(EXERCISES[name])
    assert len(one.wrong) >= 3
    for what, *edit, says in one.wrong:
        edits = [edit] if edit else [each[1:] for each in FAULTS[what].edits]
        assert ours.count(edits[0][0]) == 1, what
        found = verdict(one, functools.reduce(lambda text, each: text.replace(*each), edits, ours), tmp_path)
        assert not found.is_right, f"accepted: {what}"
        assert says in found.message, (what, found.message)
        assert len(found.message.splitlines()) <= 30 and "Traceback" not in found.message


@pytest.mark.slow(drawn=7)
@pytest.mark.parametrize("name", COUNTS)
def test_a_usual_multiple_is_named(name, tmp_path):
    """With the mistakes of its own, each exercise that counts names ten."""
    ratios, ours = RATIOS[COUNTS[name].unit], solution(EXERCISES[name]).replace(f"def {name}(", "def right(")
    assert len(COUNTS[name].mistakes) + len(ratios) >= 10 and len(COUNTS[name].sizes) >= 10
    for ratio in ratios:
        wrong = f"{ours}\n\ndef {name}(*sizes):\n    return {ratio} * right(*sizes)\n"
        found = verdict(EXERCISES[name], wrong, tmp_path)
        *_, numbers, empty, says = found.message.splitlines()
        assert "a run measures" in found.message and "sizes are" in numbers and says, found.message


MATRICES = "4 * layers / pp * (4 * hidden * hidden + 3 * hidden * width) / tp"
OF_A_RANK = f"{MATRICES} + 8 * layers / pp * hidden"  # bytes of weights


@pytest.mark.parametrize("name, answer, says", [
    ("rank_of_many", f"({MATRICES} + 8 * layers / pp * hidden / tp, (dp - 1) / dp * 2 * ({OF_A_RANK}), "
     "8 * microbatches * tokens * hidden)[number - 1]", "norms are whole"),
    ("rank_of_many", f"({OF_A_RANK}, microbatches * (dp - 1) / dp * 2 * ({OF_A_RANK}), 8 * microbatches * tokens * "
     "hidden)[number - 1]", "once an optimizer step"),
    ("rank_of_many", f"(4 * ({OF_A_RANK}), (dp - 1) / dp * 2 * ({OF_A_RANK}), 8 * microbatches * tokens * hidden)"
     "[number - 1]", "all 16 bytes of a parameter"),
    ("rank_of_many", f"({OF_A_RANK}, (dp - 1) / dp * 2 * ({OF_A_RANK}), 8 * pp * microbatches * tokens * hidden)"
     "[number - 1]", "all pp stages"),
    ("rank_of_many", f"({OF_A_RANK}, (dp - 1) / dp * 2 * ({OF_A_RANK}), 8 * dp * microbatches * tokens * hidden)"
     "[number - 1]", "too large by the factor `dp`"),
    ("fsdp_bytes", "3 * microbatches * (replicas - 1) / replicas * 4 * (layer * layers + rest)", "is a bound"),
    ("zero_bytes", "(8 + 8 / replicas) * num_parameters", "8 + 8/N is --zero 1"),
    ("ring_attention_bytes", "4 * (ranks - 1) * 2 * 4 * tokens / ranks * kv_heads * head_dim", "4 (cp - 1)"),
    ("ring_attention_bytes", "4 * (ranks - 1) * 4 * tokens / ranks * kv_heads * head_dim", "4 (cp - 1)"),
    ("active_parameters", "layers * hidden * (4 * hidden + 2 + experts + 3 * per_token * width)", "norms' weights"),
    ("tp_bytes", "2 * (ranks - 1) / ranks * 4 * (tokens * ((4 * layers + 2) * hidden + 3) + (2 * layers + 1) * hidden)",
     "norms' gradients"),
    ("norm_gradient_bytes", "2 * (ranks - 1) / ranks * 4 * (2 * layers + 1) * hidden / ranks", "norms are whole"),
    ("layers_that_fit", "max(0, (memory / 16 - (2 * vocab + 1) * hidden) // (hidden * (4 * hidden + 3 * width)))",
     "norms are missing"),
    ("gradient_bytes", "2 * (ranks - 1) / ranks * 16 * num_parameters", "AdamW's moments"),
    ("unlike_pipelines_units", "3 * pipelines[0][1] * (pipelines[0][2] + pipelines[0][0] - 1)", "the first pipeline"),
])
def test_what_a_reader_may_count_has_a_name(name, answer, says, tmp_path):
    """Formulas that are not ours with a text replaced, maybe wrong for some sizes only. Nothing is run."""
    source, sizes = solution(EXERCISES[name]), COUNTS[name].sizes
    right, wrong = mistaken(source, name, ()), eval(f"lambda {', '.join(sizes[0])}: {answer}")
    (path := tmp_path / "answer.py").write_text(source, encoding="utf-8")
    reader = attempt.Attempt(EXERCISES[name], path)
    assert says in named(reader, COUNTS[name], [wrong(**size) for size in sizes], [right(**size) for size in sizes])


@pytest.mark.parametrize("name", COUNTS)
def test_no_argument_can_be_left_out(name):
    """Not for its first value, its mean, or what another one suggests: in their first ratio, or their first product."""
    source, sizes = solution(EXERCISES[name]), COUNTS[name].sizes
    function, right = mistaken(source, name, ()), [mistaken(source, name, ())(**size) for size in sizes]
    columns = {key: [size[key] for size in sizes] for key, value in sizes[0].items() if not isinstance(value, list)}
    for key, values in columns.items():
        guesses = [values[:1] * len(sizes), [statistics.mean(values)] * len(sizes)]
        for other in (other for each, other in columns.items() if each != key and all(other)):
            guesses += [[values[0] / (other[0] / each) ** power for each in other] for power in (1, -1)]
        for guess in guesses if len(re.findall(rf"\b{key}\b", source)) > 1 else ():  # else ours does not read it
            answers = [function(**{**size, key: each}) for size, each in zip(sizes, guess)]
            assert not all(map(near, answers, right, [COUNTS[name].unit] * len(sizes))), f"accepted: {key} as {guess}"


@pytest.mark.slow(drawn=8)
@pytest.mark.parametrize("name", RIGHT)
def test_another_right_answer_is_accepted(name, tmp_path):
    found = verdict(EXERCISES[name], RIGHT[name], tmp_path)
    assert found.is_right and found.stars >= 1, found.message


@pytest.fixture(scope="module")
def commands():
    """try.py as a module: its main(), whose folder is given with each command."""
    spec = importlib.util.spec_from_file_location("try_it", ROOT / "exercises" / "try.py")
    module = importlib.util.module_from_spec(spec)
    before, readers = list(sys.path), baton.READER
    spec.loader.exec_module(module)
    yield module
    sys.path[:], baton.READER = before, readers


def test_an_exercise_from_start_to_reset(commands, tmp_path, capsys):
    def call(*words) -> tuple[int, str]:
        code = commands.main([*words, "--folder", str(tmp_path)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    name, path = "ring_all_reduce", tmp_path / "ring_all_reduce.py"
    code, printed = call()
    assert code == 0 and f"0 of {len(EXERCISES)} solved" in printed
    assert call("check", name) == (2, f"there is no {path} yet: python exercises/try.py start {name}\n")
    assert call("start", name)[0] == 0 and path.read_text() == stub(EXERCISES[name])
    assert call("start", name)[0] == 2, "a second start must not write over what the reader has written"
    code, printed = call("check", name)
    assert code == 2 and "is still empty" in printed
    for seen in (1, 2, 3, 3):
        assert [line[:6] for line in call("hint", name)[1].splitlines()] == [f"hint {i}" for i in range(1, seen + 1)]

    path.write_text("def ring_all_reduce(tensor):\n    tensor[99]\n")
    code, printed = call("check", name)
    assert code == 1 and "rank 0: IndexError" in printed and f"in {path}, line 2: tensor[99]" in printed
    path.write_text("def ring_all_reduce(tensor):\n    dist.send(tensor, 1 - dist.get_rank())\n")
    code, printed = call("check", name)
    assert code == 1 and "rank 0 -> rank 1 -> rank 0" in printed and f"{path}, line 2: dist.send" in printed
    path.write_text("def ring_all_reduce(tensor)\n")
    assert call("check", name)[0] == 2
    path.write_text("def other(tensor):\n    pass\n")
    assert "has no ring_all_reduce" in call("check", name)[1]

    path.write_text(solution(EXERCISES[name]))
    code, printed = call("check", name)
    assert code == 0 and f"{name}: right, ***" in printed and "***" in call()[1]
    first = find(source_path(EXERCISES[name]), name).first
    assert f"> {first:3}  def ring_all_reduce" in call("solution", name)[1]
    assert call("check", "--all")[1].startswith("right  ***")
    assert call("reset", name)[0] == 0 and path.with_suffix(".py.1").is_file() and "0 of" in call()[1]
    assert call("check", "nothing")[0] == 2


@pytest.mark.parametrize("content, words", [
    (b"return 3\n", "line 1, is no Python"), ("# \u00e9\n".encode("latin-1"), "can't be read"),
    (b"\0", "is no Python|can't be read"),
    (b"def ring_all_reduce(tensor):\n    pass\n\ndef broadcast():\n    pass\n", "choose another name"),
])
def test_files_that_are_no_answer(content, words, tmp_path):
    one = EXERCISES["ring_all_reduce"]
    (tmp_path / f"{one.name}.py").write_bytes(content)
    with pytest.raises(Unwritten, match=words):
        judge(one, tmp_path / f"{one.name}.py")


def test_a_count_below_the_bound_is_refused(tmp_path):
    """What goes around the count can't get stars."""
    one, path = EXERCISES["ring_all_reduce"], tmp_path / "ring_all_reduce.py"
    found = verdict(one, "def ring_all_reduce(tensor):\n    dist.all_reduce(tensor)\n", tmp_path)
    assert "write it with sends and receives" in found.message
    with pytest.raises(attempt.Wrong, match="is the least"):
        attempt.Attempt(one, path).score("bytes", 71, 72)


def test_an_answer_that_does_not_end(tmp_path, monkeypatch):
    monkeypatch.setattr(attempt, "SECONDS", 1)
    one = EXERCISES["ring_all_reduce"]
    found = verdict(one, "def ring_all_reduce(tensor):\n    import time\n    time.sleep(3)\n", tmp_path)
    assert "does not end" in found.message


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring_all_reduce", "executor"])  # the second one trains
def test_on_processes(name, commands, tmp_path, capfd):
    one = EXERCISES[name]
    (tmp_path / f"{one.name}.py").write_text(solution(one))
    assert commands.main(["check", one.name, "--torchrun", "--folder", str(tmp_path)]) == 0
    assert "right on processes, too" in capfd.readouterr().out
