import torch

from helpers import load_base
from helpers.course.listening import listen


def test_each_attention_is_heard_and_the_model_is_left_as_it_was():
    model, _ = load_base("dates")
    ids = {"input_ids": torch.arange(10, 16)[None], "decoder_input_ids": torch.arange(20, 24)[None]}
    before = model(**ids).logits
    heard = listen(model, **ids)
    assert list(heard) == ["encoder 0", "encoder 1", "decoder 0", "cross 0", "decoder 1", "cross 1"]
    for place, (hidden, context, output) in heard.items():
        own = 6 if place.startswith("encoder") else 4
        assert hidden.shape == output.shape == (1, own, 128)
        assert context.shape == (1, 4 if place.startswith("decoder") else 6, 128)
    attention = model.encoder.block[1].layer[0].SelfAttention
    bias = model.encoder.block[0].layer[0].SelfAttention.compute_bias(6, 6)
    torch.testing.assert_close(attention(heard["encoder 1"].hidden, position_bias=bias)[0], heard["encoder 1"].output)
    assert torch.equal(model(**ids).logits, before)
    assert not any(module._forward_hooks for module in model.modules())
