"""Where each kind of transformers model has its attention: one line a stack of layers."""

import inspect
from dataclasses import dataclass
from functools import reduce

from torch import nn
from transformers import PreTrainedModel

SITES = ("encoder", "decoder", "cross")  # encoder self-attention, decoder self-attention, cross-attention

# stack:     its module in transformers.models, and its class, which makes the masks and takes the KV cache
# side:      encoder or decoder; config where `config.is_decoder` says which
# layers:    the list of its layers
# self, cross: the attention modules of a layer. A decoder of T5Gemma 2 has one for both, in one softmax
# heads, head_dim: of the keys and values, from the attention module; fewer heads than queries where they are grouped
# masks:     causal in decoders; full in encoders, and where a decoder looks at them; a window where some layers see the
#            nearest tokens alone; none where all that comes is a sound
_TABLE = """
stack                           side     layers         self                   cross                    heads                       head_dim             masks
t5.T5Stack                      config   block          layer.0.SelfAttention  layer.1.EncDecAttention  n_heads                     key_value_proj_dim   full,causal
mt5.MT5Stack                    config   block          layer.0.SelfAttention  layer.1.EncDecAttention  n_heads                     key_value_proj_dim   full,causal
umt5.UMT5Stack                  config   block          layer.0.SelfAttention  layer.1.EncDecAttention  n_heads                     key_value_proj_dim   full,causal
bert.BertModel                  config   encoder.layer  attention.self         crossattention.self      num_attention_heads         attention_head_size  full,causal
roberta.RobertaModel            config   encoder.layer  attention.self         crossattention.self      num_attention_heads         attention_head_size  full,causal
xlm_roberta.XLMRobertaModel     config   encoder.layer  attention.self         crossattention.self      num_attention_heads         attention_head_size  full,causal
gpt2.GPT2Model                  decoder  h              attn                   crossattention           num_heads                   head_dim             causal,full
gpt_neox.GPTNeoXModel           decoder  layers         attention              -                        config.num_attention_heads  head_size            causal
gpt_oss.GptOssModel             decoder  layers         self_attn              -                        config.num_key_value_heads  head_dim             causal,window
llama.LlamaModel                decoder  layers         self_attn              -                        config.num_key_value_heads  head_dim             causal
mistral.MistralModel            decoder  layers         self_attn              -                        config.num_key_value_heads  head_dim             causal,window
qwen2.Qwen2Model                decoder  layers         self_attn              -                        config.num_key_value_heads  head_dim             causal,window
qwen3.Qwen3Model                decoder  layers         self_attn              -                        config.num_key_value_heads  head_dim             causal,window
gemma2.Gemma2Model              decoder  layers         self_attn              -                        config.num_key_value_heads  head_dim             causal,window
gemma3.Gemma3TextModel          decoder  layers         self_attn              -                        config.num_key_value_heads  head_dim             causal,window
olmo.OlmoModel                  decoder  layers         self_attn              -                        config.num_key_value_heads  head_dim             causal
olmo2.Olmo2Model                decoder  layers         self_attn              -                        config.num_key_value_heads  head_dim             causal
phi.PhiModel                    decoder  layers         self_attn              -                        config.num_key_value_heads  head_dim             causal
phi3.Phi3Model                  decoder  layers         self_attn              -                        config.num_key_value_heads  head_dim             causal,window
smollm3.SmolLM3Model            decoder  layers         self_attn              -                        config.num_key_value_heads  head_dim             causal,window
bart.BartEncoder                encoder  layers         self_attn              -                        num_heads                   head_dim             full
bart.BartDecoder                decoder  layers         self_attn              encoder_attn             num_heads                   head_dim             causal,full
mbart.MBartEncoder              encoder  layers         self_attn              -                        num_heads                   head_dim             full
mbart.MBartDecoder              decoder  layers         self_attn              encoder_attn             num_heads                   head_dim             causal,full
pegasus.PegasusEncoder          encoder  layers         self_attn              -                        num_heads                   head_dim             full
pegasus.PegasusDecoder          decoder  layers         self_attn              encoder_attn             num_heads                   head_dim             causal,full
marian.MarianEncoder            encoder  layers         self_attn              -                        num_heads                   head_dim             full
marian.MarianDecoder            decoder  layers         self_attn              encoder_attn             num_heads                   head_dim             causal,full
whisper.WhisperEncoder          encoder  layers         self_attn              -                        num_heads                   head_dim             none
whisper.WhisperDecoder          decoder  layers         self_attn              encoder_attn             num_heads                   head_dim             causal
t5gemma.T5GemmaEncoder          encoder  layers         self_attn              -                        config.num_key_value_heads  head_dim             full,window
t5gemma.T5GemmaDecoder          decoder  layers         self_attn              cross_attn               config.num_key_value_heads  head_dim             causal,window,full
t5gemma2.T5Gemma2TextEncoder    encoder  layers         self_attn              -                        config.num_key_value_heads  head_dim             full,window
t5gemma2.T5Gemma2Decoder        decoder  layers         self_attn              -                        config.num_key_value_heads  head_dim             causal,window,full
"""  # noqa: E501
_COLUMNS, *_LINES = (line.split() for line in _TABLE.strip().splitlines())
FAMILIES = {line[0]: dict(zip(_COLUMNS, line, strict=True)) for line in _LINES}


