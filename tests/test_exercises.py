"""The exercises: the course's own solution is right and has all stars, wrong answers are not, and another right one is."""

import importlib
import time

import pytest
from blanks import Unwritten, find
from catalogue import EXERCISES, Exercise, judge, load, source_path, stub

load()
SECONDS = 5.0  # of a check; twice that here, where other tests run beside it


def versions(name: str):
    chapter = EXERCISES[name].chapter
    return importlib.import_module(f"versions.{'step' * chapter.isdigit()}{chapter}").VERSIONS[name]


def solution(one: Exercise) -> str:
    return find(source_path(one), one.name_in_module).source()


def verdict(one: Exercise, source: str, folder):
    path = folder / f"{one.name}.py"
    path.write_text(source, encoding="utf-8")
    return judge(one, path)


def test_there_are_thirty_or_more():
    assert len(EXERCISES) >= 30


@pytest.mark.parametrize("name", EXERCISES)
def test_solution_is_right(name, tmp_path):
    one, start = EXERCISES[name], time.perf_counter()
    found = verdict(one, solution(one), tmp_path)
    assert found.is_right and found.stars == 3, (found.message, found.scores)
    assert time.perf_counter() - start < 2 * SECONDS


@pytest.mark.parametrize("name", EXERCISES)
def test_blank_is_a_sentence(name, tmp_path):
    """The course still has the place, and the empty body is no error but a sentence."""
    one = EXERCISES[name]
    with pytest.raises(Unwritten, match="still empty"):
        verdict(one, stub(one), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXERCISES)
def test_wrong_answers_are_refused(name, tmp_path):
    one, ours = EXERCISES[name], solution(EXERCISES[name])
    assert len(versions(name).wrong) >= 3
    for wrong in versions(name).wrong:
        assert ours.count(wrong.old) == 1, wrong
        found = verdict(one, ours.replace(wrong.old, wrong.new), tmp_path)
        assert not found.is_right, f"accepted: {wrong.sentence}"
        assert wrong.symptom in found.message, (wrong.sentence, found.message)
        assert len(found.message.splitlines()) <= 30 and "Traceback" not in found.message


@pytest.mark.slow
@pytest.mark.parametrize("name", EXERCISES)
def test_another_right_answer_is_accepted(name, tmp_path):
    found = verdict(EXERCISES[name], versions(name).right, tmp_path)
    assert found.is_right and found.stars >= 1, found.message
