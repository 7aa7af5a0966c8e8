"""The loss of a batch, with logits only where they are needed."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import (
    MT5ForConditionalGeneration,
    PreTrainedModel,
    T5ForConditionalGeneration,
    UMT5ForConditionalGeneration,
)
from transformers.loss.loss_utils import ForCausalLMLoss

from helpers._shapes import Float, Shaped

LOGIT_BYTES = 2**25  # of logits at a time


def labelled_loss(model: nn.Module, batch: Mapping) -> Tensor:
    """The mean cross-entropy of `model(**batch).loss`, with the vocabulary's logits only where there is a label.

    Padded labels (-100) carry no loss, yet the model would compute a row of logits for each: on short targets in a
    padded batch a large part of the step. Equal to the model's own loss up to rounding. One call at a time on a model:
    it puts a hook on its head.

    Args:
        model: a T5 of transformers, or a decoder alone, with a language modelling head (see `has_labelled_loss`).
        batch: what the model takes; `labels` `[batch, target]`, or of a decoder alone as long as its text.
    """
    inputs = dict(batch)
    labels = inputs.pop("labels")
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    else:
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)  # each token writes the next one
        inputs["use_cache"] = False
    labelled = labels != -100
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, args: (args[0][labelled],))
    try:
        logits = model(**inputs).logits
    finally:
        hook.remove()
    return F.cross_entropy(logits.float(), labels[labelled])


def has_labelled_loss(model: nn.Module) -> bool:
    """Whether the model's own loss is the one that `labelled_loss` computes: it is a T5, or a decoder alone."""
    if isinstance(model, T5ForConditionalGeneration | MT5ForConditionalGeneration | UMT5ForConditionalGeneration):
        return True
    is_plain = isinstance(model, PreTrainedModel) and not model.config.is_encoder_decoder
    return is_plain and model.loss_function is ForCausalLMLoss and model.get_output_embeddings() is not None


def frozen_cross_entropy(
    states: Float[Tensor, "tokens d_model"], head: Float[Tensor, "vocabulary d_model"], labels: Shaped[Tensor, "tokens"]
) -> Float[Tensor, ""]:
    """The mean cross-entropy of `states @ head.T`, whose gradient reaches `states` alone.

        loss              = mean_t( log sum_v exp(head_v . states_t) - head_label(t) . states_t )
        dloss / dstates_t = sum_v (p_v - [v = label(t)]) head_v / tokens              p = softmax(head states_t)

    With a frozen head, the gradient is known as soon as the logits are: 32 MB of logits (in float32) are made, used for
    both and thrown away, and then the next. Every label must be a class: there is no -100.
    """
    return _FrozenCrossEntropy.apply(states, head, labels)


class _FrozenCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, head, labels):
        rows = max(1, LOGIT_BYTES // (4 * len(head)))
        losses, gradients = [], []
        for some, right in zip(states.split(rows), labels.split(rows), strict=True):
            logits = F.linear(some, head).to(torch.promote_types(head.dtype, torch.float32))
            highest, wanted = logits.amax(dim=1, keepdim=True), logits.gather(1, right[:, None])
            shares = logits.sub_(highest).exp_()
            total = shares.sum(dim=1, keepdim=True)
            losses.append(total.log() + highest - wanted)
            if ctx.needs_input_grad[0]:
                # The 1 is taken off before the product: in bfloat16, two products that are nearly equal would leave
                # their rounding alone.
                shares.div_(total).scatter_add_(1, right[:, None], -torch.ones_like(total))
                gradients.append(shares.to(head.dtype) @ head)
        if gradients:
            ctx.save_for_backward(torch.cat(gradients) / len(labels))
        return torch.cat(losses).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx, outer):
        (gradient,) = ctx.saved_tensors
        return gradient * outer.to(gradient.dtype), None, None
