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
    "attention map": ["attention maps", "weights"],
    "batch": ["several sentences", "two sentences"],
    "bias": ["relative position", "position bias"],
    "BERT": [],
    "cache": ["past_key_values", "past", "KV cache"],
    "causal": ["future", "leak", "autoregressive", "upper triangle", "triangle"],
    "contiguous": ["copy", "stride", "strides", "memory"],
    "cost": ["parameters", "memory", "cheaper", "slow", "fast", "how many"],
    "cross-attention": ["encoder and decoder", "context", "another sequence"],
    "dropout": [],
    "einsum": ["einops", "rearrange"],
    "head_dim": ["d_k", "64", "head dimension"],
    "heads": ["head", "num_heads", "12", "multi-head", "multihead"],
    "hidden states": ["[1, 8, 768]", "768", "embedding", "model_dim", "d_model"],
    "initialisation": ["start", "random"],
    "key": ["keys", "K"],
    "layers": ["layer", "8 layers"],
    "mask": ["masks", "padding", "attention_mask", "-inf", "minus infinity", "NaN"],
    "merge": ["concatenate", "concat", "W_O", "output projection", "o_proj"],
    "order of tokens": ["position", "positions", "order"],
    "prefix": ["soft prompt", "prompt tuning", "prefix tuning", "virtual tokens"],
    "projection": ["W_Q", "W_K", "W_V", "nn.Linear", "linear layer", "matrix", "matrices"],
    "query": ["queries", "Q"],
    "reshape": ["view", "transpose", "permute", "swap axes", "split", "axes"],
    "scaling": ["square root", "sqrt", "1/sqrt(d)", "divide", "scale", "temperature"],
    "shapes": ["shape", "axis", "dimension", "dimensions"],
    "softmax": ["exponential", "dim=-1"],
    "T5": [],
    "training": ["learn", "learns", "learned", "loss", "gradient", "learning rate"],
    "value": ["values", "V"],
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
        "by a cell that you can run. Here they are by lesson, and then by word.",
    ]
    for path, asked in books.items():
        title = nbformat.read(path, as_version=nbformat.NO_CONVERT).cells[0].source.splitlines()[0].removeprefix("# ")
        lines += ["", f"## {title}", "", *(f"- {link(path, question)}" for question in asked)]
    lines += ["", "## By word"]
    for word, synonyms in sorted(VOCABULARY.items(), key=lambda entry: entry[0].lower()):
        found = [link(path, each) for path, asked in books.items() for each in asked if holds(each, [word, *synonyms])]
        if found:
            also = f" (also: {', '.join(synonyms)})" if synonyms else ""
            lines += ["", f"**{word}**{also}", "", *(f"- {each}" for each in found)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
