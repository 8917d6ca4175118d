"""From text to token ids: corpora, sentences and WordPiece. Nothing here imports torch."""
