"""What has to work on another device than the CPU, and the tensor left on the CPU that has to be seen there.

Not collected with the other tests: test_second_device.py runs this file in a process of its own, since torch counts an
accelerator from then on. To run it alone: `python -m pytest tests/second_device_checks.py`.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import sys
import textwrap
from collections import Counter
from typing import NamedTuple

import nbformat
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from disguised_device import NAME, WANTING, register
from lessons import NOTEBOOKS
from torch import nn
from torch.utils._pytree import tree_leaves

import helpers
import helpers.course.figures.words
import helpers.masks
import helpers.prefix
import helpers.tuning.attach
import helpers.tuning.lean_t5
import helpers.tuning.losses
import helpers.tuning.peft_prefix
import helpers.tuning.routing
import helpers.tuning.training
from helpers import (
    LeanT5,
    MultiHeadAttention,
    PrefixEncoder,
    PrefixPerRow,
    T5Prefix,
    T5WithPrefix,
    causal_mask,
    from_peft,
    load_base,
    load_task,
    padding_mask,
    to_peft,
)
from helpers.tuning.peft_prefix import PeftT5Prefix
from helpers.tuning.training import collate, fit, generate_texts

REFUSED = "[Ee]xpected all tensors to be on the same device|expected to be in the same device"
PAIRS = load_task("german").train[:12]
SOURCES = ["2030-05-17 Fri", "1999-12-31 Fri", "?"]  # the last is padded
DECODER = ("decoder", "cross")


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    if WANTING:
        pytest.skip(WANTING)
    return register()


@functools.cache
def base_on(device):
    model, tokenizer = load_base("dates")
    return model.requires_grad_(False).to(device), tokenizer


def prefix_on(device, kind=T5Prefix, prefix_length=3, **options):
    """The same numbers on every device, large enough to change texts."""
    torch.manual_seed(0)
    prefix = kind.for_model(base_on("cpu")[0], prefix_length=prefix_length, init_std=1.0, **options)
    return prefix.to(device)


def batch_on(device):
    return collate(base_on("cpu")[1], PAIRS, device)


def gradients(loss, module) -> list[torch.Tensor]:
    """The loss, and its gradients at the module's parameters."""
    return [loss.detach(), *torch.autograd.grad(loss, list(module.parameters()))]


def forward(device):
    model, prefix = base_on(device)[0], prefix_on(device)
    with prefix.attached(model):
        output = model(**batch_on(device))
    return [output.logits.detach(), *gradients(output.loss, prefix)]


def forward_with_maps(device):
    model, prefix = copy.deepcopy(base_on(device)[0]), prefix_on(device)
    model.set_attn_implementation("eager")
    with prefix.attached(model), torch.no_grad():
        output = model(**batch_on(device), output_attentions=True)
    return [*output.encoder_attentions, *output.decoder_attentions, *output.cross_attentions]


def prefix_on_the_cpu(device):
    """A prefix as `from_pretrained` gives it, in front of a model on the device."""
    model, prefix = base_on(device)[0], prefix_on("cpu")
    with prefix.attached(model):
        loss, *own = gradients(model(**batch_on(device)).loss, prefix)
    assert {gradient.device.type for gradient in own} == {"cpu"}
    return [gradient.to(device) for gradient in (loss, *own)]


def bfloat16(device):
    model, prefix = copy.deepcopy(base_on(device)[0]).bfloat16(), prefix_on(device)
    with prefix.attached(model), torch.no_grad():
        return model(**batch_on(device)).loss


def checkpointed(device):
    model, prefix = copy.deepcopy(base_on(device)[0]), prefix_on(device)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    model.train()  # transformers checkpoints in training mode only; the dropout of this base is 0
    with prefix.attached(model):
        return gradients(model(**batch_on(device), use_cache=False).loss, prefix)


def generate(options, device):
    model, tokenizer = base_on(device)
    with prefix_on(device).attached(model):
        return generate_texts(model, tokenizer, SOURCES, max_new_tokens=12, **options)


