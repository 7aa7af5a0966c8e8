"""Prefix-tuning checkpoints of peft, read and written; neither needs peft, and no pickle is opened.

peft feeds the prefix as a KV cache that the decoder has already filled. What its forward pass does with it (peft 0.21
on transformers 5.24; the tests hold this module against it) differs from `Prefix`:

- Decoder self-attention is its only site.
- Each slot has a position, as if it were a token. In a decoder alone, the tokens' positions begin behind the slots, at
  P, and a window counts slots too, until they have left it. In a T5, the tokens begin at 0 and the slots lie at
  -P ... -1: with P slots and the query at position t, slot j lies t + P - j tokens back, and its score gets T5's
  relative position bias for that distance, which drifts while decoding.
- For a T5, a file holds N pairs of keys and values, N being `num_layers`, which peft sets to the depth of the encoder.
  Decoder layer i is given pair 2i mod N: with an even N, the odd pairs are never read, and layers i and i + N/2 share a
  pair. For a decoder alone, layer i is given pair i.
- A reparameterising MLP is evaluated when the prefix is saved. The file holds its result alone.

`PeftPrefix`, for a decoder alone, and `PeftT5Prefix` are prefixes with the first two, so that `from_peft` gives the
outputs of peft's forward pass, and `to_peft` a file with which peft gives the prefix's own. Here `generate` follows the
forward pass. In peft 0.21.2 on transformers 5.24 it does not: with a KV cache, the prefix is lost in all families and
the bare model writes; without one, it is lost in most after the first step (tests/stored/peft_report.json).
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
from helpers.tuning.attach import Prefix
from helpers.tuning.families import is_t5
from helpers.tuning.store import replace_file

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"
_SIZES = ("num_virtual_tokens", "num_layers", "num_attention_heads", "token_dim")


class PeftPrefix(Prefix):
    """A prefix that means what it means in peft, for a decoder alone: its slots are tokens in front.

    At each layer, with P slots in front of K keys of which the query's own is number t,

        scores = s Q(t + P) [P_k ; K(P ... P + K - 1)]^T + [w ; mask]         X(p): X at position p

    where w hides the slots that a window of W tokens has left behind, those j with t + P - j >= W. The slots' keys are
    used as they are: whatever rotation belongs to their positions is learned with them.

    Everything else is as in Prefix; make a new one with `PeftPrefix.for_model(model)`.
    """

    def __init__(self, encoders: dict[str, PrefixEncoder], base: dict | None = None):
        """Args: as Prefix. Raises ValueError for other sites than "decoder"."""
        super().__init__(encoders, base)
        _check_decoder_alone(self.sites)

    def check_fits(self, model: PreTrainedModel) -> None:
        """Raise ValueError if `model` has another shape or is no decoder alone; warn if it has other weights."""
        super().check_fits(model)
        if model.config.is_encoder_decoder:
            raise ValueError(
                f"a PeftPrefix is for a decoder alone, and a {type(model).__name__} has an encoder: of those, peft's "
                "prefixes for a T5 can be read"
            )

    def position_shift(self) -> int:
        """The number of slots."""
        return self.encoders["decoder"].prefix_length

    def position_bias(
        self, stack: PreTrainedModel, queries: int, past: int | Tensor
    ) -> Float[Tensor, "layers 1 1 queries prefix"] | None:
        """`[layers, 1, 1, queries, prefix]`, 0 or minus infinity; None if no layer has a window."""
        slots, config = self.encoders["decoder"].prefix_length, stack.config
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * self.encoders["decoder"].num_layers
        if window is None or "sliding_attention" not in kinds:
            return None
        embedding = self.encoders["decoder"].embedding
        positions = torch.arange(queries, device=embedding.device) + past + slots
        left = positions[:, None] - torch.arange(slots, device=embedding.device) >= window
        hidden = torch.zeros(left.shape, dtype=embedding.dtype, device=embedding.device).masked_fill(left, -torch.inf)
        layers = [hidden if kind == "sliding_attention" else torch.zeros_like(hidden) for kind in kinds]
        return torch.stack(layers)[:, None, None]

    def fold(self) -> "PeftPrefix":
        """A new PeftPrefix that holds the same keys and values without the MLP."""
        return PeftPrefix(dict(super().fold().encoders), self.base).train(self.training)


class PeftT5Prefix(Prefix):
    """A prefix that means what it means in peft, for a T5: at decoder self-attention, its slots at -P ... -1.

    At each layer, with P slots in front of K keys of which the query's own is at position t,

        scores = Q [P_k ; K]^T + [b(t + P) ... b(t + 1) ; b(t) ... b(0)] + [0 ; mask]      b: T5's bias by distance

    Everything else is as in Prefix; make a new one with `PeftT5Prefix.for_model(model, sites=("decoder",))`.
    """

    def __init__(self, encoders: dict[str, PrefixEncoder], base: dict | None = None):
        """Args: as Prefix. Raises ValueError for other sites than "decoder"."""
        super().__init__(encoders, base)
        _check_decoder_alone(self.sites)

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


def from_peft(folder: str | os.PathLike, model: PreTrainedModel) -> PeftPrefix | PeftT5Prefix:
    """Read a prefix-tuning checkpoint of peft for `model`: with it, `model` computes what it computes in peft.

    The prefix comes without an MLP, on the model's device, in evaluation mode, in float32 (float64 if the file is).
    Layers that share a pair in peft have a copy each, which training moves apart.
    `Prefix(dict(prefix.encoders), prefix.base)` holds the same keys and values without positions: another function, to
    start training from.

    peft records the base's name and nothing of its weights: that `model` has the weights which the prefix was trained
    for remains to be known.

    Args:
        folder: a local folder with adapter_config.json and adapter_model.safetensors.
        model: a T5, MT5 or UMT5, or a model that is a decoder alone, as GPT-2, Llama, Qwen, Gemma and others are, of
            the shape that the prefix was trained for.

    Raises FileNotFoundError if one of the files is missing; TypeError for another kind of model; ValueError for weights
    that are a pickle, files that cannot be read or do not belong together, another method than prefix tuning, and a
    prefix for another kind or shape of model.
    """
    folder = Path(folder)
    prefix_class = PeftT5Prefix if is_t5(model.config.model_type) else PeftPrefix
    prefix = prefix_class.for_model(model, prefix_length=0, sites=("decoder",))
    config = _read_config(folder, prefix_class)
    slots, pairs, heads, width = (config[name] for name in _SIZES)
    rows = _read_embeddings(folder, (slots, pairs * 2 * width))
    layers, model_heads, head_dim = prefix.encoders["decoder"].shape
    if (heads, width) != (model_heads, model_heads * head_dim):
        raise ValueError(
            f"the peft prefix in {folder} has {heads} heads and token_dim {width}, but the model has {model_heads} "
            f"heads of {head_dim}, which need token_dim {model_heads * head_dim}"
        )
    if pairs < layers or (prefix_class is PeftPrefix and pairs != layers):
        raise ValueError(
            f"the peft prefix in {folder} has num_layers {pairs}, but the model's decoder has {layers} layers: with "
            "fewer pairs than layers peft cannot run"
        )
    key_values = rearrange(rows, "p (n kv h d) -> n kv 1 h p d", n=pairs, kv=2, h=heads)
    encoder = PrefixEncoder.from_key_values(key_values[_pairs_of_layers(prefix_class, layers, pairs)])
    device = next(prefix.parameters()).device
    return prefix_class({"decoder": encoder}, prefix.base).to(device).eval()


def _pairs_of_layers(prefix_class: type, layers: int, pairs: int) -> list[int]:
    """Which of the file's pairs each layer is given."""
    return [2 * layer % pairs if prefix_class is PeftT5Prefix else layer for layer in range(layers)]


