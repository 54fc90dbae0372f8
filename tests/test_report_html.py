import base64
import gzip
import json
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from browser import open_text
from report_worlds import log
from sortedrl.report.html import asset, data_script, head_value, packed_script, page, visible
from sortedrl.report.page import runs_page
from sortedrl.report.record import RunRecord
from sortedrl.report.watch import waiting_page

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
    max_leaves=10,
)


def content(element):
    found = re.fullmatch(r'<script type="[^"<>]+" id="name">([^<]*)</script>', element)
    assert found
    assert found[1].isascii()
    return found[1]


@settings(max_examples=50)
@given(VALUES)
def test_packed_data_comes_back_and_holds_nothing_that_ends_its_element(value):
    assert (
        json.loads(gzip.decompress(base64.b64decode(content(packed_script("name", value)))))
        == value
    )


@settings(max_examples=50)
@given(VALUES)
def test_plain_data_comes_back_and_holds_nothing_that_ends_its_element(value):
    assert json.loads(content(data_script("name", value))) == value


def test_the_same_data_is_packed_the_same():
    assert packed_script("name", [1, "</script>"]) == packed_script("name", [1, "</script>"])


@pytest.mark.parametrize("value", [float("nan"), [float("inf")]])
def test_numbers_that_json_does_not_know_are_refused(value):
    with pytest.raises(ValueError, match="JSON"):
        packed_script("name", value)


def made(**changes):
    given = {"title": "t", "body": "<main></main>", "style": "", "script": "", "refresh_seconds": 2}
    return page(**given | changes)


def test_a_page_from_disk_may_connect_to_nothing_and_one_that_is_served_to_its_server():
    assert "connect-src" not in made(refresh_seconds=None)
    assert "sortedrl-" not in made(refresh_seconds=None)
    assert "connect-src 'self'" in head_value(made(), "Content-Security-Policy")
    assert head_value(made(refresh_seconds=0.5), "sortedrl-refresh") == "0.5"


def test_a_page_has_a_version_of_its_own_content():
    changes = [{"title": "u"}, {"body": "b"}, {"style": "s"}, {"script": "1"}, {}]
    versions = [head_value(made(**change), "sortedrl-version") for change in changes]
    assert len(set(versions)) == len(versions)
    assert head_value(made(), "sortedrl-version") == versions[-1]


def test_only_the_head_of_a_page_is_asked_for_its_values():
    forged = '<meta name="forged" content="1">'
    with pytest.raises(ValueError, match="the head of the page must hold forged"):
        head_value(made(title=forged, body=forged, style=forged), "forged")


# --- characters that cannot be seen ---------------------------------------------------------------

SIGNS_THAT_SHOW = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}
"""Format characters of Arabic, Syriac and Kaithi that have a shape of their own."""
BLANK_LETTERS = [0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0, 0xFE00, 0xE0100]
EMOJIS = [
    "\u26a0\ufe0f",
    "\U0001f469\U0001f3fd\u200d\U0001f4bb",
    "\u2764\ufe0f\u200d\U0001f525",
    "1\ufe0f\u20e3",
]


def hidden_characters():
    """Every code point that draws nothing, or that has no meaning of its own."""
    for code in range(0x110000):
        kind = unicodedata.category(chr(code))
        is_hidden = kind in ("Cc", "Cf", "Cs", "Zl", "Zp") or code & 0xFFFE == 0xFFFE
        if is_hidden and code not in {9, 10, 13, *SIGNS_THAT_SHOW}:
            yield code
    yield from BLANK_LETTERS


def test_every_hidden_character_is_shown_by_its_code_point():
    for code in hidden_characters():
        assert visible(f"a{chr(code)}b") == f"a\u2039U+{code:04X}\u203ab"


def test_letters_signs_spaces_and_emojis_stay_as_they_are():
    kinds = ("L", "N", "P", "S", "Zs")
    codes = {c for c in range(0x110000) if unicodedata.category(chr(c)).startswith(kinds)}
    text = "".join(map(chr, sorted(codes - set(BLANK_LETTERS)))) + "\t\n\r\n"
    assert visible(text) == text
    for emoji in EMOJIS:
        assert visible(f"a{emoji}b") == f"a{emoji}b"
    assert visible("1\ufe0f a\u200db") == "1\u2039U+FE0F\u203a a\u2039U+200D\u203ab"


def test_the_script_of_the_page_shows_the_same_characters(browser_page, tmp_path):
    script = f"{asset('browse.js')}\nwindow.visible = visible; window.gist = gist;"
    open_text(browser_page, page(title="", body="", style="", script=script), tmp_path)
    changed = browser_page.evaluate(
        "() => Array.from({length: 0x110000}, (_, c) => c)"
        ".filter((c) => visible(String.fromCodePoint(c) + 'b') !== String.fromCodePoint(c) + 'b')"
    )
    assert changed == [c for c in range(0x110000) if visible(chr(c)) != chr(c) or c == 13]
    for emoji in EMOJIS:
        assert browser_page.evaluate("text => visible(text)", emoji) == emoji
    cut = browser_page.evaluate(
        "() => gist('\\ufeff\\u2028x ' + '\\u{1f600}'.repeat(200)).textContent"
    )
    assert cut.startswith("\u2039U+FEFF\u203a\u2039U+2028\u203ax \U0001f600")
    assert "U+D8" not in cut


# --- colours --------------------------------------------------------------------------------------


def test_every_colour_that_a_page_uses_is_defined_by_day_and_by_night():
    run = RunRecord(name="a", events=log("partial"))
    for text in (
        runs_page([run], title="a", refresh_seconds=2),
        waiting_page(["soon"], title="a", refresh_seconds=2),
    ):
        (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
        day = re.sub(r"@media \(prefers-color-scheme: dark\) \{.*?\n\}", "", style, flags=re.DOTALL)
        night = "".join(re.findall(r"prefers-color-scheme: dark\) \{(.*?)\n\}", style, re.DOTALL))
        used = set(re.findall(r"var\((--[\w-]+)\)", style))
        assert "--good" in used
        assert used <= set(re.findall(r"(--[\w-]+):", day))
        assert used <= set(re.findall(r"(--[\w-]+):", night))
