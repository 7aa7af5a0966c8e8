"""Sphinx's settings for the course's web page. `.site/build.py` lays out the sources and runs Sphinx with them."""

import re
import tomllib
from pathlib import Path

from docutils import nodes
from myst_nb.core.render import MimeData, NbElementRenderer

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = re.search(r"^# (.+)$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
html_title = project
html_favicon = "favicon.svg"
version = release = PROJECT["version"]
language = "en"
root_doc = "index"

extensions = [
    "myst_nb",
    "sphinx-mathjax-offline",  # MathJax from PyPI, copied into the page: nothing is fetched while it is read
]
myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the stored outputs are shown: they are what the tests compare

html_theme = "sphinx_book_theme"
html_show_copyright = html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["course.css"]
html_context = {"default_mode": "auto"}  # light or dark as the reader's system is, until the button is used
# Without the theme's logo, which stands outside the landmarks of a screen reader; the way home is in the contents.
html_sidebars = {"**": ["search-button-field.html", "sbt-sidebar-nav.html"]}
html_theme_options = {
    "home_page_in_toc": True,
    "navbar_persistent": [],  # one search field is enough
    "footer_content_items": [],
    "repository_url": PROJECT["urls"]["Repository"],
    "repository_branch": "main",
    "use_repository_button": True,
    "use_download_button": True,
    "launch_buttons": {"colab_url": "https://colab.research.google.com"},
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


def render_image(self: NbElementRenderer, data: MimeData) -> list[nodes.Element]:
    """A figure with its alternative text, which myst-nb leaves out."""
    images = render_without_alt(self, data)
    for image in images:
        image["alt"] = data.output_metadata["image/png"]["alt"]
    return images


render_without_alt = NbElementRenderer.render_image
NbElementRenderer.render_image = render_image
