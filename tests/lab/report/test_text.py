import json

import pytest

from affine_attention.lab.report.text import embedded_json, escaped, short, visible


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain", "plain"),
        ("a\0b", "a⟨U+0000⟩b"),
        ("\u202eevil", "⟨U+202E⟩evil"),
        ("\u2066x\u2069", "⟨U+2066⟩x⟨U+2069⟩"),
        ("line\nnext\ttab", "line↵next⇥tab"),
        ("\ud800", "⟨U+D800⟩"),
        ("zero\u200bwidth", "zero⟨U+200B⟩width"),
        ("\u2028", "⟨U+2028⟩"),
        ("👩\u200d💻 ünïcödé 漢字", "👩\u200d💻 ünïcödé 漢字"),
        (3, "3"),
    ],
)
def test_control_characters_are_escaped(given, shown):
    assert visible(given) == shown


def test_html_is_escaped():
    assert escaped("<img src=x onerror='a(\"b\")'> & co") == (
        "&lt;img src=x onerror=&#x27;a(&quot;b&quot;)&#x27;&gt; &amp; co"
    )


def test_long_text_is_cut_with_its_length():
    assert short("x" * 10_000, 50) == "x" * 49 + "… (10,000 characters)"
    assert short("x" * 50, 50) == "x" * 50


@pytest.mark.parametrize(
    "text", ["</script><script>alert(1)</script>", "<!--", "]]>", "a&b", "\u2028\u2029", "\0", "\ud800"]
)
def test_json_cannot_leave_its_script_and_comes_back_whole(text):
    packed = embedded_json({"text": text})
    assert not set(packed) & set("<>&\u2028\u2029\0")
    assert packed.isascii()
    assert json.loads(packed) == {"text": text}


def test_json_holds_no_nan():
    with pytest.raises(ValueError):
        embedded_json([float("nan")])
