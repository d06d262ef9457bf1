"""Model families: config.json -> DecoderConfig, safetensors -> weights, and the decoder itself."""
