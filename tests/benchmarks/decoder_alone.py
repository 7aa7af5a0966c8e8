"""What a prefix costs a decoder alone, of Llama's architecture: a training step, and 32 tokens written."""

from functools import partial
from importlib.util import find_spec

import measuring
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers import Prefix
from helpers.tuning.losses import labelled_loss

SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 32000}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}


def random_llama() -> LlamaForCausalLM:
    """46 million numbers: t5-small's width, and as many layers as its decoder and two more."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(bos_token_id=None, **SIZES, **HEADS)).eval()


def random_texts(rows: int = 8, source: int = 64, target: int = 32) -> dict[str, torch.Tensor]:
    """Sources of which the loss counts nothing, and targets."""
    torch.manual_seed(1)
    ids = torch.randint(2, 32000, (rows, source + target))
    labels = ids.clone()
    labels[:, :source] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def with_prefix(prefix_length: int) -> tuple[LlamaForCausalLM, Prefix]:
    model = random_llama().requires_grad_(False)
    prefix = Prefix.for_model(model, prefix_length=prefix_length)
    prefix.attach(model)
    return model, prefix


def with_peft(prefix_length: int):
    from peft import PrefixTuningConfig, get_peft_model

    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=prefix_length)
    return get_peft_model(random_llama(), config).eval()


def step_variants(step, prefix_length: int = 20) -> measuring.Variants:
    """Of `step(loss, parameters)`: peft's, ours with the model's own loss and with logits for the labels alone."""
    batch = random_texts()
    model, prefix = with_prefix(prefix_length)
    full = random_llama()
    variants = {
        "ours, the model's loss": step(lambda: model(**batch, use_cache=False).loss, prefix.parameters()),
        "ours, as fit does it": step(lambda: labelled_loss(model, batch), prefix.parameters()),
        "full fine-tuning": step(lambda: full(**batch, use_cache=False).loss, full.parameters()),
    }
    if find_spec("peft"):
        peers = with_peft(prefix_length)
        variants["peft"] = step(lambda: peers(**batch).loss, peers.parameters())
    return variants


def generate_variants(rows: int, source: int, prefix_length: int) -> measuring.Variants:
    """32 tokens, greedy, through transformers' own `generate`."""
    torch.manual_seed(2)
    bare = random_llama().requires_grad_(False)  # as the others: torch.matmul takes another way where it is not
    model, prefix = with_prefix(prefix_length)
    prefix.eval().requires_grad_(False)
    ids = torch.randint(2, 32000, (rows, source))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    given |= {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False}
    variants = {"no prefix": partial(bare.generate, **given), "ours": partial(model.generate, **given)}
    if find_spec("peft"):
        peers = with_peft(prefix_length).requires_grad_(False)
        variants["peft, which drops the prefix"] = partial(peers.generate, **given)
    return variants
