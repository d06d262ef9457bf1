"""Templates that loop, grow or pry are stopped, and the next request is served."""

import asyncio
import encodings.aliases
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import tokenmesh
from tokenmesh.services.tokenizer_svc.chat import Renderer
from tokenmesh.services.tokenizer_svc.render_child import render_job
from tokenmesh.services.tokenizer_svc.render_job import (
    RenderAnswer,
    Rendered,
    RenderFailed,
    RenderJob,
)
from tokenmesh.services.tokenizer_svc.template import compile_template
from tokenmesh.shared.config.model import TokenizerSettings
from tokenmesh.shared.errors import Overloaded

LIMITS = TokenizerSettings(
    render_time_limit_s=0.4, render_memory_bytes=256 * 1024 * 1024, render_queue=3
)


def job(template: str) -> RenderJob:
    return RenderJob(
        template=template, messages=[{"role": "user", "content": "hi"}], max_chars=10_000
    )


@pytest.fixture
async def renderer() -> AsyncIterator[Renderer]:
    renderer = Renderer(LIMITS, 1)
    yield renderer
    await renderer.stop()


async def ask_twice(renderer: Renderer, template: str) -> RenderAnswer:
    """The answer to a hostile template, once a sound one was served after it."""
    answer = await renderer.render(job(template))
    assert await renderer.render(job("{{ messages[0].content }}")) == Rendered("hi")
    return answer


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        pytest.param(
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "too_long",
            id="loops for ever",
        ),
        pytest.param("{{ 99999999 ** 99999999 }}", "too_long", id="one endless operation"),
        pytest.param("{{ range(1000000000) }}", "error", id="huge range"),
        pytest.param("{% for i in range(9999) %}xxxx{% endfor %}", "too_long", id="long text"),
        pytest.param("{{ 'x' * 1000000000 }}", "memory", id="huge string"),
        pytest.param("{{ 'x'|center(1000000000) }}", "memory", id="huge padding"),
        pytest.param(
            "{% set ns = namespace(s='x') %}"
            "{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
            "memory or too_long",
            id="doubling string",
        ),
        pytest.param(
            "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "error", id="recursion"
        ),
    ],
)
async def test_a_template_without_bounds_is_stopped(
    renderer: Renderer, template: str, kind: str
) -> None:
    answer = await ask_twice(renderer, template)
    assert isinstance(answer, RenderFailed)
    assert answer.kind in kind.split(" or ")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ dict.__init__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format('') }}",
        "{% set ns = namespace(__init__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.environ }}",
        "{{ strftime_now.__code__ }}",
    ],
)
def test_a_template_that_pries_learns_nothing(template: str) -> None:
    answer = render_job(job(template))
    if isinstance(answer, Rendered):
        # Jinja gives an undefined value for an attribute that is unsafe to read.
        assert answer.text == ""
    else:
        assert answer.kind == "error"


async def test_a_cancelled_rendering_leaves_no_answer_for_the_next(
    renderer: Renderer,
) -> None:
    await renderer.render(job("warm"))
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await renderer.render(job(endless))
    assert await renderer.render(job("next")) == Rendered("next")


async def test_renderings_share_the_process_and_each_gets_its_own_answer(
    renderer: Renderer,
) -> None:
    answers = await asyncio.gather(*(renderer.render(job(f"t{n}")) for n in range(4)))
    assert answers == [Rendered(f"t{n}") for n in range(4)]


async def test_more_waiting_renderings_than_the_bound_are_refused(renderer: Renderer) -> None:
    results = await asyncio.gather(
        *(renderer.render(job("x")) for _ in range(6)), return_exceptions=True
    )
    assert [type(result) for result in results] == [Rendered] * 4 + [Overloaded] * 2


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 'a b'|wordwrap(1) }}", "a\nb"),
        ("{{ [1]|pprint }}", "[1]"),
        ("{{ '%d'|format(3) }}{{ strftime_now('%Y')|length }}", "34"),
        ("{{ 'h\u00e9'.encode('utf-16')|length }}{{ messages|tojson|length > 9 }}", "6True"),
        ("{{ '<b>x &amp; y</b>'|striptags }}", "x & y"),
        ("{% set caf\u00e9 = 1 %}{{ caf\u00e9 }}", "1"),
        (r"{{ '\N{BULLET}' }}", "\u2022"),
        ("{{ 'caf\u00e9.fr'.encode('idna')|length }}{{ 'a'.encode('utf-7')|length }}", "141"),
    ],
)
async def test_a_process_that_can_open_nothing_renders_all_the_same(
    renderer: Renderer, template: str, text: str
) -> None:
    assert await renderer.render(job(template)) == Rendered(text)
    assert isinstance(await renderer.render(job("{{ 1 / 0 }}")), RenderFailed)


async def test_nothing_that_a_template_may_use_needs_a_file(renderer: Renderer) -> None:
    """Every filter, test and method of a text either works as elsewhere or fails as elsewhere."""
    environment = compile_template("").program.environment
    values = ("'a <b>&amp;</b> \u00e9'", "[3, 1]", "messages", "7")
    expressions = [
        *(f"{value}|{name}" for value in values for name in environment.filters),
        *(f"{value} is {name}" for value in values for name in environment.tests),
        *(f"'a \u00e9'.{name}()" for name in dir(str) if not name.startswith("_")),
        *(f"'a'.encode('{name}')" for name in sorted({*encodings.aliases.aliases.values()})),
    ]
    never_alike = ("|random", " object")
    for row in expressions:
        template = f"{{{{ {row} }}}}"
        found, expected = await renderer.render(job(template)), render_job(job(template))
        assert "Too many open files" not in str(found), row
        if "encode(" not in row and not any(each in f"{row}{expected}" for each in never_alike):
            assert found == expected, row


@pytest.mark.parametrize(
    "template",
    [r"{{ '\ud800' }}", r"{{ raise_exception('\udfff') }}", r"{% set x = {}['\ud800'].y %}"],
)
async def test_half_of_a_surrogate_pair_does_not_end_the_process(
    renderer: Renderer, template: str
) -> None:
    await renderer.render(job("x"))
    child = renderer.processes[0].pid
    assert isinstance(await ask_twice(renderer, template), RenderFailed)
    assert renderer.processes[0].pid == child


async def test_a_rendering_process_has_no_secret_and_opens_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOKENMESH_BUS__PASSWORD", "hidden")
    monkeypatch.setenv("HF_TOKEN", "hidden")
    renderer = Renderer(LIMITS, 1)
    await renderer.render(job("x"))
    folder = Path(f"/proc/{renderer.processes[0].pid}")
    assert "hidden" not in (folder / "environ").read_text()
    limits = (folder / "limits").read_text().splitlines()
    for name in ("Max open files", "Max processes", "Max file size"):
        (line,) = [each for each in limits if each.startswith(name)]
        assert line.split()[-3:-1] == ["0", "0"], line
    await renderer.stop()


async def test_nothing_is_imported_from_the_folder_that_one_stands_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit(1)")
    monkeypatch.setenv("PYTHONPATH", str(Path(tokenmesh.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    renderer = Renderer(LIMITS, 1)
    assert await renderer.render(job("x")) == Rendered("x")
    await renderer.stop()


async def test_stopping_ends_the_processes() -> None:
    renderer = Renderer(LIMITS, 2)
    await asyncio.gather(*(renderer.render(job("x")) for _ in range(2)))
    children = list(renderer.processes)
    assert len(children) == 2
    await renderer.stop()
    assert all(child.returncode is not None for child in children)
    assert renderer.processes == ()
