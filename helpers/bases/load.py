"""`load_base`: a bundled small model, or one of the Hugging Face hub that writes texts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5ForConditionalGeneration,
)
from transformers.utils import logging

_BUNDLED = Path(__file__).parent
BUNDLED_NAMES = ("wordnet", "dates")


def load_base(name: str | os.PathLike | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in float32 and evaluation mode, and its tokenizer.

    None or "wordnet" is the bundled T5 on WordNet, "dates" the bundled byte-level T5 on dates; neither needs
    a network. Anything else is a folder or a name on the hub, for `from_pretrained`: an encoder-decoder, or a decoder
    alone. A hub that cannot be reached raises OSError, a model that writes no texts ValueError; another type than these
    raises TypeError.
    """
    if name is None:
        name = "wordnet"
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"name must be None, a string or a path, not {type(name).__name__}")
    if name in BUNDLED_NAMES:
        return _load_bundled(name)
    if not Path(name).is_dir():
        _check_reachable(str(name))
    config = AutoConfig.from_pretrained(name)
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto_class.from_pretrained(name, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(name)


def _load_bundled(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    folder = _BUNDLED / name
    with _no_progress_bars():
        # The weights are stored in float16, and transformers would otherwise compute in that too.
        model = T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    if name == "dates":
        return model.eval(), ByT5Tokenizer()  # its vocabulary is the 256 bytes: there is nothing to load
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """A bar for a file of a few megabytes on this disk would only leave its timings in a notebook."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _check_reachable(name: str) -> None:
    """Ask the hub once: without a network, `from_pretrained` tries each file six times, over 23 seconds."""
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=10)
    except (HfHubHTTPError, HFValidationError):
        return  # the hub answered, or the name cannot be on it: from_pretrained says what is wrong
    except Exception as error:  # no connection; its class differs between versions of huggingface_hub
        why = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(" .:")
        raise OSError(
            f"{name!r} is neither a folder nor in the cache, and the Hugging Face hub could not be reached ({why}); "
            f"without a network, use one of the bundled bases: {', '.join(map(repr, BUNDLED_NAMES))}"
        ) from None  # else this sentence would stand below the tracebacks of every library on the way
