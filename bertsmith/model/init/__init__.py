"""Weight initialization beyond the paper's: from word counts, and with structured heads."""