def rows(device):
    model, tokenizer = base_on(device)
    prefixes = [prefix_on(device), prefix_on(device, prefix_length=5, sites=("cross",)), None]
    three = PrefixPerRow(prefixes * 4)
    with three.attached(model):
        losses = gradients(model(**batch_on(device)).loss, three)
    with PrefixPerRow(prefixes).attached(model):
        return losses, generate_texts(model, tokenizer, SOURCES, max_new_tokens=12)


def lean(device):
    model, prefix = base_on(device)[0], prefix_on(device)
    return gradients(LeanT5(model, prefix)(batch_on(device)), prefix)


def lean_rows(device):
    three = PrefixPerRow([prefix_on(device), prefix_on(device, prefix_length=5, sites=DECODER), None] * 4)
    return gradients(LeanT5(base_on(device)[0], three)(batch_on(device)), three)


def trained(options, device):
    """Losses and the prefix after three steps."""
    model, tokenizer = base_on(device)
    prefix = prefix_on(device, sites=DECODER)
    with prefix.attached(model):
        losses = fit(model, prefix.parameters(), tokenizer, PAIRS, steps=3, batch_size=8, **options)
    return losses, [parameter.detach() for parameter in prefix.parameters()]


def engine(device):
    """The module for engines, with an MLP, dropout off, over two batches whose labels are counted together."""
    prefix = T5Prefix.for_model(base_on("cpu")[0], prefix_length=3, mid_dim=8).to(device)
    torch.manual_seed(0)
    for parameter in prefix.parameters():
        nn.init.normal_(parameter)
    prefixed = T5WithPrefix(copy.deepcopy(base_on(device)[0]), prefix)
    batch = batch_on(device)
    return gradients(prefixed(**batch, num_items_in_batch=2 * (batch["labels"] != -100).sum()).loss, prefix)


def saved(device):
    folder = next(FOLDERS)
    prefix = prefix_on(device, dropout=0.1)
    prefix.save_pretrained(folder)
    loaded = T5Prefix.from_pretrained(folder).to(device)
    files = sorted(path.name for path in folder.iterdir())  # a weight's file is named after its content
    return files, [*loaded.state_dict().values()], [*prefix.fold().state_dict().values()]


def peft_checkpoint(device):
    folder, (model, tokenizer) = next(FOLDERS), base_on(device)
    to_peft(prefix_on(device, PeftT5Prefix, sites=("decoder",)), folder)
    prefix = from_peft(folder, model)
    assert {parameter.device.type for parameter in prefix.parameters()} == {torch.device(device).type}
    with prefix.attached(model):
        losses = gradients(model(**batch_on(device)).loss, prefix)
        return losses, generate_texts(model, tokenizer, SOURCES, max_new_tokens=12)


def multi_head(device):
    """Attention, self and cross, with masks, bias and a prefix, by both of its computations."""
    torch.manual_seed(0)
    attention, encoder = MultiHeadAttention(8, 2), PrefixEncoder(3, 1, 2, 4, mid_dim=5)
    x, context, bias = torch.randn(2, 4, 8), torch.randn(2, 6, 8), torch.randn(2, 2, 4, 6)
    attention, encoder = attention.to(device), encoder.to(device)
    x, context, bias = (tensor.to(device) for tensor in (x, context, bias))
    padding = padding_mask(torch.tensor([[1] * 6, [1] * 4 + [0] * 2], device=device))
    results = []
    for need_weights in (False, True):
        options = {"prefix": tuple(encoder(2)[0]), "need_weights": need_weights}
        own = attention(x, mask=causal_mask(4, device=device), **options)
        cross = attention(x, context, mask=padding, bias=bias, **options)
        own, cross = (each[0] if need_weights else each for each in (own, cross))
        results += gradients(own.square().mean() + cross.square().mean(), attention)
    folded = encoder.fold()
    results += [folded(1), *PrefixEncoder.from_key_values(folded(1)).state_dict().values()]
    return results


def figure(device):
    """Figures take tensors from any device, with a gradient or without."""
    tensor = torch.arange(6.0).view(2, 3).requires_grad_().to(device)
    return helpers.course.figures.words.to_array(tensor).tolist()


