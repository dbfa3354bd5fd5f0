"""A turn ends at a stop string, in whatever tokens the model spells it."""

from pipelines.protocols.blocks import StopStrings, truncate_at_stop


def test_a_tag_that_is_one_token(codec):
    stops = StopStrings(codec.tokenizer, ("</sql>", "</solution>"), codec.decode)
    ids = codec.agent("<sql> select 1 </sql>")
    assert [stops.ended(ids[: i + 1]) for i in range(len(ids))] == [False] * (len(ids) - 1) + [True]


def test_a_tag_spelt_letter_by_letter(codec):
    stops = StopStrings(codec.tokenizer, ("</sql>",), codec.decode)
    ids = codec.tokenizer.convert_tokens_to_ids(list("x</sql>"))
    assert [stops.ended(ids[: i + 1]) for i in range(7)] == [False] * 6 + [True]


def test_a_string_that_does_not_end_in_ascii(codec):
    stops = StopStrings(codec.tokenizer, ("ende\u2764",), codec.decode)
    ids = codec.agent("das ende\u2764")
    assert stops.ended(ids)
    assert not stops.ended(ids[:-1])


def test_no_stop_strings(codec):
    assert not StopStrings(codec.tokenizer, (), codec.decode).ended(codec.agent("</sql>"))


def test_text_is_cut_after_the_first_stop_string():
    assert truncate_at_stop("a</sql>b</solution>", ("</solution>", "</sql>")) == "a</sql>"
    assert truncate_at_stop("a", ("</sql>",)) == "a"