def _check_decoder_alone(sites: tuple[str, ...]) -> None:
    if sites != ("decoder",):
        raise ValueError(f"peft has a prefix at site 'decoder' alone, got {sites}: pass sites=('decoder',)")


def to_peft(prefix: Prefix, folder: str | os.PathLike, *, base_name: str | None = None) -> None:
    """Write `prefix` as a checkpoint that peft's `PeftModel.from_pretrained(model, folder)` reads.

    With a PeftPrefix or PeftT5Prefix, peft's forward pass gives the same outputs. With any other Prefix this warns: the
    keys and values are the same, but peft gives the slots positions that the prefix was not trained with.

    For a T5, the file has an odd number of pairs, one more than layers where these are even, because then 2i mod N
    gives each layer its own; the pair left over is zero and never read. The MLP is folded, and dropout, which peft does
    not have, is left out. The base's fingerprint has no place in peft's files. Each file is replaced whole.

    Args:
        prefix: with site "decoder" alone, of a T5 or of a model that is a decoder alone.
        folder: made if need be; other files in it are left alone.
        base_name: what peft's AutoPeftModel classes load the base by.

    Raises TypeError if `prefix` is not a Prefix; ValueError if it has other sites, or rows for several examples.
    """
    if not isinstance(prefix, Prefix):
        raise TypeError(f"to_peft writes a Prefix, not a {type(prefix).__name__}")
    if prefix.sites != ("decoder",):
        raise ValueError(
            f"peft has a prefix at site 'decoder' alone, and this one has {prefix.sites}: its effect cannot be kept"
        )
    prefix_class = PeftT5Prefix if is_t5(prefix.base.get("model_type", "t5")) else PeftPrefix
    if not isinstance(prefix, prefix_class):
        positions = "T5's position bias to the scores" if prefix_class is PeftT5Prefix else "positions to the slots"
        warnings.warn(
            f"peft adds {positions} of the prefix, which this one was used without: the file holds the same keys and "
            "values, but the model will give other outputs with it",
            stacklevel=2,
        )
    key_values = prefix.fold().eval().key_values("decoder").detach().cpu()
    layers, _, _, heads, slots, head_dim = key_values.shape
    for_t5 = prefix_class is PeftT5Prefix
    pairs = layers + 1 - layers % 2 if for_t5 else layers
    by_pair = key_values.new_zeros(pairs, *key_values.shape[1:])
    by_pair[_pairs_of_layers(prefix_class, layers, pairs)] = key_values
    config = {
        "peft_type": "PREFIX_TUNING",
        "task_type": "SEQ_2_SEQ_LM" if for_t5 else "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "num_virtual_tokens": slots,
        "num_layers": pairs,
        "num_attention_heads": heads,
        "token_dim": heads * head_dim,
        "num_transformer_submodules": 2 if for_t5 else 1,
        "prefix_projection": False,
        "encoder_hidden_size": heads * head_dim,
    }
    rows = rearrange(by_pair, "n kv 1 h p d -> p (n kv h d)").contiguous()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / WEIGHTS_NAME, save({"prompt_embeddings": rows}, metadata={"format": "pt"}))
    replace_file(folder / CONFIG_NAME, (json.dumps(config, indent=2) + "\n").encode())


def _read_config(folder: Path, prefix_class: type) -> dict:
    """adapter_config.json, once it is known to describe a prefix for a T5, or for a decoder alone."""
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
    kind, task, submodules = (
        ("a T5", "SEQ_2_SEQ_LM", 2) if prefix_class is PeftT5Prefix else ("a decoder alone", "CAUSAL_LM", 1)
    )
    if config.get("task_type") != task or config.get("num_transformer_submodules") not in (None, submodules):
        raise ValueError(
            f"{path} has task_type {config.get('task_type')} and num_transformer_submodules "
            f"{config.get('num_transformer_submodules')}: a prefix for {kind} has {task} and {submodules}"
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
