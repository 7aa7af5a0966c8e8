"""The command line `python -m helpers.train`, on a tiny random T5 in a folder."""

import ast
import csv
import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration, TrainerState, TrainingArguments

from helpers import train
from helpers.bases.load import load_base
from helpers.bases.tasks import load_task
from helpers.tuning import pairs, progress, resuming
from helpers.tuning.attach import T5Prefix
from helpers.tuning.training import generate_texts

PAIRS = [(f"{number}", "abc"[number % 3] * (1 + number % 5)) for number in range(24)]
COMMAND = {"max_steps": 8, "per_device_train_batch_size": 4, "prefix_length": 3, "max_target_length": 6}
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": os.devnull}


def write_pairs(path, pairs):
    lines = [json.dumps({"source": source, "target": target}, ensure_ascii=False) for source, target in pairs]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With pairs.jsonl, and a T5 and its tokenizer in base/."""
    folder = tmp_path_factory.mktemp("train")
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=384,
        d_model=16,
        d_kv=5,
        num_heads=3,
        d_ff=23,
        num_layers=2,
        decoder_start_token_id=0,
        dropout_rate=0.1,
    )
    T5ForConditionalGeneration(config).save_pretrained(folder / "base")
    ByT5Tokenizer().save_pretrained(folder / "base")
    write_pairs(folder / "pairs.jsonl", PAIRS)
    return folder


def arguments(folder, output, **options):
    given = {"base": folder / "base", "train_file": folder / "pairs.jsonl", "output_dir": output, **COMMAND, **options}
    command = []
    for name, value in given.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        command += [f"--{name}", *map(str, values)] if value is not None else []
    return command


def refused(capsys, command) -> str:
    """The sentence that a command ends with."""
    with pytest.raises(SystemExit) as exit_:
        train.main(command)
    assert exit_.value.code == 2
    usage, sentence = capsys.readouterr().err.splitlines()[-2:]  # a bar for loading the base may come before
    assert usage == f"usage: {train.USAGE}"
    return sentence.removeprefix("helpers.train: error: ")


def rows(folder):
    with (folder / "loss.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def weights(folder):
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


# --- data ------------------------------------------------------------------------------------------------------------


def test_pairs_are_read_as_they_stand(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"source": "a", "target": "\xc3\xbc \\u2028"}\r\n\r\n{"target": "", "source": " b", "id": 7}'
    )
    assert train.read_pairs(path) == [("a", "ü \u2028"), (" b", "")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"source": "a"}', "has no 'target', only 'source'"),
        (b"{}", "has no 'source', only nothing"),
        (b'{"source": "a", "target": 5}', "'target' needs a string, got 5"),
        (b'{"source": null, "target": "b"}', "'source' needs a string, got null"),
        (b'["a", "b"]', r"""needs an object \{"source": ..., "target": ...\}, got a list"""),
        (b'{"source": "a", "target": "b"', r"not JSON \(Expecting ',' delimiter at column 30\)"),
        (b"a\tb", r"not JSON \(Expecting value at column 1\)"),
        (b'{"source": "\xff", "target": "b"}', r"not UTF-8 \(invalid start byte at byte 13\)"),
        (b'{"source": "\\ud83d", "target": "b"}', "'source' holds half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path, line, message):
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b'{"source": "a", "target": "b"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"pairs\.jsonl:3: {message}$|pairs\.jsonl:3: {message},"):
        train.read_pairs(path)


def test_files_without_pairs_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n \n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"empty\.jsonl: holds no pairs"):
        train.read_pairs(tmp_path / "empty.jsonl")
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"{path}: there is no such file"):
            train.read_pairs(path)


def test_the_share_held_out_depends_on_the_seed_alone():
    kept, held_out = train.hold_out(PAIRS, 0.25, seed=0)
    assert len(held_out) == 6
    assert sorted(kept + held_out, key=PAIRS.index) == PAIRS
    assert not set(kept) & set(held_out)
    assert train.hold_out(PAIRS, 0.25, seed=0) == (kept, held_out)
    assert train.hold_out(PAIRS, 0.25, seed=1)[1] != held_out
    assert train.hold_out(PAIRS, 0.0, seed=0) == (PAIRS, [])
    for share in (-0.1, 1.0, 0.99, 0.01):
        with pytest.raises(ValueError, match=f"validation_share {share} of 24 pairs leaves nothing"):
            train.hold_out(PAIRS, share, seed=0)


def test_long_texts_are_cut_before_the_end_token_and_counted():
    tokenizer = ByT5Tokenizer()
    tokens, cut = pairs.encode(tokenizer, ["abc", "abcd", "abcdef"], 5)
    assert tokens == tokenizer(["abc", "abcd", "abcd"]).input_ids
    assert {each[-1] for each in tokens} == {tokenizer.eos_token_id}
    assert cut == 1


# --- a whole run -----------------------------------------------------------------------------------------------------


def test_a_run_leaves_prefix_scores_predictions_and_curve(folder, tmp_path, capsys):
    train.main(arguments(folder, tmp_path / "run", max_steps=30, mid_dim=8, learning_rate=0.02, validation_share=0.25))
    run = tmp_path / "run"
    model, tokenizer = load_base(folder / "base")
    held_out = train.hold_out(PAIRS, 0.25, seed=0)[1]
    predictions = [json.loads(line) for line in (run / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(each["source"], each["target"]) for each in predictions] == held_out
    texts = [each["prediction"] for each in predictions]
    for name in ("prefix", "prefix_folded"):
        prefix = T5Prefix.from_pretrained(run / name)
        with prefix.attached(model):
            assert generate_texts(model, tokenizer, [source for source, _ in held_out], max_new_tokens=6) == texts
    assert T5Prefix.from_pretrained(run / "prefix").encoders["cross"].mid_dim == 8
    assert prefix.encoders["cross"].mid_dim is None

    scores = json.loads((run / "scores.json").read_text(encoding="utf-8"))
    assert scores["exact_match"] == sum(t == target for t, (_, target) in zip(texts, held_out, strict=True)) / 6
    assert (scores["training_pairs"], scores["validation_pairs"], scores["steps"]) == (18, 6, 30)
    history = rows(run)
    assert [int(row["step"]) for row in history] == list(range(1, 31))
    assert [row["step"] for row in history if row["validation_loss"]] == [str(step) for step in range(3, 31, 3)]
    losses = [float(row["loss"]) for row in history]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    rates = [float(row["learning_rate"]) for row in history]
    assert max(rates) == 0.02 == rates[2]  # 5 % of 30 steps are 2 of warm-up, from 0
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(0.02 / 28)
    assert float(history[-1]["validation_loss"]) == scores["validation_loss"]
    assert Image.open(run / "loss.png").size[0] > 400
    output = capsys.readouterr().out
    assert "18 pairs to learn, 6 to evaluate on" in output
    assert f"Loss by step: loss falls from {losses[0]:.3f} to {losses[-1]:.3f} between step 1 and 30" in output
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-27", "checkpoint-30"]


def test_our_defaults_reach_the_optimizer(folder, tmp_path, monkeypatch):
    seen = {}

    class Spy(train._Watch):
        def on_train_begin(self, args, state, control, optimizer=None, model=None, **kwargs):
            seen.update(optimizer=optimizer, args=args, model=model)

    monkeypatch.setattr(train, "_Watch", Spy)
    train.main(arguments(folder, tmp_path, max_steps=1, per_device_train_batch_size=None))
    (group,) = [group for group in seen["optimizer"].param_groups if group["params"]]
    assert "AdamW" in type(getattr(seen["optimizer"], "optimizer", seen["optimizer"])).__name__
    assert (group["initial_lr"], group["weight_decay"]) == (0.1, 0.0)
    args = seen["args"]
    assert (args.max_grad_norm, args.warmup_steps, args.lr_scheduler_type, args.seed) == (1.0, 0.05, "linear", 0)
    assert args.report_to == []
    assert args.per_device_train_batch_size == 32
    assert {name for name, p in seen["model"].named_parameters() if p.requires_grad} == {
        f"prefix.encoders.{site}.embedding" for site in ("encoder", "decoder", "cross")
    }


def test_without_pairs_to_evaluate_on(folder, tmp_path, capsys):
    train.main(arguments(folder, tmp_path, validation_share=0, sites=["decoder", "cross"], disable_tqdm=True))
    assert not any(row["validation_loss"] for row in rows(tmp_path))
    assert "exact_match" not in json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    assert T5Prefix.from_pretrained(tmp_path / "prefix").sites == ("decoder", "cross")
    assert "24 pairs to learn, 0 to evaluate on" in capsys.readouterr().out


def test_the_best_prefix_is_the_one_kept(folder, tmp_path):
    # As "best" counts here the highest loss, which is not the last one.
    options = {"metric_for_best_model": "loss", "greater_is_better": True, "load_best_model_at_end": True}
    command = arguments(folder, tmp_path, save_steps=2, eval_steps=2, **options)
    for _ in ("a run", "the same once more, which is finished"):
        train.main(command)
        losses = {int(row["step"]): float(row["validation_loss"]) for row in rows(tmp_path) if row["validation_loss"]}
        assert list(losses) == [2, 4, 6, 8]
        best = max(losses, key=losses.get)
        assert best != 8
        scores = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
        assert (scores["step_of_prefix"], scores["validation_loss"], scores["steps"]) == (best, losses[best], 8)
        kept = {f"prefix.{name}": tensor for name, tensor in weights(tmp_path / "prefix").items()}
        checkpoint = load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors")
        assert all(torch.equal(kept[name], checkpoint[name]) for name in checkpoint)


def test_what_is_cut_or_cannot_be_written_is_said(folder, tmp_path, capsys):
    options = {"max_source_length": 2, "max_target_length": 4, "validation_share": 0, "max_steps": 1}
    train.main(arguments(folder, tmp_path, **options))
    output = capsys.readouterr().out
    assert "note: 14 of 24 sources are longer than 2 tokens and are cut" in output
    too_long = sum(len(target) > 3 for _, target in PAIRS)
    assert f"note: {too_long} of 24 targets are longer than 4 tokens and are cut" in output
    assert f"note: {too_long} of 24 targets cannot be written exactly" in output


def test_a_target_the_tokenizer_cannot_write_is_no_match_even_if_decoded_labels_would_be(tmp_path, capsys):
    class Prediction:
        def __init__(self, tokenizer, texts):
            self.predictions = torch.tensor(tokenizer(texts, padding=True).input_ids).numpy()

    _, tokenizer = load_base("wordnet")
    score = train._ExactMatch(tokenizer, ["a 火 b", "a"])
    assert score(Prediction(tokenizer, ["a 火 b", "a", "a"])) == {"exact_match": 0.5}
    assert len(score.texts) == 2
    pairs.data_set(tokenizer, [("a", "a 火 b"), ("a", "a")], 100, 100, print)
    assert "note: 1 of 2 targets cannot be written exactly with this tokenizer" in capsys.readouterr().out


# --- stopping and going on -------------------------------------------------------------------------------------------

KILLED = textwrap.dedent(
    """
    import os, signal, sys
    import torch

    save = torch.save

    def save_and_die(content, path, *args, **kwargs):
        save(content, path, *args, **kwargs)
        if "checkpoint-6" in str(path) and str(path).endswith("rng_state.pth"):
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save_and_die
    torch.set_num_threads(1)
    from helpers.train import main

    main(sys.argv[1:])
    """
)


def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_to_the_same_end(folder, tmp_path, capsys):
    options = {"mid_dim": 8, "prefix_dropout": 0.2, "learning_rate": 0.02, "save_steps": 3, "eval_steps": 2}
    options |= {"gradient_accumulation_steps": 2, "logging_steps": 2}
    through, cut = tmp_path / "through", tmp_path / "cut"
    train.main(arguments(folder, through, **options))
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments(folder, cut, **options)],
        env=ONE_THREAD,
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -9, killed.stderr
    assert sorted(path.name for path in cut.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]
    assert not (cut / "prefix").exists()

    capsys.readouterr()
    with said_by_transformers() as said:
        train.main(arguments(folder, cut, **options))
    assert said == []
    assert f"continuing from {cut / 'checkpoint-3'}\n" in capsys.readouterr().out
    files = [path.relative_to(through) for path in through.glob("prefix*/*")]
    assert len(files) == 4
    for file in [*files, "loss.csv", "loss.png", "predictions.jsonl", "scores.json"]:
        assert (cut / file).read_bytes() == (through / file).read_bytes(), file
    assert [row["step"] for row in rows(cut)] == ["2", "3", "4", "6", "8"]

    train.main(arguments(folder, cut, **options))  # of a finished run: nothing is left to do
    assert f"continuing from {cut / 'checkpoint-8'}\n" in capsys.readouterr().out
    for file in [*files, "loss.csv", "scores.json"]:
        assert (cut / file).read_bytes() == (through / file).read_bytes(), file


@contextmanager
def said_by_transformers():
    """The warnings of transformers within the block."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def test_transformers_warns_of_a_setting_that_differs_and_of_no_other(folder, tmp_path):
    options = {"logging_steps": 0.3, "eval_steps": 0.5, "num_train_epochs": 2, "max_steps": -1}
    train.main(arguments(folder, tmp_path, **options))
    shutil.rmtree(tmp_path / "checkpoint-12")
    with said_by_transformers() as said:
        train.main(arguments(folder, tmp_path, **options))
        assert said == []
        options |= {"logging_steps": 5, "resume_from_checkpoint": tmp_path / "checkpoint-10"}
        train.main(arguments(folder, tmp_path, **options))
    (warning,) = said
    assert re.findall(r"\w+: .*", warning.partition("directory: ")[2]) == [
        "logging_steps: 5 (from args) != 4 (from trainer_state.json)"
    ]


