"""Weight initialization from token counts and with structured heads; neither is in the paper."""
