"""The benchmarks: `python tests/benchmarks/run.py [attention] [step] [length] [shape] [generate] [decoder] [start]`;
none = all.

Prints a table for each, and stores them in `helpers/course/costs.json`, which lesson 8 draws, with a picture for the
README. `--quick` runs few rounds and stores nothing. Random weights of t5-small's shape, and the bundled base. peft
takes part where it is installed (it is in the extra `lab`). About twenty minutes on one free core.

`--without-bf16` keeps oneDNN from the processor's bfloat16 instructions, as if it had none, and stores the step of
t5-small's shape under a name of its own. What each table was measured on stands in the file under "processors".

`--device cuda` runs training steps of t5-small's and t5-base's shape on a GPU, in float32 and bfloat16, compiled and
not, and stores them under the device's name in `costs_gpu.json` in the working folder.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import decoder_alone
import measuring
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from helpers import LeanT5, MultiHeadAttention, T5Prefix, load_base, load_task, scaled_dot_product_attention
from helpers.course.figures import curves
from helpers.tuning.losses import labelled_loss
from helpers.tuning.training import collate

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "helpers" / "course" / "costs.json"
PICTURE = ROOT / "notebooks" / "pictures" / "cost_by_prefix_length.png"
SITES = {"decoder": ("decoder",), "three sites": ("encoder", "decoder", "cross")}
LENGTHS = (1, 20, 50, 100, 200, 512)
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


def module_variants(batch: int, length: int, width: int, heads: int, *, backward: bool) -> measuring.Variants:
    """The whole module, projections included."""
    x = torch.randn(batch, length, width, requires_grad=True)
    torchs, ours = nn.MultiheadAttention(width, heads, bias=False, batch_first=True), MultiHeadAttention(width, heads)
    outputs = {
        "nn.MultiheadAttention": lambda: torchs(x, x, x, need_weights=False)[0],
        "nn.MultiheadAttention, as called by default": lambda: torchs(x, x, x)[0],
        "MultiHeadAttention": lambda: ours(x),
        "MultiHeadAttention, with weights": lambda: ours(x, need_weights=True)[0],
    }
    if not backward:
        return outputs
    return {name: lambda output=output: output().sum().backward() for name, output in outputs.items()}


# --- a training step -------------------------------------------------------------------------------------------------


def random_t5(**sizes) -> T5ForConditionalGeneration:
    """T5Config's defaults are t5-small's."""
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes)).eval()


def bundled() -> T5ForConditionalGeneration:
    return load_base()[0]


def random_batch(rows: int = 8, source: int = 64, target: int = 32) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids, labels = (torch.randint(2, 32000, (rows, length)) for length in (source, target))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def cards() -> dict[str, torch.Tensor]:
    """32 biographies and their cards: real texts, so a third of a batch is padding."""
    return collate(load_base()[1], load_task("card").train[:32])


def step(loss, parameters) -> partial:
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)

    def run():
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def full_step(make, batch):
    model = make()
    return step(lambda: model(**batch).loss, model.parameters())


def prefix_step(make, batch, sites, *, prefix_length=20, lean=False, cached=False, dtype=torch.float32, compiled=False):
    """cached: the encoder ran before, which is exact, since it has neither a prefix nor dropout."""
    model = make().requires_grad_(False).to(dtype)
    prefix = T5Prefix.for_model(model, prefix_length=prefix_length, sites=sites)
    if lean:
        lean_model = LeanT5(model, prefix)
        with torch.no_grad():
            encoded = lean_model.encode(batch) if cached else None
        return step(lambda: lean_model(batch, encoded=encoded), prefix.parameters())
    prefix.attach(model)
    if cached:
        with torch.no_grad():
            states = model.encoder(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        batch = {**batch, "input_ids": None, "encoder_outputs": BaseModelOutput(states)}
    if compiled:
        forward = torch.compile(model)
        return step(lambda: forward(**batch).loss, prefix.parameters())
    return step(lambda: labelled_loss(model, batch), prefix.parameters())


def peft_step(make, batch, prefix_length=20):
    from peft import PrefixTuningConfig, get_peft_model

    options = {"task_type": "SEQ_2_SEQ_LM", "num_virtual_tokens": prefix_length}
    model = get_peft_model(make(), PrefixTuningConfig(**options)).eval()
    return step(lambda: model(**batch).loss, model.parameters())


def floor_step(make, batch, sites):
    """What no prefix can save in transformers: forward, and backward through the activations alone."""
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


def prefix_variants(make, batch, **options) -> measuring.Variants:
    """Ours in two arrangements, the same numbers from both: attached to transformers' model, and LeanT5."""
    variants = {
        f"{arrangement}, {name}": prefix_step(make, batch, sites, lean=arrangement == "lean", **options)
        for name, sites in SITES.items()
        for arrangement in ("attached", "lean")
    }
    if find_spec("peft"):
        variants["peft, decoder"] = peft_step(make, batch, options.get("prefix_length", 20))
    return variants


