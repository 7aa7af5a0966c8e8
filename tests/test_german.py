import pytest
import torch
from torch import nn

from helpers import T5Prefix, generate_texts, load_base, load_task
from helpers.bases.scores import BASES
from helpers.course.german import ASKED, HEAD_DIM, NUM_HEADS, NUM_LAYERS, german_loss, learn_german, write_date
from helpers.prefix import PrefixEncoder
from helpers.tuning.training import collate

SIZES = NUM_LAYERS, NUM_HEADS, HEAD_DIM


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    return PrefixEncoder(5, *SIZES, init_std=1.0)


def test_the_loss_is_that_of_a_prefix_with_the_same_numbers_at_each_site(encoder):
    model, tokenizer = load_base("dates")
    batch = collate(tokenizer, load_task("german").validation[:ASKED])
    prefix = T5Prefix.for_model(model, prefix_length=5)
    for site, rows in zip(("encoder", "decoder", "cross"), encoder.embedding.data.chunk(3, dim=1), strict=True):
        prefix.encoders[site].embedding.data = rows
    with torch.no_grad():
        assert german_loss() == pytest.approx(model(**batch).loss.item())
        with prefix.attached(model):
            assert german_loss(encoder) == pytest.approx(model(**batch).loss.item())


def test_it_learns_german_and_the_t5_stays_as_it_is(encoder):
    before, without = german_loss(encoder), german_loss()
    losses = learn_german(encoder, rate=0.3, steps=12)
    assert len(losses) == 12
    assert german_loss(encoder) < before / 2
    assert german_loss() == without


def test_a_date_is_written_with_the_prefix_and_without():
    model, tokenizer = load_base("dates")
    date = "2030-05-17 Fri"
    assert write_date(date) == generate_texts(model, tokenizer, [date])[0]
    german = T5Prefix.from_pretrained(BASES / "dates" / "prefixes" / "german")
    rows = torch.cat([german.key_values(site) for site in ("encoder", "decoder", "cross")])
    assert write_date(date, lambda: rows) == "Freitag, 17. Mai 2030"


def test_the_seed_chooses_the_dates():
    losses = []
    for seed in (0, 0, 1):
        torch.manual_seed(0)
        losses.append(learn_german(PrefixEncoder(5, *SIZES), rate=0.3, seed=seed, steps=2))
    assert losses[0] == losses[1] != losses[2]


def test_an_mlp_is_trained_too():
    torch.manual_seed(0)
    encoder = PrefixEncoder(5, *SIZES, mid_dim=16)
    before = [parameter.detach().clone() for parameter in encoder.parameters()]
    learn_german(encoder, rate=0.01, steps=2)
    assert all(not torch.equal(*pair) for pair in zip(before, encoder.parameters(), strict=True))


def test_another_number_of_layers_is_refused():
    with pytest.raises(ValueError, match="layers"):
        german_loss(lambda: torch.zeros(9, 2, 1, NUM_HEADS, 5, HEAD_DIM))
    with pytest.raises(ValueError, match="nothing to train"):
        learn_german(nn.Module(), rate=0.1)
