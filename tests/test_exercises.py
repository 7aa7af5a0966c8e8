"""Every exercise, as its reader meets it: the stub, the folded solution, and wrong answers that must be named."""

import ast
import re
from importlib import import_module

import nbformat
import pytest
import torch
from einops import rearrange
from lessons import lessons

from helpers.course.exercises.checking import CORRECT, NOT_DONE, WRONG, Exercise, Mistake, Prediction

LESSONS = [f"lesson_{number}" for number in range(1, len(lessons()) + 1)]
CHECKS = {
    name: check
    for lesson in LESSONS
    for name, check in vars(import_module(f"helpers.course.exercises.{lesson}")).items()
    if isinstance(check, Exercise | Prediction)
}
WRONG_ANSWERS = {
    name: wrong for lesson in LESSONS for name, wrong in import_module(f"wrong_answers.{lesson}").WRONG_ANSWERS.items()
}


# The notebooks' stubs and solutions


def stubs_and_solutions() -> list:
    """(check, stub, solution, imports) of every exercise, in the order of the lessons."""
    found = []
    for path in lessons():
        cells = nbformat.read(path, as_version=4).cells
        imports = "\n".join(_imports(cell.source) for cell in cells if cell.cell_type == "code")
        for number, cell in enumerate(cells):
            check = re.search(r"^(?:\w+ = )?(check_\w+)(?:\.or_ours)?\(", cell.source, flags=re.MULTILINE)
            if cell.cell_type == "code" and check:
                solution = re.search(
                    r"<summary>Solution</summary>.*?```python\n(.*?)```.*?</details>",
                    cells[number + 1].source if number + 1 < len(cells) else "",
                    flags=re.DOTALL,
                )
                assert solution, f"no folded solution behind {cell.id}"
                found.append(pytest.param(check[1], cell.source, solution[1], imports, id=cell.id))
                imports += "\n" + cell.source  # what the reader, or the course, wrote before
    return found


def _imports(source: str) -> str:
    """What a cell imports, but for what only Colab runs, and the classes that exercises extend."""
    if "google.colab" in source:
        return ""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef)]
    return "\n".join(map(ast.unparse, nodes))


EXERCISES = stubs_and_solutions()
of_the_notebooks = pytest.mark.parametrize(("check", "stub", "solution", "imports"), EXERCISES)


@of_the_notebooks
def test_the_stub_is_not_done_yet(check, stub, solution, imports, capsys):
    names = {}
    exec(imports, names)
    capsys.readouterr()
    exec(stub, names)
    printed = capsys.readouterr().out
    assert printed.startswith("Not done yet: ")
    assert printed.count("\n") == 1


@of_the_notebooks
def test_the_folded_solution_is_right(check, stub, solution, imports, capsys):
    call = re.search(rf"^(?:\w+ = )?{check}(?:\.or_ours)?\(.*\)$", stub, flags=re.MULTILINE)[0]
    names = {}
    exec(imports, names)
    capsys.readouterr()
    exec(f"{solution}\n{call}", names)
    assert capsys.readouterr().out.startswith("Correct: ")


def test_every_check_has_its_exercise_and_wrong_answers():
    assert sorted(param.values[0] for param in EXERCISES) == sorted(CHECKS)
    assert set(WRONG_ANSWERS) == set(CHECKS)
    assert all(len(wrong) >= 3 for wrong in WRONG_ANSWERS.values())


@pytest.mark.parametrize(
    ("check", "answer", "message"), [(check, *wrong) for check, every in WRONG_ANSWERS.items() for wrong in every]
)
def test_a_wrong_answer_is_named(check, answer, message):
    verdict = CHECKS[check].judge(answer)
    assert verdict.state == WRONG
    assert re.search(message, verdict.sentence), verdict.sentence


FUNCTIONS = {name: check for name, check in CHECKS.items() if isinstance(check, Exercise)}


@pytest.mark.parametrize("check", FUNCTIONS.values(), ids=FUNCTIONS)
def test_each_known_mistake_is_wrong_and_told_apart_from_the_others(check):
    toys = list(check.toys(torch.Generator().manual_seed(0)))
    for mistake in check.mistakes:
        verdict = check.judge(mistake.answer)
        assert verdict.state == WRONG
        if isinstance(mistake.sentence, str):
            assert verdict.sentence == mistake.sentence
        else:
            assert verdict.sentence in [mistake.sentence(*toy) for toy in toys]


