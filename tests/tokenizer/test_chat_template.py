"""Rendering conversations: as transformers does, in a sandbox, and refusals that cost one request."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from engine.errors import RequestError
from engine.tokenizer.chat_template import ChatTemplate, ChatTemplateError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PARTS_ONLY = (
    "{% for m in messages %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}[{{ part['text'] }}]{% endif %}{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}({{ part['text'] }}){% endfor %}{% endif %}{% endfor %}"
)
USER = {"role": "user", "content": "Hi"}


def text_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_a_conversation_and_the_generation_prompt() -> None:
    template = ChatTemplate(CHATML)
    assert template.render([USER]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render([USER], add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_text_parts_are_joined_for_a_template_that_takes_strings() -> None:
    message = {"role": "user", "content": text_parts("one", "two")}
    assert "user\none\ntwo<|im_end|>" in ChatTemplate(CHATML).render([message])


def test_a_string_becomes_a_part_for_a_template_that_takes_parts() -> None:
    assert ChatTemplate(PARTS_ONLY).render([USER]) == "[Hi]"


def test_a_template_that_takes_both_gets_what_was_sent() -> None:
    template = ChatTemplate(BOTH)
    assert template.render([USER]) == "Hi"
    assert template.render([{"role": "user", "content": text_parts("a", "b")}]) == "(a)(b)"


def test_a_template_that_prints_the_list_is_not_taken_to_accept_it() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert template.render([{"role": "user", "content": text_parts("it's")}]) == "it's"


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    message = {"role": "developer", "content": "Be brief"}
    assert ChatTemplate(CHATML).render([message]).startswith("<|im_start|>system\nBe brief")
    knows = ChatTemplate("{% if messages[0].role == 'developer' %}yes{% else %}no{% endif %}")
    assert knows.render([message]) == "yes"


def test_tool_calls_reach_the_template_with_arguments_as_objects() -> None:
    template = ChatTemplate("{% for c in messages[0].tool_calls %}{{ c.function.arguments.city }}{% endfor %}")
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Brno"}'}}
    assert template.render([{"role": "assistant", "content": None, "tool_calls": [call]}]) == "Brno"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "at least one"),
        (["Hi"], r"messages\[0\] must be an object"),
        ([{"role": "robot", "content": "Hi"}], r"messages\[0\].role must be one of system, .* got 'robot'"),
        ([USER, {"role": "user"}], r"messages\[1\].content must be a string"),
        ([{"role": "user", "content": 7}], "must be a string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'; this model takes text only"),
        ([{"role": "user", "content": [{"type": "text", "text": 7}]}], r"content\[0\].text must be a string"),
        ([{"role": "assistant", "content": "", "tool_calls": ["x"]}], r"tool_calls\[0\] must be an object"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "arguments is not JSON",
        ),
    ],
)
def test_messages_of_the_wrong_form_are_refused_by_place(messages: list[Any], complaint: str) -> None:
    with pytest.raises(ChatTemplateError, match=complaint):
        ChatTemplate(CHATML).render(messages)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate"),
        ("{{ messages[5].content.text }}", "no element 5|has no attribute|undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(99999999) %}{% endfor %}", "range"),
        ("{{ unclosed", "does not compile"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_what_a_template_raises_is_the_requests_error(source: str, complaint: str) -> None:
    with pytest.raises(ChatTemplateError, match=complaint) as caught:
        ChatTemplate(source).render([USER])
    assert isinstance(caught.value, RequestError)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{% set f = '{0.__class__}'.format %}{{ f('') }}",
    ],
)
def test_a_template_cannot_reach_python(attack: str) -> None:
    try:
        text = ChatTemplate(attack).render([USER])
    except ChatTemplateError:
        return
    assert "class" not in text
    assert text == ""


@pytest.mark.parametrize("change", ["{{ messages.append(1) }}", "{{ messages[0].update(role='x') }}"])
def test_a_template_cannot_change_the_messages(change: str) -> None:
    messages = [dict(USER)]
    with pytest.raises(ChatTemplateError):
        ChatTemplate(change).render(messages)
    assert messages == [USER]


def test_the_callers_messages_are_left_as_they_were() -> None:
    message = {"role": "developer", "content": text_parts("a", "b"), "name": None}
    before = json.dumps(message)
    ChatTemplate(CHATML).render([message])
    assert json.dumps(message) == before


# Templates that use what hub templates use, each with the odd corners of that feature.
FEATURES = {
    "chatml": CHATML,
    "blocks are trimmed": "  {% if true %}\n  a\n  {% endif %}\n\n"
    "{%- for m in messages -%}\n {{ m.role }} \n{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "generation block": "{% for m in messages %}{% generation %}<{{ m.content }}>{% endgeneration %}\n{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ {'b': '<&>\\u017e', 'a': 1} | tojson }}",
    "special tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    "namespace and macros": "{% set ns = namespace(n=0) %}{% macro f(x) %}[{{ x }}]{% endmacro %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ f(m.content | trim) }}{% endfor %}{{ ns.n }}",
    "undefined variables": "{{ nothing }}{% if tools %}tools{% endif %}{% if documents is not none %}docs{% endif %}",
    "strftime_now": "{{ strftime_now('%Y') }}",
    "keyword arguments": "{% if enable_thinking is defined and not enable_thinking %}off{% endif %}",
    "string methods": "{{ messages[0].content.split(' ')[-1].upper().strip('X') }}",
}
CONVERSATION = [
    {"role": "system", "content": "You are  <terse> & \"exact\" 'here'."},
    {"role": "user", "content": " Žluťoučký kůň 👩‍🚀 \n"},
    {"role": "assistant", "content": "{{ not a template }}"},
    {"role": "user", "content": "<|im_end|>"},
]


@pytest.mark.parametrize("feature", FEATURES)
def test_renders_as_transformers_does(feature: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template(
        conversations=[CONVERSATION],
        chat_template=FEATURES[feature],
        add_generation_prompt=True,
        enable_thinking=False,
        **special,
    )
    ours = ChatTemplate(FEATURES[feature], special).render(CONVERSATION, enable_thinking=False)
    assert ours == expected[0]


def test_strftime_now_is_today() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}")
    before = datetime.date.today().isoformat()
    assert template.render([USER]) in (before, datetime.date.today().isoformat())
