"""What a T5WithPrefix answers for the model inside, and what it refuses."""

import copy

import pytest
import torch
from test_also_train import make_classifier
from test_engines import make_model, make_prefixed
from transformers.trainer_utils import validate_quantization_for_training

from helpers.tuning.engines import _ANSWERED_BY_THE_MODEL


def test_numbers_and_bytes_are_those_of_model_and_prefix_together():
    prefixed = make_prefixed(mid_dim=11)
    own = sum(p.numel() for p in prefixed.prefix.parameters())
    base = sum(p.numel() for p in prefixed.model.parameters())
    assert prefixed.num_parameters() == own + base == sum(p.numel() for p in prefixed.parameters())
    assert prefixed.num_parameters(only_trainable=True) == own
    assert prefixed.num_parameters(exclude_embeddings=True) == own + prefixed.model.num_parameters(
        exclude_embeddings=True
    )
    assert prefixed.get_memory_footprint() == 4 * own + prefixed.model.get_memory_footprint()
    frozen = prefixed.prefix.encoders["cross"].requires_grad_(False)
    assert prefixed.num_parameters(only_trainable=True) == own - sum(p.numel() for p in frozen.parameters())
    head = make_classifier()
    trained = sum(p.numel() for p in head.prefix.parameters()) + 16 * 16 + 16 + 3 * 16 + 3
    assert head.num_parameters(only_trainable=True) == trained


def test_what_the_model_answers_is_the_models():
    prefixed = make_prefixed()
    names = ("device", "dtype", "main_input_name", "supports_gradient_checkpointing", "tp_size", "_no_split_modules")
    for name in names:
        assert getattr(prefixed, name) == getattr(prefixed.model, name)
    assert prefixed.get_encoder() is prefixed.model.encoder
    assert prefixed.get_output_embeddings() is prefixed.model.lm_head
    assert prefixed.can_generate()
    ids = torch.tensor([[5, 6]])
    assert prefixed.prepare_decoder_input_ids_from_labels(labels=ids).tolist() == [[0, 5]]
    prefixed.model.hf_device_map = {"": "cpu"}
    assert prefixed.hf_device_map == {"": "cpu"}
    config = copy.deepcopy(prefixed.config)
    prefixed.config = config
    assert prefixed.model.config is config
    assert "config" not in vars(prefixed)


@pytest.mark.parametrize(
    "name",
    """
    encoder shared lm_head base_model name_or_path resize_token_embeddings set_attn_implementation add_adapter
    load_adapter active_adapters model_tags add_model_tags save_distributed_checkpoint loss_function nonsense
    set_input_embeddings tie_weigths _is_accelerate_prepared init_weights dequantize key_values sites fold
    """.split(),
)
def test_whatever_else_is_asked_is_an_error_that_says_where_to_look(name):
    prefixed = make_prefixed()
    with pytest.raises(
        AttributeError, match=rf"has no attribute '{name}', .*: ask \.model\.{name}, or \.prefix\.{name}"
    ):
        getattr(prefixed, name)
    assert not hasattr(prefixed, name)
    assert getattr(prefixed, name, 7) == 7


def test_every_name_that_the_model_answers_is_one_that_some_model_has():
    """The exceptions are set on a model that is quantised, dispatched or sharded when it is loaded."""
    model = make_model()
    missing = {name for name in _ANSWERED_BY_THE_MODEL if not hasattr(model, name)}
    if "activation_checkpointing_enable" in missing:  # transformers 5.15 had one set of names less
        missing -= {name for name in missing if "activation_checkpointing" in name}
        missing -= {"is_distributed_loading_by_transformers"}
    assert missing <= {
        "hf_device_map",
        "hf_quantizer",
        "quantization_method",
        "is_loaded_in_8bit",
        "is_loaded_in_4bit",
        "set_requires_gradient_sync",
        "set_requires_all_reduce",
    }


def test_a_quantised_base_is_known_to_the_trainer_as_one_that_trains_something_else():
    prefixed = make_prefixed()
    prefixed.model.is_quantized = True
    validate_quantization_for_training(prefixed)
    with pytest.raises(ValueError, match="purely quantized"):
        validate_quantization_for_training(prefixed.model)
