import base64
import gzip
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.report.html import data_script, head_value, packed_script, page

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
