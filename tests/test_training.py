"""The training loop and evaluation by generation, on a tiny T5 that counts."""

import copy
import random

import pytest
import torch
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration

from helpers.t5 import T5Prefix
from helpers.training import collate, exact_match, fit, generate_texts, linear_warmup_decay, majority_baseline

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
