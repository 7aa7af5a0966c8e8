"""Figures where there is no notebook to show them in."""

import subprocess
import sys

from helpers.course import figures


def test_a_plain_script_prints_the_sentence():
    code = """
import sys, torch
from helpers.course.figures import curves, heat_map, shape_table
heat_map([[0.9, 0.1], [0.2, 0.8]])
curves({"loss": [3.0, 1.0]})
shape_table([("query", torch.zeros(2, 3), "asks")])
print("IPython" in sys.modules)
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [
        figures.heat_map_sentence([[0.9, 0.1], [0.2, 0.8]]),
        figures.curves_sentence({"loss": [3.0, 1.0]}),
        "concept  shape   role",
        "query    [2, 3]  asks",
        "False",
    ]


def test_ipython_in_a_terminal_prints_the_sentence_once():
    code = "from helpers.course.figures import heat_map; heat_map([[0.9, 0.1], [0.2, 0.8]])"
    command = [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [figures.heat_map_sentence([[0.9, 0.1], [0.2, 0.8]])]
