"""Weight initialization from word counts and with structured heads, which the paper lacks."""
