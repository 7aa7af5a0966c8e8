"""Measure how long the lessons take a reader: `python tests/measure_times.py`, on a machine with nothing else to do.

Each lesson runs once, from the start of its kernel, with as many threads as torch takes by itself. The seconds go to
tests/seconds.json, with the processor's name; tests/test_times.py holds what the lessons say to them.
"""

import datetime
import json
import os
import platform
import sys
import time
from pathlib import Path

import nbformat
import torch
from lessons import lessons
from nbclient import NotebookClient

STORED = Path(__file__).with_name("seconds.json")
LONG = 0.5  # seconds; of shorter cells nobody needs a warning


def seconds_of(path: Path) -> dict:
    """The seconds of the whole lesson, and those of each long cell by its id."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    start = time.perf_counter()
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources).execute()
    whole = time.perf_counter() - start
    cells = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            times = cell.metadata.execution
            begun, ended = (
                datetime.datetime.fromisoformat(times[event])
                for event in ("iopub.execute_input", "shell.execute_reply")
            )
            if (seconds := (ended - begun).total_seconds()) >= LONG:
                cells[cell.id] = round(seconds, 1)
    return {"whole": round(whole, 1), "cells": cells}


def processor() -> str:
    """Its name, and its widest instructions as torch sees them."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def main() -> None:
    seconds = {}
    for path in lessons():
        seconds[path.stem] = seconds_of(path)
        print(path.stem, seconds[path.stem]["whole"], "seconds", flush=True)
    measured = {"processor": processor(), "torch": torch.__version__, "lessons": seconds}
    STORED.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
