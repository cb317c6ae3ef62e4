"""From fields to requests of the contract: grammars, choices, and names of fields in errors."""

from __future__ import annotations

import json
import re

import pytest

from coppice.gateway.errors import ApiError
from coppice.gateway.fields import ChatFields, CompletionFields, parse
from coppice.gateway.translation import CallRequests, chat_requests, completion_requests, renaming
from coppice.v1 import inference_pb2


def completion(**fields: object) -> inference_pb2.GenerateRequest:
    return only(completion_requests(parsed(**fields), "id"))


def only(requests: CallRequests) -> inference_pb2.GenerateRequest:
    [prompt] = requests.prompts
    return inference_pb2.GenerateRequest.FromString(requests.shared + prompt)


def parsed(**fields: object) -> CompletionFields:
    return parse(json.dumps({"model": "m", "prompt": "p", **fields}).encode(), CompletionFields)


def chat(**fields: object) -> ChatFields:
    said = [{"role": "user", "content": "x"}]
    return parse(json.dumps({"model": "m", "messages": said, **fields}).encode(), ChatFields)


SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, SCHEMA),
        ({"guided_json": SCHEMA}, SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
    ],
)
def test_schemas_keep_the_order_of_their_properties(fields: dict[str, object], schema: object) -> None:
    grammar = completion(**fields).sampling.grammar
    assert json.dumps(json.loads(grammar.json_schema)) == json.dumps(schema)
    assert renaming(parsed(**fields))("sampling.grammar.json_schema") in {*fields, "structured_outputs.json"}


def test_a_text_format_is_no_grammar() -> None:
    assert not completion(response_format={"type": "text"}).sampling.HasField("grammar")


@pytest.mark.parametrize("field", ["guided_choice", "structured_outputs"])
def test_choices_are_a_regular_expression_of_their_texts(field: str) -> None:
    texts = ["a.b", "(c|d)*", "x y", "\\", "é[1]{2}^$", "# & - ~", "new\nline"]
    fields = {field: texts if field == "guided_choice" else {"choice": texts}}
    pattern = completion(**fields).sampling.grammar.regex
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert not any(re.fullmatch(pattern, text) for text in ("axb", "c", "cd", "x  y", "é1"))


def test_errors_name_the_field_that_the_request_has() -> None:
    assert renaming(chat(max_completion_tokens=3))("stopping.max_tokens") == "max_completion_tokens"
    assert renaming(chat(max_tokens=3))("stopping.max_tokens") == "max_tokens"
    assert renaming(chat())("response.top_log_probs") == "top_logprobs"
    assert renaming(parsed())("response.top_log_probs") == "logprobs"
    assert renaming(parsed())("speculation.sources") == "speculation.sources"
    assert renaming(parsed())("sampling.top_p") == "top_p"


def test_log_probabilities_are_asked_for_in_the_terms_of_each_api() -> None:
    assert not completion().response.HasField("top_log_probs")
    assert completion(logprobs=0).response.HasField("top_log_probs")
    assert completion(logprobs=3).response.top_log_probs == 3
    assert not only(chat_requests(chat(logprobs=False), "id")).response.HasField("top_log_probs")
    assert only(chat_requests(chat(logprobs=True), "id")).response.HasField("top_log_probs")
    assert only(chat_requests(chat(logprobs=True, top_logprobs=2), "id")).response.top_log_probs == 2


def test_two_grammars_are_refused_by_name() -> None:
    with pytest.raises(ApiError, match="guided_regex: excludes response_format") as caught:
        completion(response_format={"type": "json_object"}, guided_regex="a")
    assert caught.value.param == "guided_regex"


@pytest.mark.parametrize("prompts", [["a", "b", ""], [[1, 300], [2], []]])
def test_the_requests_of_many_prompts_have_one_copy_of_their_other_fields(prompts: list[str] | list[list[int]]) -> None:
    regex, biases = "(a|b)" * 5000, {str(token): 0.5 for token in range(1000)}
    requests = completion_requests(parsed(prompt=prompts, guided_regex=regex, logit_bias=biases), "id")
    assert sum(map(len, requests.prompts)) < 100
    for prompt, own in zip(prompts, requests.prompts, strict=True):
        whole = inference_pb2.GenerateRequest.FromString(requests.shared + own)
        assert whole.sampling.grammar.regex == regex
        assert len(whole.sampling.logit_bias) == 1000
        assert (whole.prompt if isinstance(prompt, str) else list(whole.token_ids.ids)) == prompt
        assert whole.WhichOneof("input") == ("prompt" if isinstance(prompt, str) else "token_ids")
