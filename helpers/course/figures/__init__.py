"""The lessons' figures, each with a sentence computed from its data.

The sentence is the figure's alternative text, is what a test of the notebook compares, and is written under the figure
unless a shorter `caption` is given. Every drawing function shows its figure and returns None; `..._sentence` returns
the sentence alone. In a plain script, where there is no notebook to show a figure in, the sentence is printed.
"""

from helpers.course.figures.canvas import show
from helpers.course.figures.cells import memory_cells, memory_cells_sentence
from helpers.course.figures.charts import bars, bars_sentence, curves, curves_sentence, dots, dots_sentence
from helpers.course.figures.layer import attention_layer, attention_layer_sentence
from helpers.course.figures.matrices import heat_map, heat_maps, matrix_product
from helpers.course.figures.matrix_words import heat_map_sentence, heat_maps_sentence, matrix_product_sentence
from helpers.course.figures.memory import blocks, blocks_sentence
from helpers.course.figures.path import query_path, query_path_sentence
from helpers.course.figures.t5 import t5_sites, t5_sites_sentence
from helpers.course.figures.tables import shape_table

__all__ = [
    "attention_layer",
    "attention_layer_sentence",
    "bars",
    "bars_sentence",
    "blocks",
    "blocks_sentence",
    "curves",
    "curves_sentence",
    "dots",
    "dots_sentence",
    "heat_map",
    "heat_map_sentence",
    "heat_maps",
    "heat_maps_sentence",
    "matrix_product",
    "matrix_product_sentence",
    "memory_cells",
    "memory_cells_sentence",
    "query_path",
    "query_path_sentence",
    "shape_table",
    "show",
    "t5_sites",
    "t5_sites_sentence",
]
