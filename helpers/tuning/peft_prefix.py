"""Prefix-tuning checkpoints of peft, read and written for a T5; neither needs peft, and no pickle is opened.

What peft's forward pass does with a prefix on a T5 (peft 0.21 on transformers 5.24; the tests hold this module
against it) differs from `T5Prefix` in four ways:

- It feeds the prefix as a KV cache that the decoder has already filled. So decoder self-attention is its only site.
- So each slot has a position, -P ... -1, and its score gets T5's relative position bias: with P slots and the query at
  position t, slot j lies t + P - j tokens back. The bias drifts while decoding. In `T5Prefix` it is 0.
- A file holds N pairs of keys and values, N being `num_layers`, which peft sets to the depth of the encoder. Decoder
  layer i is given pair 2i mod N: with an even N, the odd pairs are never read, and layers i and i + N/2 share a pair.
- A reparameterising MLP is evaluated when the prefix is saved. The file holds its result alone.

`PeftT5Prefix` is a T5Prefix with the first two, so that `from_peft` gives the outputs of peft's forward pass, and
`to_peft` a file with which peft gives the prefix's own. Here `generate` follows the forward pass. In peft 0.21.2 it
need not: with a KV cache, transformers 5.24 loses the prefix (lesson 6) and 5.15 keeps it; without one, both write
another text.
"""

import json
import os
import warnings
from pathlib import Path

import torch
from einops import rearrange
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import PreTrainedModel

from helpers._shapes import Float
from helpers.prefix import PrefixEncoder
from helpers.tuning.attach import T5Prefix
from helpers.tuning.store import replace_file

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"
_SIZES = ("num_virtual_tokens", "num_layers", "num_attention_heads", "token_dim")


class PeftT5Prefix(T5Prefix):
    """A prefix that means what it means in peft: at decoder self-attention, its slots at positions -P ... -1.

    At each layer, with P slots in front of K keys of which the query's own is at position t,

        scores = Q [P_k ; K]^T + [b(t + P) ... b(t + 1) ; b(t) ... b(0)] + [0 ; mask]      b: T5's bias by distance

    Everything else is as in T5Prefix; make a new one with `PeftT5Prefix.for_model(model, sites=("decoder",))`.
    """

    def __init__(self, encoders: dict[str, PrefixEncoder], base: dict | None = None):
        """Args: as T5Prefix. Raises ValueError for other sites than "decoder"."""
        super().__init__(encoders, base)
        if self.sites != ("decoder",):
            raise ValueError(f"peft has a prefix at site 'decoder' alone, got {self.sites}: pass sites=('decoder',)")

    def position_bias(
        self, stack: PreTrainedModel, queries: int, past: int | Tensor
    ) -> Float[Tensor, "layers 1 heads queries prefix"]:
        """`[layers, 1, heads, queries, prefix]` from the stack's own tables: T5 has one, UMT5 one for each layer."""
        slots = self.encoders["decoder"].prefix_length
        attentions = [block.layer[0].SelfAttention for block in stack.block]
        device = self.encoders["decoder"].embedding.device  # T5's own tables may be offloaded
        biases = [
            attention.compute_bias(queries, slots, device=device, past_seen_tokens=slots + past)
            for attention in attentions
            if attention.has_relative_attention_bias
        ]
        return torch.stack(biases).expand(len(attentions), -1, -1, -1, -1)

    def fold(self) -> "PeftT5Prefix":
        """A new PeftT5Prefix that holds the same keys and values without the MLP."""
        return PeftT5Prefix(dict(super().fold().encoders), self.base).train(self.training)


def from_peft(folder: str | os.PathLike, model: PreTrainedModel) -> PeftT5Prefix:
    """Read a prefix-tuning checkpoint of peft for `model`: with it, `model` computes what it computes in peft.

    The prefix comes without an MLP, on the model's device, in evaluation mode, in float32 (float64 if the file is).
    Layers that share a pair in peft have a copy each, which training moves apart.
    `T5Prefix(dict(prefix.encoders), prefix.base)` holds the same keys and values without position bias: another
    function, to start training from.

    peft records the base's name and nothing of its weights: that `model` has the weights which the prefix was trained
    for remains to be known.

    Args:
        folder: a local folder with adapter_config.json and adapter_model.safetensors.
        model: a T5, MT5 or UMT5 of transformers, of the shape that the prefix was trained for.

    Raises FileNotFoundError if one of the files is missing; TypeError for another kind of model; ValueError for weights
    that are a pickle, files that cannot be read or do not belong together, another method than prefix tuning, and a
    prefix for another shape of model.
    """
    folder = Path(folder)
    config = _read_config(folder)
    slots, pairs, heads, width = (config[name] for name in _SIZES)
    rows = _read_embeddings(folder, (slots, pairs * 2 * width))
    prefix = PeftT5Prefix.for_model(model, prefix_length=0, sites=("decoder",))
    layers, model_heads, d_kv = prefix.encoders["decoder"].shape
    if (heads, width) != (model_heads, model_heads * d_kv):
        raise ValueError(
            f"the peft prefix in {folder} has {heads} heads and token_dim {width}, but the model has {model_heads} "
            f"heads of {d_kv}, which need token_dim {model_heads * d_kv}"
        )
    if pairs < layers:
        raise ValueError(
            f"the peft prefix in {folder} has num_layers {pairs}, but the model's decoder has {layers} layers: with "
            "fewer pairs than layers peft cannot run"
        )
    key_values = rearrange(rows, "p (n kv h d) -> n kv 1 h p d", n=pairs, kv=2, h=heads)
    encoder = PrefixEncoder.from_key_values(key_values[[2 * layer % pairs for layer in range(layers)]])
    device = next(prefix.parameters()).device
    return PeftT5Prefix({"decoder": encoder}, prefix.base).to(device).eval()


