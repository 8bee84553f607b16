"""JSON schemas as the world writes them: what compiles, and whether its texts fit.

The schemas are those that check-jsonschema bundles, and ten as pydantic and zod write them.
GPTMANAGER_FUZZ multiplies the number of random texts, 3 for each schema if it is not set.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import random
import re
from pathlib import Path

import jsonschema
import llguidance
import pytest
from everyday_schemas import EVERYDAY
from fuzz import FUZZ
from grammar_walks import random_text, without

from gptmanager.decoding.guided import grammar_matcher
from gptmanager.decoding.guided.grammar_matcher import (
    GrammarSource,
    answerer,
    new_matcher,
    new_tokenizer,
    read_source,
)
from gptmanager.decoding.guided.json_schema import SchemaReader
from gptmanager.decoding.guided.schema_keywords import DROPPED, ENFORCED, FORMATS, SOMETIMES
from gptmanager.decoding.guided.schema_overlap import excludes
from gptmanager.decoding.guided.schema_references import SchemaReferences

NUM_TEXTS = 3 * FUZZ
ROOT = Path(__file__).parents[2]
STATISTICS = json.loads((ROOT / "gptmanager/statistics.schema.json").read_text())
FIRST = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
CLOSED = {**FIRST, "additionalProperties": False}
SET = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


@pytest.fixture(scope="module")
def parser(tokenizer):
    return new_tokenizer(llguidance, tokenizer.to_str(), [0])


def compiled(parser, schema, *, lenient=False, expands=True):
    """Matcher and pointers to what it does not enforce, as a process on trial makes them."""
    source = GrammarSource("json_schema", json.dumps(schema), lenient=("",) if lenient else ())
    try:
        text, unenforced = read_source(llguidance, source, expands=expands)
        return new_matcher(llguidance, parser, "json_schema", text), unenforced
    except ValueError:
        if not lenient or not expands:
            raise
    return compiled(parser, schema, lenient=True, expands=False)


def check_texts(parser, schema, matcher, unenforced, num_texts):
    """Random texts that have ended fit the schema without what is reported."""
    schema = without(copy.deepcopy(schema), unenforced)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    ended = 0
    for seed in range(num_texts):
        text = random_text(matcher, parser, random.Random(seed))
        if text is not None:
            ended += 1
            kind(schema).validate(json.loads(text))
    return ended


def bundled():
    """Name -> schema of those that check-jsonschema bundles, without importing it."""
    spec = importlib.util.find_spec("check_jsonschema")
    if spec is None or spec.origin is None:
        pytest.skip("check-jsonschema is not installed")
    folder = Path(spec.origin).parent / "builtin_schemas"
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*/*.json"))}


@pytest.mark.slow
def test_most_public_schemas_compile_and_their_texts_fit(parser):
    schemas = {**bundled(), **EVERYDAY}
    num_strict = num_lenient = num_ended = 0
    for schema in schemas.values():
        try:
            matcher, unenforced = compiled(parser, schema)
            num_strict += 1
            assert not unenforced
        except ValueError:
            try:
                matcher, unenforced = compiled(parser, schema, lenient=True)
                assert unenforced
            except ValueError:
                continue
        num_lenient += 1
        num_ended += check_texts(parser, schema, matcher, unenforced, NUM_TEXTS)
    assert num_strict >= 0.6 * len(schemas), num_strict
    assert num_lenient >= 0.9 * len(schemas), num_lenient
    assert num_ended >= 2 * len(schemas)


@pytest.mark.parametrize("name", EVERYDAY)
def test_everyday_schemas_compile_as_they_are(parser, name):
    matcher, unenforced = compiled(parser, EVERYDAY[name])
    assert not unenforced
    check_texts(parser, EVERYDAY[name], matcher, (), NUM_TEXTS)


def test_the_schema_of_the_statistics_compiles(parser):
    assert compiled(parser, STATISTICS)[1] == []
    assert compiled(parser, STATISTICS, lenient=True)[1] == []


# Keywords in other words --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string", "maxLength": 3}, {"enum": [1, 2]}, {"type": "null"}]},
        {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]},
        {"oneOf": [{"enum": [1, 2]}, {"enum": [1.0, 3]}]},
        {"oneOf": [{"type": "string", "maxLength": 4}, {"type": "string", "minLength": 3}]},
        {"oneOf": [{**CLOSED, "required": ["a"]}, {**CLOSED, "required": ["b"]}]},
        {"oneOf": [{**FIRST, "required": ["a"]}, {**FIRST, "required": ["b"]}]},
        {
            "oneOf": [
                {"type": "array", "items": {"type": "null"}, "maxItems": 2},
                {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            ]
        },
        {"type": "string", "maxLength": 5, "not": {"enum": ["", "a", "ab", "b", "é", "]^-\\"]}},
        {"enum": ["a", "b", "c"], "not": {"const": "b"}},
        {"enum": [[1], 2], "not": {"const": [1.0]}},
        {"properties": {"a": {"const": True}}, "not": {"properties": {"a": {"const": 1}}}},
        {**CLOSED, "not": {"required": ["a"]}},
        {**CLOSED, "not": {"required": ["a", "b"]}},
        {**CLOSED, "minProperties": 1},
        {**CLOSED, "maxProperties": 1},
        {**CLOSED, "minProperties": 1, "maxProperties": 1},
        {**FIRST, "minProperties": 1, "maxProperties": 1},
        {**CLOSED, "dependentRequired": {"a": ["b"]}},
        {**CLOSED, "dependencies": {"a": ["b"], "b": {"required": ["a"]}}},
        {**CLOSED, "dependentSchemas": {"a": {"properties": {"b": {"maximum": 5}}}}},
        {
            "type": "object",
            "properties": {"kind": {"type": "string", "maxLength": 3}, "n": {"type": "integer"}},
            "required": ["kind", "n"],
            "additionalProperties": False,
            "if": {"properties": {"kind": {"const": "low"}}, "required": ["kind"]},
            "then": {"properties": {"n": {"maximum": 9}}},
            "else": {"properties": {"n": {"minimum": 100}}},
        },
        {
            "type": "object",
            "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
            "required": ["kind"],
            "additionalProperties": False,
            "allOf": [
                {"if": {"properties": {"kind": {"const": k}}}, "then": {"required": ["n"]}}
                for k in ("a", "x")
            ],
        },
        {"type": "array", "items": {"enum": [1, "a", 1, None]}, "uniqueItems": True, "minItems": 1},
        {**SET, "maxItems": 1},
        {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}, "maxItems": 3},
        {
            "type": "object",
            "allOf": [{"properties": {"a": {"type": "null"}}}],
            "properties": {"b": {"type": "null"}},
            "unevaluatedProperties": False,
        },
        {
            "type": "object",
            "propertyNames": {"pattern": "^[ab]{1,2}$"},
            "additionalProperties": {"type": "null"},
        },
        {"propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"enum": [1]}},
        {"type": "string", "format": "password", "maxLength": 4, "pattern": "^[a-c]*$"},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)  # fmt: skip
def test_a_keyword_that_the_parser_has_not_is_enforced_in_other_words(parser, schema):
    matcher, unenforced = compiled(parser, schema)
    assert not unenforced
    assert check_texts(parser, schema, matcher, (), 25 * FUZZ) > 5


@pytest.mark.parametrize(
    ("schema", "fits", "misfits"),
    [
        (
            {
                "allOf": [FIRST],
                "properties": {"c": {"type": "null"}},
                "unevaluatedProperties": False,
            },
            {"a": "x", "c": None},
            {"a": "x", "d": None},
        ),
        (
            {"$ref": "#/$defs/it", "$defs": {"it": FIRST}, "unevaluatedProperties": False},
            {"a": "x"},
            {"a": "x", "d": None},
        ),
        ({"type": "string", "not": {"minLength": 3}}, "ab", "abc"),
        ({"type": "string", "not": {"maxLength": 2}}, "abc", "ab"),
        ({"type": "string", "not": {"allOf": [{"minLength": 3}]}}, "ab", "abc"),
        ({"type": "string", "not": {"anyOf": [{"minLength": 3}, {"const": "a"}]}}, "ab", "a"),
        ({"type": "boolean", "not": {"const": True}}, False, True),
        ({"anyOf": [{"type": "integer"}, {"not": {}}]}, 7, "a"),  # zod: a value, or nothing
        ({"properties": {"a": {"not": {}}}}, {"b": 1}, {"a": 1}),
        ({"type": "boolean", "not": {"const": False}}, True, False),
        ({"type": "boolean", "if": True, "then": {"const": True}}, True, False),
        ({"type": "boolean", "if": False, "else": {"const": True}}, True, False),
        ({"type": "object", "propertyNames": {"minLength": 0}}, {"": 1}, [1]),
        (
            {**CLOSED, "not": {"required": ["a"], "additionalProperties": True}},
            {"b": 1},
            {"a": "x"},
        ),
        (
            {**CLOSED, "not": {"properties": {"a": {}}, "additionalProperties": False}},
            {"b": 1},
            {"a": "x"},
        ),
    ],
    ids=str,
)
def test_a_keyword_in_other_words_permits_no_less_and_no_more(parser, schema, fits, misfits):
    matcher, unenforced = compiled(parser, schema)
    assert not unenforced
    for value, expected in ((fits, True), (misfits, False)):
        written = json.dumps(value, separators=(",", ":"))
        assert accepts(matcher, parser, written) is expected, value


@pytest.mark.parametrize(
    ("schema", "fits", "misfits"),
    [
        ({"format": "date"}, "2024-02-29 2000-02-29", "2023-02-29 1900-02-29 2024-04-31"),
        ({"format": "time"}, "23:59:59Z 00:00:00.5+01:00", "23:59:60Z 22:59:60Z"),
        (
            {"format": "date-time"},
            "2024-02-29T23:59:59Z 2023-12-31t00:00:00.25-08:00",
            "2023-02-29T00:00:00Z 1998-12-31T23:59:60Z",
        ),
        ({"format": "date", "pattern": "^2"}, "2024-02-29", "1996-02-29 2023-02-29"),
        ({"maxLength": 2.0}, "é", "abc"),
        ({"enum": ["a/b", "é"]}, "a/b é", "a"),
    ],
    ids=str,
)  # fmt: skip
def test_each_text_that_is_permitted_fits(parser, schema, fits, misfits):
    matcher, unenforced = compiled(parser, {"type": "string", **schema})
    assert not unenforced
    for texts, expected in ((fits, True), (misfits, False)):
        for text in texts.split():
            written = json.dumps(text, ensure_ascii=False)
            assert accepts(matcher, parser, written) is expected, text


def accepts(matcher, parser, text):
    tokens = parser.tokenize_str(text)
    own = matcher.deep_copy()
    is_read = own.validate_tokens(tokens) == len(tokens) and own.consume_tokens(tokens)
    return bool(is_read and own.is_accepting())


def test_a_character_is_escaped_only_if_json_demands_it(parser):
    """As docs/guided.md says."""
    matcher, _ = compiled(parser, {"type": "string"})
    for text in ('"/"', '"é"', r'"\""', r'"\\"', r'"\n"', r'"\u0001"'):
        assert accepts(matcher, parser, text), text
    for text in (r'"\/"', r'"\u00e9"', r'"\u0041"'):
        assert not accepts(matcher, parser, text), text


def test_unevaluated_properties_do_not_look_around(parser):
    part = {"unevaluatedProperties": False}
    matcher, _ = compiled(parser, {"type": "object", "properties": {"a": {}}, "allOf": [part]})
    assert accepts(matcher, parser, "{}") and not accepts(matcher, parser, '{"a":1}')


def test_properties_that_a_closed_schema_collects_keep_their_order(parser):
    """Another order in each process would give other outputs, and other ones on each rank."""
    names = ["delta", "alpha", "omega", "zeta", "beta"]
    parts = [{"properties": {name: {"type": "integer"}}} for name in names]
    schema = {"type": "object", "allOf": parts, "unevaluatedProperties": False}
    text, _ = read_source(llguidance, GrammarSource("json_schema", json.dumps(schema)))
    (closed,) = json.loads(text)["anyOf"]
    assert [*closed["properties"]] == names
    matcher, _ = compiled(parser, schema)
    assert accepts(matcher, parser, json.dumps(dict.fromkeys(names, 1), separators=(",", ":")))


def test_required_properties_exclude_only_if_their_values_do():
    def tagged(value, **more):
        return {"type": "object", "properties": {"a": {"const": value}}, "required": ["a"], **more}

    def resolve(schema):
        return schema

    assert excludes(tagged(1), tagged(2), resolve)
    assert not excludes(tagged(1), tagged(1), resolve)
    assert not excludes(tagged(1), tagged(1, required=[]), resolve)


def test_listed_values_and_ranges_exclude_others_and_an_endless_schema_nothing():
    def resolve(schema):
        return schema

    assert excludes({"const": True}, {"type": ["null", "integer"]}, resolve)
    assert excludes({"const": None}, {"type": ["boolean", "object"]}, resolve)
    assert excludes({"enum": [[1]]}, {"type": "string"}, resolve)
    assert not excludes({"enum": [[1]]}, {"type": "array"}, resolve)
    low, high = {"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 3}
    assert not excludes(low, high, resolve) and excludes(low, {**high, "minimum": 4}, resolve)
    endless = {"allOf": []}
    endless["allOf"].append(endless)
    assert not excludes(endless, {}, resolve)


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"a/b": SET}}, "#/properties/a~1b/uniqueItems"),
        ({"type": "string", "not": {"pattern": "a"}}, "#/not"),
        ({"type": "string", "if": {"pattern": "^a"}, "then": {"minLength": 3}}, "#/if"),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "#/oneOf"),
        ({"type": "array", "contains": {}, "minContains": 2}, "#/contains"),
        ({"type": "object", "propertyNames": {"minLength": 3}}, "#/propertyNames"),
        ({"type": "object", "propertyNames": {"type": "integer"}}, "#/propertyNames"),
        ({"propertyNames": {"minLength": 0, "format": "date"}}, "#/propertyNames"),
        ({"propertyNames": {"not": {"const": "a"}}}, "#/propertyNames"),
        ({"propertyNames": {"$dynamicRef": "#a"}}, "#/propertyNames"),
        ({**FIRST, "minProperties": 2}, "#/minProperties"),
        ({**FIRST, "maxProperties": 3}, "#/maxProperties"),
        ({**FIRST, "dependentRequired": {"a": ["b"]}, "items": SET}, "#/items/uniqueItems"),
        ({**FIRST, "dependentSchemas": {"a": {"items": SET}}}, "#/dependentSchemas"),
        ({"unevaluatedItems": False}, "#/unevaluatedItems"),
        ({"unevaluatedProperties": {"type": "null"}}, "#/unevaluatedProperties"),
        ({"$ref": "http://localhost/none.json"}, "#/$ref"),
        ({"$ref": "#/allOf/-1", "allOf": [{"type": "null"}]}, "#/$ref"),
        ({"$ref": "#/$defs/x", "$defs": {"x": SET, "y": SET}}, "#/$defs/x/uniqueItems"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_or_reported(parser, schema, pointer):
    keyword = pointer.rpartition("/")[2]
    with pytest.raises(ValueError, match=re.escape(keyword)) as refused:
        compiled(parser, schema)
    if keyword != "$ref":
        told = f"(at {pointer}): pass lenient=True, or in the server strict: false or --lenient"
        assert told in str(refused.value)
    matcher, unenforced = compiled(parser, schema, lenient=True)
    assert unenforced == [pointer]
    check_texts(parser, schema, matcher, unenforced, 2 * FUZZ)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"required": 5}, "required must be a list, got 5 (at #/required)"),
        ({"items": {"oneOf": 5}}, "oneOf must be a list, got 5 (at #/items/oneOf)"),
        ({"minProperties": "x"}, 'minProperties must be an integer, got "x"'),
        ({"dependencies": 5}, "dependencies must be an object, got 5"),
        ({"format": ["a"]}, "format must be a string"),
        ({"oneOf": [{"required": 5, "type": 5}, {"properties": 5}]}, "a keyword has a value of a"),
        ({"propertyNames": {"enum": 5}}, "a keyword has a value of a wrong type"),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_type_is_reported(schema, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        SchemaReader(lenient=True).read(json.dumps(schema))


def test_a_schema_that_is_nested_too_deeply_is_refused(parser):
    schema = {"type": "integer"}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ValueError, match="the schema is nested too deeply"):
        compiled(parser, schema)


def test_many_branches_are_not_compared_for_ever(parser):
    names = [f"a{i}" for i in range(60)]
    schema = {"oneOf": [{"type": "object", "required": [name]} for name in names]}
    assert compiled(parser, schema, lenient=True)[1] == ["#/oneOf"]


def test_what_is_too_large_in_other_words_is_left_out_if_lenient(tokenizer, monkeypatch):
    answer, make = answerer(tokenizer.to_str(), [0]), grammar_matcher.new_matcher

    def limited(llguidance, parser, kind, text):
        if "prefixItems" in text:
            raise ValueError("the grammar is too large")
        return make(llguidance, parser, kind, text)

    monkeypatch.setattr(grammar_matcher, "new_matcher", limited)
    schema = json.dumps({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True})
    strict = GrammarSource("json_schema", schema)
    with pytest.raises(ValueError, match="too large"):
        answer([*strict])
    assert answer([*strict._replace(lenient=("",))])[1] == ["#/uniqueItems"]


def test_a_pattern_that_the_parser_cannot_read_is_left_out_if_lenient(parser):
    schema = {"type": "string", "pattern": "^(?!a)b", "maxLength": 3}
    with pytest.raises(ValueError, match="look-around"):
        compiled(parser, schema)
    assert compiled(parser, schema, lenient=True)[1] == ["#/pattern"]


def test_references_by_pointer_anchor_and_address():
    root = {
        "$id": "http://x.test/root.json",
        "$defs": {
            "a": {"$id": "part.json", "$defs": {"i n": {"const": 1}}},
            "b": {"$anchor": "here"},
            "c": {"$id": "#old"},
        },
        "items": [{"const": 2}],
    }
    parts = root["$defs"]

    def target(reference):
        references = SchemaReferences({**root, "not": {"$ref": reference}})
        return references.target(references.schema["not"]["$ref"])

    for reference, part, pointer in (
        ("#/items/0", {"const": 2}, "#/items/0"),
        ("root.json#/items/0", {"const": 2}, "#/items/0"),
        ("#here", parts["b"], "#/$defs/b"),
        ("#old", parts["c"], "#/$defs/c"),
        ("part.json", parts["a"], "#/$defs/a"),
        ("http://x.test/part.json#/$defs/i%20n", {"const": 1}, "#/$defs/a/$defs/i n"),
    ):
        assert target(reference) == (part, pointer)
    assert target("#")[1] == target("root.json")[1] == "#"
    for wrong in ("#/items/9", "#/none", "#none", "other.json", 5):
        assert target(wrong) is None
        assert SchemaReferences(root).resolve({"$ref": wrong}) is True
    assert SchemaReferences({"$ref": "#"}).resolve({"$ref": "#"}) is True


@pytest.mark.parametrize("base", ["http://x.test/root.json", "urn:uuid:1", None])
def test_references_are_relative_to_the_address_of_the_enclosing_part(parser, base):
    """jsonschema, which resolves references itself, decides what fits."""
    inner = {
        "$id": "http://x.test/sub/inner.json",
        "$defs": {"x": {"const": "inner"}, "default": {"const": "named"}},
        "prefixItems": [
            {"$ref": "item.json"},
            {"$ref": "#/$defs/x"},
            {"$ref": "#/$defs/default"},
            {"$ref": "../item.json"},
        ],
        "type": "array",
        "minItems": 4,
        "items": False,
    }
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"default": inner, "r": {"$ref": "#/$defs/x"}},
        "required": ["default", "r"],
        "additionalProperties": False,
        "$defs": {
            "x": {"const": "root"},
            "near": {"$id": "http://x.test/sub/item.json", "const": "near"},
            "far": {"$id": "http://x.test/item.json", "const": "far"},
        },
    }
    schema |= {} if base is None else {"$id": base}
    matcher, unenforced = compiled(parser, schema)
    assert unenforced == [] and check_texts(parser, schema, matcher, unenforced, 3) == 3


def test_the_page_lists_the_keywords_of_the_code():
    page = (ROOT / "docs/guided.md").read_text()
    table = page.partition("## Keywords of JSON schemas")[2].partition("\n## ")[0]
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| `")]
    listed = [(set(re.findall(r"`([^`]+)`", row[1])), row[2].strip()) for row in rows]
    found = {kind: set() for kind in ("yes", "sometimes", "no")}
    for names, kind in listed:
        found[re.split("[:;,]", kind)[0]] |= names
    assert found == {"yes": ENFORCED, "sometimes": SOMETIMES, "no": DROPPED}
    assert all(f"`{name}`" in table for name in FORMATS)


def test_a_reader_keeps_its_order_of_properties():
    schema = {"properties": {"z": True, "a": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"enum": [1]}}}
    read = json.loads(SchemaReader(lenient=False).read(json.dumps(schema)))
    assert list(read["properties"]) == ["z", "a"]
