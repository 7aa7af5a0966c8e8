"""The web page: built without a warning from the stored outputs, whole, readable without a network, accessible."""

import http.server
import json
import re
import subprocess
import sys
import threading
import tomllib
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe
from bs4 import BeautifulSoup
from lessons import lessons, questions

ROOT = Path(__file__).parents[1]
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
LESSONS = lessons()
PAGES = [
    "index.html",
    f"notebooks/{LESSONS[0].stem}.html",
    "notebooks/notation.html",
    "notebooks/questions/README.html",
]  # opened in the browser
SCHEMES = ["light", "dark"]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "build"
    command = [sys.executable, str(ROOT / ".site" / "build.py"), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def parsed(site) -> dict[Path, BeautifulSoup]:
    pages = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    return {path: BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser") for path in pages}


@pytest.fixture(scope="module")
def address(site):
    """Where the page is served on this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Visit:
    """An opened page, and what it asked for and complained about."""

    def __init__(self, browser, address: str, scheme: str):
        self.address = address
        self.context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 1800})
        self.context.set_default_timeout(120_000)
        self.page = self.context.new_page()
        self.outside, self.complaints = [], []
        self.page.on("request", self._requested)
        self.page.on("response", lambda response: response.ok or self.complaints.append(response.url))
        self.page.on("console", lambda message: message.type == "error" and self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _requested(self, request):
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.outside.append(request.url)

    def open(self, path: str):
        self.page.goto(self.address + path, wait_until="networkidle")
        return self.page


@pytest.fixture
def visit(browser, address):
    visits = []

    def start(scheme: str) -> Visit:
        visits.append(Visit(browser, address, scheme))
        return visits[-1]

    yield start
    for each in visits:
        each.context.close()


def figures(path: Path) -> list[str]:
    """The sentence of each figure of a lesson."""
    cells = nbformat.read(path, as_version=nbformat.NO_CONVERT).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    return [output.data["text/plain"] for output in outputs if "image/png" in output.get("data", {})]


def test_every_lesson_has_a_page_with_its_outputs(site, parsed):
    for path in [*LESSONS, *questions()]:
        page = parsed[(site / path.relative_to(ROOT)).with_suffix(".html")]
        cells = nbformat.read(path, as_version=nbformat.NO_CONVERT).cells
        code = [cell for cell in cells if cell.cell_type == "code"]
        assert len(page.select("article div.cell")) == len(code)
        shown = words(page.select_one("article").get_text())
        for cell in code:
            for output in cell.outputs:
                data = output.get("data", {})
                if "image/png" in data:  # whose sentence is its alternative text, see below
                    continue
                text = output.get("text", "") or data.get("text/markdown", "") or data.get("text/plain", "")
                assert words(text) in shown, cell.id


def words(text: str) -> str:
    """Its letters and digits, without what Markdown and HTML do to the rest."""
    return "".join(re.findall(r"[^\W_]+", text))


def test_figures_keep_their_sentences_as_alternative_text(site, parsed):
    for path in [*LESSONS, *questions()]:
        images = parsed[(site / path.relative_to(ROOT)).with_suffix(".html")].select("div.cell_output img")
        assert [image["alt"] for image in images] == figures(path)
        assert all(image["alt"].strip() for image in images)


def test_every_link_within_the_page_leads_somewhere(site, parsed):
    anchors = {path: {tag["id"] for tag in page.select("[id]")} for path, page in parsed.items()}
    checked = 0
    for path, page in parsed.items():
        for tag in page.select("[href], [src]"):
            url = urlsplit(tag.get("href") or tag.get("src"))
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            assert target.exists(), f"{path.name}: {tag}"
            if url.fragment and target in anchors:
                assert unquote(url.fragment) in anchors[target] | {""}, f"{path.name}: {tag}"
            checked += 1
    assert checked > 500


def test_git_ignores_what_the_build_leaves(site):
    left = [f".site/{path.name}/a" for path in site.parent.iterdir()]
    assert ".site/build/a" in left
    command = ["git", "check-ignore", *left]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=False).stdout
    assert ignored.splitlines() == left


def test_nothing_is_loaded_from_elsewhere(parsed):
    for path, page in parsed.items():
        for tag in page.select("script[src], img[src], iframe[src], link[rel=stylesheet], link[rel=preload]"):
            assert not urlsplit(tag.get("src") or tag.get("href")).netloc, f"{path.name}: {tag}"


def test_each_lesson_opens_in_colab(site, parsed):
    owner_and_name = ADDRESS.removeprefix("https://github.com/")
    for path in [*LESSONS, *questions()]:
        page = parsed[(site / path.relative_to(ROOT)).with_suffix(".html")]
        links = {tag["href"] for tag in page.select(".article-header-buttons a[href]")}
        assert (
            f"https://colab.research.google.com/github/{owner_and_name}/blob/main/{path.relative_to(ROOT).as_posix()}"
            in links
        )


def test_the_readmes_links_to_other_files_lead_to_the_repository(site, parsed):
    links = {tag["href"] for tag in parsed[site / "index.html"].select("article a[href]")}
    assert f"{ADDRESS}/blob/main/LICENSE" in links
    assert f"notebooks/{LESSONS[0].stem}.html" in links


@pytest.mark.browser
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("path", PAGES)
def test_a_page_in_the_browser(visit, screenshots, path, scheme):
    visited = visit(scheme)
    page = visited.open(path)
    page.wait_for_function("scheme => document.documentElement.dataset.theme === scheme", arg=scheme)

    formulas = page.locator(".math").count()
    page.wait_for_function("count => document.querySelectorAll('mjx-container').length >= count", arg=formulas)
    assert page.locator("mjx-merror").count() == 0
    assert bool(formulas) == ("index" not in path)
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    filters = page.evaluate(
        "[...document.querySelectorAll('article img')].map(image => getComputedStyle(image).filter)"
    )
    assert set(filters) <= {"none"}, "a figure's colours are changed"
    for width in (390, 1280):  # a telephone, a laptop
        page.set_viewport_size({"width": width, "height": 1800})
        over = page.evaluate("document.documentElement.scrollWidth") - width
        assert over <= 0, f"the page is {over} pixels wider than a window of {width}"
    if images := page.locator("article img").all():
        images[0].scroll_into_view_if_needed()
    page.screenshot(path=screenshots / f"site-{Path(path).stem}-{scheme}.png")

    assert visited.outside == []
    assert visited.complaints == []
    violations = [
        {"rule": each["id"], "where": [node["html"][:200] for node in each["nodes"]]}
        for each in Axe().run(page).response["violations"]
    ]
    assert violations == [], json.dumps(violations, indent=2)


@pytest.mark.browser
def test_the_search_finds_a_lesson(visit):
    visited = visit("light")
    page = visited.open("search.html?q=softmax")
    page.locator("#search-results li a").first.wait_for()
    found = page.locator("#search-results li a").evaluate_all("links => links.map(link => link.href)")
    assert any(LESSONS[0].stem in link for link in found)
    assert visited.outside == []
    assert visited.complaints == []


@pytest.mark.browser
def test_the_theme_can_be_switched(visit):
    page = visit("light").open("index.html")
    for mode, theme in (("dark", "dark"), ("light", "light"), ("auto", "light")):
        page.locator(".theme-switch-button:visible").click()
        page.locator(f".theme-change-button[data-mode={mode}]").click()
        state = page.evaluate("[document.documentElement.dataset.mode, document.documentElement.dataset.theme]")
        assert state == [mode, theme]
