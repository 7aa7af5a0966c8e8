"""The benchmarks: `python tests/benchmarks/run.py [attention] [step] [generate] [length] [start]`; no name means all.

Prints a table for each, and stores them in results.json beside this file. `--quick` runs few rounds, to see that it
works. Random weights of t5-small's shape, and the bundled bases. peft takes part where it is installed (it is in the
extra `lab`), adapters where it is.
"""

import argparse
import json
import platform
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import measuring
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from helpers import MultiHeadAttention, T5Prefix, load_base, load_task, scaled_dot_product_attention
from helpers.training import collate, labelled_loss

RESULTS = Path(__file__).with_name("results.json")
SITES = {"decoder": ("decoder",), "three sites": ("encoder", "decoder", "cross")}
PEER = "peft, decoder" if find_spec("peft") else "full fine-tuning"


# --- attention -------------------------------------------------------------------------------------------------------


def attention_variants(batch: int, length: int, heads: int, head_dim: int) -> measuring.Variants:
    """Attention alone: forward and backward of `[batch, heads, length, head_dim]`."""
    query, key, value = (torch.randn(batch, heads, length, head_dim, requires_grad=True) for _ in range(3))

    def textbook(query, key, value):
        return (query @ key.mT / head_dim**0.5).softmax(-1) @ value

    def einsum(query, key, value):
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / head_dim**0.5
        return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), value)

    def run(attend):
        attend(query, key, value).sum().backward()

    return {
        "textbook": partial(run, textbook),
        "einsum": partial(run, einsum),
        "ours, with weights": partial(run, lambda *qkv: scaled_dot_product_attention(*qkv)[0]),
        "F.scaled_dot_product_attention": partial(run, F.scaled_dot_product_attention),
    }


def module_variants(batch: int, length: int, width: int, heads: int) -> measuring.Variants:
    """The whole module, projections included: forward and backward."""
    x = torch.randn(batch, length, width, requires_grad=True)
    torchs, ours = nn.MultiheadAttention(width, heads, bias=False, batch_first=True), MultiHeadAttention(width, heads)
    return {
        "nn.MultiheadAttention": lambda: torchs(x, x, x, need_weights=False)[0].sum().backward(),
        "MultiHeadAttention": lambda: ours(x).sum().backward(),
        "MultiHeadAttention, with weights": lambda: ours(x, need_weights=True)[0].sum().backward(),
    }


# --- a training step -------------------------------------------------------------------------------------------------


def t5_small() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(decoder_start_token_id=0)  # its defaults are t5-small's
    return T5ForConditionalGeneration(config).eval()


def bundled() -> T5ForConditionalGeneration:
    return load_base()[0]


def batch_for(size: str, *, padded: float = 0.0) -> dict[str, torch.Tensor]:
    """t5-small: 8 sources of 64 tokens, targets of 32; bundled: 32 biographies and their cards."""
    if size == "bundled":
        return collate(load_base()[1], load_task("card").train[:32])
    torch.manual_seed(1)
    batch = {"input_ids": torch.randint(2, 32000, (8, 64)), "labels": torch.randint(2, 32000, (8, 32))}
    if padded:
        batch["labels"][:, int(32 * (1 - padded)) :] = -100
    return {**batch, "attention_mask": torch.ones(8, 64, dtype=torch.long)}


