"""The training loop and evaluation by generation, on a tiny T5 that counts."""

import copy
import random
import signal
import threading
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from test_t5 import FAMILIES, make_inputs, make_model, make_prefix
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration

from helpers.bases.load import BUNDLED_NAMES, load_base
from helpers.tuning import training
from helpers.tuning.attach import T5Prefix
from helpers.tuning.training import (
    _has_bfloat16_instructions,
    collate,
    exact_match,
    fit,
    generate_texts,
    labelled_loss,
    linear_warmup_decay,
    majority_baseline,
    one_thread_if_small,
)

PAIRS = [("a", "b"), ("bb", "c"), ("ccc", "d"), ("dddd", "e")]


@pytest.fixture(scope="module")
def tokenizer():
    return ByT5Tokenizer()


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=384,
        d_model=16,
        d_kv=5,
        num_heads=3,
        d_ff=23,
        num_layers=2,
        decoder_start_token_id=0,
        dropout_rate=0.2,
    )
    return T5ForConditionalGeneration(config).eval().requires_grad_(False)


def test_collate_pads_to_the_longest_and_hides_padding_from_the_loss(tokenizer):
    batch = collate(tokenizer, PAIRS)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (4, 5)  # four letters and the end token
    assert batch["attention_mask"].sum(1).tolist() == [2, 3, 4, 5]
    uneven = collate(tokenizer, [("a", "b"), ("a", "bcd")])["labels"]
    assert uneven.shape == (2, 4)
    assert (uneven == -100).sum(1).tolist() == [2, 0]
    assert (uneven == 0).sum() == 0, "padding would be learnt"


