"""same_numbers on its trainers and on the museum's faults of them: none is missed, and no right version is accused."""

import inspect
import re

import pytest
import torch
from museum import checks
from museum import trainers as small
from museum.faults import FAULTS
from same_numbers import trainers, trainers_data, trainers_model
from same_numbers.trainers_base import faults
from support.trainers_of_libraries import LIBRARIES

RIGHT = trainers_model.TRAINERS | trainers_data.TRAINERS
OF_TRAINERS = [fault for fault in FAULTS.values() if fault.is_trainer]


def test_each_switch_of_a_library_s_trainer_has_a_source():
    for trainer in (*trainers.TRAINERS.values(), *LIBRARIES.values()):
        source = inspect.getsource(inspect.getmodule(trainer))
        for fault, (_, reported) in faults(trainer).items():
            assert f'"{fault}"' in source and re.fullmatch(r"[\w.-]+/[\w.-]+#\d+|arXiv \d{4}\.\d{5}", reported), fault
    assert not any(faults(trainer) for trainer in RIGHT.values())


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", RIGHT)
def test_a_trainer_is_right_and_its_faults_are_found(kind, tmp_path):
    check(tmp_path, 2, torch.float64, [kind])


@pytest.mark.slow(drawn=2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_no_fault_is_missed_and_no_right_version_accused(ranks, dtype, tmp_path):
    check(tmp_path, ranks, dtype, RIGHT)


def check(folder, ranks: int, dtype: torch.dtype, kinds) -> None:
    small.record(1, [(RIGHT[kind], folder / kind) for kind in kinds], dtype=dtype)
    wrong = [fault for fault in OF_TRAINERS if fault.step in kinds]
    cases = [(RIGHT[kind], folder / f"right {kind}") for kind in kinds]
    cases += [(small.of(fault.step, fault.program().load()), folder / f"wrong {fault.name}") for fault in wrong]
    small.record(ranks, cases, dtype=dtype)
    for kind in kinds:
        found = checks.verdict(folder / kind, folder / f"right {kind}")
        assert not found.alarm, (kind, found.saw)
    for fault in wrong:
        found = checks.verdict(folder / fault.step, folder / f"wrong {fault.name}")
        assert found.alarm and all(checks.says(fault, "numbers", found.saw)), (fault.name, found.saw)


@pytest.mark.parametrize("kind", RIGHT)
def test_types_find_what_the_records_say(kind):
    for fault in [fault for fault in OF_TRAINERS if fault.step == kind]:
        for healthy in (False, True):
            found = checks.find(fault, "types", healthy)
            assert found.alarm == ("types" in fault.seen and not healthy), (fault.name, found.saw)
            assert not found.alarm or all(checks.says(fault, "types", found.saw)), (fault.name, found.saw)


def test_find_records_the_fault_beside_one_process():
    assert len(OF_TRAINERS) >= 23
    assert "sign" in checks.find(FAULTS["sign"]).saw and not checks.find(FAULTS["sign"], healthy=True).alarm
