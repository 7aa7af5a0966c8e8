"""What peft's prefix tuning does with decoders alone: `python tests/peft_report.py` measures it and stores the report.

Random small models in float64, a random prefix of 3 slots, 6 greedy steps. For each family,

- forward: the largest difference between peft's logits and those of `from_peft`'s prefix, in one batch with padding on
  the left;
- cached, uncached: whose logits peft's `generate` gives, of one text without padding: "prefix" if they are those of its
  own forward pass over the text so far, at every step; "bare" if they are the model's without a prefix; or how many of
  the first steps are the prefix's;
- left padding: the largest difference of the first step's logits that two tokens of padding make (cached, uncached);
- checkpointing: the largest difference of the prefix's gradients, relative, or what is raised.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import peft
import torch
import transformers
from families_oracle import difference, make_inputs, make_model
from peft import PrefixTuningConfig, get_peft_model
from transformers.utils import logging

from helpers import from_peft
from helpers.tuning.families import sites_of

REPORT = Path(__file__).parent / "stored" / "peft_report.json"
FAMILIES = (
    *("GPT-2", "GPT-NeoX", "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma 2", "Gemma 3"),
    *("GPT-OSS", "OLMo", "OLMo 2", "Phi", "Phi-3", "SmolLM3"),
)
STEPS = 6
SAME = 1e-4  # of logits that differ by about 1 where something is lost


def tuned_by_peft(family: str, num_virtual_tokens: int = 3, **options):
    """A model as peft wraps it, with a prefix that is strong enough to be seen."""
    model = make_model(family)
    layers, heads, head_dim = sites_of(model)["decoder"].shape
    config = PrefixTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=num_virtual_tokens,
        num_layers=layers,
        num_attention_heads=heads,
        token_dim=heads * head_dim,
        **options,
    )
    tuned = get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in tuned.prompt_encoder.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).double()
    return tuned


def one_text(family: str) -> dict:
    inputs = make_inputs(family)
    return {name: each[:1] for name, each in inputs.items()}


def steps_of(model, inputs: dict, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """The text, and the logits of each step `[step, vocabulary]`."""
    output = model.generate(
        **inputs,
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return output.sequences, torch.stack(output.logits)[:, 0]


@torch.no_grad()
def whose_logits(family: str, tuned, use_cache: bool) -> str:
    text, logits = steps_of(tuned, one_text(family), use_cache=use_cache)
    read = {"input_ids": text[:, :-1], "attention_mask": torch.ones_like(text[:, :-1])}
    of_prefix = tuned(**read).logits[0, -STEPS:]
    of_bare = make_model(family)(**read).logits[0, -STEPS:]
    right = [difference(ours, theirs) < SAME for ours, theirs in zip(logits, of_prefix, strict=True)]
    if all(right):
        return "prefix"
    if difference(logits, of_bare) < SAME:
        return "bare"
    return f"prefix in the first {right.index(False)} of {STEPS} steps"


@torch.no_grad()
def of_left_padding(family: str, tuned, use_cache: bool) -> float:
    inputs = one_text(family)
    padding = torch.zeros_like(inputs["input_ids"][:, :2])
    padded = {name: torch.cat([padding, each], dim=1) for name, each in inputs.items()}
    return difference(*(steps_of(tuned, each, use_cache=use_cache)[1][0] for each in (inputs, padded)))


def of_checkpointing(family: str) -> float | str:
    gradients = []
    for checkpointing in (False, True):
        tuned = tuned_by_peft(family)
        if checkpointing:
            tuned.base_model.gradient_checkpointing_enable({"use_reentrant": False})
            tuned.train()
        try:
            logits = tuned(**one_text(family)).logits
            weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5), dtype=logits.dtype)
            (logits * weights).mean().backward()
        except Exception as error:
            return type(error).__name__
        gradient = tuned.prompt_encoder.default.embedding.weight.grad
        if gradient is None:
            return "no gradient"
        gradients.append(gradient)
    return difference(*gradients) / gradients[0].abs().max().item()


def of_forward(family: str, tuned, folder: Path) -> float:
    tuned.save_pretrained(folder)
    model, inputs = make_model(family), make_inputs(family, side="left")
    real = inputs["attention_mask"].bool()
    with torch.no_grad(), from_peft(folder, model).attached(model):
        return difference(model(**inputs).logits[real], tuned(**inputs).logits[real])


def attempted(measured: Callable, *args, **options):
    """What is measured, or the name of the error that peft ends with."""
    try:
        return measured(*args, **options)
    except Exception as error:
        return type(error).__name__


def measure(family: str, folder: Path) -> dict:
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned = tuned_by_peft(family)
        return {
            "forward": of_forward(family, tuned, folder),
            "cached": attempted(whose_logits, family, tuned, use_cache=True),
            "uncached": attempted(whose_logits, family, tuned, use_cache=False),
            "left padding, cached": attempted(of_left_padding, family, tuned, use_cache=True),
            "left padding, uncached": attempted(of_left_padding, family, tuned, use_cache=False),
            "checkpointing": of_checkpointing(family),
        }


def versions() -> dict:
    return {"peft": peft.__version__, "transformers": transformers.__version__}


def main() -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        measured = {family: measure(family, Path(folder) / family) for family in FAMILIES}
    rounded = {
        family: {name: float(f"{each:.1e}") if isinstance(each, float) else each for name, each in found.items()}
        for family, found in measured.items()
    }
    REPORT.write_text(json.dumps({"versions": versions(), "families": rounded}, indent=1) + "\n", encoding="utf-8")
    for family, found in rounded.items():
        print(family, found)


if __name__ == "__main__":
    main()
