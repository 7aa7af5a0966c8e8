"""Any model's attention a second time, eager and by hand, with the prefix's keys and values put in front.

`python tests/families_oracle.py` prints the table families x modes: the largest difference of logits (of the prefix's
gradients, in the two columns that say so) between `Prefix` and this oracle. Random small models in float64, whose
norms compute in float32; nothing is downloaded. Nothing of the mechanism under test is used: neither the table of
families in `helpers`, nor its hooks, nor a KV cache.
"""

import re
import sys
import warnings
from contextlib import contextmanager

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.utils import logging

from helpers import Prefix, PrefixPerRow

TOKENS = {"vocab_size": 50, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
DECODER = TOKENS | {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WIDE = DECODER | {"head_dim": 10}  # 4 heads of 10 are not 24
WINDOW = WIDE | {"sliding_window": 4}
QWEN2 = DECODER | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
GEMMA3 = WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
BERT = TOKENS | {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = TOKENS | {"n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 64}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BART = TOKENS | {
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "dropout": 0.0,
}
T5 = {
    "vocab_size": 50,
    "d_model": 16,
    "d_kv": 5,
    "num_heads": 3,
    "d_ff": 32,
    "num_layers": 3,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "dropout_rate": 0.0,
}
GEMMA = {key: WINDOW[key] for key in WINDOW if key not in ("num_hidden_layers",)}
WHISPER = {key: BART[key] for key in BART if key != "max_position_embeddings"} | {
    "num_mel_bins": 5,
    "max_source_positions": 6,
    "max_target_positions": 64,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 8,
    "patch_size": 4,
}

# family: (model class, config class, sizes)
MODELS = {
    "T5": ("T5ForConditionalGeneration", "T5Config", T5),
    "MT5": ("MT5ForConditionalGeneration", "MT5Config", T5),
    "UMT5": ("UMT5ForConditionalGeneration", "UMT5Config", T5),
    "BERT": ("BertForMaskedLM", "BertConfig", BERT),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", BERT),
    "XLM-RoBERTa": ("XLMRobertaForMaskedLM", "XLMRobertaConfig", BERT),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", BERT),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", WIDE),
    "Mistral": ("MistralForCausalLM", "MistralConfig", WINDOW),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", QWEN2),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", WIDE),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", WINDOW | {"attn_logit_softcapping": 3.0}),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA3),
    "GPT-OSS": ("GptOssForCausalLM", "GptOssConfig", WINDOW | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "OLMo": ("OlmoForCausalLM", "OlmoConfig", DECODER),
    "OLMo 2": ("Olmo2ForCausalLM", "Olmo2Config", DECODER),
    "Phi": ("PhiForCausalLM", "PhiConfig", DECODER | {"hidden_size": 32}),
    "Phi-3": ("Phi3ForCausalLM", "Phi3Config", DECODER | {"sliding_window": 4}),
    "SmolLM3": ("SmolLM3ForCausalLM", "SmolLM3Config", DECODER | {"no_rope_layers": [1, 0, 1]}),
    "BART": ("BartForConditionalGeneration", "BartConfig", BART),
    "mBART": ("MBartForConditionalGeneration", "MBartConfig", BART),
    "Pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", BART),
    "Marian": ("MarianMTModel", "MarianConfig", BART),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
    "T5Gemma": (
        "T5GemmaForConditionalGeneration",
        "T5GemmaConfig",
        TOKENS | {"encoder": GEMMA | {"num_hidden_layers": 2}, "decoder": GEMMA | {"num_hidden_layers": 3}},
    ),
    "T5Gemma 2": (
        "T5Gemma2ForConditionalGeneration",
        "T5Gemma2Config",
        TOKENS
        | {
            "encoder": {"text_config": GEMMA | {"num_hidden_layers": 2}, "vision_config": VISION},
            "decoder": GEMMA | {"num_hidden_layers": 3},
            "image_token_index": 49,
            "boi_token_index": 48,
            "eoi_token_index": 47,
        },
    ),
}  # fmt: skip
EAGER_ALONE = ("Gemma 2", "GPT-OSS", "T5Gemma")  # soft caps and sinks, which torch's fused attention does not have
ENCODERS = ("BERT", "RoBERTa", "XLM-RoBERTa")


def make_model(family: str, implementation: str = "sdpa"):
    model_class, config_class, sizes = MODELS[family]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**sizes)).eval()
    for parameter in model.parameters():  # away from the start, where attention is nearly uniform
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    model = model.double().requires_grad_(False)
    if family == "GPT-OSS":
        model.set_experts_implementation("eager")  # the fast one knows no float64
    model.set_attn_implementation("eager" if family in EAGER_ALONE else implementation)
    return model


