"""Builds the description that package indexes show; everything else is said in pyproject.toml.

README.md names pictures and documents beside it, which an index does not have: with a Repository in
pyproject.toml's URLs they are named there, without one pictures are left out.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def description(readme: str, repository: str | None) -> str:
    """README.md with nothing relative in it."""
    picture = r"!\[([^]]*)\]\((?!https?:)([^)]+)\)"
    link = r"\[([^]]*)\]\((?!https?:)([^)]+)\)"
    if repository is None:
        return re.sub(link, r"\1", re.sub(picture + r"\s*", "", readme))
    readme = re.sub(picture, rf"![\1]({repository}/raw/HEAD/\2)", readme)
    return re.sub(link, rf"[\1]({repository}/blob/HEAD/\2)", readme)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    readme = (ROOT / "README.md").read_text()
    setup(
        long_description=description(readme, project["urls"].get("Repository")),
        long_description_content_type="text/markdown",
    )