@pytest.mark.parametrize("check", FUNCTIONS.values(), ids=FUNCTIONS)
def test_no_answer_is_not_done_yet(check):
    def stub(*arguments):
        raise NotImplementedError

    def forgetful(*arguments):
        arguments = arguments[::-1]

    assert str(check.judge(stub)) == "Not done yet: fill in stub and run this cell again."
    assert check.judge(forgetful).state == NOT_DONE
    assert str(check.judge(forgetful)) == "Not done yet: forgetful returned None. Is a return missing?"


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
    assert verdict.sentence.endswith("The arguments were x [3].")


def test_arguments_without_names_are_said_by_shape():
    for answer in (torch.rsqrt, lambda *arguments: arguments[0] + 1):
        assert exercise(lambda x: x, ROW).judge(answer).sentence.endswith("The arguments were [3].")


def test_not_implemented_with_a_message_is_an_error_and_no_stub():
    def answer(x):
        raise NotImplementedError("'bitwise_and_cpu' not implemented for 'Float'")

    verdict = exercise(lambda x: x, ROW).judge(answer)
    assert verdict.state == WRONG
    assert "Your code raised NotImplementedError: 'bitwise_and_cpu' not implemented for 'Float'." in verdict.sentence


def test_a_pair_may_come_as_one_tensor():
    pair = exercise(lambda x: (x, 2 * x), ROW)
    assert pair.judge(lambda x: torch.stack([x, 2 * x])).state == CORRECT
    assert "Your output 1 has the right shape" in pair.judge(lambda x: torch.stack([x, x])).sentence
    assert "should be 2 results" in pair.judge(lambda x: torch.stack([x, x, x])).sentence
    assert "should be 2 results" in pair.judge(lambda x: x[:2]).sentence
    split = CHECKS["check_split_prefix"]
    assert split.judge(lambda p, h: rearrange(p, "b p (kv h d) -> kv b h p d", kv=2, h=h)).state == CORRECT


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
    assert verdict.sentence == "Your output is 9, expected 6. The arguments were n 3."


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
    assert "RuntimeError: shape '[5]'" in check.judge(lambda x: x.view(5)).sentence


def test_an_exercise_may_read_its_result_before_comparing():
    check = exercise(lambda x: x, ROW, read=lambda result, x: result.argmax().item())
    assert check.judge(lambda x: 5 * x).state == CORRECT
    assert check.judge(lambda x: -x).sentence == "Your output is 0, expected 2. The arguments were x [3]."


def test_a_verdict_is_printed_as_one_line_and_draws_no_random_number(capsys):
    before = torch.get_rng_state()
    CHECKS["check_one_query"](lambda query, keys, values: query)
    assert torch.equal(torch.get_rng_state(), before)
    assert capsys.readouterr().out.startswith("Not right yet: Your output has shape [9], expected [3].")


PREDICTION = Prediction(
    [1, 8, 64], because="One value for each token.", mistakes=[([1, 64, 8], "The axes are swapped.")]
)


@pytest.mark.parametrize(
    ("expected", "sentence"),
    [
        (..., "Not done yet: put what you expect in the place of the three dots, and run this cell again."),
        ([1, ..., ...], "Not done yet: put what you expect in the place of the three dots, and run this cell again."),
        ([1, 8, 64], "Correct: One value for each token."),
        ((1, 8, 64), "Correct: One value for each token."),
        (torch.Size([1, 8, 64]), "Correct: One value for each token."),
        ([1, 64, 8], "Not right yet: The axes are swapped."),
        ([2, 8, 64], "Not right yet: [2, 8, 64] is not what comes out."),
        (None, "Not right yet: None is not what comes out."),
    ],
)
def test_a_prediction_is_compared(expected, sentence, capsys):
    PREDICTION(expected)
    assert capsys.readouterr().out == sentence + "\n"


def test_or_ours_gives_the_answer_if_it_is_right_else_the_right_one(capsys):
    doubling = exercise(lambda x: 2 * x, ROW)
    yours, wrong = (lambda x: x + x), (lambda x: 3 * x)
    assert doubling.or_ours(yours) is yours
    assert "goes on with yours" in capsys.readouterr().out
    assert doubling.or_ours(wrong) is doubling.right
    printed = capsys.readouterr().out
    assert printed.startswith("Not right yet")
    assert "goes on with ours" in printed
