"""Sphinx: the documentation, from Markdown. `python -m tox -e docs` builds it, with warnings as errors."""

project = "verl + MindSpeed conformance"
copyright = "the project's authors, Apache-2.0"
extensions = ["myst_parser"]
exclude_patterns = ["_build", "examples"]
html_theme = "furo"
html_title = project
# The generated pages quote text from results: nothing in them may be read as a macro, a formula or a link.
myst_enable_extensions = []
smartquotes = False  # quotes are part of a message