def test_the_schedule_rises_then_falls_to_zero():
    factor = linear_warmup_decay(100, warmup=0.05)
    assert [factor(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factor(5) == pytest.approx(1.0)
    assert factor(52) == pytest.approx(48 / 95)
    assert factor(99) == pytest.approx(1 / 95)
    assert linear_warmup_decay(1)(0) > 0


def test_fit_trains_the_prefix_alone_and_repeats_itself(model, tokenizer):
    weights = copy.deepcopy(model.state_dict())
    runs = []
    for _ in range(2):
        torch.manual_seed(1)
        prefix = T5Prefix.for_model(model, prefix_length=4)
        with prefix.attached(model):
            runs.append(fit(model, prefix.parameters(), tokenizer, PAIRS, steps=40, batch_size=4))
    assert runs[0] == runs[1]
    assert len(runs[0]) == 40
    assert runs[0][-1] < 0.8 * runs[0][0]
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


def test_the_seed_decides_the_order_and_nothing_else_does(model, tokenizer):
    losses = []
    for seed in (0, 0, 1):
        torch.manual_seed(1)
        random.seed(seed + 5)
        prefix = T5Prefix.for_model(model, prefix_length=2)
        with prefix.attached(model):
            losses.append(fit(model, prefix.parameters(), tokenizer, PAIRS, steps=3, batch_size=2, seed=seed))
    assert losses[0] == losses[1] != losses[2]


def test_fit_is_adamw_on_clipped_gradients_of_each_batch_alone(model, tokenizer):
    torch.manual_seed(1)
    prefix = T5Prefix.for_model(model, prefix_length=2)
    by_hand = copy.deepcopy(prefix)
    with prefix.attached(model):
        fit(model, prefix.parameters(), tokenizer, PAIRS[:1], steps=3, batch_size=2, learning_rate=0.5, clip=0.1)

    parameters = list(by_hand.parameters())
    first, second = [[torch.zeros_like(p) for p in parameters] for _ in range(2)]
    batch = collate(tokenizer, PAIRS[:1] * 2)
    with by_hand.attached(model):
        for step, factor in enumerate((1.0, 1.0, 0.5), start=1):  # warm-up ends with step 1
            gradients = torch.autograd.grad(model(**batch).loss, parameters)
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            assert norm > 0.1
            with torch.no_grad():
                for p, gradient, m, v in zip(parameters, gradients, first, second, strict=True):
                    gradient = gradient * 0.1 / norm
                    m.lerp_(gradient, 0.1)
                    v.lerp_(gradient**2, 0.001)
                    p -= 0.5 * factor * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    for a, b in zip(prefix.parameters(), parameters, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_nothing_to_train_is_refused(model, tokenizer):
    with pytest.raises(ValueError, match="0 trainable parameters, 4 pairs"):
        fit(model, model.parameters(), tokenizer, PAIRS, steps=1)
    with pytest.raises(ValueError, match="0 pairs"):
        fit(model, T5Prefix.for_model(model).parameters(), tokenizer, [], steps=1)


def test_generated_texts_keep_the_order_and_do_not_depend_on_the_batch(model, tokenizer):
    sources = [source for source, _ in PAIRS]
    prefix = T5Prefix.for_model(model, prefix_length=4)
    for parameter in prefix.parameters():
        torch.nn.init.normal_(parameter)
    with prefix.attached(model):
        together = generate_texts(model, tokenizer, sources, max_new_tokens=5)
        assert generate_texts(model, tokenizer, sources, batch_size=1, max_new_tokens=5) == together
    assert len(together) == 4
    assert generate_texts(model, tokenizer, []) == []


def test_exact_match_and_majority():
    assert exact_match(["a", "b ", "c"], ["a", "b", "x"]) == pytest.approx(2 / 3)
    assert majority_baseline(["x", "y", "y"], ["y", "x", "y", "y"]) == 0.75
    with pytest.raises(ValueError, match="training set is empty"):
        majority_baseline([], ["a"])
    with pytest.raises(ValueError, match="got 1 and 2"):
        exact_match(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="got 0 and 0"):
        exact_match([], [])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_labelled_loss_is_the_models_own_with_logits_for_the_labels_alone(family):
    model, inputs = make_model(family), make_inputs()
    labels = inputs.pop("decoder_input_ids")
    labels[0, 3:], labels[2, 1:] = -100, -100
    prefix, seen, losses, gradients = make_prefix(model, std=0.5), [], [], []
    counter = model.lm_head.register_forward_hook(lambda _, args, logits: seen.append(logits.shape[:-1].numel()))
    batch = {**inputs, "labels": labels}
    with prefix.attached(model):
        for loss_of in (lambda: model(**batch).loss, lambda: labelled_loss(model, batch)):
            prefix.zero_grad()
            loss = loss_of()
            loss.backward()
            losses.append(loss.item())
            gradients.append([parameter.grad.clone() for parameter in prefix.parameters()])
    counter.remove()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*gradients, strict=True))
    assert seen == [15, 9]
    assert not model.lm_head._forward_pre_hooks
    assert "labels" in batch, "the caller's batch was changed"


def test_a_failing_step_leaves_no_hook_behind(model, tokenizer):
    batch = collate(tokenizer, PAIRS)
    batch["input_ids"] = batch["input_ids"] + 1000
    with pytest.raises(IndexError):
        labelled_loss(model, batch)
    assert not model.lm_head._forward_pre_hooks


@pytest.mark.parametrize("sites", [("decoder",), ("cross", "decoder")])
def test_a_cached_encoder_runs_once_and_changes_nothing(model, tokenizer, sites):
    calls, losses = [], []
    counter = model.encoder.register_forward_hook(lambda *_: calls.append(1))
    for cached in (False, True):
        torch.manual_seed(1)
        prefix = T5Prefix.for_model(model, prefix_length=3, sites=sites)
        with prefix.attached(model):
            losses.append(
                fit(
                    model,
                    prefix.parameters(),
                    tokenizer,
                    PAIRS,
                    steps=20,
                    batch_size=3,
                    cache_encoder=cached,
                )
            )
    counter.remove()
    assert len(calls) == 20 + 1
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert losses[0][-1] < losses[0][0] - 0.5


def test_an_encoder_that_changes_is_not_cached(model, tokenizer):
    def train(sites=("decoder",)):
        prefix = T5Prefix.for_model(model, prefix_length=3, sites=sites)
        with prefix.attached(model):
            fit(model, prefix.parameters(), tokenizer, PAIRS, steps=1, cache_encoder=True)

    with pytest.raises(ValueError, match=r"sites \['encoder', 'decoder'\]"):
        train(sites=("encoder", "decoder"))
    model.encoder.block[1].train()
    with pytest.raises(ValueError, match="dropout on True"):
        train()
    model.eval().encoder.block[0].requires_grad_(True)
    with pytest.raises(ValueError, match="trainable True"):
        train()


STEPS = 30


def train_interactively(model, tokenizer, interrupt_in: dict[int, int], steps: int = STEPS):
    """The prefix and the losses of `steps` steps, of which some are interrupted so many times in their midst, and the
    prefix after each step."""
    torch.manual_seed(1)
    prefix, states = T5Prefix.for_model(model, prefix_length=2), []

    def in_the_midst(optimizer, *_):
        for _ in range(interrupt_in.get(len(states), 0)):
            signal.raise_signal(signal.SIGINT)

    def at_the_end(optimizer, *_):
        states.append([parameter.detach().clone() for parameter in prefix.parameters()])

    hooks = [
        register_optimizer_step_pre_hook(in_the_midst),
        register_optimizer_step_post_hook(at_the_end),
    ]
    try:
        with prefix.attached(model):
            losses = fit(model, prefix.parameters(), tokenizer, PAIRS, steps=steps, batch_size=2, interactive=True)
    finally:
        for hook in hooks:
            hook.remove()
    return prefix, losses, states


@pytest.fixture
def handler():
    """Ctrl-C as it was before the test, and as it has to be after training."""
    before = signal.getsignal(signal.SIGINT)
    assert before is signal.default_int_handler
    yield before
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("steps", "line"),
    [
        (30, "30 steps: 3 6 9 12 15 18 21 24 27 30\n"),
        (25, "25 steps: 3 5 8 10 13 15 18 20 23 25\n"),
        (3, "3 steps: 1 2 3\n"),
        (0, "0 steps:\n"),
    ],
)
def test_interactive_training_prints_its_steps_and_is_the_same_training(model, tokenizer, handler, capsys, steps, line):
    _, losses, _ = train_interactively(model, tokenizer, {}, steps)
    assert capsys.readouterr().out == line
    torch.manual_seed(1)
    prefix = T5Prefix.for_model(model, prefix_length=2)
    with prefix.attached(model):
        assert fit(model, prefix.parameters(), tokenizer, PAIRS, steps=steps, batch_size=2) == losses
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("step", [0, 12, STEPS - 1])
def test_an_interrupt_ends_the_training_after_its_step(model, tokenizer, handler, capsys, step):
    _, whole, states = train_interactively(model, tokenizer, {})
    capsys.readouterr()
    prefix, losses, _ = train_interactively(model, tokenizer, {step: 1})
    assert losses == whole[: step + 1]
    assert all(torch.equal(a, b) for a, b in zip(prefix.parameters(), states[step], strict=True))
    assert capsys.readouterr().out.endswith(f"; interrupted after {step + 1}\n")
    prefix.attach(model)()  # nothing is left on the model


