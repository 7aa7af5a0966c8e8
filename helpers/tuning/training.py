"""Training in the open, and evaluation by generation."""

import platform
import random
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from helpers._checks import check_share, check_texts
from helpers._shapes import Pair
from helpers.tuning.continuing import check_no_form, collate_continuations, continuations, sources_of, stops_of
from helpers.tuning.lean_t5 import LeanT5
from helpers.tuning.losses import has_labelled_loss, labelled_loss
from helpers.tuning.routing import attached_prefix, has_dropout_on

SMALL = 10_000_000
"""Fewer numbers make a model small: on a CPU, it computes with one thread.

The time of a training step with two threads, in that with one, on two cores; medians of interleaved runs:

    numbers of the model                       both cores free   one busy   both busy
    1.0 million (the base "dates")             0.7               1.7        48
    1.9 million (the base "wordnet")           0.6 to 0.8        1.3        9
    15.6 million (random, d_model 256)         0.6 to 0.7        1.4        2
    60.5 million (random, t5-small's shape)    0.6               1.7        10

So a second thread is worth up to four tenths where a core is free for it, at every size, and costs a multiple where
none is. A small model trains in a minute either way, unless its threads wait for each other: it is spared that. With a
large one, four tenths are hours, and whether the cores are free is for its user to know.
"""


