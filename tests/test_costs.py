"""What a training step costs, in numbers that are the same on every machine."""

import pytest
import torch
from benchmarks.measuring import Operations
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from helpers.tuning.attach import T5Prefix
from helpers.tuning.lean_t5 import LeanT5
from helpers.tuning.losses import labelled_loss

BATCH, SOURCE, TARGET = 3, 11, 7
ENCODER_LAYERS, DECODER_LAYERS, WIDTH, HEADS, INNER, FEED_FORWARD, VOCABULARY = 5, 4, 24, 8, 40, 36, 71
CASES = pytest.mark.parametrize(
    ("sites", "cached"),
    [(("decoder",), False), (("decoder",), True), (("cross",), False), (("encoder", "decoder", "cross"), False)],
    ids=["decoder", "decoder, encoder cached", "cross", "three sites"],
)
WAYS = pytest.mark.parametrize("lean", [False, True], ids=["attached", "lean"])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        num_heads=HEADS,
        d_kv=INNER // HEADS,
        d_ff=FEED_FORWARD,
        num_layers=ENCODER_LAYERS,
        num_decoder_layers=DECODER_LAYERS,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(2, VOCABULARY, (BATCH, n), generator=generator) for n in (SOURCE, TARGET))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def measured_step(model, batch, sites, cached, lean, mode, prefix_length=20):
    """Forward and backward pass under `mode`; returns the prefix. With `cached`, the encoder ran before."""
    prefix = T5Prefix.for_model(model, prefix_length=prefix_length, sites=sites)
    if lean:
        lean_model = LeanT5(model, prefix)
        encoded = lean_model.encode(batch) if cached else None
        with mode:
            lean_model(batch, encoded=encoded).backward()
        return prefix
    if cached:
        encoded = model.encoder(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        batch = {**batch, "input_ids": None, "encoder_outputs": BaseModelOutput(encoded)}
    with prefix.attached(model), mode:
        labelled_loss(model, batch).backward()
    return prefix


def needed_products(sites, cached) -> int:
    """Floating-point operations of the matrix products outside attention that no arrangement avoids.

    Forward: every projection once. Backward: a product for each projection whose input depends on the prefix.
    """
    source, target = 2 * BATCH * SOURCE * WIDTH, 2 * BATCH * TARGET * WIDTH  # of one output feature
    encoder_layer, decoder_layer = 4 * INNER + 2 * FEED_FORWARD, 6 * INNER + 2 * FEED_FORWARD
    cross_key_value = source * DECODER_LAYERS * 2 * INNER
    encoder, decoder = source * ENCODER_LAYERS * encoder_layer, target * DECODER_LAYERS * decoder_layer
    forward = (0 if cached else encoder) + cross_key_value + decoder + target * VOCABULARY
    backward = decoder - target * 3 * INNER + target * VOCABULARY  # the first queries, keys, values read embeddings
    if "encoder" in sites:
        backward += encoder - source * 3 * INNER + cross_key_value
    elif "decoder" not in sites:  # nothing of the first self-attention, nor the first cross-attention's query
        backward -= target * 2 * INNER
    return forward + backward


@WAYS
@CASES
def test_no_matrix_product_is_done_in_vain(model, batch, sites, cached, lean):
    counter = FlopCounterMode(display=False)
    measured_step(model, batch, sites, cached, lean, counter)
    products = counter.get_flop_counts()["Global"].items()
    assert sum(n for name, n in products if "attention" not in str(name)) == needed_products(sites, cached)


@WAYS
@CASES
def test_operations_do_not_creep_up(model, batch, sites, cached, lean):
    """On a GPU the number of operations decides the time of a small model's step."""
    counter = Operations()
    measured_step(model, batch, sites, cached, lean, counter)
    most = {
        (("decoder",), False): (695, 568),
        (("decoder",), True): (515, 428),
        (("cross",), False): (672, 560),
        (("encoder", "decoder", "cross"), False): (980, 815),
    }[sites, cached][lean]
    assert most * 0.8 < counter.count <= most, "lower the bound" if counter.count < most else "more operations"


@WAYS
@CASES
def test_every_number_of_the_prefix_has_a_gradient(model, batch, sites, cached, lean):
    prefix = measured_step(model, batch, sites, cached, lean, Operations())
    zero = sum((parameter.grad == 0).sum().item() for parameter in prefix.parameters())
    assert zero == 0
    assert all(parameter.grad is None for parameter in model.parameters())


class Kept(saved_tensors_hooks):
    """The sizes of the storages that autograd keeps for the backward pass."""

    def __init__(self):
        self.sizes = {}
        super().__init__(self.keep, lambda tensor: tensor)

    def keep(self, tensor):
        storage = tensor.untyped_storage()
        self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor


@WAYS
@CASES
def test_a_slot_keeps_its_joined_keys_and_values_and_no_more(model, batch, sites, cached, lean):
    totals = []
    for prefix_length in (16, 48):
        kept = Kept()
        prefix = measured_step(model, batch, sites, cached, lean, kept, prefix_length)
        own = {parameter.untyped_storage().data_ptr() for parameter in prefix.parameters()}
        totals.append(sum(size for place, size in kept.sizes.items() if place not in own))
    slots = 4 * (48 - 16)  # bytes of one number for each
    layers = {"encoder": ENCODER_LAYERS, "decoder": DECODER_LAYERS, "cross": DECODER_LAYERS}
    joined = slots * 2 * BATCH * INNER * sum(layers[site] for site in sites)
    masks = {"encoder": HEADS * SOURCE, "decoder": HEADS * TARGET, "cross": 1}  # one for all layers, [.., query, slot]
    assert joined <= totals[1] - totals[0] <= joined + slots * BATCH * sum(masks[site] for site in sites)
