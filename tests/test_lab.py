"""The reader's road: the lessons opened in JupyterLab in a real browser, run whole, looked at and saved.

The lessons are opened without their outputs, so that what stands there afterwards was computed in this browser.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from lessons import lessons
from store_notebooks import normalise, normalised, text_of
from test_days_use import as_jupyterlab_saves

ROOT = Path(__file__).parents[1]
LESSONS = lessons()
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECONDS = 300  # for one lesson
SETTINGS = {  # of JupyterLab: draw every cell, not only those in the window; no news, no question about it
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
PROMPTS = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(prompt => prompt.textContent.trim())"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The lessons without their outputs."""
    folder = tmp_path_factory.mktemp("lessons")
    for path in LESSONS:
        notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.update(outputs=[], execution_count=None)
        nbformat.write(notebook, folder / path.name)
    shutil.copy(ROOT / "notebooks" / "notation.md", folder)
    return folder


@pytest.fixture(scope="module")
def address(browser, folder, tmp_path_factory):
    """Where a JupyterLab serves the lessons."""
    with jupyterlab(tmp_path_factory.mktemp("jupyter"), folder) as url:
        yield url


@contextmanager
def jupyterlab(home: Path, target: Path) -> Iterator[str]:
    """The address of `jupyter lab target`, which knows nothing of this user's own Jupyter."""
    for name, settings in SETTINGS.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings), encoding="utf-8")
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    environment = {**os.environ, **{name: str(home / place) for name, place in places.items()}}
    options = ["--no-browser", "--allow-root", "--expose-app-in-browser", "--ip=127.0.0.1", "--ServerApp.port=0"]
    command = [sys.executable, "-m", "jupyterlab", *options, "--IdentityProvider.token=", str(target)]
    with (home / "log").open("w", encoding="utf-8") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield wait_for_server(server, home)
    finally:
        server.terminate()
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:  # it waits for a kernel that was still starting: not what is tested here
            server.kill()
            server.wait()


def wait_for_server(server: subprocess.Popen, home: Path) -> str:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and server.poll() is None:
        for path in (home / "runtime").glob("jpserver-*.json"):
            return json.loads(path.read_text(encoding="utf-8"))["url"]
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start:\n{(home / 'log').read_text(encoding='utf-8')}")


def opened_by(home: Path) -> Path:
    """The page that JupyterLab has the reader's browser open; it writes it a moment after it answers."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for path in (home / "runtime").glob("jpserver-file-to-run-*-open.html"):
            return path
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab opened nothing:\n{(home / 'log').read_text(encoding='utf-8')}")


@pytest.fixture
def page(browser, address):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(SECONDS * 1000)
    yield context.new_page()
    context.close()


def execute(page, command: str, **options) -> None:
    """Have JupyterLab carry out a command, and wait until it has."""
    page.evaluate(
        """([name, options, seconds]) => Promise.race([
            jupyterapp.commands.execute(name, options),
            new Promise((_, fail) => setTimeout(() => fail(Error(`${name} took over ${seconds} s`)), 1000 * seconds)),
        ]).then(() => null)""",
        [command, options, SECONDS],
    )


def without_pictures(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """What has to be the same in each run; figures are compared by nbval."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/png", None)
    return notebook


@pytest.mark.browser
def test_the_readmes_command_opens_lesson_1_beside_the_list_of_lessons(page, screenshots, tmp_path):
    target = re.search(r"^python3 .*jupyter lab (\S+)$", README, flags=re.MULTILINE)[1]
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    with jupyterlab(tmp_path, tmp_path / target):
        page.goto(opened_by(tmp_path).as_uri())
        page.wait_for_function("window.jupyterapp?.shell?.currentWidget?.context?.isReady")
        assert page.evaluate("jupyterapp.shell.currentWidget.context.path") == LESSONS[0].name
        listed = page.locator(".jp-DirListing-itemText")
        listed.get_by_text(LESSONS[-1].name).wait_for()
        page.screenshot(path=screenshots / "lab-start.png")


@pytest.mark.browser
def test_opening_a_lesson_and_saving_it_adds_a_version_and_nothing_else(page, address, folder):
    stored, path = text_of(LESSONS[0]), folder / "opened.ipynb"
    path.write_text(stored, encoding="utf-8", newline="\n")
    page.goto(f"{address}lab/workspaces/opened/tree/{path.name}")
    page.wait_for_function("window.jupyterapp?.shell?.currentWidget?.context?.isReady")
    page.wait_for_function("jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'")
    page.wait_for_function("jupyterapp.shell.currentWidget.context.model.dirty")  # though nobody touched it
    execute(page, "docmanager:save")
    page.wait_for_function("!jupyterapp.shell.currentWidget.context.model.dirty")
    page.evaluate("jupyterapp.serviceManager.sessions.shutdownAll()")
    saved = path.read_text(encoding="utf-8")
    assert saved != stored
    assert normalised(saved) == stored
    path.write_text(stored, encoding="utf-8", newline="\n")
    as_jupyterlab_saves(path)  # which test_days_use.py plants
    planted = path.read_text(encoding="utf-8")
    assert re.sub(r'"version": "3.+"', "", planted) == re.sub(r'"version": "3.+"', "", saved)


@pytest.mark.browser
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_runs_in_jupyterlab(page, address, folder, screenshots, path):
    complaints = []
    page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    stored = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    code = [cell for cell in stored.cells if cell.cell_type == "code"]

    page.goto(f"{address}lab/workspaces/{path.stem}/tree/{path.name}")  # a workspace of its own opens one notebook
    page.wait_for_function(f"count => {PROMPTS}.length === count", arg=len(code))
    page.wait_for_function("jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'")
    execute(page, "notebook:run-all-cells")
    page.wait_for_function(f"!{PROMPTS}.includes('[*]:')")
    page.screenshot(path=screenshots / f"lab-{path.stem}-end.png")
    assert page.evaluate(PROMPTS) == [f"[{cell.execution_count}]:" for cell in code]

    figures = page.locator(".jp-OutputArea-output img")
    count = sum("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)
    assert figures.count() == count
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    assert page.locator("[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    assert page.locator("mjx-merror").count() == 0
    for theme in ("Light", "Dark"):
        execute(page, "apputils:change-theme", theme=f"JupyterLab {theme}")
        page.wait_for_function(
            "light => document.body.dataset.jpThemeLight === light", arg=str(theme == "Light").lower()
        )
        page.wait_for_selector("#jupyterlab-splash", state="detached")  # it covers the page while a theme loads
        figures.first.scroll_into_view_if_needed()
        page.screenshot(path=screenshots / f"lab-{path.stem}-{theme.lower()}.png")

    execute(page, "docmanager:save")
    page.wait_for_function("!jupyterapp.shell.currentWidget.context.model.dirty")
    saved = nbformat.read(folder / path.name, as_version=nbformat.NO_CONVERT)
    normalise(saved)
    assert without_pictures(saved) == without_pictures(stored)
    assert complaints == []
    page.evaluate("jupyterapp.serviceManager.sessions.shutdownAll()")