def to_peft(prefix: T5Prefix, folder: str | os.PathLike, *, base_name: str | None = None) -> None:
    """Write `prefix` as a checkpoint that peft's `PeftModel.from_pretrained(model, folder)` reads.

    With a PeftT5Prefix, peft's forward pass gives the same outputs. With any other T5Prefix this warns: the keys and
    values are the same, but peft adds a position bias that the prefix was not trained with.

    The file has an odd number of pairs, one more than layers where these are even, because then 2i mod N gives each
    layer its own; the pair left over is zero and never read. The MLP is folded, and dropout, which peft does not have,
    is left out. The base's fingerprint has no place in peft's files. Each file is replaced whole.

    Args:
        prefix: with site "decoder" alone.
        folder: made if need be; other files in it are left alone.
        base_name: what peft's AutoPeftModelForSeq2SeqLM loads the base by.

    Raises TypeError if `prefix` is not a T5Prefix; ValueError if it has other sites, or rows for several examples.
    """
    if not isinstance(prefix, T5Prefix):
        raise TypeError(f"to_peft writes a T5Prefix, not a {type(prefix).__name__}")
    if prefix.sites != ("decoder",):
        raise ValueError(
            f"peft has a prefix at site 'decoder' alone, and this one has {prefix.sites}: its effect cannot be kept"
        )
    if not isinstance(prefix, PeftT5Prefix):
        warnings.warn(
            "peft adds T5's position bias to the scores of the prefix, which this one was used without: the file holds "
            "the same keys and values, but the model will give other outputs with it",
            stacklevel=2,
        )
    key_values = prefix.fold().eval().key_values("decoder").detach().cpu()
    layers, _, _, heads, slots, d_kv = key_values.shape
    pairs = layers + 1 - layers % 2
    by_pair = key_values.new_zeros(pairs, *key_values.shape[1:])
    by_pair[[2 * layer % pairs for layer in range(layers)]] = key_values
    config = {
        "peft_type": "PREFIX_TUNING",
        "task_type": "SEQ_2_SEQ_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "num_virtual_tokens": slots,
        "num_layers": pairs,
        "num_attention_heads": heads,
        "token_dim": heads * d_kv,
        "num_transformer_submodules": 2,
        "prefix_projection": False,
        "encoder_hidden_size": heads * d_kv,
    }
    rows = rearrange(by_pair, "n kv 1 h p d -> p (n kv h d)").contiguous()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / WEIGHTS_NAME, save({"prompt_embeddings": rows}, metadata={"format": "pt"}))
    replace_file(folder / CONFIG_NAME, (json.dumps(config, indent=2) + "\n").encode())


def _read_config(folder: Path) -> dict:
    """adapter_config.json, once it is known to describe a prefix for an encoder-decoder."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no peft checkpoint: {CONFIG_NAME} is missing")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not json: {error}") from error
    if not isinstance(config, dict) or "peft_type" not in config:
        raise ValueError(f"{path} is not a config of peft: it has no 'peft_type'")
    if config["peft_type"] != "PREFIX_TUNING":
        raise ValueError(f"{path} is of peft type {config['peft_type']}: only PREFIX_TUNING is a prefix")
    if config.get("task_type") != "SEQ_2_SEQ_LM" or config.get("num_transformer_submodules") not in (None, 2):
        raise ValueError(
            f"{path} has task_type {config.get('task_type')} and num_transformer_submodules "
            f"{config.get('num_transformer_submodules')}: a prefix for a T5 has SEQ_2_SEQ_LM and 2"
        )
    for name in _SIZES:
        least = 0 if name == "num_virtual_tokens" else 1
        if type(config.get(name)) is not int or config[name] < least:
            raise ValueError(f"{path} needs a whole number {name!r} of at least {least}, got {config.get(name)!r}")
    return config


def _read_embeddings(folder: Path, shape: tuple[int, int]) -> Float[Tensor, "prefix numbers"]:
    """The file's one tensor, in float32, or float64 if the file is."""
    path = folder / WEIGHTS_NAME
    if not path.is_file() and (folder / PICKLE_NAME).is_file():
        raise ValueError(
            f"{folder / PICKLE_NAME} is a pickle, which can run any code when it is opened: save it from peft with "
            "safe_serialization=True"
        )
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no weights: {WEIGHTS_NAME} is missing")
    try:
        tensors = load_file(path)
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if set(tensors) != {"prompt_embeddings"}:
        raise ValueError(f"{path} must hold 'prompt_embeddings' alone, but holds {sorted(tensors)[:5]}")
    rows = tensors["prompt_embeddings"]
    if tuple(rows.shape) != shape or not rows.is_floating_point():
        raise ValueError(
            f"{path} holds {rows.dtype} {list(rows.shape)}, but its {CONFIG_NAME} needs floating-point "
            f"[num_virtual_tokens, num_layers * 2 * token_dim] = {list(shape)}"
        )
    return rows if rows.dtype == torch.float64 else rows.float()
