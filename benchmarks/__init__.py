"""Programs that measure; each says at its top what and how."""
