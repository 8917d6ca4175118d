"""Training of rerankers: cross-encoders that score the relevance of a document to a query."""
