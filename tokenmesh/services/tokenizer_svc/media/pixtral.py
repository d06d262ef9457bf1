"""Pixtral's processor, whose class in transformers imports torch: rows of tokens of an image."""

from typing import Any

from transformers.processing_utils import ProcessorMixin


class RowsProcessor(ProcessorMixin):  # type: ignore[misc]
    """An image is rows of tokens, with a token between two rows and another one at the end."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: str | None = None,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
        **_ignored: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.side = patch_size * spatial_merge_size
        self.image_token = image_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)
        self.image_break_token = image_break_token
        self.image_end_token = image_end_token

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_named: Any) -> str:
        """The text of one image."""
        height, width = (int(each) for each in image_inputs["image_sizes"][image_idx])
        row = self.image_token * (width // self.side)
        rows = self.image_break_token.join([row] * (height // self.side))
        return f"{rows}{self.image_end_token}"
