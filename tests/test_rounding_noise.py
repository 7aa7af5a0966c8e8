"""The machine that rounds otherwise: it moves what hangs on the last digits, and nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from nbformat import v4
from rounding_noise import UNITS_IN_THE_LAST_PLACE, RoundingNoise
from store_notebooks import store

TESTS = Path(__file__).parent
FRAGILE = {
    "one-digit-too-many": "print(f'{x.logsumexp(dim=0).mean():.7f}')",
    "trained-too-long": (
        "w = torch.zeros(7, requires_grad=True)\nfor _ in range(60):\n    loss = (3 * x @ w).sin().sum()\n"
        "    loss.backward()\n    w.data -= 0.4 * w.grad\n    w.grad = None\nprint(f'{loss:.2f}')"
    ),
}
STURDY = {
    "rounded": "print(f'{x.logsumexp(dim=0).mean():.3f}')",
    "the-same-twice": "print(torch.equal(x @ x.mT, x @ x.mT))",
    "one-row-of-a-batch": "print(torch.equal(x.softmax(dim=-1)[3:4], x[3:4].softmax(dim=-1)))",
    "a-count": "print((x > 0).float().sum().item(), torch.zeros(2, 1).softmax(dim=-1).tolist())",
    "random-numbers": "print(torch.randn(2).tolist())",
}

pytestmark = pytest.mark.skipif("ROUNDING_NOISE" in os.environ, reason="these tests bring noise of their own")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """One notebook, stored without noise, with the project's checks."""
    project = tmp_path_factory.mktemp("project")
    (project / "pytest.ini").write_text(
        "[pytest]\naddopts = --nbval --nbval-current-env\npythonpath = tests\n", encoding="utf-8"
    )
    for name in ("notebooks/conftest.py", "tests/lessons.py", "tests/rounding_noise.py"):
        (project / name).parent.mkdir(exist_ok=True)
        shutil.copy(TESTS.parent / name, project / name)
    sources = {"start": "import torch\n_ = torch.manual_seed(0)\nx = torch.randn(11, 7)"} | FRAGILE | STURDY
    cells = [v4.new_code_cell(source, id=name) for name, source in sources.items()]
    path = project / "notebooks" / "09_fragile.ipynb"
    nbformat.write(v4.new_notebook(cells=cells), path)
    store(path)
    return project


def failing_cells(project: Path, **environment: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "--color=no", "-p", "no:cacheprovider", "notebooks"]
    ran = subprocess.run(
        command, cwd=project, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )
    named = [line for line in ran.stdout.splitlines() if line.startswith("notebooks/09_fragile.ipynb: ")]
    assert bool(named) == (ran.returncode == 1), ran.stdout + ran.stderr
    return {cell for line in named for cell in line.split()[1:]}


def test_without_noise_every_cell_is_as_stored(project):
    assert failing_cells(project) == set()


@pytest.mark.parametrize("seed", ["1", "2"])
def test_fragile_cells_are_named_and_no_others(project, seed):
    assert failing_cells(project, ROUNDING_NOISE=seed) == set(FRAGILE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "compute", [lambda x: x @ x.mT, lambda x: x.softmax(dim=-1), lambda x: x.exp(), lambda x: x.var(dim=0)]
)
def test_errors_are_relative_bounded_and_of_both_signs(compute, dtype):
    x = torch.randn(50, 31, dtype=dtype)
    exact = compute(x)
    with RoundingNoise(1):
        moved = compute(x)
    errors = (moved / exact - 1) / torch.finfo(dtype).eps
    assert UNITS_IN_THE_LAST_PLACE / 2 < errors.abs().max() <= UNITS_IN_THE_LAST_PLACE + 1
    assert errors.mean().abs() < 2 < errors.std()


def test_each_seed_is_another_machine():
    x = torch.randn(5, 7)
    products = []
    for seed in (1, 2, 1):
        with RoundingNoise(seed):
            products.append(x @ x.mT)
    assert torch.equal(products[0], products[2])
    assert not torch.equal(products[0], products[1])


def test_gradients_err_and_half_precision_does_not():
    x = torch.randn(5, 7, requires_grad=True)

    def gradient():
        return torch.autograd.grad((x @ x.mT).tanh().sum(), x)[0]

    exact, half = gradient(), x.bfloat16() @ x.bfloat16().mT
    with RoundingNoise(1):
        assert 0 < (gradient() - exact).abs().max() < 1e-4
        assert torch.equal(x.bfloat16() @ x.bfloat16().mT, half)
