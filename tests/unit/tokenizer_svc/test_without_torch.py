"""tokenizer_svc neither imports torch nor needs it, whether it is installed or not."""

import subprocess
import sys
from pathlib import Path

from tests.fakes.llava import llava_without_weights

SCRIPT = """
import sys
from PIL import Image
from tokenmesh.services.tokenizer_svc.loading import forbid_torch
assert "torch" not in sys.modules and "transformers" not in sys.modules
forbid_torch()
from tokenmesh.services.tokenizer_svc.loading import load_model
from tokenmesh.services.tokenizer_svc.media.media_model import media_model
from tokenmesh.services.tokenizer_svc.media.processor import ItemProcessor
from tokenmesh.shared.config.model import MediaSettings, ModelSettings
settings = ModelSettings(model=sys.argv[1])
loaded = load_model(settings)
model = media_model(loaded, settings, MediaSettings())
assert loaded.tokenizer.encode("The fox").ids
assert model.placeholders == {"image": "<image>"}
processor = ItemProcessor(loaded.directory)
assert processor.image(Image.new("RGB", (9, 7)), {}).prepared.runs == [25]
assert sys.modules["torch"] is None
"""


def test_text_and_images_are_prepared_without_torch(tmp_path: Path) -> None:
    directory = llava_without_weights(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # Nor does transformers complain about it to the operator.
    assert done.stderr == ""
