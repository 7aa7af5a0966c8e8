"""A device that is not the CPU: second_device_checks.py, in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from disguised_device import WANTING


def test_everything_that_trains_and_generates_works_on_a_second_device():
    if WANTING:
        pytest.skip(WANTING)
    checks = Path(__file__).with_name("second_device_checks.py")
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", str(checks)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-2000:]
    [passed] = re.findall(r"(\d+) passed", result.stdout)
    assert int(passed) > 70
    assert "skipped" not in result.stdout