PATHS = {
    "forward and backward": forward,
    "attention maps": forward_with_maps,
    "a prefix on the CPU": prefix_on_the_cpu,
    "bfloat16": bfloat16,
    "gradient checkpointing": checkpointed,
    "generate": functools.partial(generate, {}),
    "generate, static cache": functools.partial(generate, {"cache_implementation": "static"}),
    "generate, no cache": functools.partial(generate, {"use_cache": False}),
    "generate, beams": functools.partial(generate, {"num_beams": 3, "num_return_sequences": 2}),
    "a prefix per row": rows,
    "lean": lean,
    "lean, a prefix per row": lean_rows,
    "fit": functools.partial(trained, {}),
    "fit, lean": functools.partial(trained, {"lean": True}),
    "fit, encoder cached": functools.partial(trained, {"cache_encoder": True}),
    "fit, lean, encoder cached": functools.partial(trained, {"lean": True, "cache_encoder": True}),
    "fit, interactive": functools.partial(trained, {"interactive": True}),
    "in one module": engine,
    "save and load": saved,
    "peft's files": peft_checkpoint,
    "MultiHeadAttention and PrefixEncoder": multi_head,
    "figures": figure,
}


@pytest.fixture(autouse=True)
def folders(tmp_path_factory):
    """New folders for the paths that write files."""
    global FOLDERS
    FOLDERS = iter(lambda: tmp_path_factory.mktemp("saved"), None)


def parts(result, device) -> tuple[list[torch.Tensor], list]:
    """The result's tensors, on the CPU once they are known to lie on the device; and its texts and numbers."""
    leaves = tree_leaves(result)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} <= {torch.device(device).type}
    return [tensor.cpu() for tensor in tensors], [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", PATHS)
def test_computes_what_the_cpu_computes(name):
    (expected, expected_others), (got, others) = (parts(PATHS[name](device), device) for device in ("cpu", NAME))
    tolerance = 0.05 if name == "bfloat16" else 1e-4
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=1e-5)
    assert [
        pytest.approx(other, rel=1e-4) if isinstance(other, float) else other for other in expected_others
    ] == others
    assert got or others


class Plant(NamedTuple):
    """A tensor left on the CPU: one piece of one function of helpers, and what stands there instead."""

    path: str
    owner: object  # the module or class whose function it is
    function: str
    piece: str
    fault: str


