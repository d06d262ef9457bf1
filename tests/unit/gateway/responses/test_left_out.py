"""Fields that responses leave out with a warning, or refuse by the name of their replacement."""

import pytest

from tokenmesh.services.gateway.apis.openai.tools import read_tools
from tokenmesh.services.gateway.apis.responses.request import ResponsesRequest
from tokenmesh.services.gateway.apis.responses.translation import translate
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput


def test_tools_and_hints_that_are_not_served_are_left_out_with_a_warning() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    hosted = ["tool_search", "web_search", "web_search_preview_2025_03_11", "local_shell"]
    body = ResponsesRequest.model_validate(
        {
            "input": "Hi",
            "tools": [
                *({"type": kind, "name": "x"} for kind in hosted),
                {"type": "custom", "name": "patch", "format": grammar},
            ],
            "text": {"verbosity": "low"},
            "service_tier": "flex",
        }
    )
    translation = translate(body)
    assert translation.chat.tools is not None
    (tool,) = translation.chat.tools
    assert "start: /a+/" in tool["function"]["description"]
    assert tool["function"]["strict"]
    assert tool["function"]["parameters"]["properties"]["input"]["lark"] == "start: /a+/"
    (shown,) = read_tools(translation.chat, GatewaySettings()).shown
    assert "lark" not in str(shown["function"]["parameters"])
    assert translation.chat.service_tier == "default"
    text = "; ".join(translation.warnings)
    for name in (*hosted, "text.verbosity", "service_tier"):
        assert name in text


FORMER = ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "ebnf", "n_predict"]


@pytest.mark.parametrize("name", FORMER)
def test_former_fields_of_other_servers_are_refused_by_name(name: str) -> None:
    for fields in ({name: "x"}, {"extra_body": {name: "x"}}):
        with pytest.raises(InvalidInput) as caught:
            translate(ResponsesRequest.model_validate({"input": "Hi", **fields}))
        assert caught.value.param == name
        assert "use " in caught.value.message
    translate(ResponsesRequest.model_validate({"input": "Hi", name: None}))


def test_known_fields_in_an_extra_body_are_not_lost_silently() -> None:
    given = {"input": "Hi", "extra_body": {"structured_outputs": {"regex": "a"}}}
    with pytest.raises(InvalidInput) as caught:
        translate(ResponsesRequest.model_validate(given))
    assert caught.value.param == "extra_body.structured_outputs"
