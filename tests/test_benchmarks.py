"""What the README says about costs is what was measured and stored; the benchmarks still run."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COSTS = json.loads((ROOT / "helpers" / "course" / "costs.json").read_text(encoding="utf-8"))
SECTION = (ROOT / "README.md").read_text(encoding="utf-8").split("## What it costs")[1].split("\n## ")[0]
VARIANTS = {
    "`T5Prefix`, decoder": "attached, decoder",
    "`T5Prefix`, three sites": "attached, three sites",
    "`LeanT5`, decoder": "lean, decoder",
    "`LeanT5`, three sites": "lean, three sites",
    "`LeanT5`, decoder, encoder outputs cached": "lean, decoder, encoder cached",
    "the same with a bfloat16 base": "lean, decoder, encoder cached, bf16 base",
    "the same without bfloat16 instructions": "lean, decoder, encoder cached, bf16 base",
    "full fine-tuning": "full fine-tuning",
}
WITHOUT_BF16 = "step t5-small, without bf16 instructions"


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    yield pytest.importorskip("run")
    for name in ("run", "measuring", "decoder_alone"):
        sys.modules.pop(name)


def test_the_readme_says_what_was_measured():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in SECTION.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == list(VARIANTS)
    for label, *cells in rows[1:]:
        tables = (WITHOUT_BF16, "") if "without bfloat16" in label else ("step t5-small", "step bundled")
        for table, cell in zip(tables, cells, strict=True):
            cost = COSTS.get(table, {}).get(VARIANTS[label])
            assert cell == ("" if cost is None else f"{cost['ratio']:.2f}, {cost['memory']:.2f}")
    generation = COSTS["generate t5-small, 1 row"]["ours, three sites"]["ratio"]
    step = COSTS["decoder alone, step"]
    one, many = (COSTS[f"decoder alone, generate, {name}"]["ours"]["ratio"] for name in ("1 row", "16 rows"))
    own, fit = step["ours, the model's loss"], step["ours, as fit does it"]
    assert re.findall(r"costs (\d\.\d\d) of the bare model", SECTION) == [f"{one:.2f}", f"{generation:.2f}"]
    alone = next(line for line in SECTION.splitlines() if line.startswith("On a decoder alone"))
    measured = [own["ratio"], fit["ratio"], fit["memory"], one, many]
    assert re.findall(r"\d\.\d\d", alone) == [f"{number:.2f}" for number in measured]


def test_the_file_says_on_which_processor_each_cost_was_measured(benchmarks):
    processors = COSTS["processors"]
    assert set(processors) == set(COSTS) - {"versions", "processors", "reported"}
    for table, processor in processors.items():
        assert processor["name"], table
        assert set(processor["instructions"]) <= set(benchmarks.INSTRUCTIONS)
        assert "avx512_bf16" in processor["instructions"]
        limits = {name: value for name, value in processor.items() if name not in ("name", "instructions")}
        assert limits == (benchmarks.WITHOUT_BF16 if table == WITHOUT_BF16 else {})


def test_without_its_instructions_bfloat16_is_slower_than_float32():
    variant = VARIANTS["the same with a bfloat16 base"]
    ratios = {table: COSTS[table][variant]["ratio"] for table in (WITHOUT_BF16, "step t5-small")}
    assert ratios["step t5-small"] < COSTS["step t5-small"][variant.removesuffix(", bf16 base")]["ratio"]
    assert ratios[WITHOUT_BF16] > COSTS[WITHOUT_BF16][variant.removesuffix(", bf16 base")]["ratio"]
    [reported] = COSTS["reported"]
    assert reported["variant"] == variant
    assert f"{reported['ratio']} was reported" in SECTION


def test_the_benchmarks_record_this_processor(benchmarks, monkeypatch):
    has = {"cpu_name": "A", "avx2": True, "avx512_bf16": False, "amx_bf16": True, "sha": True}
    monkeypatch.setattr(benchmarks.torch.cpu, "get_capabilities", lambda: has)
    for name in benchmarks.WITHOUT_BF16:
        monkeypatch.delenv(name, raising=False)
    assert benchmarks.processor() == {"name": "A", "instructions": ["avx2", "amx_bf16"]}
    for name, value in benchmarks.WITHOUT_BF16.items():
        monkeypatch.setenv(name, value)
    assert benchmarks.processor() == {"name": "A", "instructions": ["avx2", "amx_bf16"], **benchmarks.WITHOUT_BF16}


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