ATTENTION, JOIN = helpers.tuning.routing, helpers.prefix
PLANTS = [
    Plant(
        "forward and backward",
        ATTENTION,
        "_added_to_scores",
        "key.new_zeros(mask.shape).masked_fill(~mask, torch.f",
        "torch.zeros(mask.shape).masked_fill(~mask, torch.f",
    ),
    Plant("attention maps", ATTENTION, "join_prefix", "prefix.to(content)", "prefix.cpu()"),
    Plant("a prefix on the CPU", ATTENTION, "join_prefix", "prefix.to(content)", "prefix.to(content.dtype)"),
    Plant("bfloat16", ATTENTION, "join_prefix", "prefix.to(content)", "prefix.to('cpu', content.dtype)"),
    Plant("gradient checkpointing", ATTENTION, "join_prefix", "prefix.to(content)", "prefix.cpu()"),
    Plant("generate", helpers.tuning.training, "generate_texts", ".to(model.device), 0", ", 0"),
    Plant("generate, static cache", ATTENTION, "join_prefix", "prefix.to(content)", "prefix.cpu()"),
    Plant("generate, no cache", helpers.tuning.training, "generate_texts", ".to(model.device), 0", ", 0"),
    Plant("generate, beams", ATTENTION, "join_prefix", "prefix.to(content)", "prefix.cpu()"),
    Plant(
        "a prefix per row",
        PrefixPerRow,
        "key_values",
        "known[0].new_zeros(*known[0].shape[:4], longest",
        "torch.zeros(*known[0].shape[:4], longest",
    ),
    Plant(
        "a prefix per row",
        PrefixPerRow,
        "visible",
        "torch.arange(max(lengths), device=device)",
        "torch.arange(max(lengths))",
    ),
    Plant("a prefix per row", PrefixPerRow, "visible", "torch.tensor(lengths, device=device)", "torch.tensor(lengths)"),
    Plant("lean", LeanT5, "__call__", "labels.shape[1], device=labels.device", "labels.shape[1]"),
    Plant("lean", LeanT5, "_site", "torch.zeros_like(mask, dtype", "torch.zeros(mask.shape, dtype"),
    Plant("lean", helpers.tuning.lean_t5.Padding, "pad", "rows.new_zeros(", "torch.zeros("),
    Plant(
        "lean",
        helpers.tuning.losses._FrozenCrossEntropy,
        "forward",
        "torch.ones_like(total)",
        "torch.ones(total.shape)",
    ),
    Plant(
        "lean, a prefix per row",
        PrefixPerRow,
        "visible",
        "torch.arange(max(lengths), device=device)",
        "torch.arange(max(lengths))",
    ),
    Plant("fit", helpers.tuning.training, "collate", "batch.input_ids.to(device)", "batch.input_ids"),
    Plant("fit", helpers.tuning.training, "collate", "labels.to(device)", "labels"),
    Plant("fit, lean", helpers.tuning.training, "collate", "batch.attention_mask.to(device)", "batch.attention_mask"),
    Plant("fit, encoder cached", helpers.tuning.training, "_encode_all", ".to(model.device)", ""),
    Plant("fit, encoder cached", helpers.tuning.training, "_padded", "rows.new_zeros(", "torch.zeros("),
    Plant("fit, lean, encoder cached", helpers.tuning.training, "_encode_all", ".to(model.device)", ""),
    Plant("fit, interactive", helpers.tuning.training, "collate_for", "pairs, device)\n", "pairs)\n"),
    Plant("in one module", PrefixEncoder, "forward", "self.mlp(self.embedding)", "self.mlp(self.embedding.cpu())"),
    Plant(
        "save and load",
        PrefixEncoder,
        "forward",
        "self.dropout(self.mlp(self.embedding))",
        "self.embedding + torch.zeros(self.embedding.shape)",
    ),
    Plant("peft's files", PeftT5Prefix, "position_bias", "device=device", "device='cpu'"),
    Plant(
        "MultiHeadAttention and PrefixEncoder",
        helpers.masks,
        "causal_mask",
        "dtype=torch.bool, device=device",
        "dtype=torch.bool",
    ),
    Plant(
        "MultiHeadAttention and PrefixEncoder",
        helpers.masks,
        "padding_mask",
        "visible.new_ones(visible.shape[0], prefix_length)",
        "torch.ones(visible.shape[0], prefix_length).bool()",
    ),
    Plant(
        "MultiHeadAttention and PrefixEncoder",
        MultiHeadAttention,
        "forward",
        "torch.where(mask, bias, -torch.inf)",
        "torch.where(mask, bias, torch.full(bias.shape, -torch.inf))",
    ),
    Plant("figures", helpers.course.figures.words, "to_array", ".detach().cpu()", ".detach()"),
]


def plant(monkeypatch, owner, function: str, piece: str, fault: str) -> None:
    """Put the fault into the function, for every module of the paths that has imported it."""
    was = owner.__dict__[function]
    plain = inspect.unwrap(getattr(was, "__func__", was))
    source = textwrap.dedent(inspect.getsource(plain))
    assert source.count(piece) == 1, f"{piece!r} is not once in {function}"
    made = {}
    exec(source.replace(piece, fault), plain.__globals__, made)
    monkeypatch.setattr(owner, function, made[function])
    if inspect.ismodule(owner):
        importers = [module for name, module in sys.modules.items() if name.startswith("helpers") or name == __name__]
        for module in importers:
            if module.__dict__.get(function) is was:
                monkeypatch.setattr(module, function, made[function])


