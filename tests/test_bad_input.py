"""Every public function, fed with what does not fit: one clear sentence at the door, raised by helpers itself.

And with what is odd but right, such as an empty batch: the right answer.
"""

import math
import re
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from test_t5 import make_inputs, make_model, make_prefix

import helpers
from helpers.attention import MultiHeadAttention, scaled_dot_product_attention
from helpers.bases.load import load_base
from helpers.bases.tasks import load_task
from helpers.heads import merge_heads, split_heads
from helpers.masks import causal_mask, padding_mask
from helpers.prefix import PrefixEncoder, join_prefix, split_prefix
from helpers.tuning.attach import PrefixPerRow, T5Prefix, detach_prefix
from helpers.tuning.training import collate, exact_match, fit, generate_texts, linear_warmup_decay, majority_baseline

pytestmark = pytest.mark.usefixtures("unchecked")

BATCH, HEADS, SEQ, DIM, PREFIX = 2, 3, 5, 7, 4
x3 = torch.zeros(BATCH, SEQ, HEADS * DIM)
x4 = torch.zeros(BATCH, HEADS, SEQ, DIM)
prefix4 = torch.zeros(1, HEADS, PREFIX, DIM)
model = make_model(num_layers=2, num_decoder_layers=1)
attention = MultiHeadAttention(HEADS * DIM, HEADS)
encoder = PrefixEncoder(PREFIX, 2, HEADS, DIM)
t5_prefix = make_prefix(model)
key_values = torch.zeros(2, 2, 1, HEADS, PREFIX, DIM)


def attend(query=x4, key=x4, value=x4, mask=None, bias=None, **options):
    return scaled_dot_product_attention(query, key, value, mask, bias, **options)


def join(prefix_key=prefix4, prefix_value=prefix4, key=x4, value=x4, mask=None, bias=None, **options):
    return join_prefix(prefix_key, prefix_value, key, value, mask, bias, **options)


def encoder_with(**options):
    return PrefixEncoder(**({"prefix_length": PREFIX, "num_layers": 2, "num_heads": HEADS, "head_dim": DIM} | options))


