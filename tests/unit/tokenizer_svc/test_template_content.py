"""Content reaches each template in the form that it expects, and no text is lost."""

import pytest

from tests.fakes import chat_templates
from tokenmesh.services.tokenizer_svc.render_child import render_job
from tokenmesh.services.tokenizer_svc.render_job import JsonObject, Rendered, RenderJob
from tokenmesh.services.tokenizer_svc.template import compile_template

SHAPES = {
    "prints content": ("{% for m in messages %}{{ m.content }}{% endfor %}", False, False, False),
    "loops over content": (
        "{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}",
        True,
        False,
        False,
    ),
    "asks for a string": (chat_templates.PARTS, True, True, False),
    "filters parts": (chat_templates.PARTS_ONLY, True, False, False),
    "follows aliases": (
        "{% set rest = messages[1:] %}{% for m in rest %}{% set c = m.content %}"
        "{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}",
        True,
        False,
        False,
    ),
    "first message": (
        "{% set first = messages[0] %}{% for p in first.content %}{{ p.text }}{% endfor %}",
        True,
        False,
        False,
    ),
    "namespace": (
        "{% set ns = namespace(c='') %}{% for m in messages %}{% set ns.c = m.content %}"
        "{% for p in ns.c %}{{ p.text }}{% endfor %}{% endfor %}",
        True,
        False,
        False,
    ),
    "asks for none": (
        "{% for m in messages %}{% if m['content'] is none %}-{% endif %}{% endfor %}",
        False,
        False,
        True,
    ),
    "compares with none": (
        "{% for m in messages %}{% if m.content != None %}-{% endif %}{% endfor %}",
        False,
        False,
        True,
    ),
    "loops over something else": (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}",
        False,
        False,
        False,
    ),
    "takes other fields from content": (
        "{% for m in messages %}{% if m.tool_calls is defined %}{% set calls = m.tool_calls %}"
        "{% else %}{% set calls = m.content %}{% endif %}"
        "{% for c in calls %}{{ c }}{% endfor %}{{ 'x' + m.content }}{% endfor %}",
        False,
        False,
        False,
    ),
    "chatml": (chat_templates.CHATML, False, False, False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_of_a_template_is_read_from_its_text(name: str) -> None:
    template, wants_parts, tests_string, tests_none = SHAPES[name]
    shape = compile_template(template).shape_of("other")
    assert (shape.wants_parts, shape.tests_string, shape.tests_none) == (
        wants_parts,
        tests_string,
        tests_none,
    )


def render(template: str, content: object, placeholder: str = "", role: str = "user") -> str:
    message: JsonObject = {"role": role, "content": content}
    answer = render_job(
        RenderJob(
            template=template,
            messages=[message],
            add_generation_prompt=False,
            placeholders={"image": placeholder} if placeholder else {},
            max_chars=1000,
        )
    )
    assert isinstance(answer, Rendered), answer
    return answer.text


PARTS: list[JsonObject] = [
    {"type": "text", "text": "look"},
    {"type": "image"},
    {"type": "text", "text": "here"},
]


def test_parts_are_joined_by_lines_for_a_template_that_prints_content() -> None:
    template = SHAPES["prints content"][0]
    assert render(template, PARTS) == "look\nhere"


def test_images_without_a_place_in_the_text_stand_before_it() -> None:
    template = SHAPES["prints content"][0]
    assert render(template, PARTS, "<image>") == "<image>\nlook\nhere"
    own = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "a <image> b"}]
    assert render(template, own, "<image>") == "<image>\na <image> b"


def test_parts_stay_parts_for_a_template_that_loops_over_them() -> None:
    assert render(chat_templates.PARTS, PARTS) == "<|user|>look<image>here<|end|>\n"


def test_a_string_becomes_one_part_for_a_template_that_knows_only_parts() -> None:
    assert render(chat_templates.PARTS_ONLY, "hello") == "USER: hello "


def test_a_string_stays_a_string_where_the_template_asks_for_it() -> None:
    assert render(chat_templates.PARTS, "hello") == "<|user|>hello<|end|>\n"


@pytest.mark.parametrize(
    ("name", "text"), [("prints content", ""), ("filters parts", "USER: "), ("asks for none", "-")]
)
def test_null_content_never_prints_none(name: str, text: str) -> None:
    assert render(SHAPES[name][0], None) == text


TEXTS: list[JsonObject] = [{"type": "text", "text": "18"}, {"type": "text", "text": "degrees"}]
OF_EACH_ROLE = {
    "asks everyone for a string": (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'image' %}<image>{% endif %}{% endfor %}"
        "{% endif %}{% endfor %}"
    ),
    "reads the first part of others": (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
        "{% elif m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% else %}{{ m.content[0].text }}{% endif %}{% endfor %}"
    ),
    "loops over the user's": (
        "{% for m in messages %}{% if m['role'] == 'user' %}"
        "{% for p in m['content'] %}{{ p.text }}{% endfor %}"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    ),
    "loops in a macro for the user": (
        "{% macro read(content) %}{% for p in content %}{{ p.text }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{% if m.role in ['system', 'developer', 'assistant', 'tool'] %}"
        "{{ m.content }}{% else %}{{ read(m.content) }}{% endif %}{% endfor %}"
    ),
    "loops for all but some": (
        "{% for m in messages %}{% if not (m.role == 'user' or m.role == 'function') %}"
        "{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
        "{% endfor %}"
    ),
    "prints content": SHAPES["prints content"][0],
}


@pytest.mark.parametrize("role", ["system", "developer", "assistant", "tool"])
@pytest.mark.parametrize("name", OF_EACH_ROLE)
def test_parts_of_text_are_one_string_for_all_but_the_user(name: str, role: str) -> None:
    template = OF_EACH_ROLE[name]
    assert render(template, TEXTS, role=role) == "18\ndegrees"
    assert render(template, "18 degrees", role=role) == "18 degrees"


def test_parts_of_text_stay_parts_where_the_role_is_read_in_parts() -> None:
    assert render(chat_templates.PARTS_ONLY, TEXTS, role="tool") == "TOOL: 18 degrees "
    loops = OF_EACH_ROLE["loops over the user's"]
    assert render(loops, TEXTS, role="user") == "18degrees"


def test_a_tools_image_stays_a_part() -> None:
    template = OF_EACH_ROLE["asks everyone for a string"]
    assert render(template, PARTS, role="tool") == "<image>"
