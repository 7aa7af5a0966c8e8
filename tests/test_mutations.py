"""The list of deliberate faults fits the code as it is; `python tests/mutations.py` runs them."""

import ast

import pytest
from mutations import FAULTS, ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file}: {fault.piece.strip()[:40]}")
def test_each_fault_still_has_its_place(fault):
    source = (ROOT / "helpers" / fault.file).read_text(encoding="utf-8")
    assert source.count(fault.piece) == 1
    assert fault.piece != fault.fault
    ast.parse(source.replace(fault.piece, fault.fault))
    assert all((ROOT / "tests" / name).is_file() for name in fault.tests.split())


def test_there_are_enough_of_them():
    assert len(FAULTS) >= 30
    assert len(set(FAULTS)) == len(FAULTS)
