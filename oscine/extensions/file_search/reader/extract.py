"""The text of a file, in pieces: text in any form, HTML, DOCX and PDF."""

import codecs
import zipfile
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

from oscine.extensions.file_search.reader.messages import ErrorCode

_READ = 65_536  # bytes
_BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_MAX_DOCX_BYTES = 512 << 20  # of the text of a document with its marks, unpacked
_INVISIBLE = ("script", "style", "template", "noscript")
_INLINE = (
    *(
        "a",
        "abbr",
        "b",
        "bdi",
        "bdo",
        "cite",
        "code",
        "data",
        "dfn",
        "em",
        "font",
        "i",
        "kbd",
        "mark",
        "q",
        "s",
        "samp",
    ),
    *("small", "span", "strong", "sub", "sup", "u"),
)


class UnreadableError(Exception):
    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message


def pieces(path: Path, filename: str) -> Iterator[str]:
    """The format follows from the end of the name; what has no other is text. Raises UnreadableError."""
    return _FORMATS.get(Path(filename).suffix.lower(), _text)(path)


def _text(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        start = file.peek(4) if hasattr(file, "peek") else b""
        name = next((name for mark, name in _BYTE_ORDER_MARKS.items() if start.startswith(mark)), "utf-8")
        decoder = codecs.getincrementaldecoder(name)()
        while True:
            data = file.read(_READ)
            try:
                text = decoder.decode(data, not data)
            except UnicodeDecodeError:
                raise UnreadableError("invalid_file", f"The file is no text in {name.upper()}.") from None
            if "\0" in text:
                raise UnreadableError("unsupported_file", "The file is not text, nor a format that is read.")
            if text:
                yield text
            if not data:
                return


class _Page(HTMLParser):
    """Collects the text that a page shows. Blocks are lines."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.texts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in _INVISIBLE:
            self._hidden += 1
        elif tag not in _INLINE:
            self.texts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in _INVISIBLE:
            self._hidden = max(self._hidden - 1, 0)
        elif tag not in _INLINE:
            self.texts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.texts.append(data)

    def take(self) -> str:
        """The text since the last call, without blank lines."""
        lines = (" ".join(line.split()) for line in "".join(self.texts).split("\n"))
        self.texts = []
        return "".join(f"{line}\n" for line in lines if line)


def _html(path: Path) -> Iterator[str]:
    page = _Page()
    for text in _text(path):
        page.feed(text)
        if shown := page.take():
            yield shown
    page.close()
    yield page.take()


def _docx(path: Path) -> Iterator[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.getinfo("word/document.xml").file_size > _MAX_DOCX_BYTES:
                raise UnreadableError("invalid_file", f"The document unpacks to more than {_MAX_DOCX_BYTES} bytes.")
            with archive.open("word/document.xml") as file:
                for _, element in ElementTree.iterparse(file):
                    if element.tag == f"{_WORD}p":
                        yield "".join(map(_run_text, element.iter())) + "\n"
                        element.clear()
    except (zipfile.BadZipFile, KeyError, ElementTree.ParseError, RuntimeError, NotImplementedError, EOFError) as error:
        raise UnreadableError("invalid_file", f"The file is no DOCX document: {error}.") from None


def _run_text(element: ElementTree.Element) -> str:
    if element.tag == f"{_WORD}t":
        return element.text or ""
    return {f"{_WORD}tab": "\t", f"{_WORD}br": "\n", f"{_WORD}cr": "\n"}.get(element.tag, "")


def _pdf(path: Path) -> Iterator[str]:
    try:
        import pypdf
    except ImportError:
        message = "PDF files need a package that this server lacks: pip install 'oscine[pdf]'."
        raise UnreadableError("unsupported_file", message) from None
    try:
        with pypdf.PdfReader(path) as document:
            for page in document.pages:
                yield page.extract_text() + "\n"
    except Exception as error:  # it raises many kinds for a broken document
        raise UnreadableError("invalid_file", f"The PDF document cannot be read: {error}.") from None


def _unsupported(path: Path) -> Iterator[str]:
    raise UnreadableError("unsupported_file", "Files of this format are not read; convert it to text, DOCX or PDF.")


_FORMATS: dict[str, Callable[[Path], Iterator[str]]] = {
    **dict.fromkeys((".html", ".htm", ".xhtml"), _html),
    ".docx": _docx,
    ".pdf": _pdf,
    **dict.fromkeys((".doc", ".xls", ".xlsx", ".ppt", ".pptx", ".odt", ".epub", ".zip", ".gz"), _unsupported),
}
