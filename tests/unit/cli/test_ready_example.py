"""The request that the ready screen shows is one that the model answers."""

from tokenmesh.cli.embedded.run import example_request
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.messages.beat import ModelCard


def card(*, only_transcribes: bool = False) -> ModelCard:
    name = ModelName("m")
    return ModelCard(name=name, max_model_len=8, vocab_size=8, only_transcribes=only_transcribes)


def test_a_model_that_transcribes_is_shown_with_a_recording() -> None:
    path, words = example_request(card(only_transcribes=True), "a model")
    assert path == "/v1/audio/transcriptions"
    assert words == "-F model='a model' -F file=@speech.wav"


def test_other_models_are_shown_with_a_body() -> None:
    assert example_request(None, "m")[0] == "/v1/chat/completions"
    assert example_request(card(), "m")[0] == "/v1/chat/completions"
    path, words = example_request(
        ModelCard(
            name=ModelName("m"), max_model_len=8, vocab_size=8, generates=False, tasks=["embed"]
        ),
        "m",
    )
    assert path == "/v1/embeddings"
    assert '"model": "m"' in words
