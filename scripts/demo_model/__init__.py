"""The demo model's factory: data, tokenizer, training, evaluation and export."""