def make_prefix(model, prefix_length: int = 3, seed: int = 1, **options) -> Prefix:
    torch.manual_seed(seed)
    prefix = Prefix.for_model(model, prefix_length=prefix_length, init_std=1.0, **options)
    return prefix.double()


def make_inputs(family: str, *, side: str = "right") -> dict[str, Tensor]:
    """Two examples, the second with two tokens of padding."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 40, (2, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, slice(0, 2) if side == "left" else slice(5, 7)] = 0
    if family == "Whisper":
        return {"input_features": torch.randn(2, 5, 12, generator=generator, dtype=torch.float64)}
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def with_targets(model, inputs: dict) -> dict:
    """What a forward pass takes: of an encoder-decoder, also some tokens for its decoder."""
    if not model.config.is_encoder_decoder:
        return inputs
    generator = torch.Generator().manual_seed(4)
    return inputs | {"decoder_input_ids": torch.randint(3, 40, (2, 6), generator=generator)}


# --- the oracle ------------------------------------------------------------------------------------------------------


def site_of(name: str, model) -> str:
    """The site of an attention module, from its name in the model."""
    if re.search("EncDec|encoder_attn|cross", name):
        return "cross"
    is_encoder = "encoder" in name if model.config.is_encoder_decoder else "bert" in name
    return "encoder" if is_encoder else "decoder"


def attention_modules(model) -> dict:
    """`{module: (site, layer)}` of all that are called with queries, keys and values."""
    found, places = {}, {}
    for name, module in model.named_modules():
        if re.search(
            r"(SelfAttention|EncDecAttention|attention\.self|self_attn|encoder_attn|cross_attn|\.attn|layers\.\d+\.attention)$",
            name,
        ):
            if "vision" in name:
                continue
            site = site_of(name, model)
            places[module] = site, found.setdefault(site, 0)
            found[site] += 1
    return places  # fmt: skip


def attention_by_hand(places: dict, prefixes: dict):
    """An eager attention, for each family, that puts the prefix in front."""

    def attend(module, query, key, value, attention_mask, scaling=None, position_bias=None, softcap=None, **_):
        heads = query.shape[1]
        bare = key.shape[2]
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        site, layer = places[module]
        if site in prefixes:
            own = prefixes[site][layer].expand(-1, len(query), -1, -1, -1)
            key, value = (torch.cat([part, each], dim=2) for part, each in zip(own, (key, value), strict=True))
        key, value = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value))
        scores = query @ key.mT * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        for added in (attention_mask, position_bias):
            if added is not None:
                scores[..., scores.shape[-1] - bare :] += added
        if hasattr(module, "sinks"):
            sinks = module.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    return attend


@contextmanager
def by_hand(model, prefix):
    """Let the model compute with the oracle's attention."""
    prefixes = {} if prefix is None else {site: prefix.key_values(site) for site in prefix.sites}
    places = attention_modules(model)
    attend = attention_by_hand(places, prefixes)
    modules = {sys.modules[type(module).__module__] for module in places}
    stock = {module: module.eager_attention_forward for module in modules}
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    for module in modules:
        module.eager_attention_forward = attend
    try:
        yield
    finally:
        for module in modules:
            module.eager_attention_forward = stock[module]
        model.set_attn_implementation(implementation)


# --- modes -----------------------------------------------------------------------------------------------------------


def difference(ours: Tensor, theirs: Tensor) -> float:
    return (ours - theirs).abs().max().item()


def forward(family, implementation="sdpa", side="right"):
    model = make_model(family, implementation)
    prefix = make_prefix(model)
    given = make_inputs(family, side=side)
    inputs = with_targets(model, given)
    with torch.no_grad():
        with prefix.attached(model):
            ours = model(**inputs).logits
        with by_hand(model, prefix):
            theirs = model(**inputs).logits
        bare = model(**inputs).logits
    real = slice(None) if "decoder_input_ids" in inputs else given["attention_mask"].bool()
    # NaN: in float64, the eager attention of some families has no weights for a padded query.
    assert not difference(theirs[real], bare[real]) < 1e-2, "the prefix has no effect"
    return difference(ours[real], theirs[real])


def gradients(family, checkpointing=False):
    model = make_model(family)
    prefix = make_prefix(model)
    inputs = with_targets(model, make_inputs(family))

    def of_prefix(attached):
        prefix.zero_grad()
        with attached:
            logits = model(**inputs).logits
            weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5), dtype=logits.dtype)
            (logits * weights).mean().backward()
        found = [parameter.grad.clone() for parameter in prefix.parameters()]
        assert all(each.abs().amax(dim=0).min() > 0 for each in found), "a number of the prefix has no gradient"
        return found

    theirs = of_prefix(by_hand(model, prefix))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    ours = of_prefix(prefix.attached(model))
    return max(map(difference, ours, theirs)) / max(each.abs().max().item() for each in theirs)