@pytest.mark.parametrize("planted", PLANTS, ids=lambda planted: f"{planted.path}: {planted.fault[:40]}")
def test_a_tensor_left_on_the_cpu_is_seen(planted, monkeypatch):
    path, *fault = planted
    plant(monkeypatch, *fault)
    PATHS[path]("cpu")  # no fault there
    with pytest.raises(
        (RuntimeError, TypeError), match=f"{REFUSED}|can't convert {NAME}:0 device type tensor to numpy"
    ):
        PATHS[path](NAME)


def test_a_fault_is_planted_in_every_path():
    assert {planted.path for planted in PLANTS} == set(PATHS)


# Lessons 7 and 8: their own cells on the device, with less data and fewer steps. Left out are figures, scores that are
# read from files, and sizes of what a kernel keeps, which differ between kernels.
LESSONS = {
    7: """imports ask task score attach q105-counts batch exercise-training-step optimizer loop test yours untouched
        broken broken-run exercise-teacher-forcing mended-run save tasks rows words own gpu-settings gpu-trial
        gpu-t5-small""",
    8: """load score maps knock-out share-and-drop part-alone exercise-content-weights relative sites""",
}
SHORTENED = {
    '"cuda" if torch.cuda.is_available() else "cpu"': "DEVICE",
    "gpu = torch.cuda.is_available()": "gpu = True",  # t5-small's cells too, with another base in its place
    "is_bf16_supported(including_emulation=False)": "is_available()",
    '"google-t5/t5-small"': "None",
    "[2][0] for": "[0][0] for",
    "range(151)": "range(4)",
    "range(20)": "range(3)",
    "steps=60": "steps=3",
    'save_pretrained("card-for-t5-small")': "save_pretrained(Path(tempfile.mkdtemp()))",
}
needs_notebooks = pytest.mark.skipif(not NOTEBOOKS.is_dir(), reason="the notebooks are not in this copy")


