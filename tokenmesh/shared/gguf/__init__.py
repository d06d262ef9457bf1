"""GGUF files: what they hold, and the directory of a model that is made of one."""

from tokenmesh.shared.gguf.unpack import is_gguf, unpacked

__all__ = ["is_gguf", "unpacked"]
