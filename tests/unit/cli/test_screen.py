"""The screen of `up` on a terminal and in a file."""

import io
import json

import pytest
from rich.console import Console

from tokenmesh.cli.embedded.plan import warn_if_open
from tokenmesh.cli.embedded.screen import Screen, parse_line
from tokenmesh.cli.embedded.supervisor import Death
from tokenmesh.shared.config.gateway import GatewaySettings


def log_line(level: str, message: str, **more: str) -> str:
    return json.dumps({"level": level, "message": message, **more})


class Shown:
    """A screen and the text on it."""

    def __init__(self, *, is_terminal: bool = False, is_verbose: bool = False) -> None:
        self.file = io.StringIO()
        console = Console(
            file=self.file,
            width=100,
            force_terminal=is_terminal,
            color_system=None,
            highlight=False,
        )
        self.screen = Screen(console, is_verbose=is_verbose)

    @property
    def text(self) -> str:
        return self.file.getvalue()


def test_a_service_is_reported_once_when_all_its_processes_beat() -> None:
    shown = Shown()
    shown.screen.begin({"worker": 2, "gateway": 1})
    for count in (0, 1, 2, 2):
        shown.screen.progress({"worker": count, "gateway": 0})
    assert shown.text.count("worker is up after") == 1
    assert "gateway is up" not in shown.text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_ready_screen_has_url_and_curl_in_one_piece(is_terminal: bool) -> None:
    shown = Shown(is_terminal=is_terminal)
    shown.screen.begin({"worker": 1})
    shown.screen.progress({"worker": 1})
    curl = f"curl {'x' * 200}"
    shown.screen.ready({"API": "http://127.0.0.1:8000/v1"}, curl)
    assert "TokenMesh is ready" in shown.text
    assert "http://127.0.0.1:8000/v1" in shown.text
    assert curl in shown.text


def test_a_terminal_shows_what_the_services_do_while_they_start() -> None:
    shown = Shown(is_terminal=True)
    shown.screen.begin({"worker": 1})
    shown.screen.line("worker", log_line("info", "loading weights"))
    shown.screen.end_progress()
    assert "loading weights" in shown.text


def test_a_bar_shows_how_far_a_service_has_come() -> None:
    shown = Shown(is_terminal=True)
    shown.screen.begin({"worker": 1, "gateway": 1})
    line = json.dumps({"level": "info", "message": "weights 50 %: 1 GiB", "progress": 0.5})
    shown.screen.line("worker", line)
    shown.screen.end_progress()
    last = shown.text[shown.text.rindex("worker") :].splitlines()[0]
    assert "━" * 12 in last.replace("╸", "━").replace("╺", "━")
    assert "weights 50 %: 1 GiB" in last


@pytest.mark.parametrize(
    ("progress", "expected"), [(0.25, 0.25), (1, 1.0), (7, 1.0), (-1, 0.0), ("x", None)]
)
def test_a_share_that_no_service_would_log_does_no_harm(
    progress: object, expected: float | None
) -> None:
    line = json.dumps({"level": "info", "message": "m", "progress": progress})
    assert parse_line(line).progress == expected


def test_warnings_are_shown_and_the_rest_only_to_those_who_ask() -> None:
    quiet, verbose = Shown(), Shown(is_verbose=True)
    for shown in (quiet, verbose):
        shown.screen.line("worker 2", log_line("info", "fine"))
        shown.screen.line("worker 2", log_line("error", "not fine", exception="ValueError: x"))
    assert quiet.text == "worker 2: not fine\nValueError: x\n"
    assert verbose.text.startswith("worker 2: fine\n")


def test_a_death_is_explained_once() -> None:
    shown = Shown()
    complaint = log_line("critical", "no such model")
    shown.screen.line("worker", complaint)
    shown.screen.dead(Death("worker", 2, (complaint,)))
    assert shown.text == "worker cannot run (exit code 2):\nno such model\n"


def test_a_restart_says_why() -> None:
    shown = Shown()
    shown.screen.restarting(Death("worker", 1, ("Traceback", "ValueError: x")), 0.25)
    assert shown.text == "worker died (exit code 1), starting it again in 0.25 s: ValueError: x\n"


def test_a_child_that_dies_on_and_on_is_mentioned_ever_more_rarely() -> None:
    shown = Shown()
    for number in range(1, 101):
        shown.screen.restarting(Death("worker", 1, ("why",), number), 10.0)
    shown.screen.recovered("worker", 100)
    assert len(shown.text.splitlines()) == 9
    assert "worker died, 64 times in a row (exit code 1), starting it again in 10 s" in shown.text
    assert shown.text.endswith("worker runs again after it died 100 times\n")


def test_text_in_brackets_is_not_taken_for_markup() -> None:
    shown = Shown()
    shown.screen.warn("set [red] in [bus]")
    assert shown.text == "set [red] in [bus]\n"


@pytest.mark.parametrize(
    ("host", "keys", "is_warned"),
    [
        ("127.0.0.1", (), False),
        ("localhost", (), False),
        ("0.0.0.0", (), True),
        ("0.0.0.0", ("0" * 64,), False),
    ],
)
def test_an_open_mesh_is_warned_about(host: str, keys: tuple[str, ...], is_warned: bool) -> None:
    shown = Shown()
    warn_if_open(GatewaySettings(host=host, api_key_hashes=keys), shown.screen)
    assert ("set --api-key" in shown.text) == is_warned
    assert "sleep" not in shown.text
    warn_if_open(GatewaySettings(host=host, api_key_hashes=keys, admin_routes=True), shown.screen)
    assert ("put it to sleep" in shown.text) == is_warned
