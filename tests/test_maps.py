"""Attention maps without the slots' columns, for viewers; and where transformers would cut off the wrong ones."""

import pytest
import torch
import transformers
from packaging.version import Version
from test_t5 import GREEDY, STEPS, difference, make_inputs, make_model, make_prefix, source
from transformers import T5EncoderModel

from helpers import content_attentions
from helpers.tuning.attach import PrefixPerRow

MAPS = {"output_attentions": True}
GENERATED = {**MAPS, "return_dict_in_generate": True}


def all_maps(given):
    return [given] if isinstance(given, torch.Tensor) else [each for inner in given for each in all_maps(inner)]


def fits_a_viewer(maps, layers, queries, keys):
    """What bertviz's model_view asks: for each layer one map [batch, heads, query, key]."""
    assert [tuple(each.shape) for each in maps] == [(3, 3, queries, keys)] * layers


@pytest.mark.parametrize("rows", [False, True], ids=["prefix", "rows"])
def test_maps_of_a_forward_pass(rows):
    model, inputs = make_model(implementation="eager"), make_inputs()
    prefix = make_prefix(model)
    if rows:
        prefix = PrefixPerRow([prefix, None, make_prefix(model, 3, seed=2)])
    plain = model(**inputs, **MAPS)
    with prefix.attached(model):
        outputs = model(**inputs, **MAPS)
    got = content_attentions(outputs, prefix)
    assert type(got) is type(outputs)
    assert torch.equal(got.logits, outputs.logits)
    fits_a_viewer(got.encoder_attentions, 4, 6, 6)
    fits_a_viewer(got.decoder_attentions, 2, 5, 5)
    fits_a_viewer(got.cross_attentions, 2, 5, 6)
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        for whole, part in zip(outputs[name], got[name], strict=True):
            assert (
                torch.equal(whole[..., :7].sum(-1) + part.sum(-1), whole.sum(-1))
                or difference(whole[..., :7].sum(-1) + part.sum(-1), whole.sum(-1)) < 1e-12
            )
            assert (part.sum(-1) < 1 - 1e-6).any()
    again = content_attentions(outputs, prefix, renormalise=True)
    for name in ("encoder_attentions", "decoder_attentions"):  # of the first layer, whose states know no prefix yet
        assert difference(again[name][0], plain[name][0]) < 1e-10
    assert all(difference(each.sum(-1), torch.ones(())) < 1e-12 for each in all_maps(again.cross_attentions))


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"use_cache": False}], ids=str)
def test_maps_of_generate(options):
    model, inputs = make_model(implementation="eager"), make_inputs()
    prefix = make_prefix(model)
    with prefix.attached(model):
        outputs = model.generate(**source(inputs), **GREEDY, **GENERATED, **options)
    got = content_attentions(outputs, prefix)
    assert torch.equal(got.sequences, outputs.sequences)
    fits_a_viewer(got.encoder_attentions, 4, 6, 6)
    assert len(got.decoder_attentions) == len(got.cross_attentions) == STEPS
    for step in range(STEPS):
        assert {each.shape[-1] for each in got.decoder_attentions[step]} == {step + 1}
        assert {each.shape[-1] for each in got.cross_attentions[step]} == {6}
    if not options:  # the maps of a forward pass over the text
        with prefix.attached(model):
            whole = content_attentions(model(**source(inputs), decoder_input_ids=got.sequences[:, :-1], **MAPS), prefix)
        for step in range(STEPS):
            for layer in range(2):
                row = whole.decoder_attentions[layer][:, :, step, : step + 1]
                assert difference(got.decoder_attentions[step][layer][:, :, 0], row) < 1e-10


def test_maps_of_stacks_and_of_sites_without_a_prefix():
    model, inputs = make_model(implementation="eager"), make_inputs()
    prefix = make_prefix(model, sites=("encoder", "cross"))
    encoder_only = T5EncoderModel(model.encoder.config).double().eval()
    encoder_only.set_attn_implementation("eager")
    encoder_only.load_state_dict(model.state_dict(), strict=False)
    with prefix.attached(model):
        outputs = model(**inputs, **MAPS)
        encoded = model.encoder(**source(inputs), **MAPS)
        decoded = model.decoder(
            input_ids=inputs["decoder_input_ids"], encoder_hidden_states=encoded.last_hidden_state, **MAPS
        )
    fits_a_viewer(content_attentions(outputs, prefix).decoder_attentions, 2, 5, 5)
    fits_a_viewer(content_attentions(encoded, prefix).attentions, 4, 6, 6)
    fits_a_viewer(content_attentions(decoded, prefix).attentions, 2, 5, 5)
    fits_a_viewer(content_attentions(decoded, prefix).cross_attentions, 2, 5, 6)
    own = make_prefix(encoder_only, sites=("encoder",))
    with own.attached(encoder_only):
        fits_a_viewer(content_attentions(encoder_only(**source(inputs), **MAPS), own).attentions, 4, 6, 6)


def test_outputs_without_maps_or_with_those_of_another_prefix_are_refused():
    model, inputs = make_model(implementation="eager"), make_inputs()
    prefix = make_prefix(model)
    with (
        prefix.attached(model),
        pytest.raises(ValueError, match=r"set_attn_implementation\('eager'\).*output_attentions"),
    ):
        content_attentions(model(**inputs), prefix)
    sdpa = make_model()
    with prefix.attached(sdpa), pytest.raises(ValueError, match="hold no attention maps"):
        content_attentions(sdpa(**inputs, **MAPS), prefix)
    with pytest.raises(ValueError, match=r"\[3, 3, 6, 6\] of site 'encoder' has no 7 columns .* or none\?"):
        content_attentions(model(**inputs, **MAPS), prefix)


def test_assisted_decoding_gives_no_maps_of_the_decoder():
    """transformers cuts them to the length of the text, which leaves slots and no text."""
    if Version(transformers.__version__) < Version("5.24"):
        pytest.skip("the oldest transformers fails at this without a prefix too")
    model, inputs = make_model(implementation="eager"), make_inputs(batch=1)
    assistant = make_model(seed=3, implementation="eager")
    for options in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": assistant}):
        with make_prefix(model).attached(model):
            with pytest.raises(ValueError, match="maps in assisted decoding with a prefix at the site 'decoder'"):
                model.generate(**source(inputs), **GREEDY, **GENERATED, **options)
            model.generate(**source(inputs), **GREEDY, **options)
        prefix = make_prefix(model, sites=("encoder", "cross"))  # whose decoder maps have no slots
        with prefix.attached(model):
            outputs = model.generate(**source(inputs), **GREEDY, **GENERATED, **options)
        got = content_attentions(outputs, prefix)
        assert [step[0].shape[-1] for step in got.decoder_attentions] == list(range(1, STEPS + 1))
        assert {each.shape[-1] for each in all_maps(got.cross_attentions)} == {6}
        with make_prefix(assistant).attached(assistant):  # its maps are thrown away
            outputs = model.generate(**source(inputs), **GREEDY, **GENERATED, assistant_model=assistant)
        assert [step[0].shape[-1] for step in outputs.decoder_attentions] == list(range(1, STEPS + 1))
