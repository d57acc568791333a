"""From a Wikipedia XML dump to clean sentences.

A dump (``*-pages-articles*.xml.bz2``) is read as a stream: XML, then the wikitext of each article, then its
sentences. mwparserfromhell parses the wikitext and sentencex, Wikimedia's own splitter for some 300 languages,
finds the sentences; both come with ``pip install 'simcse-weince[wiki]'`` and neither needs a model or a network.
"""

import re
from collections.abc import Iterator
from typing import BinaryIO
from xml.etree import ElementTree

from simcse_weince.errors import InputError, import_extra

MIN_WORDS = 5
MAX_WORDS = 64

# Where a template, formula or widget stood. It contributed words that are lost, so its sentence is not used.
_HOLE = "\ufffc"
# A template set directly against a word or full stop is a note such as {{citation needed}}, not part of the sentence.
_NOTE = re.compile(rf"(?<=[\w.,;:!?)\]]){_HOLE}+")
_BROKEN_PARENTHESIS = re.compile(rf"\s*\([^()\n]*{_HOLE}[^()\n]*\)|\s*\([\s,;]*\)")
_BLANK_LINE = re.compile(r"\n\s*\n")
_NOT_PROSE = tuple("*#:;|!{=")  # list items, definitions, remains of tables and headings
_MARKUP = re.compile(rf"{_HOLE}|\[\[|\]\]|[{{}}|<>=]|''|https?:|__[A-Z]+__")
_SENTENCE_END = re.compile(r"[.!?…。！？।۔؟][\"'”’»)\]]*$")  # noqa: RUF001

_TYPOGRAPHY = {"nbsp": " ", "snd": " – ", "spnd": " – ", "spaced ndash": " – ", "ndash": "–", "mdash": "—"}
_PROSE_TAGS = frozenset(
    "abbr b big blockquote center cite dfn div em font i includeonly noinclude nowiki onlyinclude p q s section small "
    "span strong sub sup u".split()
)


def dropping_rule(sentence: str) -> str | None:
    """Name the first rule by which a sentence is dropped, or return None.

    The rules, in order: "markup left" (a template, formula, link or table sign stands in it), "too short" (fewer than
    5 words between spaces), "too long" (more than 64), "no final punctuation" (a full stop, question or exclamation
    mark or ellipsis, which closing quotes and brackets may follow).
    """
    if _MARKUP.search(sentence):
        return "markup left"
    words = sentence.count(" ") + 1
    if words < MIN_WORDS:
        return "too short"
    if words > MAX_WORDS:
        return "too long"
    return None if _SENTENCE_END.search(sentence) else "no final punctuation"


def read_sentences(stream: BinaryIO, name: str, pages: dict[str, int]) -> Iterator[tuple[int, str, str | None]]:
    """Read the sentences of all articles of a dump, in order and in bounded memory.

    Only pages of namespace 0 that are no redirects are articles. Of their wikitext remain the paragraphs of running
    text: no templates, tables, references, files, categories, headings, lists or formulas.

    Args:
        stream: The dump's XML, already decompressed.
        name: The file name for messages.
        pages: Counts "articles", "redirects" and "other namespaces" as they pass.

    Yields:
        The number of the page in the dump, from 1, a sentence, and the rule that drops it or None.

    Raises:
        InputError: The XML is broken, or the extra ``wiki`` is not installed.
    """
    names, need = ("mwparserfromhell", "sentencex"), "reading a Wikipedia dump needs more packages"
    parser, splitter = (import_extra(module, "wiki", need) for module in names)
    parse, split = parser.parse, splitter.segment
    # No defence against entity bombs is needed beyond expat's own: since 2.4 it stops amplification, and ElementTree
    # never loads external entities.
    events = ElementTree.iterparse(stream, events=("start", "end"))
    try:
        root = next(events)[1]
        language = root.get("{http://www.w3.org/XML/1998/namespace}lang", "en")
        namespaces = {"file", "image", "category"}
        number = 0
        for event, element in events:
            tag = element.tag.rpartition("}")[2]
            if event == "end" and tag == "namespace" and element.text:
                namespaces.add(element.text.lower())
            if event != "end" or tag != "page":
                continue
            number += 1
            wikitext = _article(element, pages)
            root.clear()  # else every page already read stays in memory
            for paragraph in _paragraphs(parse(wikitext), namespaces):
                for piece in split(language, paragraph):
                    if sentence := piece.strip():
                        yield number, sentence, dropping_rule(sentence)
    except ElementTree.ParseError as error:
        raise InputError(
            f"{name}: line {error.position[0]}: not a whole Wikipedia XML dump ({error}); download it again"
        ) from None


def _article(page: ElementTree.Element, pages: dict[str, int]) -> str:
    """Return the wikitext of an article, and nothing for any other page."""
    kind = "articles"
    if page.findtext("{*}ns", "0") != "0":
        kind = "other namespaces"
    elif page.find("{*}redirect") is not None:
        kind = "redirects"
    pages[kind] = pages.get(kind, 0) + 1
    return page.findtext("{*}revision/{*}text", "") if kind == "articles" else ""


def _paragraphs(wikicode: object, namespaces: set[str]) -> Iterator[str]:
    """Yield the paragraphs of running text of one article."""
    text = "".join(_plain_text(wikicode, namespaces))
    text = _BROKEN_PARENTHESIS.sub("", _NOTE.sub("", text))
    for block in _BLANK_LINE.split(text):
        # A single line break is a space in wikitext, except that a list item or heading ends there.
        lines = (" ".join(line.split()) for line in block.split("\n"))
        prose = " ".join(line for line in lines if line.strip(_HOLE + " ") and not line.startswith(_NOT_PROSE))
        if prose:
            yield prose


def _plain_text(wikicode: object, namespaces: set[str]) -> Iterator[str]:
    """Walk the parsed wikitext and yield what a reader sees of its running text, with holes for the rest."""
    for node in getattr(wikicode, "nodes", ()):
        kind = type(node).__name__
        if kind == "Text":
            yield node.value
        elif kind == "Wikilink":
            prefix, colon, _ = str(node.title).partition(":")
            if not (colon and prefix.strip().lower() in namespaces):
                yield from _plain_text(node.text or node.title, namespaces)
        elif kind == "Tag":
            tag = str(node.tag).strip().lower()
            if tag in _PROSE_TAGS:
                yield from _plain_text(node.contents, namespaces)
            elif tag in ("li", "dd", "dt"):
                yield "\n\n*"
            elif tag in ("br", "hr", "table"):
                yield "\n\n"
            elif tag != "ref":
                yield _HOLE
        elif kind == "Template":
            yield _TYPOGRAPHY.get(str(node.name).strip().lower(), _HOLE)
        elif kind == "ExternalLink":
            yield from _plain_text(node.title, namespaces)
        elif kind == "HTMLEntity":
            yield node.normalize()
        elif kind == "Heading":
            yield "\n\n"
        elif kind != "Comment":
            yield _HOLE