class Interrupting(train._Watch):
    """Presses Ctrl-C at one place of a run: `at` is the name of a callback and the step."""

    at = None

    def press(self, name, state):
        if self.at == (name, state.global_step):
            signal.raise_signal(signal.SIGINT)

    def on_train_begin(self, args, state, control, **kwargs):
        self.press("on_train_begin", state)

    def on_substep_end(self, args, state, control, **kwargs):
        self.press("on_substep_end", state)

    def on_prediction_step(self, args, state, control, **kwargs):
        self.press("on_prediction_step", state)

    def on_save(self, args, state, control, **kwargs):
        super().on_save(args, state, control, **kwargs)
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "rng_state.pth").unlink()  # not yet written
        self.press("on_save", state)


@pytest.fixture
def interrupted(monkeypatch, capsys):
    """What a command prints to stderr when Ctrl-C is pressed `at` a place."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def run(command, at) -> str:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(Interrupting, "at", at)
            if at[0] != "on_save":
                patch.setattr(Interrupting, "on_save", train._Watch.on_save)
            patch.setattr(train, "_Watch", Interrupting)
            with pytest.raises(SystemExit) as exit_:
                train.main(command)
        assert exit_.value.code == 130
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("at", "reached", "following"),
    [
        (("on_train_begin", 0), "at step 0 of 8", "starts again, since no checkpoint is whole yet"),
        (("on_substep_end", 1), "at step 1 of 8", "starts again, since no checkpoint is whole yet"),
        (("on_save", 2), "at step 2 of 8", "starts again, since no checkpoint is whole yet"),
        (("on_prediction_step", 4), "at step 4 of 8", "continues from {run}/checkpoint-2"),
        (("on_substep_end", 7), "at step 7 of 8", "continues from {run}/checkpoint-6"),
        (("on_prediction_step", 8), "at step 8 of 8", "continues from {run}/checkpoint-6"),
    ],
    ids=lambda value: str(value),
)
def test_an_interrupt_ends_with_one_sentence_that_is_true(
    folder, tmp_path, capsys, interrupted, at, reached, following
):
    options = {"save_steps": 2, "eval_steps": 2, "gradient_accumulation_steps": 2, "max_source_length": 8}
    command = arguments(folder, tmp_path, **options)
    said = interrupted(command, at)
    following = following.format(run=tmp_path)
    assert said.endswith(f"\nhelpers.train: stopped {reached}; the same command {following}\n")
    assert "Traceback" not in said
    train.main(command)
    output = capsys.readouterr().out
    if "continues" in following:
        assert following.replace("continues", "continuing") + "\n" in output
    else:
        assert "continuing" not in output
    assert len(rows(tmp_path)) == 8


def test_an_interrupt_of_the_last_evaluation(folder, tmp_path, monkeypatch, capsys):
    """Of a run that is done, and of a command that has nothing else left to do."""
    evaluate = train.Seq2SeqTrainer.evaluate

    def interrupt(trainer, *args, **kwargs):
        if not trainer.is_in_train:
            signal.raise_signal(signal.SIGINT)
        return evaluate(trainer, *args, **kwargs)

    command = arguments(folder, tmp_path, max_steps=2)
    monkeypatch.setattr(train.Seq2SeqTrainer, "evaluate", interrupt)
    for _ in range(2):
        with pytest.raises(SystemExit) as exit_:
            train.main(command)
        assert exit_.value.code == 130
        sentence = f"at step 2 of 2; the same command continues from {tmp_path / 'checkpoint-2'}"
        assert capsys.readouterr().err.endswith(f"\nhelpers.train: stopped {sentence}\n")
        assert not (tmp_path / "prefix").exists()
    monkeypatch.undo()
    train.main(command)
    assert (tmp_path / "prefix").exists()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_interrupt_while_loading(folder, tmp_path, monkeypatch, capsys, rank):
    monkeypatch.setattr(train, "load_base", lambda name: signal.raise_signal(signal.SIGINT))
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as exit_:
        train.main(arguments(folder, tmp_path))
    assert exit_.value.code == 130
    sentence = "helpers.train: stopped before the first step; the same command begins where this one did"
    assert capsys.readouterr() == (f"loading {folder / 'base'}\n", f"\n{sentence}\n" if rank == "0" else "")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_import_is_announced_and_can_be_interrupted(tmp_path, rank):
    """In place of the first slow module one that presses Ctrl-C: what is said is said before."""
    (tmp_path / "numpy.py").write_text(
        "import signal\nsignal.raise_signal(signal.SIGINT)\nraise SystemExit('went on')", encoding="utf-8"
    )
    result = subprocess.run(
        [sys.executable, "-m", "helpers.train", "--demo"],
        cwd=tmp_path,
        env={**ONE_THREAD, "RANK": rank},
        capture_output=True,
        text=True,
    )
    said = "importing PyTorch and transformers\n\nhelpers.train: stopped before anything was done\n"
    assert (result.returncode, result.stdout, result.stderr) == (130, "", said if rank == "0" else "")


def test_ctrl_c_in_a_terminal(folder, tmp_path):
    """As the process of its own that it is, pressed twice."""
    command = arguments(folder, tmp_path / "run", max_steps=100_000, save_steps=10, eval_steps=20)
    process = subprocess.Popen(
        [sys.executable, "-m", "helpers.train", *command],
        env=ONE_THREAD,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "run" / "checkpoint-10").exists():
        assert process.poll() is None
        time.sleep(0.05)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    output, said = process.communicate(timeout=300)
    assert process.returncode == 130
    assert said.startswith("importing PyTorch and transformers\n")
    assert output.startswith(f"loading {folder / 'base'}\n")
    assert "Traceback" not in said
    assert re.search(r"\nhelpers\.train: stopped at step \d+ of 100000; the same command .*\n\Z", said)


def test_other_settings_are_not_mixed_into_a_run(folder, tmp_path, capsys):
    run = tmp_path / "run"
    train.main(arguments(folder, run, max_steps=2))
    refusal = refused(capsys, arguments(folder, run, max_steps=4, learning_rate=0.2))
    assert refusal.startswith(f"{run} holds checkpoints of a run with max_steps 2, learning_rate 0.1: give another")
    write_pairs(tmp_path / "other.jsonl", PAIRS[1:])
    refusal = refused(capsys, arguments(folder, run, max_steps=2, train_file=tmp_path / "other.jsonl"))
    assert "a run with training_pairs " in refusal

    train.main(arguments(folder, run, max_steps=4, resume_from_checkpoint=run / "checkpoint-2"))
    assert f"continuing from {run / 'checkpoint-2'}\n" in capsys.readouterr().out
    assert json.loads((run / "scores.json").read_text(encoding="utf-8"))["steps"] == 4
    train.main(arguments(folder, run, max_steps=4))  # from now on, these are the settings

    (run / "run.json").unlink()
    assert "holds checkpoints of something else" in refused(capsys, arguments(folder, run, max_steps=4))
    missing = tmp_path / "checkpoint-1"
    refusal = refused(capsys, arguments(folder, run, resume_from_checkpoint=missing))
    assert refusal == f"{missing} is no whole checkpoint of 1 process(es)"


@pytest.mark.parametrize("broken", ["trainer_state.json", "rng_state.pth"])
def test_a_checkpoint_that_is_not_whole_is_passed_over(folder, tmp_path, broken):
    train.main(arguments(folder, tmp_path, max_steps=2, save_steps=1))
    for ruin in (lambda path: os.truncate(path, path.stat().st_size // 2), Path.unlink):
        checkpoint = tmp_path / "checkpoint-2"
        assert resuming.is_complete(checkpoint, 1) == (ruin is not Path.unlink)
        ruin(checkpoint / broken)
        assert not resuming.is_complete(checkpoint, 1)
    assert resuming.is_complete(tmp_path / "checkpoint-1", 1)
    assert not resuming.is_complete(tmp_path / "checkpoint-1", 2)


# --- several processes -----------------------------------------------------------------------------------------------


def test_two_processes_learn_what_one_learns_of_the_whole_batch(folder, tmp_path):
    """SGD, so that rounding stays rounding; 22 pairs in batches of 4 + 4, and a last one that is filled up."""
    options = {"optim": "sgd", "learning_rate": 3.0, "max_steps": 2, "validation_share": 0.3, "disable_tqdm": True}
    options |= {"per_device_eval_batch_size": 2}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "helpers.train"]
    two = subprocess.run(
        [sys.executable, *launch, *arguments(folder, tmp_path / "two", **options)],
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("pairs to learn") == two.stdout.count("loss curve are in") == 1, "both processes wrote"
    train.main(arguments(folder, tmp_path / "one", **{**options, "per_device_train_batch_size": 8}))
    one, two = tmp_path / "one", tmp_path / "two"
    assert {path.name for path in (two / "checkpoint-2").glob("rng*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    for row, other in zip(rows(one), rows(two), strict=True):
        assert float(row["loss"]) == pytest.approx(float(other["loss"]), rel=1e-5)
    learnt, also = weights(one / "prefix"), weights(two / "prefix")
    torch.manual_seed(0)
    model, _ = load_base(folder / "base")
    first = T5Prefix.for_model(model, prefix_length=3).state_dict()
    for name, tensor in learnt.items():
        assert (tensor - also[name]).abs().max() < 1e-5
        assert (tensor - first[name]).abs().max() > 1e-3
    predictions = [(run / "predictions.jsonl").read_text(encoding="utf-8").splitlines() for run in (one, two)]
    assert predictions[0] == predictions[1]
    assert len(predictions[1]) == 7
    scores = [json.loads((run / "scores.json").read_text(encoding="utf-8")) for run in (one, two)]
    assert scores[0]["exact_match"] == scores[1]["exact_match"]


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"world_size": 1, "n_gpu": 0}, "2 processes were started, but each would train alone"),
        ({"world_size": 2, "n_gpu": 2}, "one process sees 2 GPUs: start one for each with torchrun --nproc_per_node 2"),
    ],
    ids=["alone", "several GPUs"],
)
def test_engines_that_would_train_something_else_are_refused(monkeypatch, engine, message):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=message):
        train._check_engine(SimpleNamespace(**engine))
    right = {"fp16": False, "predict_with_generate": True, "prediction_loss_only": False}
    train._check_engine(SimpleNamespace(world_size=2, n_gpu=1, **right))


# --- the door --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_file": "missing.jsonl"}, "missing.jsonl: there is no such file"),
        ({"validation_file": "missing.jsonl"}, "missing.jsonl: there is no such file"),
        ({"sites": ["encoder", "head"]}, "sites must be some of ('encoder', 'decoder', 'cross')"),
        ({"prefix_length": -1}, "a prefix needs positive sizes, got prefix_length=-1"),
        ({"max_steps": "many"}, "argument --max_steps/--max-steps: invalid int value: 'many'"),
        ({"train_file": None}, "the following arguments are required: --train_file"),
        ({"prediction_loss_only": True}, "the scores come from generated texts"),
        ({"fp16": True}, "T5 overflows in float16: use bf16"),
        ({"load_best_model_at_end": True, "validation_share": 0}, "load_best_model_at_end needs pairs to evaluate on"),
        (
            {"load_best_model_at_end": True, "save_steps": 3, "eval_steps": 2},
            "--load_best_model_at_end requires the sav",
        ),
    ],
    ids=str,
)
def test_bad_input_ends_with_one_sentence(folder, tmp_path, capsys, options, message):
    assert refused(capsys, arguments(folder, tmp_path, **options)).startswith(message)
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_model_or_with_another_kind_is_refused(folder, tmp_path, capsys):
    (tmp_path / "nothing").mkdir()
    assert "config.json" in refused(capsys, arguments(folder, tmp_path / "run", base=tmp_path / "nothing"))
    assert not (tmp_path / "run").exists()


def test_the_first_prefix_is_as_wide_as_asked(folder, tmp_path, capsys):
    options = {"max_steps": 1, "learning_rate": 1e-6, "prefix_length": 50, "validation_share": 0}
    train.main(arguments(folder, tmp_path / "run", init_std=3.0, **options))
    for parameter in T5Prefix.from_pretrained(tmp_path / "run" / "prefix").parameters():
        assert parameter.std().item() == pytest.approx(3.0, rel=0.1)
    assert refused(capsys, arguments(folder, tmp_path / "other", init_std=3.0, mid_dim=4)) == (
        "init_std is for a prefix without an MLP, got init_std=3.0, mid_dim=4"
    )


def test_a_loss_that_is_not_finite_ends_the_run(folder, tmp_path):
    model, tokenizer = load_base(folder / "base")
    model.shared.weight.data[tokenizer("b").input_ids[0]] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    tokenizer.save_pretrained(tmp_path / "broken")
    with pytest.raises(SystemExit, match=r"helpers\.train: the loss is nan at step 1: lower the learning_rate"):
        train.main(arguments(folder, tmp_path / "run", base=tmp_path / "broken"))
    assert not (tmp_path / "run" / "prefix").exists()


def test_help_is_short_and_names_every_option_of_ours(capsys):
    with pytest.raises(SystemExit) as exit_:
        train.main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert all(f"  --{field.name}\n" in text for field in fields(train.PrefixArguments))
    for option in ("output_dir", "learning_rate", "max_steps", "seed", "resume_from_checkpoint", "bf16"):
        assert f"  --{option}\n" in text
    assert "attention sites with a prefix, of encoder decoder cross" in text
    assert "python -m helpers.train --demo" in text
    assert text.count("(required)") == 3
    assert len(text.splitlines()) < 100
    assert max(map(len, text.splitlines())) <= 120


def test_the_readmes_commands(tmp_path, monkeypatch, capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Tune a prefix on your own data")[1].split("\n## ")[0]
    demo, run = re.findall(r"```bash\npython -m helpers.train (.*?)\n```", section, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for command in (demo, run):
        capsys.readouterr()
        command = shlex.split(command)
        # Of two, argparse takes the last.
        train.main([*command, "--max_steps", "2", "--validation_share", "0.01", "--max_target_length", "30"])
        output = capsys.readouterr().out
        given = train.DEMO if command == ["--demo"] else dict(zip(command[::2], command[1::2], strict=True))
        given = {name.removeprefix("--"): value for name, value in given.items()}
        assert given["base"] == "dates"
        folder, pairs = Path(given["output_dir"]), Path(given["train_file"])
        assert f"`{folder}`" in section
        assert f"`{pairs}`" in section
        named = re.findall(r"`([a-z]+/|[a-z]+\.(?:json|jsonl|csv|png))`", section)
        assert set(named) == {"prefix/", "scores.json", "predictions.jsonl", "loss.csv", "loss.png"}
        assert all((folder / name).exists() for name in named)
        assert train.read_pairs(pairs) == load_task("german").train
        (line,) = re.findall(r'`(\{"source": .*?\})`', section)
        assert line in pairs.read_text(encoding="utf-8").splitlines()

        said = textwrap.dedent(output.split("in Python:\n\n")[1])
        result = subprocess.run([sys.executable, "-c", said], env=ONE_THREAD, capture_output=True, text=True)
        predictions = [
            json.loads(text) for text in (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        assert result.stdout == f"{[predictions[0]['prediction']]}\n", result.stderr


def test_the_demo_keeps_the_file_that_is_there_and_other_options_override(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "german-demo.jsonl", PAIRS)
    quick = ["--max_steps=1", "--max_target_length", "6", "--prefix_length", "2"]
    train.main(["--sites", "cross", *quick, "--demo", "--output_dir", "other"])
    assert train.read_pairs("german-demo.jsonl") == PAIRS
    assert "german-demo.jsonl is there already, and is read as it stands\n" in capsys.readouterr().out
    prefix = T5Prefix.from_pretrained("other/prefix")
    assert (prefix.sites, prefix.encoders["cross"].prefix_length) == (("cross",), 2)
    assert json.loads(Path("other/scores.json").read_text(encoding="utf-8"))["training_pairs"] == 22

    Path("german-demo.jsonl").rename("mine.jsonl")
    train.main(["--demo", *quick, "--train_file", "mine.jsonl"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["german-demo", "mine.jsonl", "other"]
    assert refused(capsys, ["--demo", "--train_file", "none.jsonl"]) == "none.jsonl: there is no such file"


def test_the_lines_that_use_a_prefix_survive_any_name_and_any_terminal(monkeypatch):
    ours = train.PrefixArguments(base="it's \\new", train_file="")
    folder, pairs = Path("Präfix 'a'"), [("long source", ""), (" ", ""), ("ü \"'\n", "")]
    for encoding in ("utf-8", "ascii"):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        lines = train._use(ours, folder, pairs)
        lines.encode(encoding)
        strings = {node.value for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.Constant)}
        assert strings == {ours.base, str(folder / "prefix"), "ü \"'\n", 128}


# --- the time left ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "state", "left"),
    [
        ("no", {"global_step": 3}, 1),
        ("steps", {"global_step": 0}, 4),
        ("steps", {"global_step": 30}, 3),
        ("steps", {"global_step": 59}, 3),
        ("steps", {"global_step": 60}, 2),
        ("steps", {"global_step": 100}, 1),
        ("epoch", {"global_step": 30, "epoch": 0.9}, 4),
        ("epoch", {"global_step": 34, "epoch": 1.0}, 3),
    ],
)
def test_the_evaluations_left_are_counted(strategy, state, left, tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), eval_strategy=strategy, eval_steps=30, use_cpu=True)
    state = TrainerState(max_steps=100, eval_steps=30, num_train_epochs=3, **state)
    assert progress.evaluations_left(args, state) == left


def test_the_time_left_has_the_evaluations_in_it(monkeypatch, tmp_path):
    now = 0.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    args = TrainingArguments(output_dir=str(tmp_path), eval_strategy="steps", eval_steps=20, use_cpu=True)
    state = TrainerState(global_step=10, max_steps=50, eval_steps=20, is_world_process_zero=True)
    control = SimpleNamespace(should_evaluate=False)
    seen = {}
    with progress.Bar(has_validation=True) as bar:
        bar.on_train_begin(args, state, control)  # of a run that is continued from step 10
        for step in range(11, 51):
            now += 2
            state.global_step, control.should_evaluate = step, step % 20 == 0
            bar.on_step_end(args, state, control)
            seen[step] = bar.training_bar.postfix
            if control.should_evaluate:
                now += 30
                control.should_evaluate = False
                bar.on_evaluate(args, state, control)
        assert seen[11] == "about 1:18 and 3 evaluations left"
        assert seen[20] == "about 1:00 and 3 evaluations left"
        assert seen[21] == "about 1:58 left"  # 29 steps, 2 evaluations
        assert seen[40] == "about 1:20 left"
        assert seen[41] == "about 0:48 left"
        assert seen[50] == "about 0:30 left"


def test_bars_have_names_and_tell_of_evaluations(folder, tmp_path, capsys):
    train.main(arguments(folder, tmp_path))
    said = capsys.readouterr().err
    assert re.search(r"\revaluating: 100%\|", said)
    assert re.search(r" 8/8 \[\d\d:\d\d, loss \d\.\d{3}, about \d:\d\d left\]", said)


def test_the_only_evaluation_may_be_the_one_at_the_end(folder, tmp_path, capsys):
    train.main(arguments(folder, tmp_path, eval_strategy="no"))
    assert re.search(r" 8/8 \[\d\d:\d\d, loss \d\.\d{3}, about 0:00 and 1 evaluation left\]", capsys.readouterr().err)
