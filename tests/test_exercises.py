"""Every exercise, as its reader meets it: the stub, the folded solution, and wrong answers that must be named."""

import ast
import re
from pathlib import Path

import nbformat
import pytest
import torch
from einops import rearrange, reduce

from helpers import exercises
from helpers.exercises import CORRECT, NOT_DONE, WRONG, Exercise, Mistake

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
CHECKS = {name: check for name, check in vars(exercises).items() if isinstance(check, Exercise)}


# The notebooks' stubs and solutions


def stubs_and_solutions() -> list:
    """(check, stub, solution, imports) of every exercise, in the order of the lessons."""
    found = []
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        imports = "\n".join(_imports(cell.source) for cell in cells if cell.cell_type == "code")
        for number, cell in enumerate(cells):
            check = re.search(r"^(check_\w+)\(", cell.source, flags=re.MULTILINE)
            if cell.cell_type == "code" and check:
                solution = re.search(
                    r"<summary>Solution</summary>.*?```python\n(.*?)```.*?</details>",
                    cells[number + 1].source if number + 1 < len(cells) else "",
                    flags=re.DOTALL,
                )
                assert solution, f"no folded solution behind {cell.id}"
                found.append(pytest.param(check[1], cell.source, solution[1], imports, id=cell.id))
    return found


def _imports(source: str) -> str:
    """The import statements of a cell, but for what only Colab runs."""
    if "google.colab" in source:
        return ""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return "\n".join(map(ast.unparse, nodes))


EXERCISES = stubs_and_solutions()
of_the_notebooks = pytest.mark.parametrize(("check", "stub", "solution", "imports"), EXERCISES)


@of_the_notebooks
def test_the_stub_is_not_done_yet(check, stub, solution, imports, capsys):
    exec(imports + "\n" + stub, {})
    printed = capsys.readouterr().out
    assert printed.startswith("Not done yet: ")
    assert printed.count("\n") == 1


@of_the_notebooks
def test_the_folded_solution_is_right(check, stub, solution, imports, capsys):
    call = re.search(rf"^{check}\(.*\)$", stub, flags=re.MULTILINE)[0]
    exec(f"{imports}\n{solution}\n{call}", {})
    assert capsys.readouterr().out.startswith("Correct: ")


def test_every_check_has_its_exercise_and_wrong_answers():
    assert sorted(param.values[0] for param in EXERCISES) == sorted(CHECKS)
    assert set(WRONG_ANSWERS) == set(CHECKS)
    assert all(len(wrong) >= 3 for wrong in WRONG_ANSWERS.values())


# Wrong answers, written as a learner would, and what the sentence must say


def softmax_by_hand(scores):
    return scores.exp() / scores.exp().sum()


def attend(query, key, value, *, scale=None, dim=-1):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.softmax(scale * torch.einsum("bqd,bkd->bqk", query, key), dim=dim)
    return torch.einsum("bqk,bkv->bqv", weights, value), weights


WRONG_ANSWERS = {
    "check_one_query": [
        (lambda q, k, v: softmax_by_hand((k * q).sum(-1)) @ v, "not divided by the square root of head_dim"),
        (lambda q, k, v: softmax_by_hand((k * q).sum(-1) / q.numel()) @ v, "by head_dim, not by its square root"),
        (lambda q, k, v: softmax_by_hand((k * q).mean(-1)) @ v, "by head_dim, not by its square root"),
        (lambda q, k, v: softmax_by_hand(k @ q / k.shape[0] ** 0.5) @ v, "number of keys, 4; .* head_dim, 9"),
        (lambda q, k, v: v.T @ (k @ q) / q.numel() ** 0.5, "the softmax is missing"),
        (lambda q, k, v: softmax_by_hand(k @ q / q.numel() ** 0.5), "you returned the weights"),
        (lambda q, k, v: reduce(v, "k v -> v", "mean"), r"3 of 3 entries are wrong: entry \[0\] is .*\[9\], \[4, 9\]"),
        (lambda q, k, v: q @ k, r"raised RuntimeError: .*cannot be multiplied.*were \[9\], \[4, 9\], \[4, 3\]"),
    ],
    "check_self_attention": [
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, scale=1.0), "not divided by the square root of head_dim"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, scale=1 / q.shape[1]), "by head_dim, not by its square root"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, scale=len(q) ** -0.5), "model_dim, 7; .* head_dim, 3"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, scale=x.shape[1] ** -0.5), "tokens, 5; .* head_dim, 3"),
        (lambda x, q, k, v: attend(x @ k, x @ q, x @ v), "queries and keys have changed places"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, dim=1), "softmax ran over the queries"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x), "project them with w_v"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v)[0], "return the output and the weights"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v)[::-1], "return the output first"),
        (
            lambda x, q, k, v: attend(x @ q, x @ k, x @ v, dim=0),
            "Your output 0 has the right shape.*entry .0, 0, 0. is",
        ),
        (lambda x, q, k, v: (x @ q) @ (x @ k), r"raised RuntimeError: .*were \[2, 5, 7\], \[7, 3\]"),
    ],
    "check_previous_token": [
        (lambda n: (torch.eye(n), 100 * torch.eye(n).roll(1, dims=0)), "the token after it"),
        (lambda n: (torch.eye(n), 100 * torch.eye(n)), "attends to itself"),
        (lambda n: (torch.eye(n).roll(1, dims=0), torch.eye(n)), "no weight exceeds 0.99"),
        (lambda n: (torch.eye(n), torch.eye(n + 1)), r"w_k \[6, 6\], expected \[5, 5\] twice"),
        (
            lambda n: (100 * torch.eye(n).roll(2, dims=0), torch.eye(n)),
            "The map of weights .*of 20 in the wrong places",
        ),
    ],
}


