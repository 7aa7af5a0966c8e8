"""Rebuild the WordNet base: `python -m helpers.bases.build.wordnet --wordnet FOLDER --out FOLDER [--smoke]`.

WordNet 3.0 comes with Debian's package wordnet-base, in /usr/share/wordnet. From it: a unigram tokenizer, a
T5 of 1.9 million parameters pretrained on the training synsets, and the tasks category, card and bio. All of
it is seeded: on one machine, with the same versions of torch and tokenizers, two runs write the same bytes.
`--smoke` builds a toy from a made-up dictionary, in seconds and without WordNet.
"""

import argparse
import gzip
import io
import json
import os
import string
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import sentencepiece
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from helpers.bases.build.pretraining import pretrain, save_half, sha256
from helpers.bases.build.wordnet_data import (
    SPLITS,
    Synset,
    biography_rows,
    category_rows,
    offensive_keys,
    read_wordnet,
    split_synsets,
)
from helpers.bases.build.wordnet_smoke import write_smoke_wordnet
from helpers.bases.build.wordnet_stream import SENTINELS, Corpus, batches, make_corpus

DESCRIPTIONS = {
    "category": "A WordNet definition to the sort of thing it defines, one of 16: animal, artifact, person ...",
    "card": "A one-line biography from WordNet to a record of its facts (text to table).",
    "bio": "A record of facts to the one-line biography that WordNet has for it (table to text).",
}
CATEGORY_SIZES = {"train": 8000, "validation": 600, "test": 600}
PIECES = 4064  # with the sentinels, 4,096 entries


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Words behind the sign of a space; each digit and sign stands alone, so that years and slots are copied."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True),
            pre_tokenizers.Split(Regex(r"▁?[^\p{L}▁]"), behavior="isolated"),
        ]
    )


def train_pieces(texts: Iterable[str], pieces: int) -> list[tuple[str, float]]:
    """The pieces of a unigram model and their scores; pad is 0, eos 1, unk 2.

    sentencepiece trains them, since the trainer of `tokenizers` breaks ties at random. It sees a list of words
    with their counts, and only words of letters: digits and signs get pieces of their own, with and without a
    space before. A piece can only be found where its right neighbour varies, so each word is there a second
    time, before a comma; else "from", which ends where it ends, would not become a piece.
    """
    words: Counter[str] = Counter()
    split = pre_tokenizer()
    for text in texts:
        words.update(word for word, _ in split.pre_tokenize_str(text))
    letters = sorted((word, count) for word, count in words.items() if word.lstrip("▁").isalpha())
    alone = [space + sign for sign in string.digits + string.punctuation for space in ("", "▁")]
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for word, n in letters for line in (f"{word}\t{n}", f"{word},\t1")),
        input_format="tsv",
        model_writer=trained,
        model_type="unigram",
        vocab_size=pieces - len(alone) + 1,  # the comma will be there twice
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        required_chars=string.ascii_letters,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        num_threads=1,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    scored = [(model.id_to_piece(i), model.get_score(i)) for i in range(len(model))]
    lowest = min(score for _, score in scored)
    return [pair for pair in scored if pair[0] != ","] + [(piece, lowest) for piece in alone]


def train_tokenizer(texts: Iterable[str], pieces: int = PIECES) -> PreTrainedTokenizerFast:
    """A unigram tokenizer; every printable ASCII character is a piece, so that only others can become <unk>.

    <extra_id_0> is the last entry and the other sentinels lie before it, as in T5.
    """
    tokenizer = Tokenizer(models.Unigram(train_pieces(texts, pieces), unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    sentinels = [f"<extra_id_{i}>" for i in reversed(range(SENTINELS))]
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>", *sentinels])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=sentinels,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def new_model(vocabulary: int, *, smoke: bool = False, seed: int = 0) -> T5ForConditionalGeneration:
    """The untrained base, a T5 1.0: relu, tied embeddings."""
    size = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_heads": 4, "num_layers": 3}
    if smoke:
        size = {"d_model": 16, "d_kv": 6, "d_ff": 24, "num_heads": 4, "num_layers": 1}
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=vocabulary, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **size
    )
    return T5ForConditionalGeneration(config)


def write_tasks(folder: Path, splits: dict[str, list[Synset]]) -> None:
    """tasks/<name>.tsv.gz and tasks.json. gzip's time stamp is zero, so that the bytes repeat."""
    tasks = {"category": category_rows(splits, CATEGORY_SIZES), **biography_rows(splits)}
    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    for name, rows in tasks.items():
        text = "".join("\t".join(row) + "\n" for row in rows)
        (folder / "tasks" / f"{name}.tsv.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    about = {name: {"description": text, "licence": "WordNet 3.0"} for name, text in DESCRIPTIONS.items()}
    (folder / "tasks.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def write_licence(wordnet: Path, folder: Path) -> None:
    """The licence as it stands at the head of data.noun, without its line numbers."""
    with open(wordnet / "data.noun", encoding="ascii") as file:
        head = [line.strip().partition(" ")[2] for line in file if line.startswith("  ")]
    (folder / "LICENSE-WORDNET").write_text("\n".join(head).rstrip() + "\n", encoding="utf-8")


def prepare(wordnet: Path) -> tuple[dict[str, list[Synset]], Corpus]:
    """The splits without offensive synsets, and what pretraining may see: the training synsets."""
    synsets = read_wordnet(wordnet)
    offensive = offensive_keys(synsets)
    splits = split_synsets(synset for synset in synsets if synset.key not in offensive)
    forbidden = {lemma for synset in synsets if synset.key in offensive for lemma in synset.lemmas}
    return splits, make_corpus(splits["train"], forbidden)


def build(wordnet: Path, folder: Path, *, smoke: bool = False, steps: int = 11000) -> list[float]:
    """Write weights, tokenizer, tasks and licence to `folder`; returns the pretraining losses."""
    folder.mkdir(parents=True, exist_ok=True)
    splits, corpus = prepare(wordnet)
    print(", ".join(f"{len(splits[split]):,} {split}" for split in SPLITS), "synsets", flush=True)
    write_licence(wordnet, folder)
    write_tasks(folder, splits)
    tokenizer = train_tokenizer(corpus.everything(), 300 if smoke else PIECES)
    tokenizer.save_pretrained(folder)
    model = new_model(len(tokenizer), smoke=smoke)
    stream = batches(corpus, tokenizer, pool=128) if smoke else batches(corpus, tokenizer)
    steps = 5 if smoke else steps
    losses = pretrain(
        model,
        stream,
        warmup_steps=max(1, min(500, steps // 20)),
        total_steps=steps,
        log=lambda line: print(line, flush=True),
    )
    # A million words are few, but the model is too small to learn them by heart: it is pretrained without
    # dropout, and stored with T5's usual rate for those who fine-tune all of it in train() mode.
    model.config.dropout_rate = 0.1
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
