"""The picture in the README: `python .github/readme_picture.py`, about a minute on a CPU.

A prefix of three slots is trained on German dates; shown is where the bytes of one date look while they are written.
"""

from base64 import b64decode
from pathlib import Path

import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from helpers import T5Prefix, load_base, load_task
from helpers.course.figures import heat_map
from helpers.tuning.training import fit

# JupyterLab shows no picture out of a hidden folder, when the README is previewed there.
PICTURE = Path(__file__).parents[1] / "notebooks" / "pictures" / "readme_picture.png"
PREFIX_LENGTH, LAYER, HEAD = 3, 1, 0
SOURCE, TARGET = "1951-01-05 Fri", "Freitag, 5. Januar 1951"

torch.manual_seed(0)
task = load_task("german")
model, tokenizer = load_base(task.base)
model.requires_grad_(False)
prefix = T5Prefix.for_model(model, prefix_length=PREFIX_LENGTH)
with prefix.attached(model):
    fit(model, prefix.parameters(), tokenizer, task.train, steps=150)
    model.set_attn_implementation("eager")  # the fused kernel keeps no weights
    source, target = (tokenizer(text, return_tensors="pt") for text in (SOURCE, TARGET))
    with torch.no_grad():
        maps = model(**source, labels=target.input_ids, output_attentions=True).cross_attentions

weights = maps[LAYER][0, HEAD, : len(TARGET), :-1]  # [target, prefix + source], without the end tokens
InteractiveShell.instance().kernel = None  # a display to capture, and what tells a notebook from a script
with capture_output() as captured:
    heat_map(
        weights,
        query_labels=list(TARGET),
        key_labels=list(SOURCE),
        prefix_length=PREFIX_LENGTH,
        title="Cross-attention of one head while it writes a German date",
    )
PICTURE.write_bytes(b64decode(captured.outputs[0].data["image/png"]))