def step_variants(make, batch, *, half: bool) -> measuring.Variants:
    variants = prefix_variants(make, batch)
    for arrangement in ("attached", "lean"):
        options = {"lean": arrangement == "lean", "cached": True}
        name = f"{arrangement}, decoder, encoder cached"
        variants[name] = prefix_step(make, batch, SITES["decoder"], **options)
        if half:
            options["dtype"] = torch.bfloat16
            variants[f"{name}, bf16 base"] = prefix_step(make, batch, SITES["decoder"], **options)
    for name, sites in SITES.items():
        variants[f"floor, {name}"] = floor_step(make, batch, sites)
    return variants | {"full fine-tuning": full_step(make, batch)}


# --- generation ------------------------------------------------------------------------------------------------------


def generate_variants(make, rows: int, source: int, prefix_length: int) -> measuring.Variants:
    """32 tokens, greedy, through transformers' own `generate`."""
    torch.manual_seed(2)
    bare, prefixed = make(), make()
    ids = torch.randint(2, bare.config.vocab_size - 100, (rows, source))
    options = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False}
    prefix = T5Prefix.for_model(prefixed, prefix_length=prefix_length).requires_grad_(False)
    prefix.eval().attach(prefixed)
    variants = {
        "no prefix": lambda: bare.generate(ids, **options),
        "ours, three sites": lambda: prefixed.generate(ids, **options),
    }
    if find_spec("peft"):
        from peft import PrefixTuningConfig, get_peft_model

        config = PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=prefix_length)
        with_peft = get_peft_model(make(), config).eval().requires_grad_(False)
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


# --- on a GPU ----------------------------------------------------------------------------------------------------

T5_BASE = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}


def device_variants(sizes: dict, batch: dict[str, torch.Tensor], device: str) -> measuring.Variants:
    """One step in float32 and with a bfloat16 base, as it is, compiled, and lean."""

    def make():
        return random_t5(**sizes).to(device)

    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    variants = {"full fine-tuning": full_step(make, batch)}
    if find_spec("peft"):
        variants["peft, decoder"] = peft_step(make, batch)
    arrangements = {"attached": {}, "compiled": {"compiled": True}, "lean": {"lean": True}}
    for dtype in (torch.float32, torch.bfloat16):
        for name, sites in SITES.items():
            for arrangement, options in arrangements.items():
                variant = f"{arrangement}, {name}, {str(dtype).removeprefix('torch.')}"
                variants[variant] = prefix_step(make, batch, sites, dtype=dtype, **options)
    return variants


# --- the processor ---------------------------------------------------------------------------------------------------

WITHOUT_BF16 = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
INSTRUCTIONS = "neon sve bf16 sve_bf16 avx2 avx512_f avx512_bf16 amx_bf16".split()  # of torch's names for them


def processor() -> dict:
    """Its name, which instructions it has of those that decide how fast products are, and what oneDNN may not use."""
    has = torch.cpu.get_capabilities()
    found = {"name": has.get("cpu_name", platform.processor()), "instructions": [i for i in INSTRUCTIONS if has.get(i)]}
    limits = {name: os.environ[name] for name in WITHOUT_BF16 if name in os.environ}
    return found | limits


# --- the tables ----------------------------------------------------------------------------------------------------

SMALL_STEP = "step t5-small"
# The most that each may cost, relative to its table's reference.
TARGETS = {
    "module, forward and backward": {"MultiHeadAttention": {"ratio": 0.97, "memory": 0.5}},
    SMALL_STEP: {
        "attached, decoder": {"ratio": 1.00, "memory": 0.8},
        "lean, decoder": {"ratio": 1.00, "memory": 0.8},
        "attached, decoder, encoder cached": {"ratio": 0.70},
        "lean, decoder, encoder cached": {"ratio": 0.70},
        "attached, decoder, encoder cached, bf16 base": {"ratio": 0.45},
        "lean, decoder, encoder cached, bf16 base": {"ratio": 0.45},
        "attached, three sites": {"ratio": 1.40},
        "lean, three sites": {"ratio": 1.40},
    },
    "step bundled": {
        "lean, decoder": {"ratio": 0.75, "memory": 0.8},
        "lean, decoder, encoder cached": {"ratio": 0.55},
        "lean, three sites": {"ratio": 1.05},
    },
    "prefix length 512": {"attached, decoder": {"memory": 0.5}, "lean, decoder": {"memory": 0.5}},
    "generate t5-small, 1 row": {"ours, three sites": {"ratio": 1.05}},
    "generate t5-small, 16 rows": {"ours, three sites": {"ratio": 1.05}},
    "generate t5-small, 8 rows, source 384, prefix 100": {"ours, three sites": {"ratio": 1.15}},
    "decoder alone, step": {"ours, the model's loss": {"ratio": 1.00}, "ours, as fit does it": {"ratio": 1.00}},
    "decoder alone, generate, 1 row": {"ours": {"ratio": 1.05}},
    "decoder alone, generate, 16 rows": {"ours": {"ratio": 1.05}},
}


