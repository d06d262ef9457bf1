"""Programs that measure; each says at its top what and how."""

# Sets, before torch is imported, how its threads wait.
import tokenmesh  # noqa: F401