@pytest.mark.parametrize(
    ("check", "answer", "message"), [(check, *wrong) for check, every in WRONG_ANSWERS.items() for wrong in every]
)
def test_a_wrong_answer_is_named(check, answer, message):
    verdict = CHECKS[check].judge(answer)
    assert verdict.state == WRONG
    assert re.search(message, verdict.sentence), verdict.sentence


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_each_known_mistake_is_wrong_and_told_apart_from_the_others(check):
    toys = list(check.toys(torch.Generator().manual_seed(0)))
    for mistake in check.mistakes:
        verdict = check.judge(mistake.answer)
        assert verdict.state == WRONG
        if isinstance(mistake.sentence, str):
            assert verdict.sentence == mistake.sentence
        else:
            assert verdict.sentence in [mistake.sentence(*toy) for toy in toys]


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_no_answer_is_not_done_yet(check):
    def stub(*arguments):
        raise NotImplementedError

    for answer in (stub, lambda *arguments: None):
        assert check.judge(answer).state == NOT_DONE
    assert str(check.judge(stub)) == "Not done yet: fill in stub and run this cell again."


# The comparison itself


def exercise(right, *arguments, **options) -> Exercise:
    return Exercise(right=right, toys=lambda draw: [arguments], **options)


ROW = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("right", "answer", "sentence"),
    [
        (lambda x: x, lambda x: x[:2], "Your output has shape [2], expected [3]."),
        (lambda x: x, lambda x: x[None], "Your output has shape [1, 3], expected [3]."),
        (lambda x: x, lambda x: x.tolist(), "Your output is a list, expected a tensor of shape [3]."),
        (lambda x: x, lambda x: x.flip(0), "Your output holds the right numbers, 2 of 3 in the wrong places."),
        (lambda x: x, lambda x: x / 0, "3 of 3 entries are wrong: entry [0] is inf, expected 1.000."),
        (lambda x: x, lambda x: x * torch.nan, "3 of 3 entries are wrong: entry [0] is nan, expected 1.000."),
        (lambda x: x > 1, lambda x: (x > 1).float(), "Your output has dtype torch.float32, expected torch.bool."),
        (lambda x: (x, x), lambda x: x, "Your output should be 2 results, and is one Tensor."),
        (lambda x: (x, x), lambda x: (x,), "Your output should be 2 results, and is 1."),
        (lambda x: (x, x), lambda x: (x, x[1:]), "Your output 1 has shape [2], expected [3]."),
        (lambda x: 3, lambda x: 4, "Your output is 4, expected 3."),
        (lambda x: x, lambda x: x[7], "Your code raised IndexError: index 7 is out of bounds"),
    ],
)
def test_what_differs_is_said(right, answer, sentence):
    verdict = exercise(right, ROW).judge(answer)
    assert verdict.state == WRONG
    assert sentence in verdict.sentence
    assert verdict.sentence.endswith("The arguments were [3].")


@pytest.mark.parametrize(
    ("right", "answer"),
    [
        (lambda x: x, lambda x: x.double() + 1e-7),
        (lambda x: (x, x > 1), lambda x: [x, x > 1]),
        (lambda x: 3, lambda x: 3),
        (lambda x: x, lambda x: x.clone().requires_grad_()),
    ],
)
def test_what_is_right_is_correct(right, answer):
    assert exercise(right, ROW).judge(answer).state == CORRECT


def test_an_answer_that_is_right_on_one_toy_alone_is_wrong():
    check = Exercise(right=lambda n: 2 * n, toys=lambda draw: [(2,), (3,)])
    verdict = check.judge(lambda n: n**2)
    assert verdict.sentence == "Your output is 9, expected 6. The arguments were 3."


def test_an_answer_may_write_into_its_arguments():
    def answer(x):
        return x.mul_(2)

    assert exercise(lambda x: 2 * x, ROW).judge(answer).state == CORRECT
    assert ROW.tolist() == [1, 2, 3]


def test_a_mistake_that_raises_is_recognised_by_its_error():
    known = Mistake(lambda x: x.t().view(6), "transpose leaves no view.")
    check = exercise(lambda x: x.t().reshape(6), torch.zeros(2, 3), mistakes=[known])
    assert check.judge(lambda x: rearrange(x, "a b -> b a").view(6)).sentence == "transpose leaves no view."
    assert "IndexError" in check.judge(lambda x: x[9]).sentence


def test_an_exercise_may_read_its_result_before_comparing():
    check = exercise(lambda x: x, ROW, read=lambda result, x: result.argmax().item())
    assert check.judge(lambda x: 5 * x).state == CORRECT
    assert check.judge(lambda x: -x).sentence == "Your output is 0, expected 2. The arguments were [3]."


def test_a_verdict_is_printed_as_one_line_and_draws_no_random_number(capsys):
    before = torch.get_rng_state()
    CHECKS["check_one_query"](lambda query, keys, values: query)
    assert torch.equal(torch.get_rng_state(), before)
    assert capsys.readouterr().out.startswith("Not right yet: Your output has shape [9], expected [3].")