def lesson(number: int, device: str, monkeypatch) -> dict[str, str]:
    """What the cells print, by their names, with `device` where they say "cuda", and where they leave it out."""

    def little_of(name):
        task = load_task(name)
        return dataclasses.replace(task, train=task.train[:1000], validation=task.validation[:5], test=task.test[:5])

    def few_steps(*args, steps, **options):
        return fit(*args, **{**options, "steps": min(steps, 3), "batch_size": 8})

    def few_tokens(*args, max_new_tokens=12, **options):
        return generate_texts(*args, max_new_tokens=min(max_new_tokens, 12), **options)

    def base(name=None):
        model, tokenizer = load_base(name)
        return model.to(device), tokenizer

    collate = helpers.tuning.training.collate
    monkeypatch.setattr(helpers, "load_task", little_of)
    monkeypatch.setattr(helpers, "load_base", base)
    for home in (helpers, helpers.tuning.training):
        monkeypatch.setattr(home, "fit", few_steps, raising=False)
        monkeypatch.setattr(home, "generate_texts", few_tokens, raising=False)
    monkeypatch.setattr(
        helpers.tuning.training, "collate", lambda tokenizer, pairs, to=device: collate(tokenizer, pairs, to)
    )
    [path] = NOTEBOOKS.glob(f"0{number}_*.ipynb")
    sources = {cell.id[3:]: cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"}
    figures = dict.fromkeys(("heat_map", "curves", "dots", "blocks"), lambda *args, **options: None)
    for name, nothing in figures.items():
        monkeypatch.setattr(helpers.course.figures, name, nothing)
    printed, names = {}, {"__name__": "lesson", "DEVICE": device}
    names |= {**figures, "Counter": Counter}  # imported in cells that are left out
    for name in LESSONS[number].split():
        source = functools.reduce(lambda text, piece: text.replace(piece, SHORTENED[piece]), SHORTENED, sources[name])
        with contextlib.redirect_stdout(io.StringIO()) as written:
            exec(compile(source, f"cell {name}", "exec"), names)
        printed[name] = written.getvalue()
    return printed


@needs_notebooks
@pytest.mark.parametrize("number", LESSONS)
def test_a_lesson_prints_what_it_prints_on_the_cpu(number):
    on_each = {}
    for device in ("cpu", NAME):
        with pytest.MonkeyPatch.context() as monkeypatch:
            on_each[device] = lesson(number, device, monkeypatch)
    assert on_each[NAME] == on_each["cpu"]
    assert sum(map(len, on_each[NAME].values())) > 500


@needs_notebooks
@pytest.mark.parametrize("number", LESSONS)
def test_a_tensor_left_on_the_cpu_is_seen_in_a_lesson(number, monkeypatch):
    plant(monkeypatch, helpers.tuning.training, "collate", "labels.to(device)", "labels")
    with pytest.raises(RuntimeError, match=REFUSED):
        lesson(number, NAME, monkeypatch)


def test_a_new_prefix_lies_where_its_model_does():
    prefix = T5Prefix.for_model(base_on(NAME)[0], prefix_length=2, mid_dim=4)
    assert {parameter.device.type for parameter in prefix.parameters()} == {NAME}


# The device itself.

MIXED = {
    "sums": lambda here, there: here + there,
    "products": lambda here, there: here @ there,
    "joining": lambda here, there: torch.cat([here, there]),
    "in place": lambda here, there: there.add_(here),
    "masks": lambda here, there: here.masked_fill(there > 0, 0.0),
    "choices": lambda here, there: torch.where(there > 0, here, here),
    "tables": lambda here, there: F.embedding(there.long().abs() % 3, here),
    "numbers where rows are chosen": lambda here, there: here.index_select(0, torch.tensor(0)),
    "indices from the device": lambda here, there: there[torch.zeros(1, dtype=torch.long, device=NAME)],
    "values put in": lambda here, there: here.index_put_((torch.tensor([0]),), there[0]),
    "comparisons": lambda here, there: torch.equal(here, there),
    "attention": lambda here, there: F.scaled_dot_product_attention(here[None], here[None], here[None], there),
    "losses": lambda here, there: F.cross_entropy(here, there.argmax(1)),
}


@pytest.mark.parametrize("name", MIXED)
def test_the_device_refuses_a_tensor_of_the_cpu(name):
    there = torch.randn(3, 3)
    MIXED[name](there, there.clone()) if name != "indices from the device" else None
    with pytest.raises(RuntimeError, match=f"{REFUSED}|indices should be either on cpu or on the same device"):
        MIXED[name](there.to(NAME), there)


def test_the_device_admits_what_a_gpu_admits():
    there = torch.randn(3, 3)
    here = there.to(NAME)
    for ours, theirs in (
        (here * torch.tensor(2.0), there * 2),
        (here[torch.tensor([2, 0])], there[[2, 0]]),
        (here[there > 0], there[there > 0]),
        (torch.zeros(3, 3).copy_(here), there),
        (here.clone().fill_(torch.tensor(7.0)), torch.full((3, 3), 7.0)),
        (here.clone().resize_(2, 2), there.clone().resize_(2, 2)),
        (torch.add(here, 1, out=torch.empty(0, device=NAME)), there + 1),
        (torch.tensor([1.0, 2.0], device=NAME), torch.tensor([1.0, 2.0])),
        (copy.deepcopy(here), there),
    ):
        assert torch.equal(ours.cpu(), theirs)
    assert here[0, 0].item() == there[0, 0].item()
    assert here.tolist() == there.tolist()


def test_views_share_memory_and_copies_do_not():
    here = torch.zeros(2, 3, device=NAME)
    view, copied = here.T[1:].unsqueeze(0), here.to("cpu").to(NAME)
    view += 1
    assert here.sum().item() == 4
    assert copied.sum().item() == 0


def test_numpy_and_the_cpus_generator_are_refused():
    with pytest.raises(TypeError, match="can't convert"):
        np.asarray(torch.zeros(2, device=NAME))
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(2, device=NAME, generator=torch.Generator())


def test_parameters_keep_their_identity_when_a_module_moves():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = shared = first.weight
    both = nn.Sequential(first, second).to(NAME)
    assert both[0].weight is both[1].weight is shared
    assert type(shared) is nn.Parameter
    assert shared.device == torch.device(NAME, 0)
