"""A tiny ColQwen2: late interaction between texts and images."""

import json
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from tests.fakes.media_models import without_weights
from tests.fakes.models import randomized
from tests.fakes.tokenizers import write_json

SIZE: Final = 24
VISUAL: Final = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe.<|im_end|><|endoftext|>"
)


def colqwen2(directory: Path) -> Path:
    """The checkpoint as transformers saves one, in float32."""
    without_weights(directory, "qwen2_vl")
    inner = json.loads((directory / "config.json").read_text())
    config = {
        "architectures": ["ColQwen2ForRetrieval"],
        "model_type": "colqwen2",
        "embedding_dim": SIZE,
        "vlm_config": inner,
    }
    write_json(directory / "config.json", config)
    options = {"processor_class": "ColQwen2Processor", "visual_prompt_prefix": VISUAL}
    write_json(directory / "processor_config.json", options)
    torch.manual_seed(0)
    made = transformers.ColQwen2ForRetrieval(transformers.AutoConfig.from_pretrained(directory))
    randomized(made).save_pretrained(directory)
    write_json(directory / "config.json", config)
    return directory


class Oracle:
    """transformers' own processor and model of the checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = transformers.ColQwen2ForRetrieval.from_pretrained(
            directory, dtype=torch.float32
        ).eval()
        self.processor = transformers.ColQwen2Processor(
            transformers.Qwen2VLImageProcessorPil.from_pretrained(directory),
            transformers.AutoTokenizer.from_pretrained(directory),
            visual_prompt_prefix=VISUAL,
        )

    def inputs(self, given: Any) -> Any:
        """Run the processor on a text or an image."""
        named = {"text": [given]} if isinstance(given, str) else {"images": [given]}
        return self.processor(**named)

    @torch.inference_mode()
    def embeddings(self, given: Any) -> torch.Tensor:
        """[tokens, SIZE] of a text or an image.

        The positions are those of Qwen2-VL, as the checkpoints were trained; transformers 5 counts
        the tokens of an image one by one unless it is given them.
        """
        inputs = dict(self.inputs(given))
        if not isinstance(given, str):
            ids = inputs["input_ids"]
            is_image = (ids == self.model.config.vlm_config.image_token_id).int()
            positions, _ = self.model.vlm.get_rope_index(
                ids, mm_token_type_ids=is_image, image_grid_thw=inputs["image_grid_thw"]
            )
            inputs["position_ids"] = positions
        inputs.pop("mm_token_type_ids", None)
        found: torch.Tensor = self.model(**inputs).embeddings[0]
        return found

    def score(self, query: Any, document: Any) -> float:
        """By the processor's own late interaction."""
        queries, documents = [self.embeddings(query)], [self.embeddings(document)]
        return float(self.processor.score_retrieval(queries, documents)[0, 0])
