"""The sequence-to-sequence loop that pretrains both bundled bases, and how their weights are stored."""

import copy
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from transformers.optimization import Adafactor

IGNORED = -100  # the label that cross-entropy skips


def pad_batch(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], pad_id: int = 0
) -> dict[str, torch.Tensor]:
    """Token ids to `input_ids` and `attention_mask` [batch, source] and `labels` [batch, target].

    Both sides are padded on the right; padded labels are -100, so that they carry no loss.
    """
    if len(sources) != len(targets):
        raise ValueError(f"a batch pairs sources with targets, but got {len(sources)} and {len(targets)}")
    input_ids = torch.full((len(sources), max(map(len, sources))), pad_id)
    attention_mask = torch.zeros_like(input_ids)
    labels = torch.full((len(targets), max(map(len, targets))), IGNORED)
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        input_ids[row, : len(source)] = torch.tensor(source)
        attention_mask[row, : len(source)] = 1
        labels[row, : len(target)] = torch.tensor(target)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def pretrain(
    model: torch.nn.Module,
    batches: Iterable[dict[str, torch.Tensor]],
    *,
    learning_rate: float = 2e-2,
    warmup_steps: int,
    total_steps: int,
    bf16: bool = True,
    log: Callable[[str], None] = print,
    checkpoint: Path | None = None,
) -> list[float]:
    """Train every weight of `model` for `total_steps` batches; returns the loss of each step.

    With `checkpoint`, all is written there every 250 steps, and a run that finds the file goes on from it, to the same
    weights: `batches` must be the same again.

    T5 initialises its embedding with standard deviation 1 and its query projections near
    (d_model * d_kv)^-0.5. One step size cannot serve both, so Adafactor multiplies the rate of each tensor by
    max(1e-3, its root mean square). The rate rises linearly for `warmup_steps`, then falls linearly to zero.
    """
    optimiser = Adafactor(
        model.parameters(), lr=learning_rate, scale_parameter=True, relative_step=False, warmup_init=False
    )

    decay_steps = max(1, total_steps - warmup_steps)

    def rate(step: int) -> float:
        return min((step + 1) / max(1, warmup_steps), (total_steps - step) / decay_steps)

    schedule = LambdaLR(optimiser, rate)
    device = next(model.parameters()).device
    model.train()
    losses: list[float] = []
    resumable = {"model": model, "optimiser": optimiser, "schedule": schedule}
    if checkpoint is not None and checkpoint.is_file():
        held = torch.load(checkpoint, weights_only=True)
        losses = held.pop("losses")
        for name, state in held.items():
            resumable[name].load_state_dict(state)
    start = time.perf_counter()
    done = len(losses)
    for step, batch in zip(range(done, total_steps), islice(batches, done, None), strict=False):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        optimiser.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        if (step + 1) % 100 == 0 or step + 1 == total_steps:
            recent = sum(losses[-100:]) / len(losses[-100:])
            log(f"step {step + 1}/{total_steps}: loss {recent:.4f}, {time.perf_counter() - start:.0f} s")
        if checkpoint is not None and (step + 1) % 250 == 0:
            states = {name: part.state_dict() for name, part in resumable.items()}
            torch.save(states | {"losses": losses}, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").replace(checkpoint)
    if len(losses) < total_steps:
        raise ValueError(f"batches ended after {len(losses)} of total_steps={total_steps}")
    return losses


def save_half(model: torch.nn.Module, folder: str | Path) -> Path:
    """Store the weights in fp16 beside config.json; returns the path of `model.safetensors`.

    `model` itself is left as it was. A weight beyond fp16's range raises ValueError.
    """
    half = copy.deepcopy(model).half().cpu().eval()
    for name, weight in half.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"{name} has values that fp16 cannot hold (above 65504, or not finite)")
    half.save_pretrained(folder)
    return Path(folder) / "model.safetensors"


def sha256(path: str | Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
