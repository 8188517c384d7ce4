"""Build hook for setuptools: the README as a package index shows it. Every other setting is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup


def index_readme(text: str) -> str:
    """Links to files of the repository become their names, and its pictures go: they lead nowhere on a package index.

    The repository has no public address yet. The files are in the source distribution.
    """
    text = re.sub(r"!\[[^\]]*\]\((?!https?://)[^)]*\)\n*", "", text)
    text = re.sub(r"\[([^\]]+)\]\((?!https?://)\1\)", r"`\1`", text)  # named by its file already
    return re.sub(r"\[([^\]]+)\]\((?!https?://)([^)#]+)[^)]*\)", r"\1 (`\2`)", text)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=index_readme(readme), long_description_content_type="text/markdown")
