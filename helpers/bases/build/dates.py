"""Rebuild the dates base and its tasks: `python -m helpers.bases.build.dates --out FOLDER [--smoke]`.

The base is a byte-level T5 that writes dates in 29 languages. The languages it is later tuned on, and English
ordinals ("March 14th"), never occur in its pretraining. Everything is seeded: on one machine, with the same
versions of torch and babel, two runs write the same bytes. Another babel brings another CLDR, which may write
a date differently; that is why the tasks are shipped as data.
"""

import argparse
import gzip
import json
import random
import shutil
from collections.abc import Iterator
from datetime import date, timedelta
from functools import lru_cache
from pathlib import Path

import babel
import torch
from babel.dates import format_date
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration

from helpers.bases.build.pretraining import pad_batch, pretrain, save_half, sha256

# fmt: off
LOCALES = (
    "en", "fr", "es", "pt", "nl", "sv", "da", "nb", "fi", "pl", "cs", "hu", "ro", "tr", "id",
    "hr", "sk", "sl", "et", "lv", "lt", "ca", "eu", "gl", "af", "sq", "is", "ga", "cy",
)
# fmt: on
STYLES = ("full", "long", "medium", "short")
HELD_OUT = {"german": "de", "italian": "it", "vietnamese": "vi", "russian": "ru"}
DESCRIPTIONS = {
    "german": "ISO date with weekday to the full German date; the base has seen no German.",
    "italian": "ISO date with weekday to the full Italian date; the base has seen no Italian.",
    "ordinal": "ISO date with weekday to an English date with an ordinal (14th), a form new to the base.",
    "vietnamese": "ISO date with weekday to the full Vietnamese date; the base has seen no Vietnamese.",
    "russian": "ISO date with weekday to the full Russian date; the base has seen no Cyrillic script.",
}
SPLIT_SIZES = {"train": 4000, "validation": 386, "test": 386}
FIRST_DAY, LAST_DAY = date(1900, 1, 1), date(2099, 12, 31)
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")

Pair = tuple[str, str]


def iso(day: date, *, weekday: bool = True) -> str:
    """`1987-03-14 Sat`; the weekday is given because no small transformer computes a calendar."""
    return f"{day.isoformat()} {WEEKDAYS[day.weekday()]}" if weekday else day.isoformat()


@lru_cache(maxsize=200_000)
def localised(day: date, locale: str, style: str) -> str:
    """The date as CLDR writes it. Special spaces become plain ones: they differ between CLDR versions."""
    return format_date(day, style, locale=locale).replace("\u202f", " ").replace("\xa0", " ")


def ordinal(day: date) -> str:
    """`Saturday, March 14th, 1987`."""
    suffix = "th" if 11 <= day.day <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th")
    weekday, month_and_day, year = localised(day, "en", "full").split(", ")
    return f"{weekday}, {month_and_day}{suffix}, {year}"


def split_days(seed: int = 0) -> dict[str, list[date]]:
    """Days for the three splits of every task, and the rest for pretraining; no day is in two of them."""
    days = [FIRST_DAY + timedelta(n) for n in range((LAST_DAY - FIRST_DAY).days + 1)]
    random.Random(seed).shuffle(days)
    splits = {}
    for name, size in SPLIT_SIZES.items():
        splits[name], days = days[:size], days[size:]
    return splits | {"pretraining": days}


def pretraining_pair(day: date, rng: random.Random) -> Pair:
    """One example: localise (half of them), back to ISO, locale to locale, or copy. The source says which."""
    locale, style = rng.choice(LOCALES), rng.choice(STYLES)
    job = rng.choices(("localise", "back", "translate", "copy"), weights=(5, 2, 2, 1))[0]
    if job == "localise":
        return f"{locale} {style}: {iso(day)}", localised(day, locale, style)
    if job == "copy":
        text = rng.choice((iso(day), localised(day, locale, style)))
        return f"copy: {text}", text
    # The short style leaves out the century, or which number is the month: nothing can be read back from it.
    source_style = rng.choice(("full", "long", "medium"))
    source = localised(day, rng.choice(LOCALES), source_style)
    has_weekday = source_style == "full"
    if job == "back":
        return f"iso: {source}", iso(day, weekday=has_weekday)
    style = style if has_weekday else rng.choice(("long", "medium", "short"))
    return f"{locale} {style}: {source}", localised(day, locale, style)


def pretraining_pairs(days: list[date], seed: int = 0) -> Iterator[Pair]:
    """The endless pretraining stream."""
    rng = random.Random(seed)
    while True:
        yield pretraining_pair(rng.choice(days), rng)


def batches(pairs: Iterator[Pair], batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Pairs as padded byte ids."""
    tokenizer = ByT5Tokenizer()
    while True:
        sources, targets = zip(*(next(pairs) for _ in range(batch_size)), strict=True)
        yield pad_batch(tokenizer(list(sources)).input_ids, tokenizer(list(targets)).input_ids)


def task_rows(name: str, days: dict[str, list[date]]) -> list[tuple[str, str, str]]:
    """(split, source, target) for one task, the same days for every task."""
    rows = []
    for split in SPLIT_SIZES:
        for day in days[split]:
            target = ordinal(day) if name == "ordinal" else localised(day, HELD_OUT[name], "full")
            rows.append((split, iso(day), target))
    return rows


def write_tasks(folder: Path, days: dict[str, list[date]]) -> None:
    """tasks/<name>.tsv.gz and tasks.json. gzip's time stamp is zero, so that the bytes repeat."""
    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    for name in DESCRIPTIONS:
        text = "".join("\t".join(row) + "\n" for row in task_rows(name, days))
        (folder / "tasks" / f"{name}.tsv.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    about = {name: {"description": text, "licence": "Unicode-3.0"} for name, text in DESCRIPTIONS.items()}
    (folder / "tasks.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def new_model(*, smoke: bool = False, seed: int = 0) -> T5ForConditionalGeneration:
    """The untrained base. num_heads * d_kv (192) is not d_model (128): nothing is right by coincidence."""
    size = {"d_model": 128, "d_kv": 48, "d_ff": 384, "num_heads": 4, "num_layers": 2}
    if smoke:
        size = {"d_model": 16, "d_kv": 6, "d_ff": 24, "num_heads": 4, "num_layers": 1}
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=384, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **size
    )
    return T5ForConditionalGeneration(config)


def build(folder: Path, *, smoke: bool = False, steps: int = 2500, batch_size: int = 48) -> list[float]:
    """Write weights, configuration, tasks and licence to `folder`; returns the pretraining losses."""
    if smoke:
        steps, batch_size = 5, 8
    folder.mkdir(parents=True, exist_ok=True)
    days = split_days()
    write_tasks(folder, days)
    # CLDR's licence, as babel ships it beside the data.
    shutil.copy(Path(babel.__file__).parent / "locale-data" / "LICENSE.unicode", folder / "LICENSE-UNICODE")
    model = new_model(smoke=smoke)
    stream = batches(pretraining_pairs(days["pretraining"]), batch_size)
    losses = pretrain(model, stream, warmup_steps=max(1, steps // 20), total_steps=steps)
    weights = save_half(model, folder)
    print(f"{weights}: {weights.stat().st_size:,} bytes, sha256 {sha256(weights)}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and five steps")
    parser.add_argument("--steps", type=int, default=2500)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # more threads may add in another order, and change the last bits
    torch.use_deterministic_algorithms(True)
    build(arguments.out, smoke=arguments.smoke, steps=arguments.steps)
