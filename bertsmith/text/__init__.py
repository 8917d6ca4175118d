"""From text to ids: corpora, sentences, WordPiece. It never knows of torch or of a model."""
