"""Weight initialization."""