def step(loss, parameters) -> partial:
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)

    def run():
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def prefix_step(make, batch, sites, prefix_length=20, *, cached=False, dtype=torch.float32):
    model = make().requires_grad_(False).to(dtype)
    prefix = T5Prefix.for_model(model, prefix_length=prefix_length, sites=sites)
    prefix.attach(model)
    if cached:  # exact: the encoder has no prefix and no dropout
        with torch.no_grad():
            states = model.encoder(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        batch = {**batch, "input_ids": None, "encoder_outputs": BaseModelOutput(states)}
    return step(lambda: labelled_loss(model, batch), prefix.parameters())


def peft_step(make, batch, prefix_length=20):
    from peft import PrefixTuningConfig, get_peft_model

    options = {"task_type": "SEQ_2_SEQ_LM", "num_virtual_tokens": prefix_length}
    model = get_peft_model(make(), PrefixTuningConfig(**options)).eval()
    return step(lambda: model(**batch).loss, model.parameters())


def floor_step(make, batch, sites):
    """What no prefix can save: forward, and backward through the activations alone."""
    model = make().requires_grad_(False)
    source, target = (
        model.get_input_embeddings()(ids) for ids in (batch["input_ids"], model._shift_right(batch["labels"]))
    )
    target.requires_grad_(True)
    source.requires_grad_("encoder" in sites)

    def run():
        model(
            inputs_embeds=source,
            attention_mask=batch["attention_mask"],
            decoder_inputs_embeds=target,
            labels=batch["labels"],
        ).loss.backward()

    return run


def step_variants(size: str) -> measuring.Variants:
    make, batch = {"t5-small": t5_small, "bundled": bundled}[size], batch_for(size)
    variants = {"full fine-tuning": full_step(make(), batch)}
    for name, sites in SITES.items():
        variants[f"floor, {name}"] = floor_step(make, batch, sites)
        variants[f"ours, {name}"] = prefix_step(make, batch, sites)
    variants["ours, decoder, encoder cached"] = prefix_step(make, batch, SITES["decoder"], cached=True)
    if size == "t5-small":
        half = {"cached": True, "dtype": torch.bfloat16}
        variants["ours, decoder, encoder cached, bf16 base"] = prefix_step(make, batch, SITES["decoder"], **half)
    if find_spec("peft"):
        variants["peft, decoder"] = peft_step(make, batch)
    return variants


def full_step(model, batch):
    return step(lambda: model(**batch).loss, model.parameters())


def length_variants(prefix_length: int) -> measuring.Variants:
    batch = batch_for("t5-small")
    variants = {"floor, decoder": floor_step(t5_small, batch, SITES["decoder"])}
    for name, sites in SITES.items():
        variants[f"ours, {name}"] = prefix_step(t5_small, batch, sites, prefix_length)
    if find_spec("peft"):
        variants["peft, decoder"] = peft_step(t5_small, batch, prefix_length)
    return variants


# --- generation ------------------------------------------------------------------------------------------------------


def generate_variants(make, rows: int, source: int, prefix_length: int) -> measuring.Variants:
    """32 tokens, greedy, through transformers' own `generate`."""
    torch.manual_seed(2)
    bare, prefixed = make(), make()
    ids = torch.randint(2, bare.config.vocab_size - 100, (rows, source))
    options = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False}
    T5Prefix.for_model(prefixed, prefix_length=prefix_length).eval().attach(prefixed)
    variants = {
        "no prefix": lambda: bare.generate(ids, **options),
        "ours, three sites": lambda: prefixed.generate(ids, **options),
    }
    if find_spec("peft"):
        from peft import PrefixTuningConfig, get_peft_model

        config = PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=prefix_length)
        with_peft = get_peft_model(make(), config).eval()
        variants["peft, which drops the prefix"] = lambda: with_peft.generate(input_ids=ids, **options)
    return variants


# --- start-up ----------------------------------------------------------------------------------------------------

IMPORTS = {
    "torch": "import torch",
    "torch, helpers": "import torch, helpers",
    "torch, helpers' attention": "import torch; from helpers import MultiHeadAttention, PrefixEncoder",
    "transformers' T5": "from transformers import T5ForConditionalGeneration",
    "helpers' T5Prefix": "from helpers import T5Prefix",
}


def start_seconds(statement: str) -> float:
    script = f"import resource\n{statement}\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_utime)"
    return float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)


# --- the tables ----------------------------------------------------------------------------------------------------

# The most that each may cost, as a ratio to its table's reference.
TARGETS = {
    "module": {"MultiHeadAttention": 0.97},
    "step t5-small": {
        "ours, decoder": 1.00,
        "ours, decoder, encoder cached": 0.70,
        "ours, decoder, encoder cached, bf16 base": 0.45,
        "ours, three sites": 1.40,
    },
    "step bundled": {"ours, decoder": 0.75, "ours, decoder, encoder cached": 0.55, "ours, three sites": 1.05},
    "generate t5-small, 1 row": {"ours, three sites": 1.05},
    "generate t5-small, 16 rows": {"ours, three sites": 1.05},
    "generate t5-small, 8 rows, source 384, prefix 100": {"ours, three sites": 1.15},
}


def tables(chosen: list[str]):
    """`(name, variants, reference, rounds)` of each table."""
    if "attention" in chosen:
        for length in (8, 128, 512):
            yield f"attention, length {length}", attention_variants(8, length, 8, 64), "textbook", 40
        yield "module", module_variants(8, 128, 512, 8), "nn.MultiheadAttention", 60
    if "step" in chosen:
        yield "step bundled", step_variants("bundled"), PEER, 40
        yield "step t5-small", step_variants("t5-small"), PEER, 15
    if "generate" in chosen:
        yield "generate t5-small, 1 row", generate_variants(t5_small, 1, 64, 20), "no prefix", 8
        yield "generate t5-small, 16 rows", generate_variants(t5_small, 16, 64, 20), "no prefix", 5
        yield (
            "generate t5-small, 8 rows, source 384, prefix 100",
            generate_variants(t5_small, 8, 384, 100),
            "no prefix",
            5,
        )
    if "length" in chosen:
        for length in (1, 20, 100, 512):
            yield f"prefix length {length}", length_variants(length), "floor, decoder", 8


def main() -> None:
    names = ["attention", "step", "generate", "length", "start"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="three rounds each, nothing stored")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(names)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    measuring.fix_environment()
    chosen = arguments.names or names
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    stored["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
    }
    for name, variants, reference, rounds in tables(chosen):
        results = measuring.compare(variants, reference, rounds=3 if arguments.quick else rounds)
        print(measuring.markdown(f"{name}, ratio to {reference}", results, TARGETS.get(name, {})), flush=True)
        stored[name] = measuring.as_json(results)
    if "start" in chosen:
        seconds = {name: min(start_seconds(statement) for _ in range(3)) for name, statement in IMPORTS.items()}
        print("\n".join(f"start-up, {name}: {value:.2f} CPU s" for name, value in seconds.items()))
        stored["start"] = seconds
    if not arguments.quick:
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
