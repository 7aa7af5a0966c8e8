"""What the README says about costs is what was measured and stored; the benchmarks still run."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COSTS = json.loads((ROOT / "helpers" / "bundled" / "costs.json").read_text(encoding="utf-8"))
SECTION = (ROOT / "README.md").read_text(encoding="utf-8").split("## What it costs")[1].split("\n## ")[0]
VARIANTS = {
    "`T5Prefix`, decoder": "attached, decoder",
    "`T5Prefix`, three sites": "attached, three sites",
    "`LeanT5`, decoder": "lean, decoder",
    "`LeanT5`, three sites": "lean, three sites",
    "`LeanT5`, decoder, encoder outputs cached": "lean, decoder, encoder cached",
    "the same with a bfloat16 base": "lean, decoder, encoder cached, bf16 base",
    "full fine-tuning": "full fine-tuning",
}


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    yield pytest.importorskip("run")
    for name in ("run", "measuring"):
        sys.modules.pop(name)


def test_the_readme_says_what_was_measured():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in SECTION.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == list(VARIANTS)
    for label, *cells in rows[1:]:
        for table, cell in zip(("step t5-small", "step bundled"), cells, strict=True):
            cost = COSTS[table].get(VARIANTS[label])
            assert cell == ("" if cost is None else f"{cost['ratio']:.2f}, {cost['memory']:.2f}")
    generation = COSTS["generate t5-small, 1 row"]["ours, three sites"]["ratio"]
    assert re.findall(r"costs (\d\.\d\d) of the bare model", SECTION) == [f"{generation:.2f}"]


def test_every_target_names_what_is_measured(benchmarks):
    for table, variants in benchmarks.TARGETS.items():
        assert set(variants) <= set(COSTS[table])


def test_a_comparison_counts_what_it_should(benchmarks):
    torch = benchmarks.torch
    small, large = torch.randn(8, 8), torch.randn(64, 64)
    variants = {"small": lambda: small @ small, "large": lambda: (large @ large) @ large}
    results = benchmarks.measuring.compare(variants, "small", rounds=3)
    assert results["small"].ratio == results["small"].memory == 1
    assert [results[name].operations for name in variants] == [1, 2]
    assert [results[name].peak_megabytes for name in variants] == [4 * 8**2 / 1e6, 2 * 4 * 64**2 / 1e6]
    assert [results[name].gigaflops for name in variants] == [2 * 8**3 / 1e9, 2 * 2 * 64**3 / 1e9]
    table = benchmarks.measuring.markdown("t", results, {"large": {"memory": 1.0}, "small": {"memory": 1.0}})
    assert "| small | 1.00 | 1.00 to 1.00 |  | 1.00 | 1.00, met |" in table
    assert "1.00, missed" in table