def collate(tokenizer, pairs: Sequence[Pair], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """A batch for T5, padded to its longest source and its longest target.

    Returns `input_ids` and `attention_mask` `[batch, source]` and `labels` `[batch, target]`, in which padding is
    -100, so that the loss ignores it. Raises ValueError without pairs.
    """
    if not pairs:
        raise ValueError("a batch needs at least one pair of source and target, got 0")
    sources, targets = zip(*pairs, strict=True)
    batch = tokenizer(list(sources), padding=True, return_tensors="pt")
    labels = tokenizer(list(targets), padding=True, return_tensors="pt")
    labels = labels.input_ids.masked_fill(labels.attention_mask == 0, -100)
    return {
        "input_ids": batch.input_ids.to(device),
        "attention_mask": batch.attention_mask.to(device),
        "labels": labels.to(device),
    }


def collate_for(
    model: nn.Module, tokenizer, pairs: Sequence[Pair], *, separator: str | None = None, chat: bool = False
) -> dict[str, Tensor]:
    """A batch in the form that the model learns from, on its device: see `collate` and `collate_continuations`."""
    form, device = {"separator": separator, "chat": chat}, next(model.parameters()).device
    if not model.config.is_encoder_decoder:
        return collate_continuations(tokenizer, continuations(tokenizer, pairs, **form), device)
    check_no_form(model, **form)
    return collate(tokenizer, pairs, device)


def linear_warmup_decay(steps: int, warmup: float = 0.05) -> Callable[[int], float]:
    """The factor of the learning rate at each step: up to 1 over the first `warmup` share, then down to 0 linearly.

    Raises ValueError for a negative number of steps, or a warmup that is no share.
    """
    if steps < 0:
        raise ValueError(f"a schedule needs at least 0 steps, got steps={steps}")
    check_share(warmup=warmup)
    warmup_steps = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        return min((step + 1) / warmup_steps, (steps - step) / max(1, steps - warmup_steps))

    return factor


def fit(
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    tokenizer,
    pairs: Sequence[Pair],
    *,
    steps: int,
    batch_size: int = 32,
    learning_rate: float = 0.1,
    clip: float = 1.0,
    seed: int = 0,
    cache_encoder: bool = False,
    lean: bool = False,
    interactive: bool = False,
    separator: str | None = None,
    chat: bool = False,
) -> list[float]:
    """Train `parameters` so that `model` turns sources into targets; returns the loss of every step.

    A decoder alone learns to write the target behind the source; the loss counts the target's tokens.

    AdamW without weight decay, 5 % warm-up, linear decay, gradients clipped to norm `clip`. The batches are drawn
    from `pairs` in an order that depends on `seed` alone. The model stays in the mode it is in: a frozen base in
    eval mode has no dropout. For a prefix, attach it first and pass `prefix.parameters()`.

    Args:
        parameters: what to train. Nothing else is updated; freeze it, or its gradients pile up.
        steps, batch_size: how many batches, of how many pairs, drawn with replacement.
        learning_rate: 0.1 suits a prefix; full fine-tuning wants about 2e-3 on the bundled bases.
        cache_encoder: encode every source once, before the first step, instead of at every use. Exact, and saves the
            encoder's share of each step, where nothing of the encoder is trained: the prefix has no "encoder" site,
            and the model is frozen and in eval mode. Takes d_model numbers for each token of the sources.
        lean: compute the same loss with LeanT5, which is faster. For an attached prefix on a frozen model in eval mode.
        interactive: for a notebook. One printed line grows with the steps. And an interrupt (a notebook's stop button,
            Ctrl-C) ends the training after the running step, not the cell: the parameters keep what they have learned,
            the losses so far are returned. Works in Python's main thread only.
        separator, chat: of a decoder alone, what stands between source and target; see `continuations`.

    Raises ValueError without pairs or without a parameter that requires a gradient, with `cache_encoder` where the
    encoder's output would change during training, or with `lean` where no prefix is attached; and what LeanT5 raises.
    Warns if the model is in bfloat16 on a processor that has no instructions for it.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if not parameters or not pairs:
        raise ValueError(f"nothing to train: {len(parameters)} trainable parameters, {len(pairs)} pairs")
    _warn_of_slow_bfloat16(model)
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, linear_warmup_decay(steps))
    batch_of = partial(collate_for, model, tokenizer, separator=separator, chat=chat)
    draw = random.Random(seed)
    lean_model = _lean(model) if lean else None
    plain = has_labelled_loss(model)
    losses = []
    with one_thread_if_small(model):
        encoded = _encode_all(model, tokenizer, [source for source, _ in pairs], lean_model) if cache_encoder else None
        with _watched(steps) if interactive else nullcontext(range(steps)) as counted:
            for _ in counted:
                chosen = draw.choices(range(len(pairs)), k=batch_size)
                batch = batch_of([pairs[index] for index in chosen])
                rows = None if encoded is None else torch.cat([encoded[index] for index in chosen])
                if lean:
                    loss = lean_model(batch, encoded=rows)
                else:
                    if rows is not None:
                        batch = {**batch, "input_ids": None, "encoder_outputs": _padded(rows, batch["attention_mask"])}
                    loss = labelled_loss(model, batch) if plain else model(**batch).loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, clip)
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
    return losses


_SETTING_THREADS = threading.Lock()


@contextmanager
def one_thread_if_small(model: nn.Module) -> Iterator[None]:
    """Within the block, torch computes with one thread if the model is on a CPU and has fewer than SMALL numbers.

    The number of before is given back after the block, also after an error or an interrupt. It is never raised: one
    thread stays one thread, whoever set it. Other Python threads keep their numbers, so they may enter such blocks and
    leave them in any order.
    """
    with _SETTING_THREADS:  # in the midst of another thread's, the number would be that one's
        before = torch.get_num_threads()
    parameters = list(model.parameters())
    small = sum(parameter.numel() for parameter in parameters) < SMALL
    if before == 1 or not small or any(parameter.device.type != "cpu" for parameter in parameters):
        yield
        return
    try:
        with _SETTING_THREADS:
            torch.set_num_threads(1)
            # This holds for our Python thread. But those that have not computed yet would start with the number set
            # last, in any thread, and keep it for good: so another one, which ends at once, sets the old number.
            setting_back = threading.Thread(target=torch.set_num_threads, args=(before,))
            setting_back.start()
            setting_back.join()
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _watched(steps: int) -> Iterator[Iterator[int]]:
    """Yields `range(steps)`, which prints each tenth of the way and ends early after an interrupt.

    It prints step counts, no time: the same in every run. An interrupt waits for the end of its step, since half-way
    through the optimiser's some parameters have moved and others have not. A second one does not wait.
    """
    interrupts = []

    def hold(number, frame):
        if interrupts:
            signal.default_int_handler(number, frame)
        interrupts.append(number)

    def counted():
        print(f"{steps} steps:", end="", flush=True)
        for step in range(steps):
            yield step
            if interrupts:
                print(f"; interrupted after {step + 1}", end="")
                return
            if (step + 1) * 10 // steps > step * 10 // steps:
                print(f" {step + 1}", end="", flush=True)

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield counted()
    finally:
        signal.signal(signal.SIGINT, before)
        print()


def _has_bfloat16_instructions() -> bool:
    """Whether torch's matrix products in bfloat16 have instructions of their own on this processor."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _warn_of_slow_bfloat16(model: nn.Module) -> None:
    on_cpu = (each.dtype for each in model.parameters() if each.device.type == "cpu")
    if torch.bfloat16 in on_cpu and not _has_bfloat16_instructions():
        warnings.warn(
            "the model is in bfloat16, for which this processor has no instructions: a step takes longer than in "
            "float32, so use model.float()",
            stacklevel=3,
        )


def _lean(model: nn.Module) -> LeanT5:
    prefix = attached_prefix(model)
    if prefix is None:
        raise ValueError("lean training needs a prefix that is attached to the model: `with prefix.attached(model):`")
    return LeanT5(model, prefix)


def _padded(rows: Tensor, attention_mask: Tensor) -> BaseModelOutput:
    """The encoder's output with the padding of this batch, on whichever side the tokenizer puts it."""
    states = rows.new_zeros(*attention_mask.shape, rows.shape[-1])
    states[attention_mask.bool()] = rows
    return BaseModelOutput(states)


@torch.no_grad()
def _encode_all(model: nn.Module, tokenizer, sources: Sequence[str], lean_model: LeanT5 | None) -> list[Tensor]:
    """The encoder's output `[source, d_model]` for each source, without its padding."""
    if not model.config.is_encoder_decoder:
        raise ValueError(
            f"a {type(model).__name__} has no encoder whose output could be cached: leave cache_encoder out"
        )
    prefix = attached_prefix(model)
    trained = any(parameter.requires_grad for parameter in model.encoder.parameters())
    dropout = has_dropout_on(model.encoder)
    if dropout or trained or (prefix is not None and "encoder" in prefix.sites):
        raise ValueError(
            "the encoder's output can be cached only if it never changes: freeze the model, put it in eval mode, and "
            f"train a prefix without the site 'encoder' (dropout on {dropout}, trainable {trained}, "
            f"sites {[] if prefix is None else list(prefix.sites)})"
        )
    states = []
    for start in range(0, len(sources), 128):
        batch = tokenizer(list(sources[start : start + 128]), padding=True, return_tensors="pt").to(model.device)
        real = batch.attention_mask.bool()
        rows = lean_model.encode(batch) if lean_model else model.encoder(**batch).last_hidden_state[real]
        states += rows.split(real.sum(dim=1).tolist())
    return states


@torch.no_grad()
def generate_texts(
    model,
    tokenizer,
    sources: Sequence[str],
    *,
    batch_size: int = 128,
    max_new_tokens: int = 64,
    separator: str | None = None,
    chat: bool = False,
    **generate_options,
) -> list[str]:
    """The model's text for each source, in the given order; of a decoder alone, what it writes behind the source.

    `separator` and `chat` are those that it was trained with (see `continuations`). Greedy, unless `generate_options`
    or the model's own generation config say otherwise. The model stays in the mode it is in: put it, and an attached
    prefix, in eval mode first.
    """
    check_texts(sources=sources)
    texts = []
    with one_thread_if_small(model):
        for start in range(0, len(sources), batch_size):
            some = list(sources[start : start + batch_size])
            if model.config.is_encoder_decoder:
                check_no_form(model, separator, chat)
                batch, begin = tokenizer(some, padding=True, return_tensors="pt").to(model.device), 0
            else:
                pairs = continuations(tokenizer, [(source, "") for source in some], separator=separator, chat=chat)
                batch = sources_of(collate_continuations(tokenizer, pairs, model.device))
                begin = batch["input_ids"].shape[1]
                generate_options = stops_of(model, tokenizer) | generate_options
            output = model.generate(**batch, max_new_tokens=max_new_tokens, **generate_options)
            texts += tokenizer.batch_decode(output[:, begin:], skip_special_tokens=True)
    return texts


def exact_match(predictions: Sequence[str], targets: Sequence[str]) -> float:
    """The share of predictions that equal their target, white space at the ends aside: 0 to 1.

    Raises ValueError if the lengths differ or nothing is given.
    """
    check_texts(predictions=predictions, targets=targets)
    if len(predictions) != len(targets) or not targets:
        raise ValueError(f"need as many predictions as targets, got {len(predictions)} and {len(targets)}")
    return sum(p.strip() == t.strip() for p, t in zip(predictions, targets, strict=True)) / len(targets)


def majority_baseline(train_targets: Sequence[str], test_targets: Sequence[str]) -> float:
    """Exact match of always answering with the most frequent target of the training set: 0 to 1.

    Raises ValueError if either list is empty.
    """
    if not train_targets:
        raise ValueError("there is no most frequent target: the training set is empty")
    most_frequent = Counter(train_targets).most_common(1)[0][0]
    return exact_match([most_frequent] * len(test_targets), test_targets)