REFUSED = {  # what is called: what its sentence must hold
    "split_heads: rank 2": (lambda: split_heads(x3[0], HEADS), r"\[5, 21\]"),
    "split_heads: rank 4": (lambda: split_heads(x4, HEADS), r"\[2, 3, 5, 7\]"),
    "split_heads: 4 heads": (lambda: split_heads(x3, 4), "21 features.*4 equal heads"),
    "split_heads: 0 heads": (lambda: split_heads(x3, 0), "0 equal heads"),
    "split_heads: half a head": (lambda: split_heads(x3, 1.5), "num_heads.*whole number.*1.5"),
    "split_heads: list": (lambda: split_heads([[[1.0]]], 1), "x.*tensor.*list"),
    "merge_heads: rank 3": (lambda: merge_heads(x3), r"\[2, 5, 21\]"),
    "merge_heads: array": (lambda: merge_heads(np.zeros((1, 1, 1, 1))), "x.*tensor.*ndarray"),
    "causal_mask: negative": (lambda: causal_mask(-1), "query_length=-1"),
    "causal_mask: float": (lambda: causal_mask(2.0), "query_length.*whole number.*2.0"),
    "causal_mask: tensor": (lambda: causal_mask(x3), "query_length.*whole number.*Tensor"),
    "causal_mask: negative prefix": (lambda: causal_mask(2, prefix_length=-3), "prefix_length=-3"),
    "padding_mask: rank 3": (lambda: padding_mask(torch.ones(2, 1, 3)), r"\[2, 1, 3\]"),
    "padding_mask: additive": (lambda: padding_mask(torch.tensor([[0.0, -math.inf]])), "other values"),
    "padding_mask: NaN": (lambda: padding_mask(torch.tensor([[0.0, math.nan]])), "other values"),
    "padding_mask: list": (lambda: padding_mask([[1, 0]]), "attention_mask.*tensor.*list"),
    "padding_mask: prefix": (lambda: padding_mask(torch.ones(1, 2), prefix_length=-1), "-1"),
    "attention: rank": (lambda: attend(query=x3), r"\[2, 5, 21\]"),
    "attention: head_dim": (lambda: attend(key=x4[..., :6]), r"\[2, 3, 5, 6\]"),
    "attention: heads": (lambda: attend(query=x4[:, :1]), r"\[2, 1, 5, 7\]"),
    "attention: batch": (lambda: attend(query=x4[:1]), r"\[1, 3, 5, 7\]"),
    "attention: fewer values": (lambda: attend(value=x4[:, :, :3]), r"\[2, 3, 3, 7\]"),
    "attention: integers": (lambda: attend(x4.long(), x4.long(), x4.long()), "float.*int64"),
    "attention: two dtypes": (lambda: attend(query=x4.double()), "same dtype.*float64.*float32"),
    "attention: float mask": (lambda: attend(mask=torch.zeros(SEQ, SEQ)), "bool.*float32"),
    "attention: wide mask": (lambda: attend(mask=torch.ones(SEQ, 6, dtype=torch.bool)), r"\[5, 6\]"),
    "attention: bool bias": (lambda: attend(bias=torch.ones(SEQ, SEQ, dtype=torch.bool)), "bias.*float"),
    "attention: wide bias": (lambda: attend(bias=torch.ones(HEADS, SEQ, 9)), r"\[3, 5, 9\]"),
    "attention: dropout": (lambda: attend(dropout=1.5), "dropout.*1.5"),
    "attention: list": (lambda: attend(query=[1.0]), "query.*tensor.*list"),
    "attention: mask list": (lambda: attend(mask=[True]), "mask.*tensor.*list"),
    "MultiHeadAttention: heads": (lambda: MultiHeadAttention(20, 3), "20.*3 equal heads"),
    "MultiHeadAttention: size": (lambda: MultiHeadAttention(0, 3), "model_dim=0"),
    "MultiHeadAttention: context_dim": (lambda: MultiHeadAttention(21, 3, context_dim=0), "context_dim=0"),
    "MultiHeadAttention: dropout": (lambda: MultiHeadAttention(21, 3, dropout=-0.1), "dropout.*-0.1"),
    "MultiHeadAttention: half a head": (lambda: MultiHeadAttention(21, 3.0), "num_heads.*whole number.*3.0"),
    "module: width": (lambda: attention(x3[..., :20]), r"\[2, 5, 20\]"),
    "module: rank": (lambda: attention(x3[0]), r"\[5, 21\]"),
    "module: context": (lambda: attention(x3, x3[..., :4]), r"context.*\[2, 5, 4\]"),
    "module: integers": (lambda: attention(x3.long()), "x.*int64"),
    "module: other dtype": (lambda: attention(x3.double()), "x.*float64.*float32"),
    "module: list": (lambda: attention([[1.0]]), "x.*tensor.*list"),
    "module: float mask": (lambda: attention(x3, mask=torch.zeros(SEQ, SEQ)), "mask"),
    "module: prefix of one": (lambda: attention(x3, prefix=(prefix4,)), r"prefix.*\(key, value\).*1"),
    "module: prefix a tensor": (lambda: attention(x3, prefix=prefix4), r"prefix.*\(key, value\).*\[1, 3, 4, 7\]"),
    "module: prefix heads": (lambda: attention(x3, prefix=(prefix4[:, :2],) * 2), r"\[1, 2, 4, 7\]"),
    "module: mask with prefix": (
        lambda: attention(x3, prefix=(prefix4,) * 2, mask=torch.ones(SEQ, SEQ + PREFIX, dtype=torch.bool)),
        r"\[5, 9\].*without the prefix",
    ),
    "join_prefix: rank": (lambda: join(prefix_key=prefix4[0]), r"\[3, 4, 7\]"),
    "join_prefix: heads": (lambda: join(prefix_key=prefix4[:, :1]), r"\[1, 1, 4, 7\]"),
    "join_prefix: batch": (lambda: join(prefix_key=prefix4.expand(3, -1, -1, -1)), r"\[3, 3, 4, 7\]"),
    "join_prefix: fewer values": (lambda: join(prefix_value=prefix4[:, :, 1:]), r"\[1, 3, 3, 7\]"),
    "join_prefix: integer mask": (lambda: join(mask=torch.ones(SEQ, SEQ).long()), "mask.*int64"),
    "join_prefix: wide mask": (lambda: join(mask=torch.ones(SEQ, 9)), r"\[5, 9\]"),
    "join_prefix: list": (lambda: join(key=[1.0]), "key.*tensor.*list"),
    "join_prefix: prefix_mask": (lambda: join(prefix_mask=torch.ones(1, 4)), "prefix_mask.*float32"),
    "split_prefix: width": (lambda: split_prefix(x3, 2, 3, 7), r"2 \* 3 \* 7 = 84\], got \[\d+, 5, \d+\]"),
    "split_prefix: rank": (lambda: split_prefix(prefix4, 2, 3, 7), r"\[batch, prefix, .*got \[1, 3, 4, 7\]"),
    "split_prefix: sizes": (lambda: split_prefix(x3, 0, 3, 7), "'num_layers': 0"),
    "PrefixEncoder: negative": (lambda: encoder_with(prefix_length=-1), "prefix_length=-1"),
    "PrefixEncoder: layers": (lambda: encoder_with(num_layers=0), "'num_layers': 0"),
    "PrefixEncoder: mid_dim": (lambda: encoder_with(mid_dim=0), "'mid_dim': 0"),
    "PrefixEncoder: float": (lambda: encoder_with(head_dim=7.0), "head_dim.*whole number.*7.0"),
    "PrefixEncoder: dropout": (lambda: encoder_with(dropout=2.0), "dropout.*2.0"),
    "PrefixEncoder: negative std": (lambda: encoder_with(init_std=-0.1), "init_std.*finite.*-0.1"),
    "PrefixEncoder: NaN std": (lambda: encoder_with(init_std=math.nan), "init_std.*finite.*nan"),
    "PrefixEncoder: infinite std": (lambda: encoder_with(init_std=math.inf), "init_std.*finite.*inf"),
    "PrefixEncoder: std of an MLP": (lambda: encoder_with(init_std=1.0, mid_dim=5), "init_std=1.0, mid_dim=5"),
    "encoder: batch": (lambda: encoder(-1), "-1"),
    "from_key_values: rank": (lambda: PrefixEncoder.from_key_values(key_values[0]), r"\[2, 1, 3, 4, 7\]"),
    "from_key_values: rows": (lambda: PrefixEncoder.from_key_values(key_values.expand(-1, -1, 2, -1, -1, -1)), "2, 2"),
    "from_key_values: list": (lambda: PrefixEncoder.from_key_values([1.0]), "key_values.*tensor.*list"),
    "for_model: no T5": (lambda: T5Prefix.for_model(attention), "not on a MultiHeadAttention"),
    "for_model: no module": (lambda: T5Prefix.for_model("t5-small"), "not on a str"),
    "for_model: sites": (lambda: T5Prefix.for_model(model, sites="encoder"), "as a tuple, got 'encoder'"),
    "for_model: site": (lambda: T5Prefix.for_model(model, sites=("self",)), r"\('self',\)"),
    "for_model: no sites": (lambda: T5Prefix.for_model(model, sites=()), r"got \(\)"),
    "for_model: length": (lambda: T5Prefix.for_model(model, prefix_length=-1), "-1"),
    "key_values: site": (lambda: t5_prefix.key_values("middle"), "'middle'"),
    "attach: no T5": (lambda: t5_prefix.attach(attention), "not on a MultiHeadAttention"),
    "attach: path": (lambda: t5_prefix.attach("t5-small"), "not on a str"),
    "attach: other shape": (lambda: t5_prefix.attach(make_model(num_heads=2)), r"\(2, 3, 5\).*\(4, 2, 5\)"),
    "detach: no T5": (lambda: detach_prefix(attention), "MultiHeadAttention"),
    "rows: not prefixes": (lambda: PrefixPerRow([model]), "T5ForConditionalGeneration"),
    "rows: none": (lambda: PrefixPerRow([]), "0 rows"),
    "from_pretrained: nothing": (lambda: T5Prefix.from_pretrained("/nowhere"), "/nowhere holds no saved prefix"),
    "load_base: number": (lambda: load_base(3), "not int"),
    "load_task: unknown": (lambda: load_task("klingon"), "'klingon'.*german"),
    "load_task: number": (lambda: load_task(3), "3.*german"),
    "collate: no pairs": (lambda: collate(None, []), "at least one pair"),
    "fit: no pairs": (lambda: fit(model, t5_prefix.parameters(), None, [], steps=1), "0 pairs"),
    "fit: frozen": (lambda: fit(model, model.parameters(), None, [("a", "b")], steps=1), "0 trainable parameters"),
    "fit: steps": (lambda: fit(model, t5_prefix.parameters(), None, [("a", "b")], steps=-1), "steps.*-1"),
    "schedule: steps": (lambda: linear_warmup_decay(-1), "steps.*-1"),
    "schedule: warmup": (lambda: linear_warmup_decay(10, warmup=1.5), "warmup.*1.5"),
    "exact_match: lengths": (lambda: exact_match(["a"], ["a", "b"]), "1 and 2"),
    "exact_match: nothing": (lambda: exact_match([], []), "0 and 0"),
    "exact_match: one text": (lambda: exact_match("abc", "abc"), "list of texts"),
    "majority: nothing": (lambda: majority_baseline([], ["a"]), "training set is empty"),
    "generate_texts: one text": (lambda: generate_texts(model, None, "abc"), "list of texts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_one_clear_sentence_at_the_door(case):
    call, sentence = REFUSED[case]
    with pytest.raises((ValueError, TypeError, FileNotFoundError)) as caught:
        call()
    message = str(caught.value)
    assert re.search(sentence, message), message
    assert "\n" not in message
    assert len(message) < 330
    raised_in = Path(traceback.extract_tb(caught.tb)[-1].filename)
    assert raised_in.is_relative_to(Path(helpers.__file__).parent), f"raised in {raised_in}"


# --- odd, but right -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_empty_batches_and_prefixes(batch, length):
    assert merge_heads(split_heads(x3[:batch], HEADS)).shape == (batch, SEQ, HEADS * DIM)
    output, weights = attend(x4[:batch], x4[:batch], x4[:batch])
    assert output.shape == (batch, HEADS, SEQ, DIM)
    assert weights.shape == (batch, HEADS, SEQ, SEQ)
    pair = (prefix4[:, :, :length],) * 2
    key, value, mask, bias = join_prefix(*pair, x4[:batch], x4[:batch], torch.ones(SEQ, SEQ, dtype=torch.bool))
    assert key.shape == value.shape == (batch, HEADS, length + SEQ, DIM)
    assert mask.shape == (SEQ, length + SEQ)
    assert bias is None
    for need_weights in (False, True):
        result = attention(x3[:batch], prefix=pair, need_weights=need_weights)
        assert (result[0] if need_weights else result).shape == (batch, SEQ, HEADS * DIM)
    pairs = encoder_with(prefix_length=length)(batch)
    assert pairs.shape == (2, 2, batch, HEADS, length, DIM)


def test_no_keys_at_all_give_zeros():
    output, weights = attend(key=x4[:, :, :0], value=x4[:, :, :0])
    assert weights.shape == (BATCH, HEADS, SEQ, 0)
    assert torch.equal(output, torch.zeros_like(x4))


def test_nan_stays_in_its_own_row():
    """A NaN in one example is no reason to lose the others, with or without a prefix."""
    states = torch.randn(BATCH, SEQ, HEADS * DIM)
    states[0, 2, 1] = math.nan
    for prefix in (None, (prefix4, prefix4)):
        for need_weights in (False, True):
            result = attention(states, prefix=prefix, need_weights=need_weights)
            output = result[0] if need_weights else result
            assert output[0].isnan().any()
            assert output[1].isfinite().all()


def test_nan_in_one_row_of_a_t5_batch():
    inputs = make_inputs()
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).clone()
    embeddings[1] = math.nan
    del inputs["input_ids"]
    with t5_prefix.attached(model):
        logits = model(inputs_embeds=embeddings, **inputs).logits
    assert logits[1].isnan().all()
    assert logits[[0, 2]].isfinite().all()


def test_one_nan_in_a_prefix_is_seen_and_not_hidden():
    broken = make_prefix(model)
    broken.encoders["cross"].embedding.data[0, 0] = math.nan
    with broken.attached(model):
        assert model(**make_inputs()).logits.isnan().any()
