"""Write the list of all questions, `notebooks/questions/README.md`: `python tests/list_questions.py`.

By lesson first, then by word: each word of the course's vocabulary with the questions that hold it, or a word that
people use for the same thing.
"""

import re
from pathlib import Path

import nbformat
from lessons import NOTEBOOKS, questions
from mdit_py_plugins.anchors.index import slugify

PAGE = NOTEBOOKS / "questions" / "README.md"
# A word of the field, and what else people call it.
VOCABULARY = {
    "attention map": ["attention maps", "attention matrix", "weights", "output_attentions", "rows of my weights"],
    "batch": ["several sentences", "two sentences", "example"],
    "beams": ["beam search"],
    "bias": ["relative position", "position bias", "bucket", "biases"],
    "BERT": [],
    "cache": ["past_key_values", "past", "KV cache", "cached"],
    "causal": ["future", "leak", "autoregressive", "upper triangle", "triangle", "is_causal"],
    "checkpoint and file": ["save", "saved", "saving", "load", "loading", "state_dict", "deepcopy", "resume"],
    "Colab and releases": ["numpy", "notebooks fail", "pin"],
    "contiguous": ["copy", "stride", "strides"],
    "cost": [
        "memory",
        "cheaper",
        "slow",
        "fast",
        "how many",
        "1 %",
        "15 %",
        "one per cent",
        "work",
        "operations",
        "numbers",
    ],
    "cross-attention": ["encoder and decoder", "context", "another sequence", "encoder-decoder"],
    "decoder inputs": ["labels", "decoder_input_ids", "start token", "shift", "targets"],
    "devices and precision": ["float16", "bfloat16", "half precision", "GPU", "CPU", "NaN", "float32", "meta"],
    "dropout": ["eval()", "evaluation mode"],
    "einsum": ["einops", "rearrange"],
    "errors": ["error", "fails", "fail", "does not fit", "mean?"],
    "forgetting": ["forgotten", "forgets"],
    "freezing": ["freeze", "frozen", "requires_grad", "require grad", "optimiser", "no_grad", "moves"],
    "generate": ["generation", "writes", "decoding", "beam search"],
    "head_dim": ["d_k", "d_kv", "64", "head dimension"],
    "heads": ["head", "num_heads", "12", "multi-head", "multihead"],
    "hidden states": ["[1, 8, 768]", "768", "embedding", "embeddings", "model_dim", "d_model"],
    "initialisation": ["starts", "initialised", "zeros", "random", "alike"],
    "key": ["keys", "K"],
    "layers": ["layer", "8 layers"],
    "learning rate": ["rate"],
    "length": ["longer", "lengths", "long"],
    "libraries": ["peft", "torch's", "transformers'", "P-tuning v2", "nn.MultiheadAttention"],
    "LoRA": ["low-rank", "adapter", "bake into the weights", "merged into the weights", "P-tuning"],
    "mask": ["masks", "padding", "padded", "attention_mask", "-inf", "minus infinity", "masked", "-1e9", "empty row"],
    "merge": ["merged", "merging", "concatenate", "W_O", "output projection", "o_proj", "reshape [b, h, s, d]"],
    "MLP": ["reparameterisation", "n_embd", "tanh", "fold"],
    "order of tokens": ["position", "positions", "order", "in front, and not behind"],
    "prefix": ["soft prompt", "virtual tokens", "trained vectors in front", "slot", "slots"],
    "projection": ["W_Q", "W_K", "W_V", "nn.Linear", "linear layer", "matrix", "matrices", "projected"],
    "prompt tuning": ["prompt", "concatenated to the embeddings"],
    "query": ["queries", "Q", "QK^\\top", "QK"],
    "reshape": ["view", "transpose", "permute", "swap axes", "split", "axes", "dim 1", "dim 2"],
    "rows and columns": ["row", "not square", "square", "8 rows and 11 columns"],
    "scaling": [
        "square root",
        "root of",
        "sqrt",
        "1/sqrt(d)",
        "divided",
        "temperature",
        "head_dim ** -0.25",
        "divide before",
    ],
    "shapes": ["shape", "axis", "dimension", "dimensions", "wide", "width"],
    "softmax": ["exponential", "dim=-1"],
    "T5": [],
    "training": ["learn", "learns", "learned", "trained", "loss", "gradient", "gradients", "batches"],
    "value": ["values", "V"],
    "zeros": ["zero", "no-op"],
}


def sections(path: Path) -> list[tuple[str, str]]:
    """(question, its text) of each section of a notebook of questions."""
    found = []
    for cell in nbformat.read(path, as_version=nbformat.NO_CONVERT).cells:
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            heading, _, text = cell.source.partition("\n")
            found.append((heading.removeprefix("## ").strip(), text))
    return found


def link(path: Path, question: str) -> str:
    """A link to the section: its anchor is made of the heading's words, without formulas."""
    return f"[{question}]({path.name}#{slugify(plain(re.sub(r'[$][^$]*[$]', '', question)))})"


def plain(question: str) -> str:
    return re.sub(r"[`*$]", "", question)


def holds(text: str, words: list[str]) -> bool:
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", plain(text), re.IGNORECASE) for word in words)


def page() -> str:
    books = {path: [question for question, _ in sections(path)] for path in questions()}
    lines = [
        "# All questions",
        "",
        "What people really ask about attention, heads, prefixes and T5, each answered in a few sentences and proved "
        "by a cell that you can run.",
    ]
    titles = {
        path: nbformat.read(path, as_version=nbformat.NO_CONVERT).cells[0].source.splitlines()[0].removeprefix("# ")
        for path in books
    }
    lines += ["", "By lesson:", "", *(f"- [{title}](#{slugify(title)})" for title in titles.values())]
    by_word = {
        word: [link(path, each) for path, asked in books.items() for each in asked if holds(each, [word, *synonyms])]
        for word, synonyms in sorted(VOCABULARY.items(), key=lambda entry: entry[0].lower())
    }
    lines += ["", "By word: " + ", ".join(f"[{word}](#{slugify(word)})" for word, found in by_word.items() if found)]
    for path, asked in books.items():
        title = titles[path]
        lines += ["", f"## {title}", "", *(f"- {link(path, question)}" for question in asked)]
    lines += ["", "## By word"]
    for word, found in by_word.items():
        if found:
            also = f"Also: {', '.join(VOCABULARY[word])}" if VOCABULARY[word] else ""
            lines += ["", f"### {word}", *(["", also] if also else []), "", *(f"- {each}" for each in found)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
