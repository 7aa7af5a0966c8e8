"""T5Prefix against the oracle, by model family and mode: `python tests/oracle_table.py` prints the table.

Each entry is the largest absolute difference of logits (of scores, for beams) in float64. `generate` returns its logits
in float32, so that its entries are float32's rounding of logits of about 4.
"""

import oracle
import torch
import transformers
from packaging.version import Version
from test_t5 import (
    by_site,
    cache_of,
    difference,
    make_inputs,
    make_model,
    make_prefix,
    norms_in_float64,
    source,
    with_cache,
)
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from helpers.tuning.attach import PrefixPerRow

GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
MODELS = {  # name: (family of test_t5, what differs from its sizes)
    "T5 1.0": ("t5", {}),
    "T5 1.1, Flan-T5": ("t5 v1.1", {"d_model": 32, "d_kv": 8, "num_heads": 3}),  # as 6 * 64 = 384 against 512
    "ByT5": (
        "t5 v1.1",
        {"vocab_size": 384, "num_layers": 6, "num_decoder_layers": 2},
    ),  # three times as deep an encoder
    "MT5": ("mt5", {}),
    "UMT5": ("umt5", {}),
    "T5-3B's widths": ("t5", {"d_model": 12, "d_kv": 16, "num_heads": 3}),  # 32 * 128 = 4096 is 4 * 1024
    "T5-11B's widths": ("t5", {"d_model": 8, "d_kv": 8, "num_heads": 16}),  # 128 * 128 = 16 * 1024
    "deeper decoder": ("t5", {"num_layers": 2, "num_decoder_layers": 4}),
}
STEPS = 7


def forward(model, inputs, prefix):
    with prefix.attached(model):
        return difference(model(**inputs).logits, want(model, inputs, prefix))


def want(model, inputs, prefix):
    return oracle.t5(model, **inputs, prefixes=by_site(prefix))["logits"]


def embeddings(model, inputs, prefix):
    embed = model.get_input_embeddings()
    with prefix.attached(model):
        got = model(
            inputs_embeds=embed(inputs["input_ids"]),
            attention_mask=inputs["attention_mask"],
            decoder_inputs_embeds=embed(inputs["decoder_input_ids"]),
        ).logits
    return difference(got, want(model, inputs, prefix))


def in_steps(cache):
    """Token by token, some together, with a KV cache of the kind that `cache(model)` makes."""

    def run(model, inputs, prefix):
        kv, logits = cache(model), []
        with prefix.attached(model), torch.no_grad():
            encoded = model.encoder(**source(inputs))
            for tokens in inputs["decoder_input_ids"].split([2, 1, 2], dim=1):
                step = model(
                    encoder_outputs=encoded,
                    attention_mask=inputs["attention_mask"],
                    decoder_input_ids=tokens,
                    use_cache=True,
                    **with_cache(kv),
                )
                kv = cache_of(step)
                logits.append(step.logits)
        return difference(torch.cat(logits, dim=1), want(model, inputs, prefix))

    return run


def growing(model):
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def fixed(model):
    own, cross = (
        StaticCache(config=model.decoder.config, max_cache_len=length, device="cpu", dtype=torch.float64)
        for length in (9, 6)
    )
    return EncoderDecoderCache(own, cross)


def generated(rows=1, encode_first=False, **options):
    """`generate` on the first rows of the batch; its logits at every step against the oracle's on what it wrote."""

    def run(model, inputs, prefix):
        few = {name: tensor[:rows] for name, tensor in inputs.items()}
        given = source(few)
        with prefix.attached(model):
            if encode_first:
                states = model.encoder(**given).last_hidden_state
                given = {"encoder_outputs": BaseModelOutput(states), "attention_mask": few["attention_mask"]}
            torch.manual_seed(5)
            out = model.generate(
                **given,
                max_new_tokens=STEPS,
                min_new_tokens=STEPS,
                output_logits=True,
                output_scores=True,
                return_dict_in_generate=True,
                **options,
            )
        copies = len(out.sequences) // len(few["input_ids"])
        repeated = {name: tensor.repeat_interleave(copies, dim=0) for name, tensor in source(few).items()}
        logits = want(model, {**repeated, "decoder_input_ids": out.sequences[:, :-1]}, prefix)
        if "num_beams" in options:
            tokens = out.sequences[:, 1:, None]
            score = logits.log_softmax(-1).gather(-1, tokens).squeeze(-1).sum(1)
            return difference(score, out.sequences_scores)
        return difference(logits, torch.stack(out.logits, dim=1))

    return run


def by_row(model, inputs, prefix):
    others = [prefix, None, make_prefix(model, 3, seed=8)]
    with PrefixPerRow(others).attached(model):
        got = model(**inputs).logits
    largest = 0.0
    for row, own in enumerate(others):
        alone = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        reference = oracle.t5(model, **alone, prefixes=None if own is None else by_site(own))["logits"]
        largest = max(largest, difference(got[row : row + 1], reference))
    return largest


MODES = {
    "forward": forward,
    "a prefix a row": by_row,
    "inputs_embeds": embeddings,
    "KV cache": in_steps(growing),
    "static cache": in_steps(fixed),
    "greedy": generated(rows=3, do_sample=False),
    "greedy, no cache": generated(rows=3, do_sample=False, use_cache=False),
    "greedy, static": generated(rows=3, do_sample=False, cache_implementation="static", disable_compile=True),
    "encoder_outputs": generated(rows=3, encode_first=True, do_sample=False),
    "sampling": generated(rows=3, do_sample=True, num_return_sequences=2),
    "beams": generated(rows=3, num_beams=3, num_return_sequences=2, length_penalty=0.0),
    "prompt lookup": generated(do_sample=False, prompt_lookup_num_tokens=2),
}
NEEDS_A_DEEP_CACHE = {"greedy", "greedy, static", "encoder_outputs", "sampling", "beams", "prompt lookup"}


def works(model: str, mode: str) -> bool:
    """Whether transformers itself can do this: its `generate` sizes the decoder's cache by the encoder."""
    return model != "deeper decoder" or mode not in NEEDS_A_DEEP_CACHE


def lacking(model: str, mode: str) -> str:
    """What an old transformers cannot do without a prefix either, or an empty string."""
    if Version(transformers.__version__) < Version("5.24"):
        if model == "UMT5":
            return "its UMT5 differs from the equations"
        if mode == "prompt lookup":
            return "its prompt lookup returns no logits"
    return ""


def measure(model_name: str, mode: str, implementation: str = "sdpa") -> float:
    family, sizes = MODELS[model_name]
    model = make_model(family, implementation=implementation, **sizes)
    with norms_in_float64():
        return MODES[mode](model, make_inputs(), make_prefix(model, 7, mid_dim=11, std=0.5))


def main() -> None:
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, float64\n")
    print("|  |", " | ".join(MODELS), "|")
    print("|" + "---|" * (len(MODELS) + 1))
    for mode in MODES:
        for implementation in ("sdpa", "eager"):
            entries = [f"{measure(model, mode, implementation):.0e}" if works(model, mode) else "–" for model in MODELS]
            print(f"| {mode}, {implementation} |", " | ".join(entries), "|")


if __name__ == "__main__":
    main()
