"""Makes the links of the README absolute, as PyPI needs them. All else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
SOURCE = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["urls"]["Source"]
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?:|#)(?P<path>[^)]+)\)")


def absolute(link: re.Match[str]) -> str:
    kind = "raw" if link["image"] else "blob"
    return f"{link['image']}[{link['text']}]({SOURCE}/{kind}/main/{link['path']})"


setup(
    long_description=LINK.sub(absolute, (HERE / "README.md").read_text()),
    long_description_content_type="text/markdown",
)
