"""Rebuild the small GPT: `python -m helpers.bases.build.wordnet_gpt --wordnet FOLDER --out FOLDER [--smoke]`.

A decoder alone with Llama's architecture, pretrained on the text of the WordNet base, with that base's tokenizer and
its held-out synsets left out. Whatever the WordNet base reads and writes as a pair is one text here,

    source </s> target </s>

and a fifth of the texts are records with questions about them, `ask`, which the WordNet base has not:

    animal: owl | size: big | ... </s> size </s> big </s> animal </s> owl </s>

It is trained to continue texts: the loss counts every token. Seeded: on one machine, with the same version of torch,
two runs write the same bytes.
"""

import argparse
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from helpers.bases.build.pretraining import IGNORED, pretrain, save_half, sha256
from helpers.bases.build.wordnet import prepare, write_licence
from helpers.bases.build.wordnet_data import as_record
from helpers.bases.build.wordnet_smoke import write_smoke_wordnet
from helpers.bases.build.wordnet_stream import Corpus, examples, random_record
from helpers.bases.load import load_base

ASK_SHARE = 0.2
LONGEST = 192  # tokens of a text; a longer one is left out
MOST_FIELDS = 14  # of a record that is asked about


def new_model(vocabulary: int, *, smoke: bool = False, seed: int = 0) -> LlamaForCausalLM:
    """The untrained base: rotary positions, 6 heads of 24 for queries, 3 for keys and values, tied embeddings.

    6 * 24 is not the 120 of the hidden states, so that nothing is right by coincidence.
    """
    size = {"hidden_size": 120, "head_dim": 24, "intermediate_size": 352, "num_hidden_layers": 7}
    if smoke:
        size = {"hidden_size": 12, "head_dim": 6, "intermediate_size": 24, "num_hidden_layers": 1}
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
        **size,
    )
    return LlamaForCausalLM(config)


def asked_record(corpus: Corpus, rng: random.Random) -> list[str]:
    """A record, and then each of some of its fields with what it holds."""
    record: dict[str, str] = {}
    fields = rng.randint(2, MOST_FIELDS)
    while len(record) < fields:
        record |= random_record(corpus, rng)
    record = dict(rng.sample(list(record.items()), fields))
    asked = rng.sample(list(record), rng.randint(1, min(4, fields)))
    return [as_record(record), *(text for name in asked for text in (name, record[name]))]


def texts(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> Iterator[list[int]]:
    """The endless stream of texts, each part of which ends in eos."""
    pairs, eos = examples(corpus, tokenizer, rng), tokenizer.eos_token_id
    while True:
        if rng.random() < ASK_SHARE:
            parts = tokenizer(asked_record(corpus, rng), add_special_tokens=False).input_ids
            text = [token for part in parts for token in (*part, eos)]
        else:
            source, target = next(pairs)
            text = source + target
        if len(text) <= LONGEST:
            yield text


def batches(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, *, padded_tokens: int = 4096, pool: int = 8192, seed: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Texts of similar length together, at most `padded_tokens` in a batch; the batches in random order.

    Padding stands on the right, where no token looks, so that no mask is needed.
    """
    rng = random.Random(seed)
    stream = texts(corpus, tokenizer, rng)
    while True:
        group = sorted((next(stream) for _ in range(pool)), key=len)
        starts, rows = [0], 0
        for place, text in enumerate(group):
            rows += 1
            if rows * len(text) > padded_tokens:
                starts, rows = [*starts, place], 1
        parts = [group[start:end] for start, end in zip(starts, [*starts[1:], len(group)], strict=True)]
        rng.shuffle(parts)
        for part in parts:
            yield pad_texts(part, tokenizer.pad_token_id)


def pad_texts(group: list[list[int]], pad_id: int) -> dict[str, torch.Tensor]:
    """`input_ids` and `labels` [text, token], the padding's labels -100."""
    longest = max(map(len, group))
    input_ids = torch.tensor([text + [pad_id] * (longest - len(text)) for text in group])
    labels = torch.tensor([text + [IGNORED] * (longest - len(text)) for text in group])
    return {"input_ids": input_ids, "labels": labels}


def build(wordnet: Path, folder: Path, *, smoke: bool = False, steps: int = 11000) -> list[float]:
    """Write the weights and their licence to `folder`; returns the pretraining losses.

    A run that was stopped goes on where it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _, corpus = prepare(wordnet)
    write_licence(wordnet, folder)
    _, tokenizer = load_base("wordnet")
    model = new_model(len(tokenizer), smoke=smoke)
    print(f"{model.num_parameters():,} parameters", flush=True)
    steps = 5 if smoke else steps
    losses = pretrain(
        model,
        batches(corpus, tokenizer, pool=128 if smoke else 8192),
        warmup_steps=max(1, min(500, steps // 20)),
        total_steps=steps,
        log=lambda line: print(line, flush=True),
        checkpoint=folder / "checkpoint.pt",
    )
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    weights = save_half(model, folder)
    print(f"{weights}: {weights.stat().st_size:,} bytes, sha256 {sha256(weights)}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"), help="WordNet's dict folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--smoke", action="store_true", help="a toy from a made-up dictionary, five steps")
    parser.add_argument("--steps", type=int, default=11000)
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread: the same sums in the same order
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if arguments.smoke:
        with tempfile.TemporaryDirectory() as made_up:
            write_smoke_wordnet(Path(made_up))
            build(Path(made_up), arguments.out, smoke=True)
    else:
        build(arguments.wordnet, arguments.out, steps=arguments.steps)
