"""Allow-lists of functions and first words, checked on a statement's tokens, for engines that have no authorizer.

The lexer knows the plain part of SQL, of DuckDB also dollar quotes and E'' strings, and refuses the rest (U& strings,
nested comments), because whatever two lexers could read differently is where a call would be hidden. It is the second
fence: the first is the engine's own parse (`parse_trees`), and behind both are the read-only transaction, the role and
the engine's settings.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from pipelines.sql.dialects.base import ERROR, LIMIT, REFUSED, RawResult, failure, fold

MAX_SQL = 100_000  # characters; their tokens are looked at in a quarter of a second
MAX_DEPTH = 200  # brackets in brackets: the parsers of these engines take time and memory that grow fast with it

TOKEN = re.compile(
    r"""
    (?P<space>\s+|--[^\n]*)
    |(?P<comment>/\*(?:[^*/]|\*(?!/)|/(?!\*))*\*/)
    |(?P<text>'(?:[^']|'')*')
    |(?P<name>"(?:[^"]|"")+")
    |(?P<number>(?:\d[\d_]*\.?[\d_]*|\.\d+)(?:e[+-]?\d+)?)
    |(?P<word>[^\W\d]\w*)
    |(?P<sign>[!#%&()*+,\-./:<=>?@\[\]^{|}~])
    """,
    re.VERBOSE | re.IGNORECASE,
)
# DuckDB's texts with escapes, and between dollars. Right behind a name or a number they would be something else.
_DUCKDB_TEXTS = r"""
    (?P<escaped>(?<![\w$])e'(?:[^'\\]|''|\\[\s\S])*')
    |(?P<dollars>(?<![\w$])\$(?P<tag>(?:[a-z_][a-z_0-9]*)?)\$[\s\S]*?\$(?-i:(?P=tag))\$)|
"""
DUCKDB_TOKEN = re.compile(_DUCKDB_TEXTS + TOKEN.pattern, re.VERBOSE | re.IGNORECASE)
# Words that may stand before a bracket without being a call.
_KEYWORDS = """
    all and any array as asc between by case cast coalesce cross cube current desc distinct distinct else end except
    exclude exists extract fetch filter first following for from full group grouping groups having ilike in inner
    intersect interval into is join last lateral left like limit list map materialized minus natural next not null
    nullif offset on only or order ordinality outer over overlay partition position preceding qualify range recursive
    replace right rollup row rows select sets similar some struct substring table then ties to trim tablesample
    unbounded union unnest unpivot pivot using values when where window with within without columns
    bigint bit blob bool boolean bytea char character date decimal double float float4 float8 hugeint int int2 int4
    int8 integer json jsonb nchar numeric real smallint text time timestamp timestamptz tinyint varchar varying
"""
_COMMON = """
    abs acos asin atan atan2 ceil ceiling cos cosh cot degrees div exp floor ln log log10 log2 mod pi pow power radians
    random round sign sin sinh sqrt cbrt tan tanh trunc greatest least factorial gcd lcm isnan isinf isfinite
    ascii bit_length btrim char_length character_length chr concat concat_ws format initcap instr length lower lpad
    ltrim md5 octet_length regexp_matches regexp_replace regexp_split_to_array regexp_like regexp_count regexp_substr
    repeat replace reverse rpad rtrim split_part starts_with string_to_array strpos substr to_char to_number translate
    upper to_hex quote_ident quote_literal array_to_string
    age current_date current_timestamp date_part date_trunc date_diff datediff date_add date_sub dateadd make_date
    make_timestamp make_time make_interval now strftime strptime to_date to_timestamp julian year month day hour
    minute second quarter week dayofweek dayofyear dayname monthname isodow epoch justify_days justify_hours
    avg count max min sum string_agg group_concat array_agg bool_and bool_or every stddev stddev_pop stddev_samp
    variance var_pop var_samp corr covar_pop covar_samp regr_slope regr_intercept mode percentile_cont percentile_disc
    bit_and bit_or any_value grouping
    row_number rank dense_rank percent_rank cume_dist ntile lag lead first_value last_value nth_value
    generate_series unnest array_length cardinality array_position array_append array_cat array_prepend array_remove
    json_array_length json_extract_path json_extract_path_text json_build_object json_build_array json_object
    json_agg json_object_agg row_to_json to_json json_array_elements json_array_elements_text json_each json_each_text
    json_object_keys json_typeof to_jsonb jsonb_agg jsonb_object_agg jsonb_array_length jsonb_extract_path
    jsonb_extract_path_text jsonb_build_object jsonb_build_array jsonb_array_elements jsonb_array_elements_text
    jsonb_each jsonb_each_text jsonb_object_keys jsonb_typeof
"""
# The functions of DuckDB 2.0 (`duckdb_functions()`) that compute with their arguments alone; for the others
# tests/sql/duckdb_refused.txt has the reasons.
_DUCKDB = """
    acosh add aggregate ago alias apply approx_count_distinct approx_quantile approx_top_k arbitrary arg_max
    arg_max_null arg_max_nulls_last arg_min arg_min_null arg_min_nulls_last argmax argmin array_aggr
    array_aggregate array_apply array_concat array_contains array_cosine_distance array_cosine_similarity
    array_cross_product array_distance array_distinct array_dot_product array_extract array_filter
    array_grade_up array_has array_has_all array_has_any array_indexof array_inner_product array_intersect
    array_negative_dot_product array_negative_inner_product array_pop_back array_pop_front array_push_back
    array_push_front array_reduce array_resize array_reverse array_reverse_sort array_select array_slice
    array_sort array_to_json array_to_string_comma_default array_transform array_unique array_value array_where
    array_zip asinh assert_true atanh bar base64 bin binom bit_count bit_position bit_xor bitstring
    bitstring_agg century constant_or_null contains count_if count_star countif current_localtime
    current_localtimestamp damerau_levenshtein datepart datesub datetrunc dayofmonth days_in_month decade decode
    divide editdist3 element_at encode ends_with entropy enum_code enum_first enum_last enum_range
    enum_range_boundary epoch_ms epoch_ns epoch_us equi_width_bins era error even favg fdiv fill filter first
    flatten fmod format_bytes formatreadabledecimalsize formatreadablesize from_base64 from_binary from_hex
    from_json from_json_strict fsum gamma gen_random_uuid generate_subscripts geomean geometric_mean get_bit
    get_current_time get_current_timestamp grade_up greatest_common_divisor hamming hash hex histogram
    histogram_exact if ilike_escape isoyear jaccard jaro_similarity jaro_winkler_similarity json json_array
    json_contains json_deep_merge json_exists json_extract json_extract_string json_group_array
    json_group_object json_group_structure json_insert json_keys json_merge_patch json_merge_patch_diff
    json_normalize json_pretty json_quote json_remove json_replace json_set json_strip_nulls json_structure
    json_transform json_transform_strict json_tree json_type json_valid json_value kahan_sum kurtosis
    kurtosis_pop last last_day lcase least_common_multiple left left_grapheme len length_grapheme levenshtein
    lgamma like_escape list list_aggr list_aggregate list_any_value list_append list_apply
    list_approx_count_distinct list_avg list_bit_and list_bit_or list_bit_xor list_bool_and list_bool_or
    list_cat list_concat list_contains list_cosine_distance list_cosine_similarity list_count list_distance
    list_distinct list_dot_product list_element list_entropy list_extract list_filter list_first list_grade_up
    list_has list_has_all list_has_any list_histogram list_indexof list_inner_product list_intersect
    list_kurtosis list_kurtosis_pop list_last list_mad list_max list_median list_min list_mode
    list_negative_dot_product list_negative_inner_product list_pack list_position list_prepend list_product
    list_reduce list_resize list_reverse list_reverse_sort list_select list_sem list_skewness list_slice
    list_sort list_stddev_pop list_stddev_samp list_string_agg list_sum list_transform list_unique list_value
    list_var_pop list_var_samp list_where list_zip listagg lttb mad make_timestamp_ms make_timestamp_ns
    make_timestamptz map map_concat map_contains map_contains_entry map_contains_value map_entries map_extract
    map_extract_value map_from_entries map_keys map_values max_by md5_number md5_number_lower md5_number_upper
    mean median microsecond millennium millisecond min_by mismatches multiply nanosecond nextafter nfc_normalize
    normalized_interval not_ilike_escape not_like_escape nullif ord overlay parse_dirname parse_dirpath
    parse_filename parse_formatted_bytes parse_path path_join pg_size_pretty pg_typeof position prefix printf
    product quantile quantile_cont quantile_disc range rank_dense reduce regexp_escape regexp_extract
    regexp_extract_all regexp_full_match regexp_split_to_table regr_avgx regr_avgy regr_count regr_r2 regr_sxx
    regr_sxy regr_syy repeat_row reservoir_quantile right right_grapheme round_even roundbankers row sem set_bit
    sha1 sha256 signbit skewness split st_asbinary st_asgeojson st_astext st_aswkb st_aswkt st_geomfromgeojson
    st_geomfromwkb str_split str_split_regex string_split string_split_regex strip_accents strlen struct_concat
    struct_contains struct_extract struct_extract_at struct_has struct_indexof struct_insert struct_keys
    struct_pack struct_position struct_update struct_values substring substring_grapheme subtract suffix
    sumkahan time_bucket timezone timezone_hour timezone_minute to_base to_base64 to_binary to_centuries to_days
    to_decades to_hours to_microseconds to_millennia to_milliseconds to_minutes to_months to_quarters to_seconds
    to_weeks to_years today transaction_timestamp trim try_strptime typeof ucase unbin unhex unicode
    union_extract union_tag union_value url_decode url_encode uuid uuid_extract_timestamp uuid_extract_version
    uuidv4 uuidv7 variant_array_length variant_contains variant_exists variant_extract variant_extract_string
    variant_keys variant_type variant_typeof wavg weekday weekofyear weighted_avg xor yearweek
"""
# Words that DuckDB's grammar has before a bracket and that are no functions: forms of a call, samples, types.
_DUCKDB_FORMS = "bernoulli enum ifnull nulls percent pivot_longer pivot_wider reservoir system try try_cast union"
_POSTGRES = """
    width_bucket scale min_scale trim_scale acosd asind atand cosd sind tand
    left right substring_index regexp_match regexp_split_to_table normalize unistr to_ascii convert_from convert_to
    encode decode string_to_table parse_ident overlay sha256
    date text clock_timestamp statement_timestamp transaction_timestamp timeofday date_bin justify_interval
    timezone xmlagg range_agg regr_avgx regr_avgy regr_count regr_r2 regr_sxx regr_sxy regr_syy bit_xor num_nonnulls
    num_nulls array_dims array_lower array_ndims array_positions array_replace array_upper trim_array
    generate_subscripts json_to_record json_to_recordset json_populate_record jsonb_to_record jsonb_to_recordset
    jsonb_set jsonb_insert jsonb_pretty jsonb_path_query jsonb_path_exists jsonb_path_query_array json_strip_nulls
    lower_inc upper_inc isempty int4range int8range numrange daterange tsrange tstzrange to_tsvector to_tsquery
    plainto_tsquery phraseto_tsquery websearch_to_tsquery ts_rank ts_headline setweight similarity
"""
_MYSQL = """
    add adddate addtime conv crc32 curdate curtime date_format dayofmonth elt field find_in_set from_days from_unixtime
    get_format hex unhex ifnull if insert isnull json_array json_arrayagg json_contains json_depth json_extract
    json_keys json_length json_objectagg json_type json_unquote json_valid json_value last_day lcase left locate
    makedate maketime microsecond mid oct ord period_add period_diff rand regexp_instr right sha1 sha2 sec_to_time
    soundex space std str_to_date strcmp subdate substring_index subtime sysdate time_format time_to_sec timediff
    timestampadd timestampdiff to_days to_seconds truncate ucase unix_timestamp utc_date utc_time utc_timestamp weekday
    weekofyear yearweek bit_xor convert char binary values nullif
"""
# Relations and functions that show the server instead of the data, and words that need no brackets to do so.
HIDDEN = re.compile(r"(pg|duckdb|pragma|sqlite)_", re.I)
_WORDS = frozenset(("current_user", "session_user", "current_role"))
# Without quotes PostgreSQL takes `user` for who is connected; the others take it for a table or a column.
_CONNECTED = {"duckdb": _WORDS, "postgres": _WORDS | {"user"}, "mysql": _WORDS}
_CATALOGUED = frozenset(("duckdb", "postgres"))  # engines with relations and functions of `HIDDEN`
_STATEMENTS = """
    abort alter analyze attach begin binlog cache call change checkpoint close cluster comment commit copy create
    deallocate declare delete describe detach discard do drop end execute explain export fetch flush force grant handler
    help import insert install kill listen load lock merge move notify optimize pragma prepare purge reassign refresh
    reindex release rename repair replace reset revoke rollback savepoint security set show shutdown signal start stop
    truncate uninstall unlisten unlock update use vacuum xa
"""
# Which argument says how wide a text becomes. Servers do not interrupt some functions, however long their text is.
_WIDTHS = {"repeat": 1, "lpad": 1, "rpad": 1, "space": 0, "binary": 0}
_WIDEST = 1_000_000  # characters that such calls of a statement make of one, together
_WIDE_FORMAT = re.compile(r"%[^a-z%]*(?:\*|\d{4})", re.IGNORECASE)
_DUCKDB_STARTS = """
    select with values from table ( show desc describe summarize explain pivot pivot_wider unpivot pivot_longer
"""
_AFTER_PIVOT = frozenset(("using", "group", "order", "limit", ")", ";"))  # words that may follow the columns of a PIVOT
KEYWORDS = frozenset(_KEYWORDS.split())
FORMS = {"duckdb": frozenset(_DUCKDB_FORMS.split())}
STATEMENTS = frozenset(_STATEMENTS.split())
FUNCTIONS = {
    "duckdb": frozenset((_COMMON + _DUCKDB).split()),
    "postgres": frozenset((_COMMON + _POSTGRES).split()),
    "mysql": frozenset((_COMMON + _MYSQL).split()),
}
STARTS = {
    "duckdb": frozenset(_DUCKDB_STARTS.split()),
    "postgres": frozenset(("select", "with", "values", "table", "(")),
    "mysql": frozenset(("select", "with", "values", "(")),
}


def token_refusal(sql: str, engine: str) -> RawResult | None:
    """The refusal of a statement; None if it may run."""
    if len(sql) > MAX_SQL:
        return failure(LIMIT, "sql_too_long", f"the query is longer than {MAX_SQL:,} characters")
    try:
        sql.encode()
    except UnicodeEncodeError:
        return failure(ERROR, "syntax", "the query is not valid text")
    token = DUCKDB_TOKEN if engine == "duckdb" else TOKEN
    tokens, rest = lexed(sql, token)
    unread = rest
    while unread:  # nothing to run is left in semicolons, spaces and comments
        further_tokens, remainder = lexed(unread.lstrip(";"), token)
        if further_tokens or remainder == unread:
            if rest.startswith(";"):
                return failure(REFUSED, "several_statements", "only one statement may be run at a time")
            return failure(REFUSED, "not_authorized", f"this part of SQL is not allowed here: {rest[:20]!r}")
        unread = remainder
    if not tokens:
        return failure(ERROR, "empty", "there is no query to run")
    start = tokens[0][1]
    if start not in STARTS[engine]:
        if start in STATEMENTS:
            return failure(REFUSED, "not_authorized", f"not authorized: {start.upper()}")
        return failure(ERROR, "syntax", f"syntax error at or near {start!r}")
    depth = 0
    deepest = 0
    for _, word in tokens:
        depth += (word == "(") - (word == ")")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        return failure(ERROR, "too_complex", f"brackets nest more than {MAX_DEPTH} deep")
    for index, (kind, word) in enumerate(tokens):
        if kind in ("word", "name"):
            reason = word_refusal(tokens, index, word, engine)
            if reason:
                return failure(REFUSED, "not_authorized", reason)
    if engine != "duckdb" and _width(tokens, engine) > _WIDEST:
        message = f"repeat, lpad and the like make at most {_WIDEST:,} characters here, by a number or least(n, 1000)"
        return failure(LIMIT, "cell_limit", message)
    return None


def _width(tokens: Sequence[tuple[str, str]], engine: str) -> float:
    """Characters that the calls of `_WIDTHS` make of one, all together; infinite if a width is no number."""
    repeated = 1.0
    padded = 1.0
    calls = [_Call("", [[]])]  # open brackets, the innermost last
    for kind, word in tokens:
        call = calls[-1]
        argument = call.arguments[-1]
        if kind == "name":
            argument.append(f'"{word}')
        elif kind != "sign" or word not in "(,)" or (word == ")" and len(calls) == 1):
            argument.append(word)
        elif word == "(":
            name = ""
            if argument:
                name = argument.pop().lstrip('"')
            calls.append(_Call(name, [[]]))
        elif word == ",":
            call.arguments.append([])
        else:
            calls.pop()
            numbers = call.numbers()
            outer_argument = calls[-1].arguments[-1]
            if call.name == "least":  # it is as wide as its smallest number
                outer_argument.append(str(min(numbers)))
            else:  # a bracket around a number is no number
                outer_argument.append("()")
            if engine == "postgres" and call.name == "format" and _is_wide_format(call.arguments[0]):
                return math.inf
            width = 1.0
            place = _WIDTHS.get(call.name)
            if place is not None and len(numbers) > place:
                width = numbers[place]
            if call.name == "repeat":
                repeated *= max(width, 1.0)
            else:
                padded = max(padded, width)
    return repeated * padded


class _Call(NamedTuple):
    """A call, or a bracket of another kind, as far as it is read."""

    name: str  # Function that is called; "" for a bracket of another kind.
    arguments: list[list[str]]  # Words of each argument.

    def numbers(self) -> list[float]:
        """The arguments that are numbers; infinite for others."""
        numbers = []
        for words in self.arguments:
            text = words[0] if len(words) == 1 else ""
            if text[:1].isdigit() and "_" not in text:
                numbers.append(float(text))
            else:
                numbers.append(math.inf)
        return numbers


def _is_wide_format(words: Sequence[str]) -> bool:
    """Whether a format may ask for a wide text: it is no constant, or it has a width."""
    if len(words) != 1 or words[0][:1] != "'":
        return True
    return _WIDE_FORMAT.search(words[0]) is not None


def body(sql: str, token: re.Pattern[str] = TOKEN) -> str:
    """A statement that passed `token_refusal`, without the semicolon at its end and what follows that."""
    if ";" not in sql:
        return sql
    _, rest = lexed(sql, token)
    return sql.removesuffix(rest)


def lexed(sql: str, token: re.Pattern[str] = TOKEN) -> tuple[list[tuple[str, str]], str]:
    """The tokens before the first thing that this lexer does not know, and the text from there."""
    tokens: list[tuple[str, str]] = []
    position = 0
    while position < len(sql):
        match = token.match(sql, position)
        if match is None:
            return tokens, sql[position:]
        kind = str(match.lastgroup)
        text = match[0]
        # An open comment may be nested, a carriage return ends one, and a text right after E or U& has escapes.
        is_open_comment = kind != "comment" and sql.startswith("/*", position)
        if is_open_comment or "\r" in text.strip():
            return tokens, sql[position:]
        is_quoted = kind in ("text", "name")
        if is_quoted and tokens and not sql[position - 1].isspace():
            _, word_before = tokens[-1]
            if word_before in ("e", "&"):
                return tokens, sql[position - 1 :]
        position = match.end()
        if kind in ("space", "comment"):
            continue
        if kind == "name":
            text = text[1:-1].replace('""', '"')
        elif kind in ("escaped", "dollars"):
            kind = "text"
        tokens.append((kind, text.lower()))
    return tokens, ""


def body_behind_as(sql: str) -> str:
    """The query of a statement that makes a view, behind its first AS; "" if what stands before is not understood."""
    position = 0
    while match := TOKEN.match(sql, position):
        position = match.end()
        if match.lastgroup == "word" and match[0].lower() == "as":
            return sql[position:].rstrip("; \n")
    return ""


def common_tables(sql: str) -> dict[str, tuple[int, int]]:
    """The common table expressions that a statement begins with, each with the places of two tokens: its name, and the
    one behind which its name stands for it. {} if a part of the statement is not understood.
    """
    tokens, rest = lexed(sql)
    words = [word for _, word in tokens]
    if words[:1] != ["with"] or rest.strip("; \n") or "[" in words:  # SQLite's [name] may have brackets in it
        return {}
    places: dict[str, tuple[int, int]] = {}
    is_recursive = words[1:2] == ["recursive"]
    name = ""
    depth = 0
    first = 2 if is_recursive else 1
    for position in range(first, len(words)):
        word = words[position]
        if not name:
            name = word
            places[name] = position, position
        depth += (word == "(") - (word == ")")
        if depth != 0:
            continue
        if word == ")" and not is_recursive:
            definition, _ = places[name]
            places[name] = definition, position
        elif word == ",":
            name = ""
        elif word == "select":
            break
    return places


def shadowed_names(sql: str) -> frozenset[str]:
    """The folded names that a statement has for its common table expressions and for nothing else, so that a table or a
    view of such a name is not meant anywhere; none if a sign is not ASCII, for engines compare others in their own way.
    """
    common = {fold(name): places for name, places in common_tables(sql).items()}
    if not common or not sql.isascii():
        return frozenset()
    tokens, _ = lexed(sql)
    others: set[str] = set()
    before = ""
    for position, (kind, word) in enumerate(tokens):
        name = fold(word)
        if kind == "text":  # SQLite also takes a text for a name
            text = word[1:-1].replace("''", "'")
            others.add(fold(text))
        elif kind in ("word", "name") and name in common:
            definition, scope_start = common[name]
            is_meant = position == definition or position > scope_start
            if before == "." or not is_meant:
                others.add(name)
        before = word
    return frozenset(common.keys() - others)


def with_pivot_values(sql: str) -> str:
    """DuckDB's statement with a value for each column that a PIVOT spreads over values which it finds by itself. It
    names what the statement names, and is a single query, where DuckDB makes several of the statement.
    """
    words: list[tuple[str, int]] = []  # each with its end
    for match in DUCKDB_TOKEN.finditer(sql):
        if match.lastgroup not in ("space", "comment"):
            word = match[0].lower()
            words.append((word, match.end()))
    words.append((";", len(sql)))
    pieces: list[str] = []
    copied_end = 0
    end = 0
    # For each open bracket: "pivot" behind that word, then "column" in a column without values, "valued" behind its IN.
    states = [""]
    for word, next_end in words:
        state = states[-1]
        is_column_over = word == "," or word in _AFTER_PIVOT
        if state == "column" and is_column_over:
            pieces += [sql[copied_end:end], " IN ('')"]
            copied_end = end
        if state in ("column", "valued") and is_column_over:
            states[-1] = "column" if word == "," else ""
        elif (state, word) == ("column", "in"):
            states[-1] = "valued"
        elif (state, word) == ("pivot", "on"):
            states[-1] = "column"
        elif word in ("pivot", "pivot_wider"):
            states[-1] = "pivot"
        if word == "(":
            states.append("")
        elif word == ")" and len(states) > 1:
            states.pop()
        end = next_end
    return "".join([*pieces, sql[copied_end:]])


def word_refusal(tokens: Sequence[tuple[str, str]], index: int, word: str, engine: str) -> str:
    """The reason to refuse a word where it stands; "" if there is none."""
    kind, _ = tokens[index]
    is_word = kind == "word"
    before = tokens[index - 1][1] if index else ""
    is_called = tokens[index + 1 : index + 2] == [("sign", "(")]
    is_function = word in FUNCTIONS[engine]
    in_catalogue = engine in _CATALOGUED and HIDDEN.match(word) is not None
    if is_called and is_function:  # such as pg_typeof
        in_catalogue = False
    tells_of_connection = is_word and word in _CONNECTED[engine]
    is_renaming = before == "as" and not is_called
    if (in_catalogue or tells_of_connection) and before != "." and not is_renaming:
        return f"not authorized to use {word}"
    if not is_called or is_function or before in ("as", ")", "with", "recursive"):
        return ""
    if is_word and (word in KEYWORDS or word in FORMS.get(engine, ())):
        return ""
    if _opens_common_table(tokens, index + 2):
        return ""
    return f"not authorized to use function: {word}"


def _opens_common_table(tokens: Sequence[tuple[str, str]], start: int) -> bool:
    """Whether the columns of a common table expression stand from a place on, as in "name(a, b) AS (SELECT"."""
    position = start
    while position < len(tokens):
        kind, word = tokens[position]
        if kind not in ("word", "name") and word != ",":
            break
        position += 1
    ahead = [word for _, word in tokens[position : position + 6]]
    if ahead[:2] != [")", "as"]:
        return False
    opening = [word for word in ahead[2:] if word not in ("not", "materialized")]
    if opening[:1] != ["("]:
        return False
    return opening[1:2] in (["select"], ["with"], ["values"], ["("], ["from"])