def small_step() -> tuple[measuring.Variants, str, int]:
    return step_variants(random_t5, random_batch(), half=True), PEER, 15


def tables(chosen: list[str]):
    """`(name, variants, reference, rounds)` of each table."""
    if "attention" in chosen:
        for length in (8, 128, 512):
            yield f"attention, length {length}", attention_variants(8, length, 8, 64), "textbook", 40
        for label, backward in {"forward": False, "forward and backward": True}.items():
            yield f"module, {label}", module_variants(8, 128, 512, 8, backward=backward), "nn.MultiheadAttention", 60
    if "step" in chosen:
        yield "step bundled", step_variants(bundled, cards(), half=False), PEER, 40
        yield SMALL_STEP, *small_step()
    if "length" in chosen:
        for length in LENGTHS:
            variants = prefix_variants(random_t5, random_batch(), prefix_length=length)
            yield f"prefix length {length}", variants, "peft, decoder", 6
    if "shape" in chosen:
        for rows, source in ((1, 64), (32, 64), (8, 16), (8, 256)):
            variants = prefix_variants(random_t5, random_batch(rows, source))
            yield f"{rows} rows, source {source}", variants, "peft, decoder", 5
    if "generate" in chosen:
        yield "generate bundled, 1 row", generate_variants(bundled, 1, 32, 20), "no prefix", 12
        yield "generate t5-small, 1 row", generate_variants(random_t5, 1, 64, 20), "no prefix", 8
        yield "generate t5-small, 16 rows", generate_variants(random_t5, 16, 64, 20), "no prefix", 6
        variants = generate_variants(random_t5, 8, 384, 100)
        yield "generate t5-small, 8 rows, source 384, prefix 100", variants, "no prefix", 6
    if "decoder" in chosen:
        peer = "peft" if find_spec("peft") else "full fine-tuning"
        yield "decoder alone, step", decoder_alone.step_variants(step), peer, 20
        for name, rows, rounds in (("1 row", 1, 30), ("16 rows", 16, 15)):
            variants = decoder_alone.generate_variants(rows, source=64, prefix_length=20)
            yield f"decoder alone, generate, {name}", variants, "no prefix", rounds


def draw(stored: dict) -> None:
    """The cost of a step against the prefix's length, as a picture."""
    names = ("peft, decoder", "attached, decoder", "lean, decoder", "attached, three sites", "lean, three sites")
    series = {name: [stored[f"prefix length {n}"][name]["milliseconds"] for n in LENGTHS] for name in names}
    options = {"x_label": "prefix length", "y_label": "CPU time (ms)", "log_x": True, "from_zero": True, "digits": 0}
    curves(series, x=LENGTHS, title="A training step, t5-small's shape", path=PICTURE, **options)


def main() -> None:
    names = ["attention", "step", "length", "shape", "generate", "decoder", "start"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="three rounds each, nothing stored")
    parser.add_argument("--without-bf16", action="store_true", help="step t5-small, without bfloat16 instructions")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(names)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if arguments.without_bf16 and (arguments.names or arguments.device != "cpu"):
        parser.error("--without-bf16 measures one table, on the CPU: give it no other name or device")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    versions["transformers"] = transformers.__version__
    if arguments.device == "cuda":
        run_on_gpu(versions | {"device": torch.cuda.get_device_name()})
        return
    measuring.fix_environment(WITHOUT_BF16 if arguments.without_bf16 else {})
    chosen = arguments.names or names
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    stored["versions"] = versions
    if arguments.without_bf16:
        chosen = []
        measured = [(f"{SMALL_STEP}, without bf16 instructions", *small_step())]
    else:
        measured = tables(chosen)
    for name, variants, reference, rounds in measured:
        results = measuring.compare(variants, reference, rounds=3 if arguments.quick else rounds)
        print(measuring.markdown(f"{name}, relative to {reference}", results, TARGETS.get(name, {})), flush=True)
        stored[name] = measuring.as_json(results)
        stored.setdefault("processors", {})[name] = processor()
    if "start" in chosen:
        stored["start"] = {
            name: round(statistics.median(start_seconds(statement) for _ in range(5)), 3)
            for name, statement in IMPORTS.items()
        }
        stored.setdefault("processors", {})["start"] = processor()
        print("\n".join(f"start-up, {name}: {value:.2f} CPU s" for name, value in stored["start"].items()))
    if not arguments.quick:
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        if find_spec("peft") and all(f"prefix length {length}" in stored for length in LENGTHS):
            draw(stored)


def run_on_gpu(stored: dict) -> None:
    for name, sizes in {"t5-small": {}, "t5-base": T5_BASE}.items():
        variants = device_variants(sizes, random_batch(32, 128, 64), "cuda")
        results = measuring.compare(variants, "full fine-tuning", rounds=20, device="cuda")
        print(measuring.markdown(f"step {name}, {stored['device']}", results, {}), flush=True)
        stored[f"step {name}"] = measuring.as_json(results)
    Path("costs_gpu.json").write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
