"""Tables of shapes."""

from collections.abc import Sequence

from helpers.course.figures.canvas import has_kernel


def shape_table(rows: Sequence[tuple[str, object, str]]) -> None:
    """Show a table of concept, shape and role, one row for each `(concept, tensor, role)`.

    The shapes are read from the tensors, so that the table cannot say what is not so. Without a notebook's kernel, the
    table is printed.
    """
    if not rows:
        raise ValueError("shape_table needs one row or more; got none")
    table = [("concept", "shape", "role")]
    table += [(concept, str(list(tensor.shape)), role) for concept, tensor, role in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    plain = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    if not has_kernel():
        print("\n".join(plain))
        return
    from IPython.display import display

    marked = [(concept, f"`{shape}`", role) for concept, shape, role in table[1:]]
    marked = [table[0], ("---", "---", "---"), *marked]
    markdown = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in marked]
    display({"text/markdown": "\n".join(markdown), "text/plain": "\n".join(plain)}, raw=True)
