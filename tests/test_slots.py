import pytest
import torch

from helpers import T5Prefix, load_base
from helpers.course.slots import slot_weights, without_slot
from helpers.tuning.training import collate


@pytest.fixture(scope="module")
def parts():
    model, tokenizer = load_base("dates")
    torch.manual_seed(0)
    prefix = T5Prefix.for_model(model, prefix_length=3, init_std=1.0)
    return model, prefix, collate(tokenizer, [("1965-05-10 Mon", "10. Mai"), ("1965", "Montag, 10. Mai 1965")])


def test_weights_on_the_slots_without_padding(parts):
    model, prefix, batch = parts
    found = slot_weights(model, prefix, batch)
    real = {"encoder": 15 + 5, "decoder": 8 + 21, "cross": 8 + 21}  # bytes, and the end
    assert {place: list(weights.shape) for place, weights in found.items()} == {
        f"{site} {layer}": [queries, 4, 3] for site, queries in real.items() for layer in (0, 1)
    }
    with prefix.attached(model):
        maps = model(**batch, output_attentions=True).cross_attentions[1]
    assert torch.equal(found["cross 1"][:8], maps[0, :, :8, :3].transpose(0, 1))
    assert torch.equal(found["cross 1"][8:], maps[1, :, :21, :3].transpose(0, 1))


def test_one_slot_less(parts):
    _, prefix, _ = parts
    shorter, whole = without_slot(prefix, "cross", 1), prefix.key_values("cross")
    assert torch.equal(shorter.key_values("cross"), whole[..., [0, 2], :])
    assert torch.equal(shorter.key_values("encoder"), prefix.key_values("encoder"))
    assert whole.shape[-2] == 3, "the whole prefix is left as it was"
