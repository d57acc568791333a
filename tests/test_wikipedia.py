"""Wikipedia dumps: which pages and sentences of the wikitext remain."""

import bz2
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from simcse_weince.errors import InputError
from simcse_weince.sentence.corpus import read_corpus
from simcse_weince.sentence.wikipedia import dropping_rule

pytest.importorskip("mwparserfromhell")
pytest.importorskip("sentencex")

ARTICLE = """{{Infobox boat|name=Heron|length={{convert|9|m}}}}
[[File:Heron.jpg|thumb|A heron [[bird]] stands on one leg here.]]
The '''grey heron''' ([[Latin]]: {{lang|la|Ardea cinerea}}) is a [[wader (bird)|wading bird]] of [[Europe]].<ref>{{cite
web|title=Not a sentence of this page.}}</ref> It stands up to 98&nbsp;cm tall, e.g. in shallow
water,{{citation needed}} and eats fish<!-- hidden words --> all day long.

== Behaviour of the heron in winter ==
It was seen over {{convert|5|km}} from the nearest lake. {{Main|Bird}}
* A list item that ends in a full stop.
: An indented remark that ends in a full stop.
{| class="wikitext"
| A cell of a table that ends in a full stop.
|}
Short one here. In winter the heron{{nbsp}}leaves the frozen lakes and walks to the sea.

It needs none of what follows here:

<math>a^2 + b^2 = c^2</math> is what it never needs to know about.
It never says <nowiki>[[link]]</nowiki> to anyone it meets outside. %s.
The '''grey heron''' is a [[wader (bird)|wading bird]] of [[Europe]].

[[Category:Birds of the world in one line.]]"""

HERON = [
    "The grey heron is a wading bird of Europe.",
    "It stands up to 98 cm tall, e.g. in shallow water, and eats fish all day long.",
    "In winter the heron leaves the frozen lakes and walks to the sea.",
]


def page(title: str, text: str, namespace: int = 0, extra: str = "") -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return f"<page><title>{title}</title><ns>{namespace}</ns>{extra}<revision><text>{text}</text></revision></page>"


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    pages = [
        page("Heron", ARTICLE % " ".join(["word"] * 65)),
        page("Talk:Heron", "This sentence of a talk page is not used.", namespace=1),
        page(
            "Grey heron", "#REDIRECT [[Heron]] which is a sentence of five words.", extra='<redirect title="Heron" />'
        ),
        page("Pond", "A pond is a small lake & nothing more than that."),
    ]
    head = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="en">'
    names = '<siteinfo><namespaces><namespace key="14">Category</namespace></namespaces></siteinfo>'
    path = tmp_path / "enwiki-pages-articles1.xml-p1p4.bz2"
    path.write_bytes(bz2.compress(f"{head}{names}{''.join(pages)}</mediawiki>".encode()))
    return path


def test_a_dump_becomes_clean_sentences(dump, tmp_path):
    corpus = read_corpus(dump, cache_dir=tmp_path / "cache")
    assert corpus.dataset["text"][:] == [*HERON, "A pond is a small lake & nothing more than that."]
    (file,) = corpus.report.files
    assert file.pages == {"articles": 2, "other namespaces": 1, "redirects": 1}
    assert file.dropped == {
        "markup left": 4,  # two templates, the formula and the link shown as text
        "too short": 1,
        "no final punctuation": 1,
        "too long": 1,
        "duplicate": 1,
    }
    assert file.unit == "sentences"
    assert corpus.report.read == corpus.report.kept + sum(file.dropped.values())
    again = read_corpus(dump, cache_dir=tmp_path / "cache")
    assert again.report.to_dict() == corpus.report.to_dict()
    assert [row["text"] for row in read_corpus(dump, streaming=True).dataset] == corpus.dataset["text"][:]


@pytest.mark.parametrize(
    ("sentence", "rule"),
    [
        ("Five words are just enough.", None),
        ("Only four words here.", "too short"),
        (" ".join(["word"] * 64) + ".", None),
        (" ".join(["word"] * 65) + ".", "too long"),
        ("It ends in nothing at all", "no final punctuation"),
        ('He asked: "Does it end well?"', None),
        ("Does it end well (or not?)", None),
        ("A left over ''quote'' is markup.", "markup left"),
        ("A left over {{template is also markup.", "markup left"),
        ("See https://example.org for all the rest.", "markup left"),
    ],
)
def test_the_rules_for_sentences(sentence, rule):
    assert dropping_rule(sentence) == rule


def test_a_damaged_dump_is_refused(dump, tmp_path):
    whole = bz2.decompress(dump.read_bytes())
    for name, content, message in (
        ("cut.xml", whole[:-40], "not a whole Wikipedia XML dump"),
        ("cut.xml.bz2", dump.read_bytes()[:-40], r"a whole \.bz2 file"),
        ("other.xml", b"<html><body>no dump</body></html>", r"no usable sentences \(0 sentences read, 0 kept\)"),
        ("empty.xml", b"", "not a whole Wikipedia XML dump"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=f"{name}: .*{message}"):
            read_corpus(tmp_path / name, cache_dir=tmp_path / "cache")


def test_an_entity_bomb_is_stopped(tmp_path):
    entities = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10}">' for i in range(1, 12))
    bomb = f'<!DOCTYPE mediawiki [<!ENTITY e0 "bang">{entities}]><mediawiki><page>&e11;</page></mediawiki>'
    (tmp_path / "bomb.xml").write_text(bomb)
    with pytest.raises(InputError, match=r"bomb\.xml: .*amplification"):
        read_corpus(tmp_path / "bomb.xml", cache_dir=tmp_path / "cache")


def test_the_missing_extra_is_named(dump, tmp_path, monkeypatch):
    def without_parser(name, *rest, **keywords):
        if name == "mwparserfromhell":
            raise ImportError(name)
        return import_module(name, *rest, **keywords)

    monkeypatch.setattr("simcse_weince.errors.import_module", without_parser)
    with pytest.raises(InputError, match=r"a Wikipedia dump needs more packages; pip install 'simcse-weince\[wiki\]'"):
        read_corpus(dump, cache_dir=tmp_path / "cache")


def test_real_articles_of_the_dump_that_gensim_ships(tmp_path):
    gensim = find_spec("gensim")  # not imported, which would take seconds; one of the development packages
    assert gensim is not None
    folder = Path(str(gensim.origin)).parent / "test" / "test_data"
    dumps = [folder / "enwiki-table-markup.xml.bz2", folder / "bgwiki-latest-pages-articles-shortened.xml.bz2"]
    english, bulgarian = (read_corpus(path, cache_dir=tmp_path / "cache") for path in dumps)
    assert english.report.files[0].pages == {"articles": 5}
    assert english.report.kept > 600
    assert bulgarian.report.files[0].pages == {"articles": 1, "other namespaces": 2}
    assert bulgarian.report.kept > 30
    for sentence in english.dataset["text"]:
        assert sentence == " ".join(sentence.split())
        assert sentence[-1] in ".!?…\"'”)]"
        assert not set("{}|<>=\ufffc") & set(sentence)
