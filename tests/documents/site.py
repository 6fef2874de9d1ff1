"""The source of the documentation site: `python -m tests.documents.site FOLDER` writes it, and `make docs` builds it.

It is docs/ with a page made from the code, and without the log of experiments, which is for those who change Oscine. A
link whose text is the name of a file shows the title of that page.
"""

import re
import shutil
import sys
from pathlib import Path

from tests.documents.api_reference import page

ROOT = Path(__file__).parents[2]
DOCS, CONFIGURATION = ROOT / "docs", ROOT / "mkdocs.yml"
GENERATED = {"api-reference.md": page}
LEFT_OUT = "log.md"
TO_LEFT_OUT = re.compile(rf"\[[^\]]*\]\((?:\.\./)?{re.escape(LEFT_OUT)}[^)]*\)")
NAMED = re.compile(r"\[(?P<name>[\w-]+\.md)\]\((?P<target>[^)]+)\)")


def title(path: Path) -> str:
    return path.read_text().partition("\n")[0].removeprefix("# ")


def write(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder / "docs", ignore=shutil.ignore_patterns(LEFT_OUT))
    shutil.copy(CONFIGURATION, folder)
    for name, make in GENERATED.items():
        (folder / "docs" / name).write_text(make())
    for path in (folder / "docs").rglob("*.md"):

        def titled(link: re.Match[str], here: Path = path.parent) -> str:
            return f"[{title(here / link['target'].partition('#')[0])}]({link['target']})"

        path.write_text(NAMED.sub(titled, TO_LEFT_OUT.sub(f"docs/{LEFT_OUT}", path.read_text())))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
