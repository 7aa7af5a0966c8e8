"""Every call of `helpers` in the tests is checked against its shape annotations."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from jaxtyping import config, install_import_hook
from rounding_noise import enter_if_asked_for

ROOT = Path(__file__).parents[1]

install_import_hook(
    ["helpers.heads", "helpers.masks", "helpers.attention", "helpers.prefix", "helpers.tuning"],
    "beartype.beartype",
)
settings.register_profile("patient", settings(), deadline=None)  # a busy machine is no fault of the code
settings.load_profile("patient")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background with it ignored
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # the tensors of the tests are too small to share
enter_if_asked_for()


collect_ignore_glob = ["*.ipynb"]  # a reader's own


def pytest_terminal_summary(terminalreporter, exitstatus):
    """Where tests failed and lessons are other than git has them, that may be why."""
    if exitstatus != pytest.ExitCode.TESTS_FAILED:
        return
    from store_notebooks import changed

    if names := " ".join(path.relative_to(ROOT).as_posix() for path in changed()):
        terminalreporter.write_line(
            f"These lessons were changed, which may be why tests failed; `git checkout {names}` gives them back as "
            f"they were, and `python tests/store_notebooks.py --no-run {names}` undoes only what JupyterLab added."
        )


@pytest.fixture
def unchecked():
    """Annotations unchecked, as for a reader: what is raised is raised by the function itself."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMIUM_OPTIONS = [  # no sandbox, since root has none; and nothing that looks for a network on its own
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium, with a profile of its own that is thrown away."""
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome is on the PATH")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_OPTIONS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory) -> Path:
    """Where the browser's tests leave their pictures: in the folder that SCREENSHOTS names, else with the other
    temporary files of pytest."""
    if "SCREENSHOTS" not in os.environ:
        return tmp_path_factory.mktemp("screenshots")
    folder = Path(os.environ["SCREENSHOTS"])
    folder.mkdir(parents=True, exist_ok=True)
    return folder
