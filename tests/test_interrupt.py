"""A reader presses the stop button in the midst of lesson 7's training: the cells below still work."""

import re

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from lessons import NOTEBOOKS
from nbval.kernel import CURRENT_ENV_KERNEL_NAME, NbvalKernelspecManager

SECONDS = 300  # for one cell
LESSON = nbformat.read(NOTEBOOKS / "07_t5_prefix_tuning.ipynb", as_version=nbformat.NO_CONVERT)
CELLS = {cell.id: cell for cell in LESSON.cells}
BEFORE_TRAINING = ["imports", "ask", "task", "score", "attach", "exercise-training-step", "optimizer"]


class Kernel:
    def __init__(self):
        self.manager = KernelManager(kernel_name=CURRENT_ENV_KERNEL_NAME, kernel_spec_manager=NbvalKernelspecManager())
        self.manager.start_kernel(cwd=str(NOTEBOOKS))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=SECONDS)

    def run(self, code: str, stop_at: str | None = None) -> tuple[str, str]:
        """What the code wrote, and "ok" or the name of its error. Interrupted once it has written `stop_at`."""
        written, stopped = "", stop_at is None

        def hear(message):
            nonlocal written, stopped
            written += message["content"].get("text", "")
            if not stopped and stop_at in written:
                stopped = True
                self.manager.interrupt_kernel()

        reply = self.client.execute_interactive(code, output_hook=hear, timeout=SECONDS)["content"]
        assert stopped, f"{stop_at!r} was never written: {written}"
        return written, reply.get("ename", reply["status"])

    def cell(self, name: str, stop_at: str | None = None) -> tuple[str, str]:
        return self.run(CELLS[f"07-{name}"].source, stop_at)


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    try:
        for name in BEFORE_TRAINING:
            assert kernel.cell(name)[1] == "ok", name
        yield kernel
    finally:
        kernel.client.stop_channels()
        kernel.manager.shutdown_kernel(now=True)


def stored_text(name: str) -> str:
    return "".join(output.text for output in CELLS[f"07-{name}"].outputs if output.output_type == "stream")


def test_after_an_interrupt_of_the_loop_the_cells_below_work(kernel):
    written, state = kernel.cell("loop", stop_at="after  30 steps")
    assert state == "KeyboardInterrupt"
    assert "after 100" not in written
    for name in ("curve", "test", "yours", "save"):
        written, state = kernel.cell(name)
        assert state == "ok", name
    assert "largest change by saving and loading: 0.0\n" in written
    written, _ = kernel.run("print(30 <= len(losses) < 100, losses[-1] < losses[0] / 2)")
    assert written == "True True\n", "the prefix has learned"
    assert kernel.cell("untouched") == (stored_text("untouched"), "ok")


def test_an_interrupt_of_fit_keeps_the_prefix_so_far(kernel):
    written, state = kernel.cell("tasks", stop_at=" 24")
    assert state == "ok"
    assert re.match(r"80 steps:( \d+)+; interrupted after \d\d\n80 steps:( \d+)+ 80\n", written)
    keep = "italian.save_pretrained(folder := Path(tempfile.mkdtemp()) / 'italian')"
    same = "print(torch.equal(T5Prefix.from_pretrained(folder).key_values('cross'), italian.key_values('cross')))"
    assert kernel.run(f"{keep}\n{same}") == ("True\n", "ok")
    assert kernel.cell("rows")[1] == "ok"
    assert kernel.cell("tasks") == (stored_text("tasks"), "ok"), "trained again, whole"