def test_a_second_interrupt_is_raised_at_once(model, tokenizer, handler):
    with pytest.raises(KeyboardInterrupt):
        train_interactively(model, tokenizer, {12: 2})
    T5Prefix.for_model(model).attach(model)()


def test_an_error_in_interactive_training_leaves_interrupts_as_they_were(model, tokenizer, handler):
    with pytest.raises(IndexError) as failure:  # its traceback keeps every frame of fit alive
        fit(model.requires_grad_(True), model.parameters(), lambda *_, **__: [][0], PAIRS, steps=2, interactive=True)
    assert signal.getsignal(signal.SIGINT) is handler
    assert failure.traceback


def test_without_interactive_an_interrupt_is_raised(model, tokenizer, handler):
    def interrupt(*_):
        signal.raise_signal(signal.SIGINT)

    hook = model.encoder.register_forward_pre_hook(interrupt)
    prefix = T5Prefix.for_model(model, prefix_length=2)
    with pytest.raises(KeyboardInterrupt), prefix.attached(model):
        fit(model, prefix.parameters(), tokenizer, PAIRS, steps=2)
    hook.remove()
    prefix.attach(model)()


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def three_threads():
    """Three for torch, whatever the machine has, in the tests' Python thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def computing(model) -> list[int]:
    """Filled with torch's number of threads at each use of the model's encoder from now on."""
    seen = []
    model.encoder.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    return seen


def run(kind: str, model, tokenizer, steps: int = 2):
    prefix = T5Prefix.for_model(model, prefix_length=2, sites=("decoder",))
    with prefix.attached(model):
        if kind == "generate_texts":
            return generate_texts(model, tokenizer, ["a", "b"], batch_size=1, max_new_tokens=2)
        options = {"fit": {}, "fit, cached": {"cache_encoder": True}}[kind]
        return fit(model, prefix.parameters(), tokenizer, PAIRS, steps=steps, batch_size=2, **options)


@pytest.mark.parametrize("kind", ["fit", "fit, cached", "generate_texts"])
def test_a_small_model_computes_with_one_thread_and_gives_the_others_back(model, tokenizer, three_threads, kind):
    seen = computing(model)
    run(kind, model, tokenizer)
    assert seen
    assert set(seen) == {1}
    assert torch.get_num_threads() == 3


def test_a_large_model_keeps_its_threads(model, tokenizer, three_threads, monkeypatch):
    monkeypatch.setattr(training, "SMALL", sum(parameter.numel() for parameter in model.parameters()))
    seen = computing(model)
    for kind in ("fit", "generate_texts"):
        run(kind, model, tokenizer)
    assert set(seen) == {3}


def test_the_bundled_bases_are_small_and_t5_small_is_not(three_threads):
    for name in BUNDLED_NAMES:
        with one_thread_if_small(load_base(name)[0]):
            assert torch.get_num_threads() == 1
    with torch.device("meta"):
        t5_small = T5ForConditionalGeneration(T5Config())
    assert sum(parameter.numel() for parameter in t5_small.parameters()) == 60_506_624 > training.SMALL


def test_on_an_accelerator_threads_stay_as_they_are(model, three_threads):
    with one_thread_if_small(model.to("meta")):
        assert torch.get_num_threads() == 3


def test_one_thread_that_was_asked_for_stays_one(model, tokenizer, three_threads):
    torch.set_num_threads(1)
    seen = computing(model)
    run("fit", model, tokenizer)
    assert {*seen, torch.get_num_threads()} == {1}


@pytest.mark.parametrize("kind", ["fit", "generate_texts"])
@pytest.mark.parametrize("stopped_by", [KeyboardInterrupt, RuntimeError])
def test_threads_are_given_back_after_an_error_or_an_interrupt(model, tokenizer, three_threads, kind, stopped_by):
    def stop(*_):
        assert torch.get_num_threads() == 1
        raise stopped_by

    model.encoder.register_forward_pre_hook(stop)
    with pytest.raises(stopped_by):
        run(kind, model, tokenizer)
    assert torch.get_num_threads() == 3


def in_a_new_thread(function):
    """What it returns in a Python thread that has not computed before."""
    returned = []
    thread = threading.Thread(target=lambda: returned.append(function()))
    thread.start()
    thread.join(60)
    return returned[0]


def test_blocks_within_each_other_give_back_at_the_end_of_the_outer_one(model, three_threads):
    with one_thread_if_small(model):
        with one_thread_if_small(model):
            assert in_a_new_thread(torch.get_num_threads) == 3
        assert torch.get_num_threads() == 1
        assert in_a_new_thread(torch.get_num_threads) == 3
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("first_to_leave", ["first to enter", "last to enter"])
def test_two_python_threads_at_once_leave_no_thread_with_one(model, three_threads, first_to_leave):
    """The second has not computed before it enters, so that torch would start it with the number of the first."""
    entered, leave, after = threading.Event(), threading.Event(), {}

    def second(block):
        after["before"] = torch.get_num_threads()
        with block:
            after["within"] = torch.get_num_threads()
            entered.set()
            assert leave.wait(60)
        after["after"] = torch.get_num_threads()

    def start(block):
        other = threading.Thread(target=second, args=(block,))
        other.start()
        assert entered.wait(60)
        return other

    def end(other):
        leave.set()
        other.join(60)

    with one_thread_if_small(model):
        other = start(one_thread_if_small(model))
        if first_to_leave == "last to enter":
            end(other)
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    end(other)
    assert after == {"before": 3, "within": 1, "after": 3}
    assert torch.get_num_threads() == 3
    end(start(nullcontext()))  # a thread that is new now
    assert after == {"before": 3, "within": 3, "after": 3}


def test_fit_in_two_python_threads_at_once(tokenizer, model, three_threads):
    models, numbers = [model, copy.deepcopy(model)], []
    for each in models:
        seen = computing(each)
        numbers.append(seen)
    together = threading.Barrier(2, timeout=60)

    def train(model, steps):
        together.wait()
        run("fit", model, tokenizer, steps)
        numbers.append([torch.get_num_threads()])

    others = [threading.Thread(target=train, args=each) for each in zip(models, (3, 9), strict=True)]
    for other in others:
        other.start()
    for other in others:
        other.join(60)
    assert numbers == [[1] * 3, [1] * 9, [3], [3]]
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("dtype", "has", "warned"),
    [(torch.bfloat16, False, 1), (torch.bfloat16, True, 0), (torch.float32, False, 0)],
    ids=["bfloat16 without instructions", "bfloat16 with instructions", "float32 without instructions"],
)
def test_fit_warns_once_of_bfloat16_that_the_processor_lacks(model, tokenizer, monkeypatch, dtype, has, warned):
    monkeypatch.setattr("helpers.tuning.training._has_bfloat16_instructions", lambda: has)
    model.to(dtype)
    prefix = T5Prefix.for_model(model, prefix_length=2)
    with prefix.attached(model), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, prefix.parameters(), tokenizer, PAIRS, steps=2, batch_size=2)
    told = [str(warning.message) for warning in caught if "bfloat16" in str(warning.message)]
    assert len(told) == warned
    assert all("use model.float()" in sentence for sentence in told)


@pytest.mark.parametrize(
    ("machine", "avx512", "amx", "arm", "has"),
    [
        ("x86_64", False, False, True, False),  # oneDNN says yes of every AVX-512: it converts
        ("AMD64", True, False, False, True),
        ("x86_64", False, True, False, True),
        ("aarch64", False, False, True, True),
        ("arm64", True, True, False, False),
    ],
)
def test_which_processors_have_bfloat16_instructions(monkeypatch, machine, avx512, amx, arm, has):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: arm, raising=False)
    assert _has_bfloat16_instructions() is has


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="no /proc/cpuinfo to compare with")
def test_this_processors_flags_say_the_same():
    words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    assert _has_bfloat16_instructions() == bool({"avx512_bf16", "amx_bf16", "bf16"} & words)
