"""helpers.bases.load: the bundled models, a folder, and a hub that is not there."""

import os
import subprocess
import sys
import time
import traceback

import pytest
import torch
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration
from transformers.utils import logging

from helpers.bases import load as base
from helpers.bases.load import load_base

NOT_CACHED = "attention-to-prefix/no-such-model"


def test_dates_is_float32_in_evaluation_mode():
    model, tokenizer = load_base("dates")
    assert isinstance(model, T5ForConditionalGeneration)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert not model.training
    assert len(tokenizer) == model.config.vocab_size == 384
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (
        model.config.pad_token_id,
        model.config.eos_token_id,
    )


def test_heads_times_head_dim_is_not_the_model_dim():
    config = load_base("dates")[0].config
    assert config.num_heads * config.d_kv != config.d_model


def test_none_and_wordnet_are_the_same_base():
    default, named = load_base(), load_base("wordnet")
    assert default[0].config.vocab_size == named[0].config.vocab_size == len(default[1])
    assert torch.equal(default[0].shared.weight, named[0].shared.weight)
    assert default[0].dtype == torch.float32
    assert not default[0].training


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """What a fresh process without a network, and with an empty cache, makes of each name."""
    code = f"""
import helpers
for name in {[*base.BUNDLED_NAMES, NOT_CACHED]}:
    try:
        print(name, helpers.load_base(name)[0].num_parameters(), sep="\\t")
    except OSError as error:
        print(name, error, sep="\\t")
"""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path_factory.mktemp("empty"))}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return {line.split("\t")[0]: line.split("\t")[1:] for line in result.stdout.splitlines()}, result.stderr


@pytest.mark.parametrize("name", base.BUNDLED_NAMES)
def test_bundled_bases_load_offline(name, offline):
    (number_of_parameters,) = offline[0][name]
    assert int(number_of_parameters) > 500_000


def test_bundled_bases_load_silently(offline):
    assert offline[1] == ""


def test_without_a_hub_it_says_so(offline):
    (message,) = offline[0][NOT_CACHED]
    assert message.startswith(f"'{NOT_CACHED}' is neither a folder nor in the cache")
    assert " could not be reached (OfflineModeIsEnabled: " in message
    assert message.endswith("'wordnet', 'dates'")


@pytest.mark.parametrize("was_enabled", [True, False])
def test_progress_bars_are_as_they_were(was_enabled):
    before = logging.is_progress_bar_enabled()
    switch = {True: logging.enable_progress_bar, False: logging.disable_progress_bar}
    switch[was_enabled]()
    try:
        load_base("dates")
        assert logging.is_progress_bar_enabled() is was_enabled
    finally:
        switch[before]()


def test_a_folder_is_loaded_in_float32_and_evaluation_mode(tmp_path):
    config = T5Config(vocab_size=384, d_model=8, d_kv=4, d_ff=8, num_heads=3, num_layers=1)
    T5ForConditionalGeneration(config).half().save_pretrained(tmp_path)
    ByT5Tokenizer().save_pretrained(tmp_path)
    for name in (tmp_path, str(tmp_path)):
        model, tokenizer = load_base(name)
        assert model.dtype == torch.float32
        assert not model.training
        assert tokenizer("a").input_ids == [100, 1]


def test_a_failing_connection_is_tried_once(monkeypatch):
    attempts = []

    def refuse(*args, **kwargs):
        attempts.append(args)
        raise ConnectionError("no route to host")

    monkeypatch.setattr(base, "get_hf_file_metadata", refuse)
    start = time.perf_counter()
    with pytest.raises(OSError, match="could not be reached") as caught:
        load_base(NOT_CACHED)
    assert time.perf_counter() - start < 2
    assert len(attempts) == 1
    assert " could not be reached (ConnectionError: no route to host); without a network, use" in str(caught.value)


def test_without_a_hub_no_other_traceback_stands_above_the_sentence(monkeypatch):
    def refuse(*args, **kwargs):
        try:
            raise TimeoutError("a library's own error")
        except TimeoutError as error:
            raise ConnectionError("no route\nto host") from error

    monkeypatch.setattr(base, "get_hf_file_metadata", refuse)
    with pytest.raises(OSError, match="could not be reached") as caught:
        load_base(NOT_CACHED)
    seen = "".join(traceback.format_exception(caught.value))
    assert seen.count("Traceback (most recent call last)") == 1
    assert "a library's own error" not in seen
    assert seen.splitlines()[-1] == f"OSError: {caught.value}"


def test_a_name_that_no_hub_can_hold_is_not_called_a_network_problem():
    with pytest.raises(OSError, match="Repo id") as caught:
        load_base("a/b/c")
    assert "could not be reached" not in str(caught.value)


@pytest.mark.parametrize("name", [3, b"dates", ["dates"], True])
def test_another_type_is_refused(name):
    with pytest.raises(TypeError, match=f"not {type(name).__name__}"):
        load_base(name)
