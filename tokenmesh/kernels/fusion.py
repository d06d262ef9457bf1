"""Fusion of products and sums; every launch states it, as Triton's default is changing.

By default Triton 3.9 fuses them and warns, Triton 3.10 does not.
"""

from typing import Final

FUSED: Final = {"enable_fp_fusion": True}
"""Options of a launch."""
ROUNDED_APART: Final = {"enable_fp_fusion": False}
"""Options of a launch whose results equal a CPU's bit for bit."""
