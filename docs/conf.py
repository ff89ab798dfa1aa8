"""Sphinx configuration of the teaching site: MyST pages, no network, no generated API pages."""

import importlib.util

project = "Twinshard"
author = "The Twinshard authors"
copyright = "The Twinshard authors, Apache-2.0"  # noqa: A001 - Sphinx wants this name
release = "0.1.0"

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

# furo comes with the extra "docs"; alabaster comes with Sphinx.
html_theme = "furo" if importlib.util.find_spec("furo") else "alabaster"
html_title = "Twinshard"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_show_sourcelink = False