def generated(family, *, cache="growing", side="left", implementation="sdpa", **options):
    """Greedy, or by beams: the largest difference of the scores of each step; the tokens have to be the same."""
    model = make_model(family, implementation)
    prefix = make_prefix(model)
    inputs = make_inputs(family, side=side)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False} | options
    options |= {"output_scores": True, "return_dict_in_generate": True}
    kinds = {"growing": {}, "none": {"use_cache": False}, "static": {"cache_implementation": "static"}}
    with torch.no_grad():
        with by_hand(model, prefix):
            theirs = model.generate(**inputs, **options, use_cache=False)
        with prefix.attached(model):
            ours = model.generate(**inputs, **options, **kinds[cache])
    assert torch.equal(ours.sequences, theirs.sequences), "other tokens"
    return max(
        difference(*(torch.where(each.isfinite(), each, 0.0) for each in pair))
        for pair in zip(ours.scores, theirs.scores, strict=True)
    )


def in_steps(family):
    """Some tokens at a time with a cache, against the whole at once."""
    model = make_model(family)
    prefix = make_prefix(model)
    inputs = with_targets(model, make_inputs(family, side="left"))
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache()) if model.config.is_encoder_decoder else DynamicCache()
    positions = None if name == "decoder_input_ids" else (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    logits, done = [], 0
    with torch.no_grad():
        with by_hand(model, prefix):
            given = {} if positions is None else {"position_ids": positions}
            theirs = model(**inputs, **given).logits
        with prefix.attached(model):
            for tokens in inputs[name].split([2, 1, 3] if positions is None else [2, 1, 3, 1], dim=1):
                until = done + tokens.shape[1]
                given = inputs | {name: tokens}
                if positions is not None:
                    given |= {
                        "attention_mask": inputs["attention_mask"][:, :until],
                        "position_ids": positions[:, done:until],
                    }
                output = model(**given, **{CACHE_NAME: cache}, use_cache=True)
                logits.append(output.logits)
                done = until
    ours = torch.cat(logits, dim=1)
    real = slice(None) if positions is None else inputs["attention_mask"].bool()
    return difference(ours[real], theirs[real])  # fmt: skip


CACHE_NAME = "cache" if hasattr(transformers.modeling_outputs.BaseModelOutputWithPast, "cache") else "past_key_values"


def rows(family):
    """A prefix of its own for each row, of another length or none, against each alone."""
    model = make_model(family)
    prefixes = [make_prefix(model, 3), make_prefix(model, 5, seed=2)]
    inputs = with_targets(model, make_inputs(family))
    found = []
    with torch.no_grad():
        for chosen in (prefixes, [None, prefixes[0]]):
            with PrefixPerRow(chosen).attached(model):
                ours = model(**inputs).logits
            for row, prefix in enumerate(chosen):
                with by_hand(model, prefix):
                    theirs = model(**{name: each[row : row + 1] for name, each in inputs.items()}).logits
                real = slice(None) if "decoder_input_ids" in inputs else inputs["attention_mask"][row].bool()
                found.append(difference(ours[row, real], theirs[0, real]))
    return max(found)


MODES = {
    "forward": lambda family: forward(family),
    "eager": lambda family: forward(family, implementation="eager"),
    "left padding": lambda family: forward(family, side="left"),
    "rows": rows,
    "gradients": gradients,
    "checkpointed gradients": lambda family: gradients(family, checkpointing=True),
    "in steps": in_steps,
    "generate": lambda family: generated(family),
    "generate, eager": lambda family: generated(family, implementation="eager"),
    "no cache": lambda family: generated(family, cache="none"),
    "static cache": lambda family: generated(family, cache="static"),
    "beams": lambda family: generated(family, num_beams=3),
}
WITH_CACHE = ("in steps", "generate", "generate, eager", "no cache", "static cache", "beams")
LEFT_OUT = {
    **{(family, mode): "an encoder generates nothing" for family in ENCODERS for mode in WITH_CACHE},
    ("Whisper", "left padding"): "sounds are not padded",
    ("T5Gemma 2", "static cache"): "transformers 5.24 fails at it without a prefix too",
}  # (family, mode): why it cannot be


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    print("| |" + "|".join(MODES) + "|\n|" + "---|" * (len(MODES) + 1))
    for family in MODELS:
        row = []
        for mode, run in MODES.items():
            if (family, mode) in LEFT_OUT:
                row.append("")
                continue
            try:
                row.append(f"{run(family):.0e}")
            except Exception as error:
                row.append(f"{type(error).__name__}: {str(error)[:150]}")
        print(f"| {family} |" + "|".join(row) + "|", flush=True)


if __name__ == "__main__":
    main()
