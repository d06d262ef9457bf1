"""Whisper in CTranslate2 directories, and the directory of a checkpoint that is made of one."""

from tokenmesh.shared.ctranslate2.reader import Ct2File
from tokenmesh.shared.ctranslate2.unpack import FILES, is_ctranslate2, is_whisper_config, unpacked

__all__ = ["FILES", "Ct2File", "is_ctranslate2", "is_whisper_config", "unpacked"]
