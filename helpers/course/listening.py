"""What each attention of a T5 is given and gives back, written down while the model runs."""

from typing import NamedTuple

from torch import Tensor, nn


class Heard(NamedTuple):
    """Of one attention, each `[batch, seq, d_model]`: what queries are made from, what keys and values, the output."""

    hidden: Tensor
    context: Tensor
    output: Tensor


def listen(model: nn.Module, **inputs) -> dict[str, Heard]:
    """Run the model, and return what its attentions heard, by place: "encoder 0", "decoder 1", "cross 1".

    The place is the site and the layer. Nothing is changed: a forward hook sees what goes in and what comes out.
    """
    heard, hooks = {}, []

    def hook(place: str, module: nn.Module):
        def note(module, args, kwargs, output):
            context = kwargs.get("key_value_states")
            heard[place] = Heard(args[0], args[0] if context is None else context, output[0])

        return module.register_forward_hook(note, with_kwargs=True)

    for name, module in model.named_modules():
        if name.endswith(("SelfAttention", "EncDecAttention")):
            stack, _, layer, *_ = name.split(".")
            site = "cross" if name.endswith("EncDecAttention") else stack
            hooks.append(hook(f"{site} {layer}", module))
    try:
        model(**inputs)
    finally:
        for each in hooks:
            each.remove()
    return heard
