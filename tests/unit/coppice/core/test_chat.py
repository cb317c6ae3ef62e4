"""Chat templates: what they make of a conversation is what `transformers` makes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from coppice.core.chat import MAX_ROLE_BYTES, CallFormat, ChatMessage, ChatTemplate, Reasoning, ToolCall
from coppice.core.errors import InvalidRequestError, UnsupportedError

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "special tokens": "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content | trim }}"
    "{{ eos_token }}{% endfor %}",
    "loop controls": "{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}"
    "{{ message.content }}\n{% endfor %}",
    "blocks on lines of their own": "{% for message in messages %}\n  {% if loop.last %}\nlast: {{ message.content }}\n"
    "  {% endif %}\n{% endfor %}\n",
    "generation": "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "undefined": "{% if tools %}tools{% endif %}{% if documents is defined and documents %}d{% endif %}x",
}
CONVERSATIONS = {
    "question": [("user", "What is 2 + 2?")],
    "several": [
        ("system", "Be short."),
        ("user", " <b>one</b> & 'two' "),
        ("assistant", "três\n"),
        ("user", "\u4f60\u597d {{ 1 }}"),
    ],
}


def ours(source: str, messages: list[tuple[str, str]]) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render([ChatMessage(role, content) for role, content in messages])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_prompts_are_those_of_transformers(name: str, messages: list[tuple[str, str]]) -> None:
    oracle: Any = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, unk_token="a")),
        bos_token="<s>",
        eos_token="</s>",
    )
    expected = oracle.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert ours(TEMPLATES[name], messages) == expected


def test_what_a_template_refuses_is_the_clients_mistake() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}ok"
    assert ours(source, [("user", "x")]) == "ok"
    with pytest.raises(InvalidRequestError, match=r"messages.*roles must alternate"):
        ours(source, [("assistant", "x")])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ 1 / 0 }}",
        "{{ none.x.y }}",
        "{{ '\\ud800' }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for message in messages %}{% endfor %}",
    ],
)
def test_templates_cannot_leave_their_sandbox_nor_fail_unseen(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        ours(source, [("user", "x")])


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("", "no chat template"),
        ("{% if %}", "cannot be used"),
        # No Python, a number too long for it, and deeper than its stack.
        ("{% break %}", "cannot be used"),
        ("{{ " + "9" * 5_000 + " }}", "cannot be used"),
        ("{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}", "cannot be used"),
    ],
)
def test_without_a_template_that_can_be_used_there_is_no_chat(source: str, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        ours(source, [("user", "x")])


def test_a_template_that_cannot_be_used_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    from_string = ImmutableSandboxedEnvironment.from_string

    def counted(self: ImmutableSandboxedEnvironment, source: str) -> object:
        compiled.append(source)
        return from_string(self, source)

    monkeypatch.setattr(ImmutableSandboxedEnvironment, "from_string", counted)
    template = ChatTemplate("{% if %}")
    for _ in range(3):
        with pytest.raises(UnsupportedError, match="cannot be used"):
            template.render([ChatMessage("user", "x")])
    assert compiled == ["{% if %}"]


@pytest.mark.parametrize("role", ["", "r" * (MAX_ROLE_BYTES + 1)])
def test_roles_have_a_length(role: str) -> None:
    with pytest.raises(InvalidRequestError, match="role"):
        ChatMessage(role, "x")


TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b> & é", "parameters": {"type": "object"}}}]
TOOL_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{% if message.tool_calls %}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endif %}"
    "{% if message.role == 'tool' %}{{ message.name }} {{ message.tool_call_id }}{% endif %}\n{% endfor %}"
)


def test_tools_and_their_calls_are_those_of_transformers() -> None:
    oracle: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    function = {"name": "f", "arguments": {"x": "é"}}
    said = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "1", "function": function}]},
        {"role": "tool", "content": "done", "name": "f", "tool_call_id": "1"},
    ]
    expected = oracle.apply_chat_template(
        said, tools=TOOLS, chat_template=TOOL_TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    ours = [
        ChatMessage("user", "go"),
        ChatMessage("assistant", "", (ToolCall("1", "f", '{"x": "é"}'),)),
        ChatMessage("tool", "done", tool_call_id="1", name="f"),
    ]
    assert ChatTemplate(TOOL_TEMPLATE).render(ours, [json.dumps(tool) for tool in TOOLS]) == expected


def test_a_template_without_a_place_for_tools_refuses_them() -> None:
    with pytest.raises(UnsupportedError, match="no place for tools"):
        ChatTemplate(CHATML).render([ChatMessage("user", "x")], [json.dumps(TOOLS[0])])


@pytest.mark.parametrize(
    ("id_", "name", "arguments"), [("1", "", "{}"), ("1", "f", "x"), ("1", "f", "[1]"), ("i" * 129, "f", "{}")]
)
def test_a_call_that_is_none_is_refused(id_: str, name: str, arguments: str) -> None:
    with pytest.raises(InvalidRequestError):
        ToolCall(id_, name, arguments)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", None),
        (CHATML, CallFormat.HERMES),
        ("<tool_call> [TOOL_CALLS]", CallFormat.HERMES),
        ("{{ '[TOOL_CALLS] [' }}{{ '\"parameters\": ' }}", CallFormat.MISTRAL),
        ("{{- '<|python_tag|>' }}", CallFormat.LLAMA3),
        ('{{- \'{"name": function name, "parameters": dictionary of its values}\' }}', CallFormat.LLAMA3),
    ],
)
def test_the_template_says_how_calls_are_written(source: str, expected: CallFormat | None) -> None:
    assert ChatTemplate(source).call_format is expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", None),
        (CHATML, None),
        (CHATML + "{# </think> #}", Reasoning.TAGS),
        (CHATML + "{{ '<think>\\n' }}", Reasoning.OPEN),
        (CHATML + "{{ '<think>\\n\\n</think>\\n' }}", Reasoning.TAGS),
        ("{{ raise_exception('<think>') }}", Reasoning.TAGS),
        ("{% <think>", Reasoning.TAGS),
    ],
)
def test_the_template_says_where_answers_have_reasoning(source: str, expected: Reasoning | None) -> None:
    assert ChatTemplate(source).reasoning is expected