@dataclass
class Site:
    """The attention of one site: encoder self, decoder self, or the decoder's to the encoder."""

    stack: PreTrainedModel  # whose forward pass makes the masks and takes the KV cache
    layers: nn.ModuleList
    attentions: list[nn.Module]  # one a layer
    heads: int  # of the keys and values
    head_dim: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(layers, heads, head_dim)`: what a prefix must have."""
        return len(self.attentions), self.heads, self.head_dim


def sites_of(model: nn.Module) -> dict[str, Site]:
    """The model's sites by name, in the order of SITES.

    Raises TypeError for a model that is not in the table; ValueError for a module that holds several models, and for
    layers that have keys of different shapes.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    stacks = {module: line for module in modules if (line := _line(module)) is not None}
    if not stacks:
        raise TypeError(
            f"a prefix works on these models of transformers (helpers.tuning.families): {_names()}; "
            f"not on a {type(model).__name__}"
        )
    found = {}
    for stack, line in stacks.items():
        for name, site in _sites_of_stack(stack, line).items():
            if name in found:
                raise ValueError(f"the {type(model).__name__} holds more than one model: give one of them")
            found[name] = site
    return {name: found[name] for name in SITES if name in found}


def is_t5(model_type: str) -> bool:
    """Whether a config's model_type is T5's or that of one of its two close relatives."""
    return model_type in ("t5", "mt5", "umt5")


@dataclass(frozen=True)
class StackSigns:
    """What a stack is marked with while a prefix is attached."""

    arguments: tuple[str, ...]  # of its forward pass
    layers: str  # where they are
    depths: dict[str, int]  # of its sites


def put_signs(stack: PreTrainedModel, sites: dict[str, Site]) -> None:
    """Mark a stack with how it is called, and each of its attention modules with its site and layer.

    Plain attributes, which a deep copy and torch.compile take along.
    """
    own = {name: site for name, site in sites.items() if site.stack is stack}
    for name, site in own.items():
        for layer, attention in enumerate(site.attentions):
            attention.prefix_place = name, layer
    _, *arguments = inspect.signature(type(stack).forward).parameters  # without self
    stack.prefix_signs = StackSigns(tuple(arguments), _line(stack)["layers"], {n: s.shape[0] for n, s in own.items()})


def take_signs(site: Site) -> None:
    """Remove what `put_signs` has put there."""
    for module, name in [(site.stack, "prefix_signs"), *((each, "prefix_place") for each in site.attentions)]:
        vars(module).pop(name, None)


def _line(module: nn.Module) -> dict[str, str] | None:
    """The table's line for a module, or None; of a subclass, its parent's."""
    names = (
        f"{cls.__module__.removeprefix('transformers.models.').split('.')[0]}.{cls.__name__}"
        for cls in type(module).__mro__
    )
    return next((FAMILIES[name] for name in names if name in FAMILIES), None)


def _sites_of_stack(stack: PreTrainedModel, line: dict[str, str]) -> dict[str, Site]:
    is_decoder = stack.config.is_decoder if line["side"] == "config" else line["side"] == "decoder"
    names = {"decoder" if is_decoder else "encoder": "self", "cross": "cross"}
    layers = at(stack, line["layers"])
    sites = {}
    for name, column in names.items():
        attentions = [at(layer, line[column]) for layer in layers]
        if None in attentions:
            continue
        shapes = {(at(each, line["heads"]), at(each, line["head_dim"])) for each in attentions}
        if len(shapes) > 1:
            raise ValueError(
                f"the layers of the {type(stack).__name__} have keys of different (heads, head_dim): {sorted(shapes)}, "
                "and a prefix has one shape for all"
            )
        sites[name] = Site(stack, layers, attentions, *shapes.pop())
    return sites


def at(start: object, path: str) -> object | None:
    """What lies at a path such as `layer.0.SelfAttention`, or None if nothing does."""
    return reduce(lambda found, name: getattr(found, name, None), path.split("."), start)


def _names() -> str:
    """The families' names, as people know them."""
    names = [line["stack"].split(".")[1] for line in FAMILIES.values()]
    for ending in ("Stack", "TextModel", "TextEncoder", "Model", "Encoder", "Decoder"):
        names = [name.removesuffix(ending) for name in names]
    return ", ".join(dict.fromkeys(names))
